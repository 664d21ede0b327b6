"""Byte-level BPE from a table of known pieces of text, for tokenizers that are recognised.

A recognised tokenizer divides text into pieces and encodes each by itself, and text has few
distinct pieces: of 18.9 M pieces of documentation and code 0.3 M. A pre-tokenizer is recognised by
its configuration if Python's `re` reproduces it exactly: the patterns are those that GPT-2, GPT-
NeoX and OLMo (`ByteLevel`), Llama 3 and OLMo 2 (`Split`, three digits) and Qwen 2 (`Split`, one
digit) have in their tokenizer.json. Which code points are letters, numbers and white space is asked
of the tokenizers library, whose Unicode version may differ from Python's. All other text goes to
the library.

A long text is cut into sections that encode as the whole text does: where every normalizer and pre-
tokenizer starts afresh, and where no added token can reach across. Cuts depend on the text alone.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from optimus.errors import OptimusError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_GPT2 = r"'(?:[sdmt]|re|ve|ll)| ?[{L}]+| ?[{N}]+| ?[^{S}{L}{N}]+|[{S}]+(?![^{S}])|[{S}]+"
_SPLIT = (
    r"'(?:[sdmtSDMT\u017f]|[rR][eE]|[vV][eE]|[lL][lL])|[^\r\n{L}{N}]?[{L}]+|[{N}]{digits}"
    r"| ?[^{S}{L}{N}]+[\r\n]*|[{S}]*[\r\n]+|[{S}]+(?![^{S}])|[{S}]+"
)
_TEMPLATES = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": _GPT2,
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _SPLIT.replace("{digits}", "{1,3}"),
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _SPLIT.replace("{digits}", ""),
}
"""The library's pattern: ours, with classes of letters {L}, numbers {N} and white space {S}."""
NOT_SPACE = r"[^\s\u180e\u200b\ufeff]"
"""Certainly no white space, in any version of Unicode, nor made such by NFC."""
CUT = re.compile(f" (?={NOT_SPACE})")
"""Where every template begins a piece, and what stands before gives the same pieces without it: the
last space of a run goes with the letter, number or sign behind it or stands alone, and white space
before it is cut as at the end of a text. NFC joins nothing to a space."""

_ASCII = {"L": "A-Za-z", "N": "0-9", "S": "\t-\r "}
_LAST = 0x1FFFF
"""Code points beyond it (rare ideographs) are not asked about: such texts go to the library."""
BEYOND = re.compile("[\U00020000-\U0010ffff]")
_ASTRAL = re.compile("[\U00010000-\U0010ffff]")
"""Not in the basic plane. `re` looks up classes of the basic plane in a table, and walks through
those with other members: 10 times slower, so a text without such code points has its own."""


@dataclass(frozen=True)
class Recipe:
    """How a recognised tokenizer divides text into the pieces that its model sees."""

    template: str
    nfc: bool
    added: tuple[str, ...]
    """Contents of added tokens that are not special: taken out of the text first."""
    special: tuple[str, ...]


def recognise(config: Mapping[str, Any]) -> Recipe | None:
    """The recipe of a tokenizer.json, or None where `re` is not known to reproduce it."""
    model, normalizer = config.get("model") or {}, config.get("normalizer")
    if model.get("type", "BPE") != "BPE" or model.get("dropout"):
        return None
    if normalizer is not None and normalizer != {"type": "NFC"}:
        return None
    template = _template(config.get("pre_tokenizer"))
    tokens = config.get("added_tokens") or []
    plain = [token for token in tokens if not token["special"]]
    simple = all(
        not (token["single_word"] or token["lstrip"] or token["rstrip"])
        and token["content"].isascii()
        for token in plain
    )
    if template is None or not simple or len({token["normalized"] for token in plain}) > 1:
        return None
    return Recipe(
        template,
        normalizer is not None,
        tuple(token["content"] for token in plain),
        tuple(token["content"] for token in tokens if token["special"]),
    )


def _template(pre_tokenizer: Mapping[str, Any] | None) -> str | None:
    steps = [pre_tokenizer or {}]
    if steps[0].get("type") == "Sequence":
        steps = steps[0]["pretokenizers"]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space", True):
        return None
    if len(steps) == 1 and last.get("use_regex", True):
        return _GPT2
    if len(steps) != 2 or last.get("use_regex", True):
        return None
    split = steps[0]
    if split.get("type") != "Split" or split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    return _TEMPLATES.get(split["pattern"].get("Regex", ""))


def pattern_for(template: str, text: str) -> re.Pattern[str]:
    """Finds the pieces of this text, in which BEYOND finds nothing."""
    if text.isascii():
        return _compile(template, tuple(_ASCII.items()))
    return _compile(template, _classes(_ASTRAL.search(text) is not None))


@functools.cache
def _compile(template: str, classes: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    for name, members in classes:
        template = template.replace(f"{{{name}}}", members)
    return re.compile(template)


@functools.cache
def _classes(astral: bool) -> tuple[tuple[str, str], ...]:
    """Members of the classes, as the library's regular expressions see them: 0.3 s."""
    from tokenizers import Regex, pre_tokenizers

    every = "".join(map(chr, [*range(0xD800), *range(0xE000, _LAST + 1 if astral else 0x10000)]))
    found = []
    for name, pattern in (("L", r"\p{L}+"), ("N", r"\p{N}+"), ("S", r"\s+")):
        split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
        runs = [run for run, _ in split.pre_tokenize_str(every)]
        # A run across the surrogates may take them in: no text holds them.
        found.append((name, _class_of((ord(run[0]), ord(run[-1])) for run in runs)))
    return tuple(found)


def _class_of(runs: Iterable[tuple[int, int]]) -> str:
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in runs)


def may_move_by_nfc(text: str) -> bool:
    """Whether NFC may change this text, in which BEYOND finds nothing.

    If not, the text is in NFC whatever the Unicode version: code points that Python's tables do not
    know count as moved, and what is once assigned keeps its normalization (UAX 15, stability).
    """
    if text.isascii():
        return False
    basic, astral = _moved_by_nfc()
    return bool(basic.search(text) or (_ASTRAL.search(text) and astral.search(text)))


@functools.cache
def _moved_by_nfc() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Finds code points of the basic plane, and beyond, that NFC changes or joins to others."""
    moved = {*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)}  # Hangul vowels and finals
    for code in range(0xC0, _LAST + 1):
        char = chr(code)
        parts = unicodedata.decomposition(char).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            moved.add(int(parts[1], 16))  # joins what stands before it
        if (
            unicodedata.combining(char)
            or unicodedata.category(char) == "Cn"
            or not unicodedata.is_normalized("NFC", char)
        ):
            moved.add(code)
    runs: list[list[int]] = []
    for code in sorted(moved):
        if runs and code == runs[-1][1] + 1 and code != 0x10000:
            runs[-1][1] = code
        else:
            runs.append([code, code])
    basic = _class_of((first, last) for first, last in runs if last < 0x10000)
    astral = _class_of((first, last) for first, last in runs if first >= 0x10000)
    return re.compile(f"[{basic}]"), re.compile(f"[{astral}]")


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
