"""Tests of the upper bound on the growth of a text by a tokenizer's steps: the tokenizers library
never exceeds the bound."""

from __future__ import annotations

import json
import random
import struct

import pytest
from tokenizers import Regex, normalizers

from data_prep.tokenizer.growth import MAX_GROWTH, max_growth, max_growth_by_map
from data_prep.tokenizer.sentencepiece_model import _max_growth, fields

SIMPLE = [
    normalizers.NFC(),
    normalizers.NFD(),
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Lowercase(),
    normalizers.StripAccents(),
    normalizers.Nmt(),
    normalizers.BertNormalizer(),
]
LETTERS = (
    "aAbB \u00e9E\u0301\u212b\ufdfa\u0644\u023e\u2c66\u4e2d\u2f800\uac01\u1100\u1161\u11a8\u3000"
)


def growth(*steps: object) -> float:
    return max_growth(json.loads(normalizers.Sequence(list(steps)).__getstate__()))


LOWERCASE_BOMB = [
    normalizers.Replace("e", "BB"),
    normalizers.Lowercase(),
    normalizers.Replace("b", "EE"),
    normalizers.Lowercase(),
]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (LOWERCASE_BOMB, "e"),
        ([normalizers.Replace("\u0644", "\ufdfa"), normalizers.NFKD()], "\u0644"),
        ([normalizers.Replace("a", "\u212b"), normalizers.NFC(), normalizers.NFD()], "a"),
        ([normalizers.Replace("\u00e9", "eE"), normalizers.NFD(), normalizers.NFC()], "e\u0301"),
    ],
)
def test_normalization_between_replacements_multiplies_their_growth(steps, text):
    repeated = normalizers.Sequence(steps * 3).normalize_str(text * 9)
    assert growth(*steps * 3) >= len(repeated.encode()) / len(text.encode() * 9)


def test_normalization_after_replacements_does_not_hide_a_bomb():
    assert growth(*LOWERCASE_BOMB * 13) == 2**26
    bert = normalizers.BertNormalizer(clean_text=False, lowercase=False, strip_accents=False)
    assert growth(*[bert, normalizers.Replace(" ", "\u4e2d")] * 8) > 6000


@pytest.mark.parametrize(
    "steps",
    [
        [normalizers.NFC()],
        [normalizers.NFKC(), normalizers.Lowercase()],
        [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()],
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")],
        [normalizers.NFKC(), normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")],
        [normalizers.NFKC(), normalizers.BertNormalizer()],
        [normalizers.BertNormalizer()],
    ],
)
def test_usual_normalizers_are_within_the_limit(steps):
    assert growth(*steps) <= MAX_GROWTH


def test_growth_bounds_random_sequences_of_normalizers():
    chance = random.Random(5)
    for _ in range(150):
        steps = []
        for _ in range(chance.randrange(1, 5)):
            content = "".join(chance.choices(LETTERS, k=chance.randrange(4)))
            replace = normalizers.Replace(chance.choice(LETTERS), content)
            steps.append(chance.choice([chance.choice(SIMPLE), replace]))
        text = "".join(chance.choices(LETTERS, k=chance.randrange(1, 4))) * 9
        longer = normalizers.Sequence(steps).normalize_str(text)
        limit = growth(*steps) * 1.0001
        assert len(longer.encode()) <= limit * len(text.encode()), [str(step) for step in steps]


def test_growth_multiplies_only_for_replaced_replacements():
    replace = normalizers.Replace
    assert growth(replace('"', "\u201d"), replace("'", "\u2019"), replace("-", "\u2013")) == 3
    assert growth(replace("\t", "    "), replace("\n", " \u23ce ")) == 5
    assert growth(replace("a", "bb"), replace("b", "ccc")) == 6
    assert growth(replace("b", "ccc"), replace("a", "bb")) == 3
    assert growth(replace("a", "bb"), replace(Regex(".+x"), "ccc")) >= 6
    assert growth(*[replace(Regex("x*"), "b")] * 9) >= 2**9  # x* also matches between characters
    assert growth(*[normalizers.ByteLevel()] * 9) == 2**9


def test_growth_is_a_bound_of_random_replacements():
    chance = random.Random(5)
    for _ in range(300):
        steps = [
            normalizers.Replace(
                chance.choice([chance.choice("abc"), "ab", Regex("b*"), Regex("c{2,}")]),
                "".join(chance.choices("abc", k=chance.randrange(4))),
            )
            for _ in range(3)
        ]
        text = "".join(chance.choices("abc", k=300))
        longer = len(normalizers.Sequence(steps).normalize_str(text)) / len(text)
        # A pattern that matches 0 bytes also matches at the end of the text.
        assert longer <= 1.02 * growth(*steps), list(map(str, steps))


def test_step_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="a step of type Magic, which Optimus does not support"):
        max_growth({"type": "Sequence", "normalizers": [{"type": "Magic"}]})


def character_map(units: dict[int, int], content: bytes) -> bytes:
    trie = struct.pack("<2048I", *[units.get(index, 0) for index in range(2048)])
    return struct.pack("<I", len(trie)) + trie + content + b"\0"


def test_key_of_six_letters_counts_for_sentencepiece():
    """The tokenizers library looks up keys of at most 5 bytes. sentencepiece looks up keys of any
    length."""
    letter = ord("a")
    units = {0: 256 << 10}
    for depth in range(6):  # the children of unit 256 * (depth + 1) ^ "a"
        index, last = 256 * (depth + 1) ^ letter, depth == 5
        children = (256 * (depth + 2) if not last else 2047) ^ index
        units[index] = children << 10 | last << 8 | letter
    table = character_map(units, b"x" * 600)
    assert max_growth_by_map(table) == 100


def test_character_map_with_endless_keys_is_refused():
    letter = ord("a")
    index = 256 ^ letter
    units = {0: 256 << 10, index: (256 ^ index) << 10 | letter}  # the unit is a child of itself
    with pytest.raises(ValueError, match="the character map is too large"):
        max_growth_by_map(character_map(units, b"x"))


def test_field_number_that_protobuf_would_shorten_is_refused():
    """The library would keep only the low 32 bits of the key, and would then read the field as
    number 3, the normalizer with its character map."""
    with pytest.raises(ValueError, match="the field number .* is out of range"):
        list(fields(b"\x9a\x80\x80\x80\x10" + b"\x00"))


def test_model_with_several_character_maps_is_refused():
    """The computation of the bound takes about a second for each map, so a model with several maps
    is refused."""
    spec = b"\x12\x01x"  # NormalizerSpec with a character map
    with pytest.raises(ValueError, match="the model has 3 character maps"):
        _max_growth((b"\x1a" + bytes([len(spec)]) + spec) * 3)
