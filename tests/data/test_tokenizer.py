from __future__ import annotations

import pytest

from optimus.data.tokenizer import TextTokenizer
from optimus.errors import DataError

TEXT = "def f(x): return x <|endoftext|> 1\n"


def test_text_survives_ids_and_special_text_is_plain(tiny_data):
    tokenizer = TextTokenizer(tiny_data / "tokenizer.json")
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 10 and tokenizer.decode(ids) == TEXT


def test_a_sentencepiece_model_serves_as_well(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text(
        "\n".join(f"the word number {n} stands here" for n in range(200))
    )
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=40,
        minloglevel=2,
    )
    tokenizer = TextTokenizer(tmp_path / "m.model")
    assert tokenizer.decode(tokenizer.encode("the word stands")) == "the word stands"


def test_another_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="tokenizer.json: is not a tokenizer"):
        TextTokenizer(tmp_path / "tokenizer.json")
