"""`inspect` names the sources of an instance; `stats` against the plainest counting."""

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
from data_prep.dataset.describe import _blocks, _count, for_training, inspect, stats
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


@pytest.mark.parametrize("part", ["", "eval"])
def test_inspect_finds_the_sources(made, part):
    """Every segment is where its document's own ids say."""
    dataset = made.data / part
    tokenizer = Tokenizer.from_file(str(made.tokenizer))
    tokenizer.encode_special_tokens = True
    ids = {
        (name, line): [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
        for name, line, text in documents(made.text)
    }
    stored = shards(dataset)
    for number in range(0, len(stored), 7):
        found = inspect(dataset, number)
        assert found["ids"] == stored[number].tolist()
        place = 0
        for segment in found["sources"]:
            document = ids[segment["input"], segment["line"]]
            begin, length = segment["document_token"], segment["stop"] - segment["first"]
            assert segment["first"] == place and length > 0
            assert document[begin : begin + length] == found["ids"][place : segment["stop"]]
            place = segment["stop"]
        assert place == CONTEXT
    assert {len(inspect(dataset, number)["sources"]) for number in range(40)} >= {1, 2}


def test_inspect_runs_on_through_epochs(made):
    stored = shards(made.data)
    row = int(Permutation(len(stored), 5, 2).apply(np.array([3]))[0])
    found = inspect(made.data, 2 * len(stored) + 3)
    assert found["epoch"] == 2 and found["ids"] == stored[row].tolist()
    with pytest.raises(ConfigError, match="numbered from 0"):
        inspect(made.data, -1)


def test_inspect_of_what_is_not_there(made, tmp_path):
    """A number beyond all epochs, and any number of an empty set."""
    with pytest.raises(ConfigError, match="is after the last epoch"):
        inspect(made.data, 10**30)
    (tmp_path / "a.txt").write_text("words " * 99)
    words = run_arguments(tmp_path / "a.txt", made.tokenizer, tmp_path / "out")
    assert main([*words, "--eval-fraction", "1e-9"]) == 0
    with pytest.raises(ConfigError, match="instance 0 does not exist; .*eval has none"):
        inspect(tmp_path / "out" / "eval", 0)


@pytest.mark.parametrize("how", ["cut", "cut by a row", "grown", "empty", "flipped", "gone"])
def test_inspect_of_a_damaged_table_of_documents(made, tmp_path, capsys, how):
    shutil.copytree(made.data, tmp_path / "data")
    for path in (tmp_path / "data" / "tokens").glob("*.docs.npy"):
        data = bytearray(path.read_bytes())
        data[-12] ^= 64  # of an input's number
        damaged = {"cut": data[:-3], "cut by a row": data[:-24], "grown": data + b"x", "empty": b""}
        path.write_bytes(damaged.get(how, data))
        if how == "gone":
            path.unlink()
    status = 2 if how == "gone" else 1  # a file that is there and wrong is damage
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
def test_damage_to_our_own_files_ends_with_1(made, tmp_path, capsys, name, command):
    data = tmp_path / "data"
    shutil.copytree(made.data, data)
    if name.endswith(".npy"):
        os.truncate(data / name, (data / name).stat().st_size - 1)
    else:
        flip(data / name, 0.5)
    more = ["--to", str(tmp_path / "new")] if command[0] == "shuffle" else []
    assert main([command[0], str(data), *command[1:], *more]) == 1
    assert name in capsys.readouterr().err.splitlines()[-1]


def test_a_name_that_standard_output_cannot_say(made, tmp_path, text):
    """Strict UTF-8, as in most terminals, and a name in Latin-1."""
    with open(os.fsencode(text) + b"/caf\xe9.txt", "wb") as file:
        file.write(b"the cat sat " * 200)
    assert main(run_arguments(text, made.tokenizer, tmp_path / "data")) == 0
    inspect = ["inspect", str(tmp_path / "data"), "0"]
    for more in ([], ["--json"]):
        words = ["-m", "data_prep.cli", *inspect, *more]
        done = python(*words, PYTHONIOENCODING="utf-8:strict")
        assert done.returncode == 0, done.stderr
        assert "caf\\udce9.txt" in done.stdout


@pytest.mark.parametrize("part", [".", "eval"])
def test_stats_of_a_flipped_id(made, tmp_path, capsys, part):
    shutil.copytree(made.data, tmp_path / "data")
    path = tmp_path / "data" / part / "shards" / "shard-00000.npy"
    flip(path, -1, 128)
    assert main(["stats", str(tmp_path / "data")]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    assert "outside its vocabulary of 400; optimus-data verify" in told


def test_inspect_prints_text_and_files(made, capsys):
    assert main(["inspect", str(made.data), "4"]) == 0
    output = capsys.readouterr().out
    found = inspect(made.data, 4)
    assert found["text"] in output and found["sources"][0]["input"] in output


def test_stats_equal_plain_counting(made):
    train, held_out = shards(made.data).tolist(), shards(made.data / "eval").tolist()
    ones = Counter(token for row in train for token in row)
    pairs = Counter(pair for row in train for pair in itertools.pairwise(row))
    first = Counter(token for row in train for token in row[:-1])
    total = sum(ones.values())
    entropy = -sum(n / total * math.log(n / total) for n in ones.values())
    targets = [pair for row in held_out for pair in itertools.pairwise(row)]
    unigram = -sum(math.log((ones[b] + 1) / (total + 400)) for _, b in targets) / len(targets)
    bigram = -sum(math.log((pairs[p] + 1) / (first[p[0]] + 400)) for p in targets) / len(targets)
    value = stats(made.data, made.data / "eval")
    assert value["instances"] == len(train) and value["tokens"] == total == len(train) * CONTEXT
    assert value["unigram_entropy"] == pytest.approx(entropy, rel=1e-12)
    assert value["held_out"]["unigram_loss"] == pytest.approx(unigram, rel=1e-12)
    assert value["held_out"]["bigram_loss"] == pytest.approx(bigram, rel=1e-12)


def test_stats_takes_the_own_held_out_part(made, capsys):
    assert main(["stats", str(made.data), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)
    assert own == stats(made.data, made.data / "eval")
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


def test_stats_refuse_a_held_out_part_with_more_ids(made, tmp_path):
    """Its ids would be beyond the counted pairs."""
    shutil.copytree(made.data / "eval", tmp_path / "eval")
    path = tmp_path / "eval" / "manifest.json"
    manifest = parse_checked_json(path.read_bytes())
    manifest.pop("self_xxh3")
    path.write_bytes(checked_json(manifest | {"vocab_size": manifest["vocab_size"] + 1}))
    with pytest.raises(DataError, match="ids, more than the .* make one of them again"):
        stats(made.data, tmp_path / "eval")


def test_inspect_beyond_the_end_names_epoch_and_place(made, capsys):
    count = len(shards(made.data))
    assert main(["inspect", str(made.data), str(2 * count + 3)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert f"beyond the {count:,} instances of the data set: position 3 of epoch 2" in first
    assert main(["inspect", str(made.data), "3"]) == 0
    assert "epoch" not in capsys.readouterr().out.splitlines()[0]
    assert main(["inspect", str(made.data), str(count), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["epoch"], found["place"], found["instances"]) == (1, 0, count)


def test_run_and_stats_say_what_a_training_run_needs(made, tmp_path, capsys):
    assert main(run_arguments(made.text, made.tokenizer, tmp_path / "data")) == 0
    run = capsys.readouterr().out
    tokens = len(shards(made.data)) * CONTEXT
    needs = (
        f"to train on it: train.seq_len = {CONTEXT}, model.vocab_size = 400 or more; one epoch is "
        f"{tokens:,} tokens, {tokens // 4096} steps of 4,096 tokens (train.global_batch_tokens)"
    )
    assert f"{tmp_path / 'data'}: {needs}" in run
    assert main(["stats", str(made.data)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == needs
    assert main(["stats", str(made.data / "eval")]) == 0
    assert "to train on it" not in capsys.readouterr().out


def test_an_epoch_shorter_than_a_step_is_not_given_as_0_steps(made):
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
def test_a_held_out_part_that_is_too_small_is_a_warning(
    made, tmp_path, text, capsys, documents, words, fraction, remedy
):
    lines = [json.dumps({"text": f"{n} " + "ab cd " * words}) for n in range(documents)]
    (text / "a.jsonl").write_text("\n".join(lines))
    arguments = run_arguments(text, made.tokenizer, tmp_path / "data", "--json")
    assert main([*arguments, "--eval-fraction", str(fraction)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["warnings"]) == (remedy is not None)
    if remedy:
        (warning,) = found["warnings"]
        held_out = found["held-out"]
        assert f"{held_out['documents']} document" in warning and remedy in warning
        assert f"{held_out['instances'] * CONTEXT:,} tokens" in warning


def test_stats_reads_a_long_instance_in_blocks(made, monkeypatch):
    """A sparse shard may hold an instance of 2^31 tokens."""
    whole = stats(made.data, made.data / "eval")
    blocks = []
    for size in (7, CONTEXT - 1):
        monkeypatch.setattr("data_prep.dataset.describe._BLOCK_TOKENS", size)
        found = stats(made.data, made.data / "eval")
        assert found["unigram_entropy"] == whole["unigram_entropy"]
        assert found["held_out"] == pytest.approx(whole["held_out"], rel=1e-12)
        blocks += [rows.size for rows, _ in _blocks(made.data, read_manifest(made.data))]
        assert max(blocks) == size


def test_inspect_refuses_an_instance_that_is_too_long_to_show(made, monkeypatch):
    monkeypatch.setattr("data_prep.dataset.describe.MAX_TOKENS", CONTEXT)
    assert len(inspect(made.data, 0)["ids"]) == CONTEXT
    monkeypatch.setattr("data_prep.dataset.describe.MAX_TOKENS", CONTEXT - 1)
    with pytest.raises(ConfigError, match=f"context = {CONTEXT}, and inspect shows at most"):
        inspect(made.data, 0)


def test_inspect_refuses_a_text_that_is_too_long_to_show(made, monkeypatch):
    """A token of a megabyte, repeated, would take all memory."""
    length = len(inspect(made.data, 0)["text"])
    monkeypatch.setattr("data_prep.dataset.describe.MAX_CHARACTERS", length // 2)
    with pytest.raises(DataError, match=r"tokenizer.json: makes a text of .* characters"):
        inspect(made.data, 0)


def test_inspect_refuses_an_id_that_a_sentencepiece_model_lacks(tmp_path):
    """A manifest may claim more ids than the model has; the library raises IndexError."""
    pytest.importorskip("sentencepiece")
    write_sentencepiece(tmp_path / "tokenizer.model", ["abc def ghi jkl mno"] * 20)
    with pytest.raises(DamageError, match="tokenizer.model: has no piece of id 70000"):
        data_prep.dataset.describe._decode(tmp_path / "tokenizer.model", np.array([5, 70000]))


def test_inspect_reads_a_table_of_documents_once(made, monkeypatch):
    """An instance may be of as many documents as it has tokens."""
    read, tables = data_prep.dataset.describe.read_docs, []
    monkeypatch.setattr(
        "data_prep.dataset.describe.read_docs", lambda *args: tables.append(args) or read(*args)
    )
    for number in range(40):
        tables.clear()
        inspect(made.data, number)
        assert len(tables) == len({unit for _, unit, _ in tables})


def test_counts_take_memory_by_the_largest_id(made, monkeypatch):
    """A manifest may claim a vocabulary of 2^32 ids."""
    manifest = dataclasses.replace(read_manifest(made.data), vocab_size=1 << 32)
    counts, _ = _count(made.data, manifest, with_pairs=False)
    assert len(counts) == shards(made.data).max() + 1
    monkeypatch.setattr("data_prep.dataset.describe.MAX_IDS", 10)
    with pytest.raises(DamageError, match="stats counts ids below 10"):
        _count(made.data, manifest, with_pairs=False)
