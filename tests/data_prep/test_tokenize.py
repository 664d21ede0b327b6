"""Tests of token arrays: the arrays contain the ids that the tokenizers library computes for each
document, and the held-out rule selects the documents of the held-out split."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from data_prep.cli import main
from data_prep.tokenize.plan import TokenPlan, held_out_below
from data_prep.tokenize.store import array_path, read_docs
from data_prep.tokenize.token_set import read_token_set
from data_prep.tokenizer.tokenizer import read_facts
from optimus.errors import DataError
from tests.data_prep.corpus import EOS, documents, run_arguments


def stored_documents(dataset: Path) -> list[tuple[str, int, list[int]]]:
    """Return (file, line, ids with EOS) of each document in the token arrays of a data set."""
    plan, _, records = read_token_set(dataset / "tokens")
    stored = []
    for unit in range(len(records)):
        tokens = np.load(array_path(dataset / "tokens", unit))
        start = 0
        for end, source, line in read_docs(dataset / "tokens", unit).tolist():
            stored.append((plan.inputs[source].name, line, tokens[start:end].tolist()))
            start = end
        assert start == len(tokens)
    return stored


def test_stored_ids_of_each_document_are_the_librarys(made):
    tokenizer = Tokenizer.from_file(str(made.tokenizer))
    tokenizer.encode_special_tokens = True
    eos = tokenizer.token_to_id(EOS)
    expected = {"train": [], "held-out": []}
    for name, line, text in documents(made.text):
        held_out = xxhash.xxh3_64_intdigest(text.encode()) < 0.15 * 2**64
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected["held-out" if held_out else "train"].append((name, line, [*ids, eos]))
    assert stored_documents(made.data) == expected["train"]
    assert stored_documents(made.data / "eval") == expected["held-out"]
    assert len(expected["train"]) > 200 and len(expected["held-out"]) > 20


def test_held_out_threshold_is_exact():
    assert held_out_below(0.0) == 0
    assert held_out_below(0.5) == 1 << 63
    assert held_out_below(2.0**-64) == 1
    assert held_out_below(0.1) == int(0.1 * 2.0**64)


def word_tokenizer(path: Path, size: int) -> None:
    """Write a word-level tokenizer with `size` ids. EOS has id 0, and the word "last" has id
    `size` - 1."""
    vocab = {EOS: 0, **{f"w{i}": i for i in range(1, size - 1)}, "last": size - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(path))


@pytest.mark.parametrize(("size", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_dtype_follows_the_vocabulary(tmp_path, size, dtype):
    word_tokenizer(tmp_path / "tokenizer.json", size)
    (tmp_path / "text.txt").write_text("last w7 last w65000")
    arguments = ["run", "--input", str(tmp_path / "text.txt"), "--context", "5"]
    arguments += ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    shard = np.load(tmp_path / "out" / "shards" / "shard-00000.npy")
    assert shard.dtype == np.dtype(dtype)
    assert shard.tolist() == [[size - 1, 7, size - 1, 65000, 0]]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["dtype"], manifest["vocab_size"]) == (dtype, size)


def test_truncation_padding_and_templates_of_a_tokenizer_are_ignored(tmp_path, made):
    """Truncation, padding and templates are for inference. In training data, they would remove text
    or add tokens."""
    tokenizer = Tokenizer.from_file(str(made.tokenizer))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, 0)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    assert main(run_arguments(made.text, tmp_path / "tokenizer.json", out)) == 0
    assert stored_documents(out) == stored_documents(made.data)


def test_eos_is_recognised_by_name_or_set_by_option(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<eos>": 2, "<end>": 3}, "a"))
    path = tmp_path / "tokenizer.json"
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))
    assert (read_facts(path).eos_token, read_facts(path).eos_id) == ("</s>", 1)
    with pytest.raises(DataError, match="not one of its special tokens"):
        read_facts(path, "<end>")
    tokenizer.add_special_tokens(["<eos>", "<end>"])
    tokenizer.save(str(path))
    with pytest.raises(
        DataError, match="include </s> and <eos>; name the end-of-document token with --eos"
    ):
        read_facts(path)
    assert read_facts(path, "<end>").eos_id == 3
    Tokenizer(models.WordLevel({"a": 0}, "a")).save(str(path))
    with pytest.raises(DataError, match="none of"):
        read_facts(path)


def test_units_are_consecutive_files_of_limited_size(made):
    plan: TokenPlan = read_token_set(made.data / "tokens")[0]
    assert [stop for _, stop in plan.units[:-1]] == [first for first, _ in plan.units[1:]]
    assert (plan.units[0][0], plan.units[-1][1]) == (0, len(plan.inputs))
    assert len(plan.units) > 4
    for unit, (first, stop) in enumerate(plan.units):
        assert plan.unit_bytes(unit) <= 6000 or stop == first + 1
    for (first, stop), (_, later) in zip(plan.units, plan.units[1:], strict=False):
        assert sum(file.size for file in plan.inputs[first : stop + 1]) > 6000 or later == stop
