"""Bound of the growth of texts in the normalizer, pre-tokenizer and decoder of a tokenizer.json."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

_LITERAL = re.compile(r"([^\\.^$*+?()\[\]{}|]+)(?:\+|\{([1-9]\d?),\})?")
"""Regular expression that matches some characters, of which the last may be repeated."""
_CLASS = re.compile(r"(?:\\[sSwWdDnrt]|\[[^\[\]\\&]+\])(?:\+|\{[1-9]\d?,\})?")
"""Regular expression that matches one or more characters of a class."""
_MAP_KEY_BYTES = 5
"""The library looks up characters, and clusters of characters with fewer than 6 bytes."""


def max_growth(component: dict[str, Any]) -> float:
    """Return by how much a component of a tokenizer can lengthen a text.

    Args:
        component: The component as the tokenizers library writes it to tokenizer.json.

    Returns:
        An upper bound of the ratio of the bytes after it to those before it, at least 1.
    """
    weights = _Weights()
    for step in reversed(list(_steps(component))):
        weights.add(step)
    return weights.top + weights.prefixes


def _steps(component: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if component["type"] != "Sequence":
        yield component
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        for step in component.get(key) or ():
            yield from _steps(step)


class _Weights:
    """Bytes that a byte of each character can become in the steps after the current step.

    A step that replaces a pattern adds up the weights of what it writes and divides them by the
    bytes of the pattern; the result is the weight of the pattern's characters before the step. So
    replacements multiply only if one writes characters that another replaces.
    """

    def __init__(self) -> None:
        self._by_character: dict[str, float] = {}
        self._of_all = 1.0
        self.top = 1.0
        """Largest weight of a character."""
        self.prefixes = 0.0
        """Bytes that steps put before a text."""

    def add(self, step: dict[str, Any]) -> None:
        """Take a step that comes before those added so far."""
        kind = step["type"]
        if kind == "Replace":
            self._replace(*_pattern(step["pattern"]), step["content"])
        elif kind == "BPEDecoder":
            self._replace(*_pattern({"String": step["suffix"]}), " ")
        elif kind == "CTC":
            self._replace(*_pattern({"String": step["word_delimiter_token"]}), " ")
        elif kind == "Precompiled":
            charsmap = base64.b64decode(step["precompiled_charsmap"])
            self._raise_all(_growth_by_map(charsmap, self._of_bytes()))
        elif kind == "Prepend":
            self.prefixes += self._of(step["prepend"])
        elif kind == "Metaspace":
            self._replace(" ", 1, step["replacement"])
            self._raise_all(self.top + self._of(step["replacement"]))  # at the start of a word
        elif kind == "WordPiece":
            self._raise_all(self.top + self._of(" "))  # before a token
        elif kind == "ByteLevel":  # a byte becomes a character of at most 2 bytes
            self._raise_all((4 if step.get("add_prefix_space") else 2) * self.top)

    def _of(self, text: str) -> float:
        return sum(
            len(character.encode()) * max(self._of_all, self._by_character.get(character, 1.0))
            for character in text
        )

    def _of_bytes(self) -> np.ndarray:
        """Return an upper bound of the weight of each byte, float64 [256]."""
        weights = np.full(256, self._of_all)
        for character, weight in self._by_character.items():
            for byte in character.encode():
                weights[byte] = max(weights[byte], weight)
        return weights

    def _replace(self, characters: str | None, size: int, content: str) -> None:
        """Take the replacement of a pattern of at least `size` bytes; its characters are unknown
        if `characters` is None. A pattern of 0 bytes also matches between two characters."""
        weight = self._of(content)
        if size == 0:
            self._raise_all(self.top + weight)
        elif characters is None:
            self._raise_all(weight / size)
        else:
            for character in characters:
                known = self._by_character.get(character, 1.0)
                self._by_character[character] = max(known, weight / size)
            self.top = max(self.top, weight / size)

    def _raise_all(self, weight: float) -> None:
        self._of_all = max(self._of_all, weight)
        self.top = max(self.top, weight)


def _pattern(pattern: dict[str, str]) -> tuple[str | None, int]:
    """Return the characters of a pattern, None if unknown, and the fewest bytes that it matches."""
    if text := pattern.get("String"):
        return text, len(text.encode())
    expression = pattern.get("Regex", "")
    if literal := _LITERAL.fullmatch(expression):
        text, repeats = literal[1], int(literal[2] or 1)
        return text, len((text + text[-1] * (repeats - 1)).encode())
    return None, 1 if _CLASS.fullmatch(expression) else 0


def _growth_by_map(charsmap: bytes, weights: np.ndarray) -> float:
    """Return the largest weight of a replacement of a sentencepiece character map for each byte of
    the text that it replaces.

    A map is the size of a trie in bytes (4 bytes, little-endian), the trie as a double array
    (github.com/s-yata/darts-clone) of units of 4 bytes, and texts that end with NUL; a value of the
    trie is the place of a text.

    Args:
        charsmap: The map.
        weights: float64 [256], weight of each byte of a replacement.
    """
    trie_bytes = int.from_bytes(charsmap[:4], "little")
    count = max(0, min(trie_bytes, len(charsmap) - 4)) // 4
    if count == 0:
        return 0.0
    units = np.frombuffer(charsmap, "<u4", count, 4).astype(np.int64)
    text = np.frombuffer(charsmap[4 + trie_bytes :], np.uint8)
    sums = np.concatenate(([0.0], np.cumsum(weights[text])))
    ends = np.append(np.flatnonzero(text == 0), len(text))
    offsets = (units >> 10) << ((units >> 6) & 8)
    labels = units & 0x800000FF
    nodes = np.flatnonzero((labels > 0) & (labels < 256))
    parents = nodes ^ labels[nodes]
    largest, reached = 0.0, offsets[:1]
    for depth in range(1, _MAP_KEY_BYTES + 1):
        children = nodes[np.isin(parents, reached)]
        reached = children ^ offsets[children]
        leaves = reached[((units[children] >> 8) & 1 == 1) & (reached < count)]
        values = units[leaves] & 0x7FFFFFFF
        values = values[values < len(text)]
        if len(values):
            sizes = sums[ends[np.searchsorted(ends, values)]] - sums[values]
            largest = max(largest, float(sizes.max()) / depth)
    return largest
