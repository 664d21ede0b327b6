"""Tests of the fast encoder, which returns the same ids as the tokenizers library, or passes the
text to the library."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from data_prep.tokenizer import encoder as encoder_module
from data_prep.tokenizer.encoder import REFERENCE_ONLY, MemoEncoder, reference_encode
from data_prep.tokenizer.tokenizer import Encoder, open_tokenizer
from optimus.errors import OptimusError
from tests.data_prep.test_families import EOS, RECOGNISED, train_family


@pytest.fixture(params=RECOGNISED)
def path(request, tmp_path) -> Path:
    train_family(tmp_path / "tokenizer.json", request.param)
    return tmp_path / "tokenizer.json"


def random_text(rng: random.Random) -> str:
    """Return random text of characters that pre-tokenizers and normalizers divide or join."""
    stock = [*" \n\t\r'_-.\x1c\x85\u00a0\u2003\u3000\u200b", "  ", "    ", "'s", "'LL", "'\u017f"]
    stock += [*"aZé漢한ก٣½²Ⅷ🙂𐐀𝟘", "12345", EOS, "return x", "\U00020000"]
    stock += [*"\u0301\u0327\u1161\u11ab\u212b\u0344\u0378", "word", " The"]
    return "".join(rng.choices(stock, k=rng.randint(1, 60)))


def assert_equal(path: Path, texts: list[str]) -> None:
    encoder, library = Encoder(path), open_tokenizer(path)
    assert encoder.cutter is not None
    expected = reference_encode(library, texts)
    for text, ours, theirs in zip(texts, encoder.encode(texts), expected, strict=True):
        assert ours.tolist() == theirs.tolist(), repr(text)


def test_ids_of_random_text_are_the_librarys(path):
    rng = random.Random(3)
    assert_equal(path, [random_text(rng) for _ in range(1500)])


@pytest.mark.parametrize("path", ["gpt-2", "olmo-2"], indirect=True)
def test_ids_of_all_code_points_are_the_librarys(path):
    codes = [code for code in range(0x20100) if not 0xD800 <= code < 0xE000]
    chars = [chr(code) for code in codes]
    texts = ["".join(chars[i : i + 64]) for i in range(0, len(chars), 64)]
    texts += [f"a{' '.join(chars[i : i + 64])}1" for i in range(0, 0x3100, 64)]
    assert_equal(path, texts)


def test_ids_in_windows_and_with_a_full_cache_are_the_librarys(path, monkeypatch):
    monkeypatch.setattr(encoder_module, "_WINDOW_CHARS", 5)
    monkeypatch.setattr(encoder_module, "_MEMO_PIECES", 20)
    monkeypatch.setattr(encoder_module, "_MEMO_CHARS", 3)
    rng = random.Random(4)
    assert_equal(path, [random_text(rng) + " and" + random_text(rng) for _ in range(300)])


@pytest.mark.parametrize("path", ["gpt-neox", "olmo-2"], indirect=True)
def test_ids_of_long_runs_of_a_character_are_the_librarys(path):
    assert_equal(path, [" " * 1_000_000, "a" * 20_000, "\n" * 20_000 + "x"])


def test_samples_detect_a_wrong_recipe(made, monkeypatch):
    wrong = encoder_module._GPT2.replace(" ?[{N}]+", "[{N}]+")
    monkeypatch.setattr(encoder_module, "_GPT2", wrong)
    assert Encoder(made.tokenizer).cutter is None


def test_difference_from_the_library_is_an_error(made):
    tokenizer = open_tokenizer(made.tokenizer)
    recipe = encoder_module.recognise(json.loads(made.tokenizer.read_text()))
    memo = MemoEncoder(tokenizer, recipe)
    memo._memo["wrong"] = np.uint32(7).tobytes()
    with pytest.raises(OptimusError, match=f"{REFERENCE_ONLY}=reference"):
        memo.encode(["wrong"])


def test_environment_variable_selects_the_library(made, monkeypatch):
    monkeypatch.setenv(REFERENCE_ONLY, "reference")
    assert Encoder(made.tokenizer).cutter is None
