"""Several data sets as one, by weight: the stream that training reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from data_prep.held_out import check_held_out
from data_prep.mixing import ALGORITHM, Mixing
from optimus.data.dataset import TokenDataset
from optimus.errors import DataError


class MixedDataset:
    """An endless stream of instances, of each source as many as its weight says, exactly.

    Every source runs through its own epochs, so that a small one with a large weight repeats.
    Stateless as `TokenDataset` is: instance n is the same whoever asks, in whatever order.
    """

    def __init__(self, sources: Sequence[TokenDataset], weights: Sequence[int]):
        """`weights` as from `data_prep.mixing.integer_weights`.

        Raises DataError for sources that do not go together, or for one that is named twice.
        """
        assert len(sources) == len(weights) > 0
        first = sources[0]
        for source in sources[1:]:
            for what in ("context", "tokenizer_sha256", "eos_id"):
                one, other = getattr(first, what), getattr(source, what)
                if one != other:
                    raise DataError(
                        f"data.mix: {first.path} has {what} = {one}, {source.path} has {other}; "
                        "mix data sets of one tokenizer and context"
                    )
        _check_held_out(sources)
        seen: dict[str, TokenDataset] = {}
        for source in sources:
            twin = seen.setdefault(source.identity, source)
            if twin is not source:
                raise DataError(
                    f"data.mix: {twin.path} and {source.path} hold the same instances; name them "
                    "once, with the sum of their weights"
                )
        self.context, self.eos_id = first.context, first.eos_id
        self.vocab_size = max(source.vocab_size for source in sources)
        self.tokenizer_file, self.tokenizer_sha256 = first.tokenizer_file, first.tokenizer_sha256
        self.sources, self._mixing = tuple(sources), Mixing(weights)
        self.num_instances = self._mixing.before_repeating([one.num_instances for one in sources])
        """Instances until a source repeats itself."""
        facts = [ALGORITHM, [source.identity for source in sources], list(weights)]
        self.identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        """Hex string that is equal for two mixes only if they give the same instances."""

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Instances [start, stop) of the mix, int64 [n, C], in `out` or a new array.

        Raises DataError.
        """
        out = np.empty((stop - start, self.context), np.int64) if out is None else out
        assert len(out) == stop - start, (out.shape, start, stop)
        sources, numbers = self._mixing.locate(start, stop)
        for index in np.flatnonzero(np.bincount(sources)).tolist():
            places = np.flatnonzero(sources == index)
            self.sources[index].scatter(out, places, int(numbers[places[0]]))
        if out.max(initial=0) >= self.vocab_size:
            for row, (index, number) in enumerate(zip(sources, numbers, strict=True)):
                self.sources[index].check_ids(out[row : row + 1], int(number))
        return out


def _check_held_out(sources: Sequence[TokenDataset]) -> None:
    """Raises DataError where a source might train on what another holds out, or holds it."""
    first = sources[0]
    for source in sources[1:]:
        if source.part != first.part:
            raise DataError(
                f"data.mix: {first.path} is a {first.part} part and {source.path} a {source.part} "
                "part; what is held out is not trained on, name the training part of each"
            )
    known = [(source.path, rule) for source in sources if (rule := source.held_out())]
    for path, rule in known[1:]:
        try:
            check_held_out(*known[0], path, rule)
        except DataError as error:
            raise DataError(f"data.mix: {error}") from None
