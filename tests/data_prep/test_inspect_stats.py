"""Tests of `inspect` and `stats`, whose results are compared with independent counts and with the
documents."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import shutil
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

import data_prep.dataset.describe
from data_prep.cli import main
from data_prep.dataset.describe import _blocks, _count, _warnings, for_training, inspect, stats
from data_prep.dataset.manifest import read_manifest
from data_prep.shuffle.order import Permutation
from optimus.errors import ConfigError, DamageError, DataError
from optimus.io.files import checked_json, parse_checked_json
from tests.data_prep.corpus import (
    CONTEXT,
    documents,
    run_arguments,
    shards,
    train_arguments,
    write_sentencepiece,
)
from tests.kit.faults.disk import flip
from tests.kit.ranks.processes import python


@pytest.mark.parametrize("folder", ["", "eval"])
def test_inspect_lists_the_sources_of_the_ids(made, folder):
    """`inspect` lists the segments of an instance with their documents. The ids of each segment
    equal the ids at the listed position of the document."""
    dataset = made.data / folder
    tokenizer = Tokenizer.from_file(str(made.tokenizer))
    tokenizer.encode_special_tokens = True
    ids = {
        (name, line): [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
        for name, line, text in documents(made.text)
    }
    stored = shards(dataset)
    for number in range(0, len(stored), 7):
        shown = inspect(dataset, number)
        assert shown["ids"] == stored[number].tolist()
        position = 0
        for segment in shown["sources"]:
            document = ids[segment["input"], segment["line"]]
            begin, length = segment["document_token"], segment["stop"] - segment["first"]
            assert segment["first"] == position and length > 0
            assert document[begin : begin + length] == shown["ids"][position : segment["stop"]]
            position = segment["stop"]
        assert position == CONTEXT
    assert {len(inspect(dataset, number)["sources"]) for number in range(40)} >= {1, 2}


def test_inspect_numbers_continue_through_epochs(made):
    stored = shards(made.data)
    row = int(Permutation(len(stored), 5, 2).apply(np.array([3]))[0])
    shown = inspect(made.data, 2 * len(stored) + 3)
    assert shown["epoch"] == 2 and shown["ids"] == stored[row].tolist()
    with pytest.raises(ConfigError, match="numbered from 0"):
        inspect(made.data, -1)


def test_inspect_of_a_missing_instance_is_refused(made, tmp_path):
    """The requested instance number is beyond the last epoch, or the data set is empty."""
    with pytest.raises(ConfigError, match="the last epoch is .*; give a smaller number"):
        inspect(made.data, 10**30)
    (tmp_path / "a.txt").write_text("words " * 99)
    words = run_arguments(tmp_path / "a.txt", made.tokenizer, tmp_path / "out")
    assert main([*words, "--eval-fraction", "1e-9"]) == 0
    with pytest.raises(
        ConfigError, match="instance 0 does not exist; .*eval contains no instances"
    ):
        inspect(tmp_path / "out" / "eval", 0)


@pytest.mark.parametrize("damage", ["cut", "cut by a row", "grown", "empty", "flipped", "gone"])
def test_inspect_of_a_damaged_table_of_documents_names_it(made, tmp_path, capsys, damage):
    shutil.copytree(made.data, tmp_path / "data")
    for path in (tmp_path / "data" / "tokens").glob("*.docs.npy"):
        data = bytearray(path.read_bytes())
        data[-12] ^= 64  # changes the number of an input
        damaged = {"cut": data[:-3], "cut by a row": data[:-24], "grown": data + b"x", "empty": b""}
        path.write_bytes(damaged.get(damage, data))
        if damage == "gone":
            path.unlink()
    status = 2 if damage == "gone" else 1  # 1: a file has wrong content
    assert main(["inspect", str(tmp_path / "data"), "0"]) == status
    assert ".docs.npy: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("manifest.json", ["inspect", "0"]),
        ("manifest.json", ["stats"]),
        ("order.json", ["shard", "--workers", "1"]),
        ("tokens/plan.json", ["shuffle", "--context", "64"]),
        ("tokens/unit-00000.json", ["shuffle", "--context", "64"]),
        ("tokens/unit-00000.npy", ["shuffle", "--context", "64"]),
        ("shards/shard-00000.npy", ["stats"]),
        ("tokenizer.json", ["inspect", "0"]),
        ("tokens/duplicates.json", ["shuffle", "--context", "64"]),
    ],
)
def test_damage_to_a_file_of_a_data_set_exits_with_1(made, tmp_path, capsys, name, command):
    data = tmp_path / "data"
    shutil.copytree(made.data, data)
    if name.endswith(".npy"):
        os.truncate(data / name, (data / name).stat().st_size - 1)
    else:
        flip(data / name, 0.5)
    more = ["--to", str(tmp_path / "new")] if command[0] == "shuffle" else []
    assert main([command[0], str(data), *command[1:], *more]) == 1
    assert name in capsys.readouterr().err.splitlines()[-1]


def test_name_that_standard_output_cannot_encode_is_escaped(made, tmp_path, text):
    """The encoding of standard output is strict UTF-8, as in most terminals. The name of the file
    is encoded in Latin-1."""
    with open(os.fsencode(text) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"the cat sat " * 200)
    assert main(run_arguments(text, made.tokenizer, tmp_path / "data")) == 0
    inspect = ["inspect", str(tmp_path / "data"), "0"]
    for more in ([], ["--json"]):
        words = ["-m", "data_prep.cli", *inspect, *more]
        done = python(*words, PYTHONIOENCODING="utf-8:strict")
        assert done.returncode == 0, done.stderr
        assert "caf\\udce9.txt" in done.stdout


@pytest.mark.parametrize("folder", [".", "eval"])
def test_stats_of_an_id_outside_the_vocabulary_is_refused(made, tmp_path, capsys, folder):
    shutil.copytree(made.data, tmp_path / "data")
    path = tmp_path / "data" / folder / "shards" / "shard-00000.npy"
    flip(path, -1, 128)
    assert main(["stats", str(tmp_path / "data")]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "outside its vocabulary of 400; optimus-data verify" in message


def test_inspect_prints_text_and_files(made, capsys):
    assert main(["inspect", str(made.data), "4"]) == 0
    output = capsys.readouterr().out
    shown = inspect(made.data, 4)
    assert shown["text"] in output and shown["sources"][0]["input"] in output


def test_stats_equal_plain_counting(made):
    train, held_out = shards(made.data).tolist(), shards(made.data / "eval").tolist()
    counts = Counter(token for row in train for token in row)
    pairs = Counter(pair for row in train for pair in itertools.pairwise(row))
    first = Counter(token for row in train for token in row[:-1])
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    targets = [pair for row in held_out for pair in itertools.pairwise(row)]
    unigram = -sum(math.log((counts[b] + 1) / (total + 400)) for _, b in targets) / len(targets)
    bigram = -sum(math.log((pairs[p] + 1) / (first[p[0]] + 400)) for p in targets) / len(targets)
    value = stats(made.data, made.data / "eval")
    assert value["instances"] == len(train) and value["tokens"] == total == len(train) * CONTEXT
    assert value["unigram_entropy"] == pytest.approx(entropy, rel=1e-12)
    assert value["held_out"]["unigram_loss"] == pytest.approx(unigram, rel=1e-12)
    assert value["held_out"]["bigram_loss"] == pytest.approx(bigram, rel=1e-12)


def test_stats_reads_the_held_out_data_by_default(made, capsys):
    assert main(["stats", str(made.data), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == stats(made.data, made.data / "eval")
    assert main(["stats", str(made.data), "--eval", str(made.data)]) == 0
    assert "bigram loss" in capsys.readouterr().out


def test_large_vocabularies_have_no_bigrams(made, monkeypatch):
    monkeypatch.setattr("data_prep.dataset.describe.MAX_BIGRAM_CELLS", 400 * 400 - 1)
    value = stats(made.data, made.data / "eval")["held_out"]
    assert value["bigram_loss"] is None and value["unigram_loss"] > 0


def test_stats_refuses_another_tokenizer(made, tmp_path):
    assert main(train_arguments(made.text, tmp_path / "t.json", 300)) == 0
    assert main(run_arguments(made.text, tmp_path / "t.json", tmp_path / "data")) == 0
    with pytest.raises(DataError, match="another tokenizer"):
        stats(made.data, tmp_path / "data")


def test_stats_refuses_held_out_data_with_more_ids(made, tmp_path):
    """The vocabulary of the training data determines the size of the table of id pairs. Held-out
    data with a larger vocabulary is refused."""
    shutil.copytree(made.data / "eval", tmp_path / "eval")
    path = tmp_path / "eval" / "manifest.json"
    manifest = parse_checked_json(path.read_bytes())
    manifest.pop("self_xxh3")
    path.write_bytes(checked_json(manifest | {"vocab_size": manifest["vocab_size"] + 1}))
    with pytest.raises(
        DataError, match="vocab_size = .*, above the .* make one of the data sets again"
    ):
        stats(made.data, tmp_path / "eval")


def test_inspect_after_the_first_epoch_prints_epoch_and_position(made, capsys):
    count = len(shards(made.data))
    assert main(["inspect", str(made.data), str(2 * count + 3)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert f"the data set has {count:,} instances, so this is position 3 of epoch 2" in first
    assert main(["inspect", str(made.data), "3"]) == 0
    assert "epoch" not in capsys.readouterr().out.splitlines()[0]
    assert main(["inspect", str(made.data), str(count), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["epoch"], shown["place"], shown["instances"]) == (1, 0, count)


def test_run_and_stats_print_settings_of_a_training_run(made, tmp_path, capsys):
    assert main(run_arguments(made.text, made.tokenizer, tmp_path / "data")) == 0
    run = capsys.readouterr().out
    tokens = len(shards(made.data)) * CONTEXT
    needs = (
        f"to train on this data set: train.seq_len = {CONTEXT}, model.vocab_size = 400 or more; "
        f"one epoch is {tokens:,} tokens, {tokens // 4096} steps of 4,096 tokens "
        "(train.global_batch_tokens)"
    )
    assert f"{tmp_path / 'data'}: {needs}" in run
    assert main(["stats", str(made.data)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == needs
    assert main(["stats", str(made.data / "eval")]) == 0
    assert "to train on this data set" not in capsys.readouterr().out


def test_epoch_shorter_than_a_step_is_less_than_a_step(made):
    manifest = dataclasses.replace(read_manifest(made.data), num_instances=50, context=32)
    text = "one epoch is 1,600 tokens, less than one step of 4,096 tokens"
    assert text in for_training(manifest)


@pytest.mark.parametrize(
    ("documents", "words", "fraction", "remedy"),
    [
        (400, 100, 0.01, "with --eval-fraction 0.13"),
        (400, 100, 0.3, None),
        (10, 100, 0.3, "give more text, or evaluate on a data set of other text"),
    ],
)
def test_small_held_out_data_is_a_warning(
    made, tmp_path, text, capsys, documents, words, fraction, remedy
):
    lines = [json.dumps({"text": f"{n} " + "ab cd " * words}) for n in range(documents)]
    (text / "a.jsonl").write_text("\n".join(lines))
    arguments = run_arguments(text, made.tokenizer, tmp_path / "data", "--json")
    assert main([*arguments, "--eval-fraction", str(fraction)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["warnings"]) == (remedy is not None)
    if remedy:
        (warning,) = report["warnings"]
        held_out = report["held-out"]
        assert f"{held_out['documents']} document" in warning and remedy in warning
        assert f"{held_out['instances'] * CONTEXT:,} tokens" in warning


@pytest.mark.parametrize(
    ("documents", "tokens", "is_small"),
    [(17, 444_416, False), (9, 444_416, True), (17, 100_000, True), (20, 9_999, True)],
)
def test_few_long_held_out_documents_are_enough(made, documents, tokens, is_small):
    train, held_out = read_manifest(made.data), read_manifest(made.data / "eval")
    instances = tokens // held_out.context
    held_out = dataclasses.replace(held_out, documents=documents, num_instances=instances)
    assert bool(_warnings(train, [held_out])) == is_small


def test_stats_reads_a_long_instance_in_blocks(made, monkeypatch):
    """A sparse shard can contain an instance of 2^31 tokens, which must not be read at once."""
    whole = stats(made.data, made.data / "eval")
    blocks = []
    for size in (7, CONTEXT - 1):
        monkeypatch.setattr("data_prep.dataset.describe._BLOCK_TOKENS", size)
        blockwise = stats(made.data, made.data / "eval")
        assert blockwise["unigram_entropy"] == whole["unigram_entropy"]
        assert blockwise["held_out"] == pytest.approx(whole["held_out"], rel=1e-12)
        blocks += [rows.size for rows, _ in _blocks(made.data, read_manifest(made.data))]
        assert max(blocks) == size


def test_inspect_refuses_an_instance_that_is_too_long_to_show(made, monkeypatch):
    monkeypatch.setattr("data_prep.dataset.describe.MAX_TOKENS", CONTEXT)
    assert len(inspect(made.data, 0)["ids"]) == CONTEXT
    monkeypatch.setattr("data_prep.dataset.describe.MAX_TOKENS", CONTEXT - 1)
    with pytest.raises(ConfigError, match=f"context = {CONTEXT}, and inspect shows at most"):
        inspect(made.data, 0)


def test_inspect_refuses_a_text_that_is_too_long_to_show(made, monkeypatch):
    """An instance that repeats a token whose text has a megabyte would take all memory."""
    length = len(inspect(made.data, 0)["text"])
    monkeypatch.setattr("data_prep.dataset.describe.MAX_CHARACTERS", length // 2)
    with pytest.raises(DataError, match=r"tokenizer.json: the text of .* characters"):
        inspect(made.data, 0)


def test_inspect_refuses_an_id_that_a_sentencepiece_model_lacks(tmp_path):
    """A manifest can permit ids that do not exist in the model. The library raises IndexError for
    such ids."""
    pytest.importorskip("sentencepiece")
    write_sentencepiece(tmp_path / "tokenizer.model", ["abc def ghi jkl mno"] * 20)
    with pytest.raises(DamageError, match="tokenizer.model: has no piece with id 70000"):
        data_prep.dataset.describe._decode(tmp_path / "tokenizer.model", np.array([5, 70000]))


def test_inspect_reads_a_table_of_documents_once(made, monkeypatch):
    """An instance can contain one document per token, so a table must not be read for each
    document."""
    read, tables = data_prep.dataset.describe.read_docs, []
    monkeypatch.setattr(
        "data_prep.dataset.describe.read_docs", lambda *args: tables.append(args) or read(*args)
    )
    for number in range(40):
        tables.clear()
        inspect(made.data, number)
        assert len(tables) == len({unit for _, unit, _ in tables})


def test_memory_of_counts_depends_on_the_largest_id(made, monkeypatch):
    """A manifest can have a vocabulary of 2^32 ids, but the memory for the counts depends only on
    the largest id that occurs."""
    manifest = dataclasses.replace(read_manifest(made.data), vocab_size=1 << 32)
    counts, _ = _count(made.data, manifest, with_pairs=False)
    assert len(counts) == shards(made.data).max() + 1
    monkeypatch.setattr("data_prep.dataset.describe.MAX_IDS", 10)
    with pytest.raises(DamageError, match="stats counts ids below 10"):
        _count(made.data, manifest, with_pairs=False)
