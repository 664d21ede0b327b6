"""Text to token ids, equal to the reference library's with special-token text as plain text.

`Encoder` is the seam behind which faster exact encoders may come: whatever stands there must give
`Tokenizer.encode(text, add_special_tokens=False).ids` for every text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.encoder import REFERENCE_ONLY, SAMPLES, MemoEncoder, reference_encode
from data_prep.growth import max_growth
from data_prep.layout import TOKENIZER_BYTES, read_bytes
from data_prep.pretokenize import recognise
from data_prep.sections import Cutter
from data_prep.sentencepiece_model import SentencePieceTokenizer, is_sentencepiece
from optimus.errors import DataError, one_line
from optimus.launch.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Spellings of the end-of-document token that are recognised without `--eos`."""

MAX_GROWTH = 16
"""Of the bytes of a text; sentencepiece's character map, its space and a prefix give 16."""

_LIBRARY_BYTES, _SENTENCEPIECE_BYTES = 300, 64
"""Measured at a token a character: 241 and 49; ordinary text takes half of it."""


@dataclass(frozen=True)
class TokenizerFacts:
    """What a data set records of its tokenizer."""

    sha256: str
    vocab_size: int
    """One more than the largest id."""
    eos_token: str
    eos_id: int


def open_tokenizer(path: str | os.PathLike) -> Tokenizer | SentencePieceTokenizer:
    """The library's tokenizer, set so that a text gives all its ids and no others."""
    if is_sentencepiece(path):
        return SentencePieceTokenizer(path)
    from tokenizers import Tokenizer

    content = read_bytes(path, TOKENIZER_BYTES)
    try:
        with library_panics(path):
            tokenizer = Tokenizer.from_buffer(content)
    except DataError:
        raise
    except Exception as error:  # the library raises bare Exception for anything it cannot read
        raise DataError(f"{path}: is not a tokenizer.json: {one_line(error)}") from None
    _check_growth(path, "normalizer", tokenizer.normalizer)
    _check_growth(path, "pre-tokenizer", tokenizer.pre_tokenizer)
    _check_growth(path, "decoder", tokenizer.decoder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    _try_short_text(path, tokenizer)
    return tokenizer


def _check_growth(path: str | os.PathLike, name: str, part: Any) -> None:
    """Raise DataError if a component makes a text much longer: a few steps, each of which replaces
    a letter by a thousand, take all memory."""
    growth = 1.0 if part is None else max_growth(json.loads(part.__getstate__()))
    if growth > MAX_GROWTH:
        raise DataError(
            f"{path}: its {name} makes texts up to {growth:.3g} times as long; use a tokenizer "
            f"with at most {MAX_GROWTH}"
        )


@contextlib.contextmanager
def library_panics(path: str | os.PathLike) -> Iterator[None]:
    """Raise DataError where the tokenizers library panics on the file at `path` or on a text.

    A damaged table of a normalizer and a pattern that needs too many steps do. The exception of a
    panic derives from BaseException, and its class cannot be imported. The library also prints it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DataError(
            f"{path}: the tokenizers library fails with this tokenizer: {one_line(error)}; use "
            "another tokenizer"
        ) from None


def _try_short_text(path: str | os.PathLike, tokenizer: Tokenizer) -> None:
    """Raise DataError if the library panics on a short text with this tokenizer. Its output is
    dropped, because a damaged tokenizer is reported in one line."""
    with library_panics(path), _without_stderr(), contextlib.suppress(Exception):
        ids = tokenizer.encode("".join(SAMPLES), add_special_tokens=False).ids
        tokenizer.decode(ids, skip_special_tokens=False)


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop what this process writes to standard error, and defer the signals that stop it.

    For a few milliseconds only: the last words of a process that ends meanwhile are lost.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    kept = -1
    try:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            kept = os.dup(2)  # fails if standard error is closed
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        if kept >= 0:
            os.dup2(kept, 2)
            os.close(kept)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def read_facts(path: str | os.PathLike, eos: str | None = None) -> TokenizerFacts:
    """Facts of a tokenizer.json. `eos` names its end-of-document token; None: found by its name.

    Raises DataError where there is no such token, several, or one that plain text could produce.
    """
    tokenizer = open_tokenizer(path)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _sentencepiece_facts(path, tokenizer, eos)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    if eos is None:
        found = [name for name in EOS_NAMES if name in special]
        if len(found) != 1:
            what = " and ".join(found) if found else f"none of {', '.join(EOS_NAMES)}"
            raise DataError(f"{path}: has {what} as special tokens; name the one with --eos TOKEN")
        eos = found[0]
    if eos not in special:
        raise DataError(f"{path}: --eos {eos!r} is not one of its special tokens")
    return TokenizerFacts(
        sha256=sha256_of(path),
        vocab_size=max(ids.values()) + 1,
        eos_token=eos,
        eos_id=ids[eos],
    )


def _sentencepiece_facts(
    path: str | os.PathLike, tokenizer: SentencePieceTokenizer, eos: str | None
) -> TokenizerFacts:
    name = eos or tokenizer.default_eos
    if name is None:
        raise DataError(f"{path}: has no end-of-sentence symbol; name a control symbol with --eos")
    if (eos_id := tokenizer.control_id(name)) is None:
        raise DataError(f"{path}: --eos {name!r} is not one of its control symbols")
    return TokenizerFacts(sha256_of(path), tokenizer.vocab_size, name, eos_id)


def sha256_of(path: str | os.PathLike) -> str:
    """Of a tokenizer's file, as data sets record it."""
    return hashlib.sha256(read_bytes(path, TOKENIZER_BYTES)).hexdigest()


class Encoder:
    """Encodes texts on the calling thread alone: parallelism is one process a core."""

    def __init__(self, path: str | os.PathLike):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._path, self._tokenizer = path, open_tokenizer(path)
        self._memo: MemoEncoder | None = None
        self.cutter: Cutter | None = None
        """Divides a long text into sections that may be encoded one by one, where that is known."""
        self.bytes_per_byte = _SENTENCEPIECE_BYTES
        """Memory that the library takes to encode a byte of a text."""
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            return
        self.bytes_per_byte = _LIBRARY_BYTES
        try:  # the library takes some files that are no JSON
            recipe = recognise(json.loads(read_bytes(path, TOKENIZER_BYTES)))
        except ValueError as error:
            raise DataError(f"{path}: is not a tokenizer.json: {one_line(error)}") from None
        if recipe and os.environ.get(REFERENCE_ONLY) != "reference":
            with library_panics(path):
                memo = MemoEncoder(self._tokenizer, recipe)
                self._memo = memo if memo.agrees() else None
            if self._memo:  # what is special is plain text, but may cover an added token
                self.cutter = Cutter([*recipe.added, *recipe.special] if recipe.added else [])

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32 [T], without any special token. Raises DataError."""
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            return self._tokenizer.encode(texts)
        with library_panics(self._path):
            if self._memo is not None:
                return self._memo.encode(texts)
            return reference_encode(self._tokenizer, texts)


@functools.lru_cache(maxsize=1)
def shared_encoder(path: str) -> Encoder:
    """One encoder a process: a large vocabulary takes a second to load."""
    return Encoder(path)
