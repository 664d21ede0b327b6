"""Byte-level BPE by memory: the ids of a piece of text are asked of the library once.

A recognised tokenizer (pretokenize.py) divides text into pieces and encodes each by itself, and
text has few different ones: of 18.9 M pieces of documentation and code 0.3 M. What is not
recognised, and what `re` might see otherwise than the library, goes to the library.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from data_prep.tokenizer.pretokenize import BEYOND, CUT, Recipe, may_move_by_nfc, pattern_for
from optimus.errors import OptimusError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REFERENCE_ONLY = "OPTIMUS_DATA_ENCODER"
"""Environment variable; `reference` has the library encode everything."""

_MEMO_PIECES = 1 << 19
"""Some 90 MB a process."""
_MEMO_CHARS = 64
_WINDOW_CHARS = 1 << 18
_BATCH_CHARS = 1 << 16
_CHECK_EVERY_CHARS = 1 << 22
_CHECK_CHARS = 1 << 15

SAMPLES = (
    "",
    " ",
    "It's he'LL WE'VE '\u017f I'd'd''s\n\n  \tx=  1234567 x1y2\r\n\r\n ...!\n\n  end  ",
    "\u00e9t\u00e9 e\u0301te\u0301 \u03a9\u03bc\u03ad\u6f22\u5b57\u304b \ud55c",
    "\u1112\u1161\u11ab \u00bd\u00b2\u0663",
    "\U0001f642\U0001f469\u200d\U0001f680 \u00a0x\u2003y\u3000z\u200b\u0085\x1c\x1f _a_",
    "\U00020000b",
    "  \n  \n\t\t if x:\n        return  y ;;  \r\r  ",
)
"""Encoded both ways before a recognised tokenizer is trusted."""


def reference_encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """The library's ids of each text, uint32 [T]; a few at a time, for it takes 100 times more."""
    ids: list[np.ndarray] = []
    first = held = 0
    for stop, text in enumerate(texts, 1):
        held += len(text)
        if held >= _BATCH_CHARS or stop == len(texts):
            found = tokenizer.encode_batch_fast(list(texts[first:stop]), add_special_tokens=False)
            ids += [np.array(encoding.ids, np.uint32) for encoding in found]
            first, held = stop, 0
    return ids


class _Memo(dict[str, bytes]):
    """Piece -> its ids as native uint32 bytes; cleared when full, so that it follows the text."""

    def __init__(self, tokenizer: Tokenizer):
        super().__init__()
        self._encode = functools.partial(tokenizer.encode, add_special_tokens=False)

    def __missing__(self, piece: str) -> bytes:
        ids = np.array(self._encode(piece).ids, np.uint32).tobytes()
        if len(piece) <= _MEMO_CHARS:
            if len(self) >= _MEMO_PIECES:
                self.clear()
            self[piece] = ids
        return ids


class MemoEncoder:
    """Encodes texts as `tokenizer` does, whose recipe this is."""

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe):
        self._tokenizer, self._recipe = tokenizer, recipe
        self._memo = _Memo(tokenizer)
        added = sorted(recipe.added, key=len, reverse=True)  # the library takes the longest
        self._added = re.compile(f"({'|'.join(map(re.escape, added))})") if added else None
        self._added_ids = {}
        for token in added:
            number = tokenizer.token_to_id(token)
            assert number is not None, f"{token!r} is an added token of this tokenizer"
            self._added_ids[token] = np.uint32(number).tobytes()
        self._unchecked = _CHECK_EVERY_CHARS  # so that the first text is checked

    def agrees(self) -> bool:
        """Whether this and the library give the same for SAMPLES and every added token."""
        samples = [*SAMPLES, *(f"a {token}b  {token} c" for token in self._recipe.added)]
        expected = reference_encode(self._tokenizer, samples)
        return all(
            np.array_equal(self._one(text), ids)
            for text, ids in zip(samples, expected, strict=True)
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32 [T]. A text in 4 MB is compared with the library.

        Raises OptimusError where the two differ.
        """
        encoded = []
        for text in texts:
            ids = self._one(text)
            self._unchecked += len(text)
            if self._unchecked >= _CHECK_EVERY_CHARS and len(text) <= _CHECK_CHARS:
                self._unchecked = 0
                if not np.array_equal(ids, reference_encode(self._tokenizer, [text])[0]):
                    raise OptimusError(
                        f"the fast encoder and the tokenizers library differ on {text[:60]!r}; set "
                        f"{REFERENCE_ONLY}=reference, remove the output, and please report it"
                    )
            encoded.append(ids)
        return encoded

    def _one(self, text: str) -> np.ndarray:
        if not text.isascii() and BEYOND.search(text):
            return reference_encode(self._tokenizer, [text])[0]
        if self._recipe.nfc and may_move_by_nfc(text):
            if self._added:
                return reference_encode(self._tokenizer, [text])[0]
            text = self._tokenizer.normalizer.normalize_str(text)
        pattern = pattern_for(self._recipe.template, text)
        if self._added is None:
            return np.frombuffer(self._pieces(pattern, text), np.uint32)
        if any(token in text for token in self._recipe.special):  # it may cover an added token
            return reference_encode(self._tokenizer, [text])[0]
        parts: list[bytes] = []
        for index, part in enumerate(self._added.split(text)):
            parts.append(self._added_ids[part] if index % 2 else self._pieces(pattern, part))
        return np.frombuffer(b"".join(parts), np.uint32)

    def _pieces(self, pattern: re.Pattern[str], text: str) -> bytes:
        """The ids of a text without added tokens; a long one is read in windows."""
        look_up = self._memo.__getitem__
        if len(text) <= _WINDOW_CHARS:
            return b"".join(map(look_up, pattern.findall(text)))
        windows, start = bytearray(), 0
        while start < len(text):
            cut = CUT.search(text, start + _WINDOW_CHARS)
            stop = cut.start() if cut else len(text)
            windows += b"".join(map(look_up, pattern.findall(text, start, stop)))
            start = stop
        return bytes(windows)
