from __future__ import annotations

import io

import pytest

from optimus.data.sentencepiece_json import has_pieces, sentencepiece_as_json
from optimus.errors import DataError


@pytest.fixture(scope="module")
def model():
    sentencepiece = pytest.importorskip("sentencepiece")
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the word is here"] * 9),
        model_writer=written,
        vocab_size=20,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=3,
    )
    return written.getvalue()


@pytest.mark.parametrize(
    "field",
    [
        b"\x1a\x02\x10\x05",  # normalizer_spec.precompiled_charsmap as a varint
        b"\x1a\x06\x12\x04\x01\x00\x00\x00",  # a damaged map
        b"\x12\x03\x1a\x01\x02",  # trainer_spec.model_type as bytes
        b"\x12\x02\x18\x09",  # an unknown model_type
        b"\x18\x01",  # normalizer_spec as a varint
        b"\x0a\x02\x18\x01",  # a piece without text
    ],
)
def test_model_with_a_wrong_field_is_refused_in_single_line(tmp_path, model, field):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    assert has_pieces(model) and sentencepiece_as_json(path)
    path.write_bytes(model + field)
    with pytest.raises(DataError) as caught:
        sentencepiece_as_json(path)
    assert "\n" not in str(caught.value)
