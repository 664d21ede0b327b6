"""A long text in sections that a recognised tokenizer encodes as it encodes the whole.

A cut is right where every normalizer and pre-tokenizer of pretokenize.py begins anew, whatever
stands on either side, and where no added token can reach across. Cuts depend on the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from data_prep.tokenizer.pretokenize import BEYOND, CUT, NOT_SPACE, may_move_by_nfc

SECTION_CHARS = 1 << 18
"""A section is cut at the first right place behind half of this."""

_LETTERS = "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
"""Kana, ideographs and Hangul: letters that join nothing before them."""
_SIGNS = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
_CUT = re.compile(
    f"(?={CUT.pattern})"
    f"|(?<={NOT_SPACE}\n)(?={NOT_SPACE})"
    f"|(?<=[{_LETTERS}])(?=[{_SIGNS}][{_LETTERS}])"
)
"""Where a piece begins, alone or not: before the last space of a run (pretokenize.CUT). Behind a
lone newline: it ends a piece, its own or that of the sign before it, and NFC joins nothing to it.
And before a lone sign between letters of scripts without spaces: it is a piece or begins one."""

_TO_ASCII = re.compile("[\u037e\u1fef\u212a]")
"""All that NFC makes ASCII, each one character: it joins none to such nor parts one from others."""


class NoCut(Exception):
    """A text has no place to cut it for longer than may be held. Holds its bytes to the next."""


class Cutter:
    """Finds the sections of texts for a tokenizer with these added tokens, special ones too."""

    def __init__(self, added: Iterable[str]):
        tokens = [token for token in added if token]
        self._reach = max(map(len, tokens), default=0) + 1
        self._added = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._all_ascii = all(map(str.isascii, tokens))

    def sections(self, blocks: Iterable[str], most: int | None = None) -> Iterator[str]:
        """The text of `blocks` in sections. Raises NoCut for one of more than `most` bytes."""
        held, size, searched = "", 0, SECTION_CHARS // 2
        blocks = iter(blocks)
        for block in blocks:
            held += block
            size += len(block.encode())
            while len(held) > SECTION_CHARS:
                cut, searched = self._find(held, searched)
                section = held[:cut]
                taken = size if cut is None else len(section.encode())
                if most is not None and taken > most and len(section) > SECTION_CHARS:
                    raise NoCut(taken + (self._until_cut(held, blocks) if cut is None else 0))
                if cut is None:
                    break
                yield section
                held, size, searched = held[cut:], size - taken, SECTION_CHARS // 2
        if held:
            yield held

    def _until_cut(self, held: str, blocks: Iterator[str]) -> int:
        """Bytes of `blocks` before the next cut, found without holding them."""
        size, around = 0, 2 * self._reach + 2
        for block in blocks:
            tail = held[-around:]
            held = tail + block
            cut, _ = self._find(held, min(len(tail), around // 2))
            if cut is not None:
                return size + max(0, len(held[:cut].encode()) - len(tail.encode()))
            size += len(block.encode())
        return size

    def _find(self, text: str, start: int) -> tuple[int | None, int]:
        """The first cut from `start` on, or None and where to search on when more has come."""
        stop = len(text) - self._reach
        place = start
        while (found := _CUT.search(text, place)) and found.start() < stop:
            place = found.start()
            if self._free(text[max(0, place - self._reach) : place + self._reach]):
                return place, place
            place += 1
        return None, max(start, stop)

    def _free(self, around: str) -> bool:
        """No added token crosses the middle, nor does one that NFC would make there."""
        if self._added is None:
            return True
        moves: re.Match[str] | bool | None
        if self._all_ascii:
            moves = _TO_ASCII.search(around)
        else:
            moves = BEYOND.search(around) or may_move_by_nfc(around)
        return not moves and not self._added.search(around)
