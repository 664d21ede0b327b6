"""Shards contain the specified instances in the specified order, with any `--memory`, and with and
without `--carry-tails`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.dataset.manifest import read_manifest
from data_prep.pipeline.shard import PROCESS_BYTES, divide_memory, memory_for
from data_prep.pipeline.verify import verify
from data_prep.shuffle import gather as gather_module
from data_prep.shuffle.gather import Gatherer
from data_prep.shuffle.order import Permutation, read_order, rows_of_shard
from data_prep.tokenize.store import array_path
from optimus.errors import ConfigError, DataError
from optimus.launch import environment
from tests.data_prep.corpus import CONTEXT, peak_memory, run_arguments, run_killed_at, shards, tree


def concatenation(dataset: Path, carry: bool, context: int = CONTEXT) -> np.ndarray:
    """Return the instances of a data set before the shuffle, [N, C], read with numpy."""
    arrays = []
    for unit in range(len(read_order(dataset).units)):
        tokens = np.load(array_path(dataset / read_order(dataset).tokens_dir, unit))
        arrays.append(tokens if carry else tokens[: len(tokens) // context * context])
    flat = np.concatenate(arrays)
    return flat[: len(flat) // context * context].reshape(-1, context)


@pytest.mark.parametrize(("folder", "carry"), [("", False), ("eval", True)])
def test_rows_are_the_permuted_instances(made, folder, carry):
    dataset = made.data / folder
    source = concatenation(dataset, carry)
    order = Permutation(len(source), 5).apply(np.arange(len(source)))
    assert np.array_equal(shards(dataset), source[order])


def test_manifest_accounts_for_tails(made, tmp_path):
    manifest = json.loads((made.data / "manifest.json").read_text())
    order = read_order(made.data)
    assert manifest["tails"] == [unit.tokens % CONTEXT for unit in order.units]
    assert manifest["tail_tokens"] == sum(manifest["tails"]) > 0
    assert manifest["tokens"] == manifest["num_instances"] * CONTEXT + manifest["tail_tokens"]
    assert main(["shuffle", str(made.data), "--to", str(tmp_path), "--context", "500",
                 "--carry-tails"]) == 0  # fmt: skip
    carried = read_order(tmp_path)
    total = sum(unit.tokens for unit in carried.units)
    assert carried.tail_tokens == sum(carried.tails()) == total % 500
    assert carried.tails()[0] == 0 and carried.tails()[-1] > 0


@pytest.mark.parametrize("carry", [False, True])
def test_shuffle_to_another_context_uses_the_token_arrays(made, tmp_path, carry):
    more = ["--carry-tails"] if carry else []
    out = str(tmp_path / "new")
    assert main(["shuffle", str(made.data), "--to", out, "--context", "400", *more]) == 0
    assert main(["shard", out, "--workers", "2"]) == 0
    assert main(["verify", out]) == 0
    source = concatenation(tmp_path / "new", carry, 400)
    order = Permutation(len(source), 0).apply(np.arange(len(source)))
    assert np.array_equal(shards(tmp_path / "new"), source[order])
    assert not (tmp_path / "new" / "tokens").exists()


@pytest.mark.parametrize("carry", [False, True])
@pytest.mark.parametrize("dense", [0, 4, 1 << 40])
@pytest.mark.parametrize("window_bytes", [1, 100, 4096, 1 << 20])
def test_gatherer_reads_the_same_rows_by_any_strategy(
    made, tmp_path, monkeypatch, carry, dense, window_bytes
):
    """The gatherer reads rows separately, in windows of several rows, or as complete arrays."""
    monkeypatch.setattr(gather_module, "_DENSE", dense)
    more = ["--carry-tails"] if carry else []
    assert main(["shuffle", str(made.data), "--to", str(tmp_path), "--context", "37", *more]) == 0
    source = concatenation(tmp_path, carry, 37)
    asked = np.random.default_rng(1).permutation(len(source))[:500]
    gatherer = Gatherer(tmp_path, read_order(tmp_path), window_bytes)
    with contextlib.closing(gatherer):
        out = np.empty((500, 37), source.dtype)
        assert np.array_equal(gatherer.rows(asked, out), source[asked])
        assert gatherer.rows(asked[:0], out[:0]).shape == (0, 37)


def test_instances_may_span_several_arrays(tmp_path, made):
    """With `--carry-tails`, an instance can consist of the tokens of several arrays, with empty
    arrays between them."""
    for number, text in enumerate(["one two", "", "three", "", "six " * 50, "x", "y", "z " * 50]):
        (tmp_path / f"{number}.txt").write_text(text)
    out = tmp_path / "out"
    arguments = ["run", "--input", str(tmp_path / "*.txt"), "--tokenizer", str(made.tokenizer)]
    arguments += ["--out", str(out), "--unit-size", "1", "--context", "50", "--carry-tails"]
    assert main([*arguments, "--eval-fraction", "0.5"]) == 0
    assert len(read_order(out).units) == 8
    assert 0 in {unit.tokens for unit in read_order(out).units}
    for dataset in (out, out / "eval"):
        source = concatenation(dataset, True, 50)
        order = Permutation(len(source), 0).apply(np.arange(len(source)))
        stored = shards(dataset) if len(source) else np.empty((0, 50))
        assert np.array_equal(stored, source[order])


def test_sharding_keeps_its_memory(made, tmp_path):
    """A process writes 96 MB of tokens to one shard with --memory 125MB. The peak memory must be at
    most 125 MB with both strategies."""
    tokens = np.random.default_rng(0).integers(1, 400, 48_000_000, dtype=np.uint16)
    tokens[4999::5000] = 0
    np.save(tmp_path / "a.npy", tokens)
    out = str(tmp_path / "out")
    base = ["--tokenizer", str(made.tokenizer), "--out", out]
    assert main(["import", "--input", str(tmp_path / "a.npy"), *base]) == 0
    assert main(["shuffle", out, "--context", "2048", "--shard-size", "1GB"]) == 0
    for strategy in ("gather", "bucket"):
        words = ["shard", out, "--workers", "1", "--memory", "125MB", "--strategy", strategy]
        assert peak_memory(words) <= 125e6
        shutil.rmtree(tmp_path / "out" / "shards")
        (tmp_path / "out" / "manifest.json").unlink()


def test_line_says_that_memory_is_too_small_for_all_workers(made, tmp_path, capsys):
    assert memory_for(4) == 2 * 10**9
    for workers in (16, 32):
        wanted = memory_for(workers)
        if wanted > 2 * 10**9:  # the machine has this much memory
            assert divide_memory(wanted, workers)[0] >= min(workers, 17)
    assert main(run_arguments(made.text, made.tokenizer, tmp_path / "out")) == 0
    shutil.rmtree(tmp_path / "out" / "shards")
    capsys.readouterr()
    assert main(["shard", str(tmp_path / "out"), "--workers", "3", "--memory", "330MB"]) == 0
    message = capsys.readouterr().err
    assert (
        "optimus-data: shard: uses 2 of 3 workers, because more do not fit in --memory 330MB; "
        in message
    )
    assert main(["shard", str(tmp_path / "out"), "--workers", "2", "--memory", "330MB"]) == 0
    assert "do not fit" not in capsys.readouterr().err


def test_memory_is_divided_among_workers_that_shard():
    assert divide_memory(2 * 10**9, 2)[0] == 2
    workers, block = divide_memory(10**9, 4)
    assert workers == 4 and workers * (block + PROCESS_BYTES) + PROCESS_BYTES <= 10**9
    assert divide_memory(300 << 20, 8)[0] == 1
    with pytest.raises(ConfigError, match="--memory 50MB is too little"):
        divide_memory(50 * 10**6, 1)
    with pytest.raises(ConfigError, match="115MB is too little for rows of 104 MB; give 401MB"):
        divide_memory(115 * 10**6, 1, 104 * 10**6)
    assert divide_memory(401 * 10**6, 2, 104 * 10**6)[0] == 1
    assert divide_memory(115 * 10**6, 1, 4 * 10**6)[0] == 1


def test_manifest_is_removed_while_shards_of_another_order_are_written(made, tmp_path):
    out = tmp_path / "out"
    command = run_arguments(made.text, made.tokenizer, out)
    assert main(command) == 0
    before = tree(out)
    (out / "order.json").unlink()
    assert main(command) == 0 and tree(out) == before, "the same order makes the same data set"
    for folder in (out, out / "eval"):
        (folder / "order.json").unlink()
    shuffle = ["shuffle", str(out), "--context", str(CONTEXT), "--seed", "99"]
    assert run_killed_at(shuffle, 1, before=False) == -signal.SIGKILL
    assert (out / "order.json").exists() and not (out / "manifest.json").exists()
    assert main(shuffle) == 0
    assert not (out / "eval" / "manifest.json").exists()
    assert run_killed_at(["shard", str(out), "--workers", "1"], 3, False) == -signal.SIGKILL
    with pytest.raises(DataError, match="not finished"):
        read_manifest(out)
    assert main(["shard", str(out), "--workers", "1"]) == 0 and list(verify(out)) == []


def test_shard_is_synced_before_its_rename_and_the_rename_before_its_mark(
    made, tmp_path, monkeypatch
):
    shuffle = ["shuffle", str(made.data), "--to", str(tmp_path), "--context", "16"]
    assert main([*shuffle, "--shard-size", "8192"]) == 0
    events, fsync, rename = [], os.fsync, os.rename

    def look_at_fsync(fd):
        fsync(fd)
        events.append((Path(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd).st_size))

    def look_at_rename(old, new):
        rename(old, new)
        events.append((Path(old), Path(new)))

    monkeypatch.setattr(os, "fsync", look_at_fsync)
    monkeypatch.setattr(os, "rename", look_at_rename)
    assert main(["shard", str(tmp_path), "--workers", "1"]) == 0
    monkeypatch.undo()
    final = sorted((tmp_path / "shards").glob("*.npy"))
    assert len(final) > 2
    for path in final:
        (at,) = (index for index, (_, new) in enumerate(events) if new == path)
        assert events[at - 1] == (events[at][0], path.stat().st_size), "content before the rename"
        assert events[at + 1][0] == path.parent, "the rename before the next file"
        (mark,) = (
            index for index, (_, new) in enumerate(events) if new == path.with_suffix(".json")
        )
        assert mark > at


def test_usable_memory_is_the_limit_of_the_control_group(tmp_path, monkeypatch):
    physical = environment.usable_memory()
    monkeypatch.setattr(environment, "_CGROUPS", tmp_path)
    monkeypatch.setattr(environment, "_OWN_CGROUP", cgroup_file := tmp_path / "own")
    for lines, path in (("0::/job/step", "job"), ("3:cpu:/\n4:memory:/a/b", "memory/a")):
        cgroup_file.write_text(lines + "\n")
        folder = tmp_path / path
        folder.mkdir(parents=True)
        name = "memory.max" if path == "job" else "memory.limit_in_bytes"
        (folder / name).write_text("max" if path == "job" else str(1 << 62))
        assert environment.usable_memory() <= physical
        (folder / name).write_text("123456789\n")
        assert environment.usable_memory() == 123456789


def test_default_shard_size_is_a_64th_within_limits():
    assert rows_of_shard(100, 512, 0) * 512 == 4 << 20
    assert rows_of_shard(1 << 20, 1 << 10, 0) << 10 == 16 << 20
    assert rows_of_shard(1 << 30, 8 << 10, 0) * (8 << 10) == 1 << 30
