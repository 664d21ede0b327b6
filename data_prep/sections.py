"""A long text in sections that a recognised tokenizer encodes as it encodes the whole.

A cut is right where every normalizer and pre-tokenizer of pretokenize.py begins anew, whatever
stands on either side, and where no added token can reach across. Cuts depend on the text alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from data_prep.pretokenize import BEYOND, may_move_by_nfc

SECTION_CHARS = 1 << 18
"""A section is cut at the first right place behind half of this."""

_WORDS = "!-~\u0400-\u045f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
"""Neither white space nor combining: printing ASCII, Cyrillic, kana, ideographs, Hangul."""
_CUT = re.compile(f"(?= [A-Za-z])|(?<=[{_WORDS}]\n)(?=[{_WORDS}])")
"""Before a space that goes with the letter behind it (pretokenize.CUT). And behind a lone newline
between such characters: it ends a piece, its own or that of the punctuation before it; and what
stands behind it joins nothing before it."""


class NoCut(Exception):
    """A text has no place to cut it for longer than may be held. Holds its characters."""


class Cutter:
    """Finds the sections of texts for a tokenizer with these added tokens, special ones too."""

    def __init__(self, added: Iterable[str]):
        tokens = [token for token in added if token]
        self._reach = max(map(len, tokens), default=0) + 1
        self._added = re.compile("|".join(map(re.escape, tokens))) if tokens else None

    def sections(self, blocks: Iterable[str], most: int | None = None) -> Iterator[str]:
        """The text of `blocks` in sections. Raises NoCut when one would be longer than `most`."""
        held, searched = "", SECTION_CHARS // 2
        for block in blocks:
            held += block
            while len(held) > SECTION_CHARS:
                cut, searched = self._find(held, searched)
                if cut is None:
                    break
                yield held[:cut]
                held, searched = held[cut:], SECTION_CHARS // 2
            if most is not None and len(held) > most:
                raise NoCut(len(held))
        if held:
            yield held

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
        moves = BEYOND.search(around) or may_move_by_nfc(around)
        return not moves and not self._added.search(around)
