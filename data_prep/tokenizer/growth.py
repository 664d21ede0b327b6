"""Upper bound of the factor by which a component of a tokenizer lengthens texts.

The components are the normalizer, the pre-tokenizer and the decoder.
"""

from __future__ import annotations

import base64
import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

MAX_GROWTH = 32
"""Largest accepted factor by which a component of a tokenizer increases the bytes of a text. Among
common tokenizers, the largest result of `max_growth` and `max_growth_by_map` is 16, for a
sentencepiece model."""
_LITERAL = re.compile(r"([^\\.^$*+?()\[\]{}|]+)(?:\+|\{([1-9]\d?),\})?")
"""Matches a regular expression that is plain text, in which `+` or `{n,}` may repeat the last
character."""
_CLASS = re.compile(r"(?:\\[sSwWdDnrt]|\[[^\[\]\\&]+\])(?:\+|\{[1-9]\d?,\})?")
"""Matches a regular expression that is a class of characters, such as `[a-z]`. `+` or `{n,}` may
repeat the class."""
_MAP_KEY_BYTES = 5
"""Bytes of the longest key that the tokenizers library looks up in a character map. The library
looks up single characters. It also looks up a cluster of characters if the cluster has fewer than 6
bytes."""
_MAX_KEY_BYTES, _MAX_NODES = 256, 1 << 21
"""Limits of a character map: the bytes of a key, and the nodes of the trie that stores the keys. A
node with two parents is counted twice. In the maps of the sentencepiece package, keys have up to 12
bytes."""
_UNICODE_GROWTH = {"NFC": 3.0, "NFD": 3.0, "NFKC": 11.0, "NFKD": 11.0, "Lowercase": 1.5}
"""Maps each normalization to the largest factor by which the normalization lengthens a character in
UTF-8. The factors are reached by U+1D1C0 (NFC), U+0DDD (NFD), U+FDFA (NFKC, NFKD) and U+023E
(Lowercase)."""
_NEVER_LONGER = frozenset(
    ("Strip", "StripAccents", "ByteFallback", "Fuse", "Split", "Punctuation", "Digits")
).union(
    ("Whitespace", "WhitespaceSplit", "CharDelimiterSplit", "FixedLength", "UnicodeScripts"),
    ("BertPreTokenizer",),
)
"""Types of steps that never make a text longer."""
_CHINESE = ((0x3400, 0xA000), (0xF900, 0xFB00), (0x20000, 0x2FA20))
"""Code point ranges that include all characters around which BertNormalizer puts spaces."""
_CHANGED = ((0, 0x3400), (0xA000, 0xD7A4), (0xF900, 0x20000), (0x2F800, 0x2FA20))
"""Code point ranges that include all characters that the steps of `_UNICODE_GROWTH` change."""


def max_growth(component: dict[str, Any]) -> float:
    """Return an upper bound of the factor by which a component of a tokenizer lengthens a text.

    Args:
        component: The component as the tokenizers library writes it to tokenizer.json.

    Returns:
        An upper bound of (bytes that the component returns for a text) / (bytes of the text). The
        result is at least 1.

    Raises:
        ValueError: The type of a step is not supported, or a character map is too large.
    """
    weights = _Weights()
    steps = list(_steps(component))
    for number in reversed(range(len(steps))):
        weights.add(steps[number], first=number == 0)
    return weights.top + weights.prefixes


def max_growth_by_map(charsmap: bytes) -> float:
    """Return an upper bound of the factor by which a sentencepiece character map lengthens a text.

    The bound includes the replacement of each space by U+2581, which has 3 bytes in UTF-8.

    Raises:
        ValueError: The map is too large.
    """
    weights = _Weights()
    weights.add({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"})
    weights.map_characters(charsmap, _MAX_KEY_BYTES)
    return weights.top


def _steps(component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if component["type"] != "Sequence":
        yield component
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        for step in component.get(key) or ():
            yield from _steps(step)


class _Weights:
    """Upper bounds of the factors by which a tokenizer component lengthens each character.

    A component is a sequence of steps. Steps are added from the last to the first. The weight of a
    character is (number of bytes that the character can become in the steps that were added so far)
    / (bytes of the character). If a step replaces a pattern, the weight of each character of the
    pattern is (number of bytes that the replacement can become in the later steps) / (bytes of the
    pattern). Therefore the factors of two replacements are multiplied only if the first replacement
    writes characters that the second replacement replaces.
    """

    def __init__(self) -> None:
        self._by_character = np.zeros(0x110000)
        """An array with a value for each code point. The weight of a code point is the maximum of
        this value and `_of_all`."""
        self._of_all = 1.0
        """Lower limit of the weights of all code points."""
        self.top = 1.0
        """Largest weight of a character."""
        self.prefixes = 0.0
        """Largest number of bytes that Prepend steps add at the start of a text."""

    def add(self, step: dict[str, Any], first: bool = False) -> None:
        """Add a step, given as in tokenizer.json. Steps are added from the last to the first.
        `first` is True for the first step of the component, which is therefore added last."""
        kind = step["type"]
        if kind == "Replace":
            self._replace(*_pattern(step["pattern"]), step["content"])
        elif kind == "BPEDecoder":
            self._replace(*_pattern({"String": step["suffix"]}), " ")
        elif kind == "CTC":
            self._replace(*_pattern({"String": step["word_delimiter_token"]}), " ")
        elif kind == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
            self.map_characters(charsmap, _MAP_KEY_BYTES)
        elif kind in _UNICODE_GROWTH:
            self._normalize([kind], first)
        elif kind == "BertNormalizer":
            self._normalize(["NFD", "Lowercase"], first)
            for start, stop in _CHINESE:
                known = np.maximum(self._by_character[start:stop], self._of_all)
                self._by_character[start:stop] = known + 2 * self._of(" ") / 3
            self.top = max(self.top, float(self._by_character.max()))
            self._raise_all(self._of(" "))  # other white space becomes U+0020
        elif kind == "Nmt":  # other white space becomes U+0020
            self._raise_all(self._of(" "))
        elif kind == "Prepend":
            self.prefixes += self._of(step["prepend"])
        elif kind == "Metaspace":
            self._replace(" ", 1, step["replacement"])
            self._raise_all(self.top + self._of(step["replacement"]))  # at the start of a word
        elif kind == "WordPiece":
            self._raise_all(self.top + self._of(" "))  # before a token
        elif kind == "ByteLevel":  # a byte becomes a character of at most 2 bytes
            self._raise_all((4 if step.get("add_prefix_space") else 2) * self.top)
        elif kind not in _NEVER_LONGER:
            raise ValueError(
                f"the component has a step of type {kind}, which Optimus does not support"
            )

    def map_characters(self, charsmap: bytes, key_bytes: int) -> None:
        """Add a sentencepiece character map as a step. Keys of more than `key_bytes` bytes are
        ignored."""
        text = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
        sums = np.concatenate(([0.0], np.cumsum(self._of_bytes(text))))
        ends = np.append(np.flatnonzero(np.frombuffer(text, np.uint8) == 0), len(text))
        of_clusters = 0.0
        for depth, keys, values in _map_entries(charsmap, key_bytes):
            known = values < len(text)
            keys, values = keys[known], values[known]
            weights = (sums[ends[np.searchsorted(ends, values)]] - sums[values]) / depth
            # The loop sets `single` to False for keys that are not a single character.
            single = weights > self._of_all
            for index in np.flatnonzero(single):
                if code := _code_point(int(keys[index]), depth):
                    self._raise(code, float(weights[index]))
                else:
                    single[index] = False
            of_clusters = max(of_clusters, float(weights[~single].max(initial=0.0)))
        self._raise_all(of_clusters)

    def _normalize(self, kinds: Sequence[str], first: bool) -> None:
        """Add the Unicode normalizations `kinds`, in the order in which the tokenizers library
        applies the normalizations to a text."""
        if first and self.top == self._of_all:  # all weights are equal: use the largest factor
            self._raise_all(self.top * max(_UNICODE_GROWTH[kind] for kind in kinds))
            return
        for kind in reversed(kinds):
            if kind in ("NFC", "NFKC"):
                self._compose()
            before, after, starts = _unicode_table(kind)
            weights = np.maximum(self._by_character, self._of_all)
            sums = np.add.reduceat(_sizes(after) * weights[after], starts)
            self._by_character[before] = sums / _sizes(before)
            self.top = max(self._of_all, float(self._by_character.max()))

    def _compose(self) -> None:
        """Add the step that composes a character and its marks, or several Hangul letters, to a
        single character. Each mark, and each Hangul letter after the first letter, gets the weight
        that would result if the composed character were made from this mark or letter alone."""
        codes = np.flatnonzero(self._by_character > self._of_all)
        for start, stop in _CHINESE:  # Chinese characters are not composed with other characters
            codes = codes[(codes < start) | (codes >= stop)]
        weights = self._by_character[codes]
        for code, weight in zip(codes.tolist(), weights.tolist(), strict=True):
            if unicodedata.category(chr(code)) == "Cn":  # not assigned in Python's Unicode tables
                self._raise_all(weight)
            for mark in unicodedata.normalize("NFD", chr(code))[1:]:
                self._raise(ord(mark), weight * len(chr(code).encode()) / len(mark.encode()))

    def _of(self, text: str) -> float:
        codes = _code_points(text)
        return float((_sizes(codes) * np.maximum(self._by_character[codes], self._of_all)).sum())

    def _of_bytes(self, text: bytes) -> np.ndarray:
        """Return a number for each byte of `text`, float64 [bytes]. The number for the first byte
        of a character is the number of bytes that the character can become. The number for any
        other byte is 0. If `text` is not UTF-8, each number is the largest weight."""
        try:
            codes = _code_points(text.decode())
        except UnicodeDecodeError:
            return np.full(len(text), self.top)
        weights = np.zeros(len(text))
        is_first = np.frombuffer(text, np.uint8) & 0xC0 != 0x80
        weights[is_first] = _sizes(codes) * np.maximum(self._by_character[codes], self._of_all)
        return weights

    def _replace(self, characters: str | None, size: int, content: str) -> None:
        """Add the replacement of a pattern by `content`.

        Args:
            characters: Characters that the pattern can match. None: these characters are unknown.
            size: Smallest size of a match in bytes. 0: the pattern can match between characters.
            content: The text that replaces a match.
        """
        weight = self._of(content)
        if size == 0:
            self._raise_all(self.top + weight)
        elif characters is None:
            self._raise_all(weight / size)
        else:
            for character in characters:
                self._raise(ord(character), weight / size)

    def _raise(self, code: int, weight: float) -> None:
        self._by_character[code] = max(self._by_character[code], weight)
        self.top = max(self.top, weight)

    def _raise_all(self, weight: float) -> None:
        self._of_all = max(self._of_all, weight)
        self.top = max(self.top, weight)


def _pattern(pattern: dict[str, str]) -> tuple[str | None, int]:
    """Return the characters that a pattern matches, and the smallest size of a match in bytes.

    If the characters are not known, the first value is None.
    """
    if text := pattern.get("String"):
        return text, len(text.encode())
    expression = pattern.get("Regex", "")
    if literal := _LITERAL.fullmatch(expression):
        text, repeats = literal[1], int(literal[2] or 1)
        return text, len((text + text[-1] * (repeats - 1)).encode())
    return None, 1 if _CLASS.fullmatch(expression) else 0


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)


def _code_point(key: int, size: int) -> int | None:
    """Return the code point of the character whose UTF-8 is `key`, or None if `key` is not the
    UTF-8 of one character.

    `key` is a big-endian integer of `size` bytes.
    """
    if size > 4:
        return None
    try:
        character = key.to_bytes(size, "big").decode()
    except UnicodeDecodeError:
        return None
    return ord(character) if len(character) == 1 else None


def _sizes(codes: np.ndarray) -> np.ndarray:
    """Return the number of bytes that each of the code points `codes` has in UTF-8."""
    return 1 + (codes > 0x7F) + (codes > 0x7FF) + (codes > 0xFFFF)


@functools.cache
def _unicode_table(kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the code points that a Unicode normalization changes, and their replacements.

    Args:
        kind: Name of a class in `tokenizers.normalizers`. The first call with a name takes 0.2 s.

    Returns:
        (changed code points, concatenated replacements of these code points, index in the
        concatenation at which each replacement begins).
    """
    from tokenizers import normalizers

    separator = "zjq"  # normalization does not change or create this text
    before = [chr(code) for start, stop in _CHANGED for code in range(start, stop)]
    normalize = getattr(normalizers, kind)().normalize_str
    after = normalize(separator.join(before)).split(separator)
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    sizes = [len(new) for _, new in changed]
    return (
        _code_points("".join(old for old, _ in changed)),
        _code_points("".join(new for _, new in changed)),
        np.cumsum([0, *sizes[:-1]]),
    )


def _map_entries(charsmap: bytes, key_bytes: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Read a sentencepiece character map, which maps keys to replacement texts.

    A map consists of the size of a trie in bytes (4 bytes, little-endian), the trie, and the
    replacement texts. Each text ends with NUL. The trie is a double array
    (github.com/s-yata/darts-clone) of 4-byte units. The trie maps a key to the offset of a text.
    Two nodes can have the same children.

    Args:
        charsmap: The map.
        key_bytes: Size of the longest keys to read, in bytes.

    Yields:
        For each key size in ascending order: (size in bytes, keys of this size, offsets of the
        replacement texts). Keys are big-endian integers, or 0 if the size is above 4.

    Raises:
        ValueError: A key to read has `_MAX_KEY_BYTES` bytes or more, or the keys to read have more
            than `_MAX_NODES` nodes in the trie.
    """
    trie_bytes = int.from_bytes(charsmap[:4], "little")
    count = max(0, min(trie_bytes, len(charsmap) - 4)) // 4
    if count == 0:
        return
    units = np.frombuffer(charsmap, "<u4", count, 4).astype(np.int64)
    offsets = (units >> 10) << ((units >> 6) & 8)
    labels = units & 0x800000FF
    nodes = np.flatnonzero((labels > 0) & (labels < 256))
    parents = nodes ^ labels[nodes]
    order = np.argsort(parents, kind="stable")
    nodes, parents = nodes[order], parents[order]
    bases, keys, visited = offsets[:1], np.zeros(1, np.int64), 0
    for depth in range(1, key_bytes + 1):
        if depth > 4:  # no character has more than 4 bytes, so the values of keys are not needed
            bases = np.unique(bases)
            keys = np.zeros_like(bases)
        first = np.searchsorted(parents, bases, "left")
        counts = np.searchsorted(parents, bases, "right") - first
        total = int(counts.sum())
        if total == 0:
            return
        visited += total
        if visited > _MAX_NODES or depth == _MAX_KEY_BYTES:
            raise ValueError("the character map is too large")
        index = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(total)
        children = nodes[index]
        keys = np.repeat(keys, counts) << 8 | labels[children]
        bases = children ^ offsets[children]
        ends = ((units[children] >> 8) & 1 == 1) & (bases < count)
        yield depth, keys[ends], units[bases[ends]] & 0x7FFFFFFF
