"""Pre-tokenizers that Python's `re` can reproduce exactly, recognised by their configuration.

Sources: the patterns are those that GPT-2, GPT-NeoX and OLMo (`ByteLevel`), Llama 3 and OLMo 2
(`Split`, three digits) and Qwen 2 (`Split`, one digit) have in their tokenizer.json. Which code
points are letters, numbers and white space is asked of the tokenizers library itself, whose Unicode
version need not be Python's.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
