from __future__ import annotations

import pytest

from data_prep.runtime import child
from optimus.data.tokenizer import TextTokenizer
from optimus.errors import DataError

TEXT = "def f(x): return x <|endoftext|> 1\n"


def test_text_is_decoded_from_its_ids_with_special_tokens_as_text(tiny_data):
    tokenizer = TextTokenizer(tiny_data / "tokenizer.json")
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 10 and tokenizer.decode(ids) == TEXT


def test_sentencepiece_model_decodes_its_ids(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text("\n".join(f"the word number {n} is here" for n in range(200)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=40,
        minloglevel=2,
    )
    tokenizer = TextTokenizer(tmp_path / "m.model")
    assert tokenizer.decode(tokenizer.encode("the word is here")) == "the word is here"


def test_file_that_is_no_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="tokenizer.json: is not a tokenizer"):
        TextTokenizer(tmp_path / "tokenizer.json")


def test_a_name_that_is_not_text_has_no_token_id(tiny_data):
    """A token name that is read from JSON can be a lone surrogate, which has no UTF-8 encoding."""
    assert TextTokenizer(tiny_data / "tokenizer.json").token_id("\ud800") is None


def test_a_tokenizer_that_was_checked_is_opened_without_a_child_process(tiny_data, monkeypatch):
    """Ranks open the tokenizer again to decode generated samples. At that time, they have already
    used a GPU or the network, so a fork is not safe."""
    path, calls = tiny_data / "tokenizer.json", []
    monkeypatch.setattr(child, "run", lambda *_, **limits: calls.append(limits))
    TextTokenizer(path)
    assert len(calls) == 1
    assert TextTokenizer(path, check=False).encode("a") and len(calls) == 1
