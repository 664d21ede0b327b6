"""Byte-level BPE with a cache of the ids of text pieces, for the tokenizers of common models.

A byte-level BPE tokenizer divides a text into pieces (pre-tokens) and encodes each piece
separately. Most pieces occur many times: in a sample of documentation and code with 18.9 M pieces,
0.3 M pieces were distinct. A tokenizer is called recognised if its configuration shows that a
pattern for Python's `re` finds exactly the pieces of its pre-tokenizer. This module encodes texts
for recognised tokenizers. The module supports the pre-tokenizers of GPT-2, GPT-NeoX and OLMo
(`ByteLevel`), Llama 3 and OLMo 2 (`Split`, three digits), and Qwen 2 (`Split`, one digit). The
patterns use the tokenizers library's classes of letters, numbers and white space, because the
library and Python can have different Unicode versions. If the patterns do not apply to a text or a
tokenizer, the tokenizers library encodes the text.

A long text is cut into sections. The concatenated ids of the sections are the ids of the text:
added tokens cannot cross a cut, and the normalizer and pre-tokenizer process the text after a cut
independently of the text before the cut. The positions of cuts depend only on the text and the
added tokens.
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
"""Maps the pattern of a pre-tokenizer to the equivalent pattern for Python's `re`. {L}, {N} and {S}
represent the classes of letters, numbers and white space."""
NOT_SPACE = r"[^\s\u180e\u200b\ufeff]"
"""Regular expression for a character that is not white space in any version of Unicode, before or
after NFC normalization."""
CUT = re.compile(f" (?={NOT_SPACE})")
"""Matches the last space of a sequence of spaces. A text can be cut before this space, because
every pattern in _TEMPLATES begins a piece at the space: the piece is the space alone, or the space
and the following letters, numbers or punctuation. The pieces before the space do not depend on the
text after the space, and NFC does not join characters to a space."""

_ASCII = {"L": "A-Za-z", "N": "0-9", "S": "\t-\r "}
_LAST = 0x1FFFF
"""Last code point in the classes of characters. A text with later code points (rare ideographs) is
encoded by the tokenizers library."""
BEYOND = re.compile("[\U00020000-\U0010ffff]")
"""Matches a code point after _LAST."""
_ASTRAL = re.compile("[\U00010000-\U0010ffff]")
"""Matches a code point outside the Basic Multilingual Plane. If a class contains such code points,
`re` searches the ranges of the class. This is 10 times slower than the table that `re` uses for
other classes. There are therefore two forms of each pattern: a form for texts with such code
points, and a form whose classes contain only the Basic Multilingual Plane."""


@dataclass(frozen=True)
class Recipe:
    """The rules by which a recognised tokenizer divides a text into the pieces that its model
    encodes."""

    template: str
    """Regular expression in which {L}, {N} and {S} represent the classes of letters, numbers and
    white space."""
    nfc: bool
    added: tuple[str, ...]
    """Texts of the added tokens that are not special. A text to encode is divided first at these
    tokens, and then into pieces."""
    special: tuple[str, ...]
    """Texts of the special tokens. In a text to encode, the text of a special token is plain
    text."""


def recognise(config: Mapping[str, Any]) -> Recipe | None:
    """Return the rules by which a tokenizer.json divides text into pieces.

    Return None if Python's `re` might not find the same pieces as the tokenizers library.
    """
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
    """Compile `template` to a pattern that finds the pieces (pre-tokens) in `text`.

    The code points of `text` must be at most _LAST.
    """
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
    """Return the characters in the classes L (letters), N (numbers) and S (white space).

    The first call takes 0.3 s.

    Args:
        astral: True: include the code points outside the Basic Multilingual Plane.

    Returns:
        For each class: (name, ranges of its characters in the tokenizers library). The ranges have
        the syntax of a regular expression's brackets.
    """
    from tokenizers import Regex, pre_tokenizers

    characters = map(chr, [*range(0xD800), *range(0xE000, _LAST + 1 if astral else 0x10000)])
    text, classes = "".join(characters), []
    for name, pattern in (("L", r"\p{L}+"), ("N", r"\p{N}+"), ("S", r"\s+")):
        split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
        runs = [run for run, _ in split.pre_tokenize_str(text)]
        # The range of a run can include the surrogates. This has no effect, because no text
        # contains surrogates.
        classes.append((name, _class_of((ord(run[0]), ord(run[-1])) for run in runs)))
    return tuple(classes)


def _class_of(runs: Iterable[tuple[int, int]]) -> str:
    return "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in runs)


def may_change_by_nfc(text: str) -> bool:
    """Return True if NFC may change `text`. The code points of `text` must be at most _LAST.

    If the result is False, the text is in NFC in every Unicode version, because later versions do
    not change the normalization of assigned code points (UAX 15, stability). If the text has code
    points that are not assigned in Python's tables, the result is True.
    """
    if text.isascii():
        return False
    basic, astral = _changed_by_nfc()
    return bool(basic.search(text) or (_ASTRAL.search(text) and astral.search(text)))


@functools.cache
def _changed_by_nfc() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return two patterns for the code points that NFC changes or joins to other code points.

    The first pattern matches code points in the Basic Multilingual Plane. The second pattern
    matches code points in other planes.
    """
    changed = {*range(0x1161, 0x1176), *range(0x11A8, 0x11C3)}  # Hangul vowels and finals
    for code in range(0xC0, _LAST + 1):
        char = chr(code)
        decomposed = unicodedata.decomposition(char).split()
        if len(decomposed) == 2 and not decomposed[0].startswith("<"):
            changed.add(int(decomposed[1], 16))  # NFC joins this mark to the preceding character
        if (
            unicodedata.combining(char)
            or unicodedata.category(char) == "Cn"
            or not unicodedata.is_normalized("NFC", char)
        ):
            changed.add(code)
    basic = {code for code in changed if code < 0x10000}
    return _pattern_of(basic), _pattern_of(changed - basic)


def _pattern_of(codes: set[int]) -> re.Pattern[str]:
    """Return a regular expression that matches one character whose code point is in `codes`."""
    ordered = np.array(sorted(codes))
    runs = np.split(ordered, np.flatnonzero(np.diff(ordered) != 1) + 1)
    return re.compile(f"[{_class_of((run[0], run[-1]) for run in runs)}]")


SECTION_CHARS = 1 << 18
"""Number of characters above which a text is cut into sections. Each section ends at the first
possible cut after SECTION_CHARS / 2 characters."""

_LETTERS = "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
"""Kana, ideographs and Hangul: letters that NFC does not join to a preceding character."""
_SIGNS = "\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f"
_CUT = re.compile(
    f"(?={CUT.pattern})"
    f"|(?<={NOT_SPACE}\n)(?={NOT_SPACE})"
    f"|(?<=[{_LETTERS}])(?=[{_SIGNS}][{_LETTERS}])"
)
"""Matches positions at which every pattern in _TEMPLATES begins a piece, and at which NFC does not
join the characters before and after the position:

- Before the last of consecutive spaces (CUT).
- After a single newline. The newline is a piece, or ends the piece of the punctuation before it.
- Before a single punctuation character between letters of scripts without spaces. This character
  is a piece, or begins a piece.
"""

_TO_ASCII = re.compile("[\u037e\u1fef\u212a]")
"""Matches all characters that NFC replaces by an ASCII character. NFC does not join these
characters to other characters."""


class NoCut(Exception):
    """Raised by `Cutter.sections` if a section would be larger than the argument `max_bytes`. The
    exception has one argument, the size of the section in bytes."""


class Cutter:
    """Divides texts into sections. The concatenated ids of the sections are the ids of the text.

    Args:
        added: Texts of the tokenizer's added tokens, including special tokens.
    """

    def __init__(self, added: Iterable[str]):
        tokens = [token for token in added if token]
        self._reach = max(map(len, tokens), default=0) + 1
        self._added = re.compile("|".join(map(re.escape, tokens))) if tokens else None
        self._all_ascii = all(map(str.isascii, tokens))

    def sections(self, blocks: Iterable[str], max_bytes: int | None = None) -> Iterator[str]:
        """Divide the text of `blocks` into sections, and yield each section.

        Args:
            blocks: Consecutive blocks of the text.
            max_bytes: Limit of the size of a section, in UTF-8 bytes. The limit applies only to
                sections of more than SECTION_CHARS characters. None: no limit.

        Raises:
            NoCut: A section would exceed `max_bytes`.
        """
        pending, size, searched = "", 0, SECTION_CHARS // 2
        blocks = iter(blocks)
        for block in blocks:
            pending += block
            size += len(block.encode())
            while len(pending) > SECTION_CHARS:
                cut, searched = self._find(pending, searched)
                section = pending[:cut]
                section_bytes = size if cut is None else len(section.encode())
                is_long = max_bytes is not None and section_bytes > max_bytes
                if is_long and len(section) > SECTION_CHARS:
                    rest_bytes = self._until_cut(pending, blocks) if cut is None else 0
                    raise NoCut(section_bytes + rest_bytes)
                if cut is None:
                    break
                yield section
                pending, size, searched = pending[cut:], size - section_bytes, SECTION_CHARS // 2
        if pending:
            yield pending

    def _until_cut(self, pending: str, blocks: Iterator[str]) -> int:
        """Return the number of bytes from the end of `pending` to the next possible cut, or to the
        end of the text. `blocks` yields the text after `pending`. Only one block is in memory at a
        time."""
        size, around = 0, 2 * self._reach + 2
        for block in blocks:
            tail = pending[-around:]
            pending = tail + block
            cut, _ = self._find(pending, min(len(tail), around // 2))
            if cut is not None:
                return size + max(0, len(pending[:cut].encode()) - len(tail.encode()))
            size += len(block.encode())
        return size

    def _find(self, text: str, start: int) -> tuple[int | None, int]:
        """Find the first position at or after `start` where `text` can be cut.

        Returns:
            (cut, next). `cut` is the position, or None if there is none. If `cut` is None, `next`
            is the position at which to continue the search after more text has been appended to
            `text`.
        """
        stop = len(text) - self._reach
        for match in _CUT.finditer(text, start):
            if (cut := match.start()) >= stop:
                break
            if self._may_cut(text[max(0, cut - self._reach) : cut + self._reach]):
                return cut, cut
        return None, max(start, stop)

    def _may_cut(self, around: str) -> bool:
        """Return False if an added token could cross the middle of `around`, or of the NFC form of
        `around`."""
        if self._added is None:
            return True
        if self._all_ascii:
            changes = _TO_ASCII.search(around) is not None
        else:
            changes = BEYOND.search(around) is not None or may_change_by_nfc(around)
        return not changes and not self._added.search(around)


REFERENCE_ONLY = "OPTIMUS_DATA_ENCODER"
"""Name of an environment variable. If its value is `reference`, the tokenizers library encodes all
texts."""

_MEMO_PIECES = 1 << 19
"""Maximum number of text pieces in the cache of a process. A full cache takes 90 MB."""
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
"""Sample texts. When a recognised tokenizer is opened, this module and the tokenizers library
encode the sample texts. If the ids differ, only the library is used."""


def reference_encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[np.ndarray]:
    """Encode texts with the tokenizers library. Return the ids of each text, uint32 [T].

    The texts are encoded in batches, because the library needs memory of more than 100 times the
    size of the texts that it encodes together.
    """
    ids: list[np.ndarray] = []
    first = chars = 0
    for stop, text in enumerate(texts, 1):
        chars += len(text)
        if chars >= _BATCH_CHARS or stop == len(texts):
            batch = tokenizer.encode_batch_fast(list(texts[first:stop]), add_special_tokens=False)
            ids += [np.array(encoding.ids, np.uint32) for encoding in batch]
            first, chars = stop, 0
    return ids


class _Memo(dict[str, bytes]):
    """Cache that maps a piece of text to the ids of the piece, as bytes of native uint32.

    A full cache is cleared before the next piece is added.
    """

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
    """Encoder that returns the same ids as `tokenizer`, but caches the ids of text pieces.

    Args:
        tokenizer: A tokenizer for which `recognise` did not return None.
        recipe: The result of `recognise` for this tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, recipe: Recipe):
        self._tokenizer, self._recipe = tokenizer, recipe
        self._memo = _Memo(tokenizer)
        added = sorted(recipe.added, key=len, reverse=True)  # the library matches the longest token
        self._added = re.compile(f"({'|'.join(map(re.escape, added))})") if added else None
        self._added_ids = {}
        for token in added:
            number = tokenizer.token_to_id(token)
            assert number is not None, f"{token!r} is an added token of this tokenizer"
            self._added_ids[token] = np.uint32(number).tobytes()
        self._unchecked = _CHECK_EVERY_CHARS  # so that the first text is checked

    def agrees(self) -> bool:
        """Return True if this encoder and the tokenizers library return the same ids for SAMPLES
        and for texts that contain each added token."""
        samples = [*SAMPLES, *(f"a {token}b  {token} c" for token in self._recipe.added)]
        expected = reference_encode(self._tokenizer, samples)
        return all(
            np.array_equal(self._encode(text), ids)
            for text, ids in zip(samples, expected, strict=True)
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32 [T].

        As a check, the ids of the first short text, and of a short text after each 4 million
        characters, are compared with the ids from the tokenizers library.

        Raises:
            OptimusError: The compared ids differ.
        """
        encoded = []
        for text in texts:
            ids = self._encode(text)
            self._unchecked += len(text)
            if self._unchecked >= _CHECK_EVERY_CHARS and len(text) <= _CHECK_CHARS:
                self._unchecked = 0
                if not np.array_equal(ids, reference_encode(self._tokenizer, [text])[0]):
                    raise OptimusError(
                        "the cached encoder of Optimus and the tokenizers library return different "
                        f"ids for {text[:60]!r}; set {REFERENCE_ONLY}=reference, remove the "
                        "output, run the same command again, and please report this error"
                    )
            encoded.append(ids)
        return encoded

    def _encode(self, text: str) -> np.ndarray:
        if not text.isascii() and BEYOND.search(text):
            return reference_encode(self._tokenizer, [text])[0]
        if self._recipe.nfc and may_change_by_nfc(text):
            if self._added:
                return reference_encode(self._tokenizer, [text])[0]
            text = self._tokenizer.normalizer.normalize_str(text)
        pattern = pattern_for(self._recipe.template, text)
        if self._added is None:
            return np.frombuffer(self._pieces(pattern, text), np.uint32)
        # A special token could overlap an added token.
        if any(token in text for token in self._recipe.special):
            return reference_encode(self._tokenizer, [text])[0]
        ids = [
            self._added_ids[run] if index % 2 else self._pieces(pattern, run)
            for index, run in enumerate(self._added.split(text))
        ]
        return np.frombuffer(b"".join(ids), np.uint32)

    def _pieces(self, pattern: re.Pattern[str], text: str) -> bytes:
        """Return the ids of a text without added tokens, as bytes of native uint32.

        A long text is divided at spaces into windows, which are encoded one after the other.
        """
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
