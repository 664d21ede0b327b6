"""Mixture of several data sets as a single stream of instances (token sequences)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from data_prep.dataset import MIXING_ALGORITHM, Mixing, check_held_out
from optimus.data.dataset import TokenDataset
from optimus.errors import DataError


class MixedDataset:
    """Endless stream of instances from several data sets. The number of instances from a data set
    is exactly proportional to the weight of the data set.

    When all instances of a data set have been read, a new epoch of this data set starts. The other
    data sets continue in their current epochs.
    """

    def __init__(self, sources: Sequence[TokenDataset], weights: Sequence[int]):
        """Create a mixture of data sets.

        Args:
            sources: Data sets, either all with training data or all with held-out data.
            weights: Integer weights of the sources. Each cycle of sum(weights) instances contains
                weights[i] instances of source i.

        Raises:
            DataError: The sources do not all have the same tokenizer, the same EOS id, the same
                number of tokens per instance, and the same split (training or held-out data). Or
                two sources have the same instances. Or a held-out document of a source could be a
                training document of another source.
        """
        assert len(sources) == len(weights) > 0
        first = sources[0]
        for source in sources[1:]:
            for name in ("context", "tokenizer_sha256", "eos_id"):
                expected, value = getattr(first, name), getattr(source, name)
                if value != expected:
                    raise DataError(
                        f"data.mix: {first.path} has {name} = {expected}, but {source.path} has "
                        f"{value}; use data sets with the same tokenizer and context"
                    )
        _check_held_out(sources)
        by_identity: dict[str, TokenDataset] = {}
        for source in sources:
            equal = by_identity.setdefault(source.identity, source)
            if equal is not source:
                raise DataError(
                    f"data.mix: {equal.path} and {source.path} have the same instances; remove one "
                    "of these data sets, and add its weight to the weight of the other data set"
                )
        self.context, self.eos_id = first.context, first.eos_id
        self.vocab_size = max(source.vocab_size for source in sources)
        self.tokenizer_file, self.tokenizer_sha256 = first.tokenizer_file, first.tokenizer_sha256
        self.sources, self._mixing = tuple(sources), Mixing(weights)
        self.num_instances = self._mixing.before_repeating([s.num_instances for s in sources])
        """Number of instances of the mixture before any source starts its second epoch."""
        facts = [MIXING_ALGORITHM, [source.identity for source in sources], list(weights)]
        self.identity = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def read(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return instances [start, stop) of the mixture. See `TokenDataset.read` for the arguments,
        the result and the errors."""
        out = np.empty((stop - start, self.context), np.int64) if out is None else out
        assert len(out) == stop - start, (out.shape, start, stop)
        sources, numbers = self._mixing.locate(start, stop)
        for index in np.flatnonzero(np.bincount(sources)).tolist():
            rows = np.flatnonzero(sources == index)
            self.sources[index].scatter(out, rows, int(numbers[rows[0]]))
        if out.max(initial=0) >= self.vocab_size:
            for row, (index, number) in enumerate(zip(sources, numbers, strict=True)):
                self.sources[index].check_ids(out[row : row + 1], int(number))
        return out

    def locate(self, start: int, stop: int) -> list[tuple[str, int]]:
        """For each instance in [start, stop), return (absolute path of its source, number of the
        instance in this source)."""
        located = zip(*self._mixing.locate(start, stop), strict=True)
        return [self.sources[i].locate(int(n), int(n) + 1)[0] for i, n in located]


def _check_held_out(sources: Sequence[TokenDataset]) -> None:
    """Raise DataError if the sources have different splits (training and held-out data), or if a
    held-out document of a source could be a training document of another source."""
    first = sources[0]
    for source in sources[1:]:
        if source.split != first.split:
            raise DataError(
                f"data.mix: {first.path} has {first.split} data and {source.path} has "
                f"{source.split} data; use the training data of each data set"
            )
    known = [(source.path, rule) for source in sources if (rule := source.held_out())]
    for path, rule in known[1:]:
        try:
            check_held_out(*known[0], path, rule)
        except DataError as error:
            raise DataError(f"data.mix: {error}") from None
