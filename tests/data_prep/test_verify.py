"""Tests that `verify` detects damage of each file of a data set, and names the file."""

from __future__ import annotations

import json
import random
import re
import shutil

import pytest

from data_prep.cli import main
from data_prep.dataset.manifest import read_manifest
from data_prep.layout import read_checked_json, write_checked_json
from data_prep.pipeline.verify import verify
from optimus.errors import DataError
from optimus.io import files
from optimus.train import resolve
from tests.data_prep.corpus import tree


@pytest.fixture
def copy(made, tmp_path):
    shutil.copytree(made.data, tmp_path / "data")
    return tmp_path / "data"


def test_verify_of_a_valid_data_set_reports_no_damage(made, capsys):
    assert list(verify(made.data)) == []
    assert main(["verify", str(made.data), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"dataset": str(made.data), "whole": True, "damage": []}


def test_flipped_bit_in_each_file_is_detected(copy):
    rng = random.Random(0)
    for name, content in tree(copy).items():
        position, bit = rng.randrange(len(content)), rng.randrange(8)
        damaged = bytearray(content)
        damaged[position] ^= 1 << bit
        (copy / name).write_bytes(damaged)
        lines = list(verify(copy))
        assert lines and all(str(copy) in line for line in lines), name
        assert any(str(copy / name) in line for line in lines), (name, lines)
        (copy / name).write_bytes(content)
    assert list(verify(copy)) == []


def a_file_of_each_kind(dataset, rng):
    """Choose a random file of each kind (such as a shard, or the sidecar of a unit) in the data set
    and in its held-out split. Return a dict that maps the relative path of each chosen file to its
    content."""
    kinds = {}
    for name, content in tree(dataset).items():
        kinds.setdefault(re.sub(r"\d+", "", name), []).append((name, content))
    return dict(map(rng.choice, kinds.values()))


@pytest.mark.parametrize("how", ["truncate", "extend", "remove"])
def test_wrong_size_of_a_file_of_each_kind_is_detected(copy, how):
    for name, content in a_file_of_each_kind(copy, random.Random(how)).items():
        if how == "remove":
            (copy / name).unlink()
        else:
            (copy / name).write_bytes(content[:-1] if how == "truncate" else content + b"\n")
        stem = name.removesuffix(".docs.npy").removesuffix(".npy").removesuffix(".json")
        assert any(f"{copy / stem}." in line for line in verify(copy)), name
        (copy / name).write_bytes(content)


def test_flipped_bit_of_a_checked_json_is_detected(tmp_path):
    path = tmp_path / "x.json"
    content = files.checked_json({"format": "f", "version": 1, "n": 12})
    path.write_bytes(content)
    assert read_checked_json(path, "f")["n"] == 12
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(DataError, match="damaged"):
                read_checked_json(path, "f")
    for form, version, needle in (("g", 1, "is g version 1"), ("f", 2, "is f version 2")):
        write_checked_json(path, {"format": form, "version": version})
        with pytest.raises(DataError, match=needle):
            read_checked_json(path, "f")


def rewritten(path, **changes):
    """Rewrite a checked JSON file with other values and a valid hash."""
    value = json.loads(path.read_text())
    del value["self_xxh3"]
    write_checked_json(path, value | changes)


def test_ids_outside_the_vocabulary_are_detected(copy):
    """`verify` detects an id outside the vocabulary, although all hashes are valid."""
    shard = copy / "shards" / "shard-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-2:] = b"\xff\xff"
    shard.write_bytes(content)
    xxh3 = files.xxh3_file(shard)
    rewritten(shard.with_suffix(".json"), xxh3=xxh3)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["shards"][0]["xxh3"] = xxh3
    rewritten(copy / "manifest.json", shards=manifest["shards"])
    (line,) = verify(copy)
    assert line.startswith(f"{shard}: contains id 65535, outside the vocabulary of 400; repair: ")


@pytest.mark.parametrize(
    ("key", "value"), [("first", -1), ("order", "zz"), ("instances", 1), ("size", 7)]
)
def test_sidecar_of_another_shard_is_detected(copy, key, value):
    sidecar = copy / "shards" / "shard-00000.json"
    rewritten(sidecar, **{key: value})
    (line,) = verify(copy)
    assert line.startswith(f"{sidecar}: {key} is {value} instead of ")


def test_wrong_count_is_detected(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    rewritten(copy / "manifest.json", num_instances=manifest["num_instances"] + 1)
    assert any("num_instances" in line for line in verify(copy))


def test_other_data_set_in_the_folder_for_held_out_data_is_detected(copy):
    manifest = read_manifest(copy)
    held_out = read_manifest(copy / "eval")
    assert resolve._evaluation_path(str(copy)) in ("", str(copy / "eval"))
    for changes, problem in (
        ({"part": "train"}, "part = 'train'"),
        ({"tokenizer_sha256": "0" * 64}, "another tokenizer"),
    ):
        rewritten(copy / "eval" / "manifest.json", **changes)
        (line,) = verify(copy)
        assert line.startswith(f"{copy / 'eval' / 'manifest.json'}: has {problem}, so it is not")
        assert f"repair: rm -r {copy / 'eval'}; then the same optimus-data" in line
        with pytest.raises(DataError, match=rf"has {problem}.* data\.eval_path"):
            resolve._evaluation_path(str(copy))
        original = {key: getattr(held_out, key) for key in changes}
        rewritten(copy / "eval" / "manifest.json", **original)
    assert held_out.tokenizer_sha256 == manifest.tokenizer_sha256 and list(verify(copy)) == []


def test_verify_exits_with_1_for_damage_and_2_for_no_data_set(copy, capsys):
    shard = copy / "eval" / "shards" / "shard-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert main(["verify", str(copy), "--json"]) == 1
    output = capsys.readouterr()
    assert str(shard) in output.err and json.loads(output.out)["whole"] is False
    assert main(["verify", str(copy / "nowhere")]) == 2
