"""Tokenizer files, and an encoder of text to token ids.

For a tokenizer.json, `Encoder` returns exactly the ids that the tokenizers library returns for
`encode(text, add_special_tokens=False)` with `encode_special_tokens = True`. With these settings,
the name of a special token in a text is encoded as plain text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data_prep.layout import TOKENIZER_BYTES, read_bytes
from data_prep.runtime import child
from data_prep.tokenizer.encoder import (
    REFERENCE_ONLY,
    SAMPLES,
    Cutter,
    MemoEncoder,
    recognise,
    reference_encode,
)
from data_prep.tokenizer.growth import MAX_GROWTH, max_growth
from data_prep.tokenizer.sentencepiece_model import SentencePieceTokenizer, is_sentencepiece
from optimus.errors import DataError, OptimusError, one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Names of special tokens. If `--eos` is not given, the end-of-document token is the special token
with one of these names."""

_CHECK_S, _CHECK_BYTES = 300.0, 192 << 20
"""Limits for the check of a tokenizer file. _CHECK_S is the limit of the wall-clock time in
seconds. The limit of the memory is _CHECK_BYTES bytes, plus _BYTES_PER_BYTE bytes for each byte of
the tokenizer file."""
_CHECK_CPU_S, _LOAD_BYTES_PER_S = 4, 4 << 20
"""Limit for the processor time of the check: _CHECK_CPU_S seconds, plus the time to load the
tokenizer file twice at _LOAD_BYTES_PER_S bytes per second."""
_BYTES_PER_BYTE = 32
"""Bytes of memory that the check can use for each byte of a tokenizer file. In measurements, the
tokenizers library used 11 bytes for each byte of a tokenizer.json."""
_MODEL = re.compile(rb'"model"\s*:\s*\{')
_OTHER_KEYS = (b'"added_tokens"', b'"normalizer"', b'"pre_tokenizer"', b'"decoder"')
_COMPONENT = re.compile(rb"\s*:\s*[{\[]")
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
"""Matches an escaped ASCII letter in JSON. `_without_model` does not change a file with such a
letter, because the function would not find a key that contains the letter. Programs that write JSON
do not escape ASCII letters."""
_SMALL_MODEL = b'"model": {"type": "BPE", "vocab": {}, "merges": []}}'

_LIBRARY_BYTES, _SENTENCEPIECE_BYTES = 300, 64
"""Bytes of memory that the tokenizers library (_LIBRARY_BYTES) and sentencepiece
(_SENTENCEPIECE_BYTES) need to encode a byte of text. For a text with one token per character, 241
and 49 bytes were measured. Ordinary text needs half as much."""


@dataclass(frozen=True)
class TokenizerFacts:
    """Properties of a tokenizer that a data set records."""

    sha256: str
    vocab_size: int
    """Largest id plus 1."""
    eos_token: str
    eos_id: int


def open_tokenizer(
    path: str | os.PathLike, check: bool = True
) -> Tokenizer | SentencePieceTokenizer:
    """Load a tokenizer from a file. The tokenizer does not truncate texts and does not add special
    tokens.

    Args:
        path: A tokenizer.json or a sentencepiece model.
        check: True: first load and try the tokenizer in a forked child process, so that a damaged
            file cannot crash this process. A fork is not safe after this process has used a GPU or
            the network. Pass True before this process uses a GPU or the network. Pass False to open
            the same file again later.

    Raises:
        DataError: The file is not a tokenizer, or the tokenizer crashes, does not end, or takes too
            much memory.
    """
    if is_sentencepiece(path):
        if check:
            size = os.stat(path).st_size
            _in_child(path, size, lambda: SentencePieceTokenizer(path).encode(SAMPLES))
        return SentencePieceTokenizer(path)
    content = read_bytes(path, TOKENIZER_BYTES)
    if check:
        _in_child(path, len(content), lambda: _try(path, content))
    return _load(path, content)


def _load(path: str | os.PathLike, content: bytes) -> Tokenizer:
    """Load a tokenizer from `content`, the content of the tokenizer.json at `path`. Raises
    DataError if `content` is not a tokenizer."""
    from tokenizers import Tokenizer

    with library_errors(path):
        try:
            tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:
            raise DataError(f"{path}: is not a tokenizer.json: {one_line(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # A post-processor could add special tokens, which data preparation does not use, or repeat the
    # text.
    tokenizer.post_processor = None
    tokenizer.encode_special_tokens = True
    return tokenizer


def _in_child(path: str | os.PathLike, size: int, work: Callable[[], object]) -> None:
    """Call `work` in a child process with limited processor time and memory. The two limits
    increase with `size`, the size of the tokenizer file in bytes. Raise DataError if `work` raises
    an exception, crashes or exceeds the limits."""

    def call() -> None:
        try:
            work()
        except (DataError, MemoryError):
            raise
        except Exception as error:
            raise DataError(_failure(path, error)) from None

    cpu_s = _CHECK_CPU_S + 2 * size // _LOAD_BYTES_PER_S
    memory_bytes = _CHECK_BYTES + _BYTES_PER_BYTE * size
    try:
        problem = child.run(call, limit_s=_CHECK_S, cpu_s=cpu_s, memory_bytes=memory_bytes)
    except child.CrashError as error:
        problem = _failure(path, error)
    except child.UnfinishedError as error:
        raise OptimusError(
            f"{path}: cannot check the tokenizer: {error}; make more memory "
            "available or end other processes, and run the same command again"
        ) from None
    if problem is not None:
        raise DataError(problem)


def _try(path: str | os.PathLike, content: bytes) -> None:
    """Load a tokenizer.json and try it on a short text. Raise DataError if the tokenizer cannot be
    loaded, if the tokenizers library panics, or if a component of the tokenizer makes texts much
    longer."""
    from tokenizers import Tokenizer

    # The normalizer, pre-tokenizer and decoder are checked before the complete tokenizer is loaded,
    # because the library normalizes each added token when it loads a file. A normalizer that makes
    # texts much longer would then take memory for each added token.
    steps = None
    with library_errors(path), contextlib.suppress(Exception):  # `_load` reports an exception
        steps = Tokenizer.from_buffer(_without_model(content))
    if steps is not None:
        _check_growth(path, "normalizer", steps.normalizer)
        _check_growth(path, "pre-tokenizer", steps.pre_tokenizer)
        _check_growth(path, "decoder", steps.decoder)
    tokenizer = _load(path, content)
    with library_errors(path), contextlib.suppress(Exception):
        ids = tokenizer.encode("".join(SAMPLES), add_special_tokens=False).ids
        tokenizer.decode(ids, skip_special_tokens=False)


def _without_model(content: bytes) -> bytes:
    """Replace the model in the content of a tokenizer.json by an empty model, and return the
    result.

    Return `content` unchanged if it is not certain that `model` is the last key.
    """
    if (model := _MODEL.search(content)) is None:
        return content
    if b"\\u00" in content and _ESCAPED_LETTER.search(content):
        return content
    for key in _OTHER_KEYS:
        start = model.end()
        while (start := content.find(key, start) + len(key)) >= len(key):
            if _COMPONENT.match(content, start):  # else the key is the text of a token
                return content
    short = content[: model.start()] + _SMALL_MODEL
    try:
        json.loads(short)  # fails if the match is not a key of the outermost object
    except (ValueError, RecursionError):
        return content
    return short


def _check_growth(path: str | os.PathLike, name: str, component: Any) -> None:
    """Raise DataError if a component may make a text more than MAX_GROWTH times as long.

    For example, three steps that each replace a letter by a thousand letters would take all memory.

    Args:
        path: The tokenizer file, for the message.
        name: "normalizer", "pre-tokenizer" or "decoder", for the message.
        component: The component with this name; None if the tokenizer has no such component.
    """
    try:
        growth = 1.0 if component is None else max_growth(json.loads(component.__getstate__()))
    except ValueError as error:
        raise DataError(f"{path}: {name}: {error}; use another tokenizer") from None
    if growth > MAX_GROWTH:
        raise DataError(
            f"{path}: its {name} makes texts up to {growth:.3g} times as long; use a tokenizer "
            f"that makes texts at most {MAX_GROWTH} times as long"
        )


@contextlib.contextmanager
def library_errors(path: str | os.PathLike) -> Iterator[None]:
    """Context manager that converts errors and panics of the tokenizers library to DataError.

    If an error occurs, the library raises an instance of `Exception` itself, not of a subclass. For
    example, if the vocabulary has no unknown token, an unknown word in a text is an error. The
    library panics if the table of a normalizer is damaged, or if a pattern needs too many steps. A
    panic raises a PanicException, which derives from BaseException and cannot be imported. The
    library also prints a message about the panic.

    Args:
        path: The tokenizer, for the message.

    Raises:
        DataError: The library failed within the context.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise DataError(_failure(path, error)) from None


def _failure(path: str | os.PathLike, error: BaseException) -> str:
    library = "sentencepiece" if is_sentencepiece(path) else "tokenizers"
    return (
        f"{path}: the {library} library fails with this tokenizer: {one_line(error)}; use "
        "another tokenizer"
    )


def read_facts(path: str | os.PathLike, eos: str | None = None) -> TokenizerFacts:
    """Return the properties of a tokenizer that a data set records.

    Args:
        path: A tokenizer.json or a sentencepiece model.
        eos: Name of the end-of-document token. None: the special token that is in EOS_NAMES or, for
            a sentencepiece model, the end-of-sentence symbol.

    Raises:
        DataError: The file is not a tokenizer, or `eos` is not the name of a special token or
            control symbol of the tokenizer. Also raised if `eos` is None and cannot be derived:
            EOS_NAMES has none or several of the special tokens, or the sentencepiece model has no
            end-of-sentence symbol.
    """
    tokenizer = open_tokenizer(path)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return _sentencepiece_facts(path, tokenizer, eos)
    ids = tokenizer.get_vocab(with_added_tokens=True)
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    if eos is None:
        names = [name for name in EOS_NAMES if name in special]
        if len(names) != 1:
            known = " and ".join(names) or f"none of {', '.join(EOS_NAMES)}"
            raise DataError(
                f"{path}: its special tokens include {known}; name the end-of-document token with "
                "--eos TOKEN"
            )
        eos = names[0]
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
    """Return the SHA-256 of a tokenizer file in hexadecimal digits. Data sets record this value.

    Raises:
        DataError: The file cannot be read.
    """
    return hashlib.sha256(read_bytes(path, TOKENIZER_BYTES)).hexdigest()


class Encoder:
    """Encoder of texts to token ids. An `Encoder` uses a single thread, because data preparation
    runs a process per core.

    Args:
        path: A tokenizer.json or a sentencepiece model.

    Raises:
        DataError: The file is not a tokenizer.
    """

    def __init__(self, path: str | os.PathLike):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._path, self._tokenizer = path, open_tokenizer(path)
        self._memo: MemoEncoder | None = None
        self.cutter: Cutter | None = None
        """`Cutter` that divides a long text into sections, which are encoded separately. None: the
        tokenizer must encode each text as a whole."""
        self.bytes_per_byte = _SENTENCEPIECE_BYTES
        """Bytes of memory that the tokenizers or sentencepiece library needs to encode a byte of
        text."""
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            return
        self.bytes_per_byte = _LIBRARY_BYTES
        try:  # the library has loaded the file, but also loads some files that are not JSON
            recipe = recognise(json.loads(read_bytes(path, TOKENIZER_BYTES)))
        except ValueError as error:
            raise DataError(f"{path}: is not a tokenizer.json: {one_line(error)}") from None
        if recipe and os.environ.get(REFERENCE_ONLY) != "reference":
            with library_errors(path):
                memo = MemoEncoder(self._tokenizer, recipe)
                self._memo = memo if memo.agrees() else None
            if self._memo:  # special tokens are included, because they may overlap an added token
                self.cutter = Cutter([*recipe.added, *recipe.special] if recipe.added else [])

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32 [T], without special tokens.

        Raises:
            DataError: The tokenizers library fails with this tokenizer.
            OptimusError: MemoEncoder and the tokenizers library return different ids.
        """
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            return self._tokenizer.encode(texts)
        with library_errors(self._path):
            if self._memo is not None:
                return self._memo.encode(texts)
            return reference_encode(self._tokenizer, texts)


@functools.lru_cache(maxsize=1)
def shared_encoder(path: str) -> Encoder:
    """Return the Encoder of the tokenizer file `path`. All callers in this process share this
    Encoder.

    The first call may take a second.
    """
    return Encoder(path)
