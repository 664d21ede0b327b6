"""Tests of `optimus checkpoint list`, `verify`, `show` and `export`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from optimus.checkpoint import inspect, shard_file, store
from optimus.checkpoint.inspect import balance
from optimus.cli import main
from optimus.io import files
from tests.kit.faults.disk import flip
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import train_on


@pytest.fixture(scope="module")
def trained(rank_pool, tiny_data, tmp_path_factory) -> Path:
    """Return the directory of a run on two ranks, with full checkpoints of steps 4 and 6 and
    model-only checkpoints of steps 3 and 6."""
    path = tmp_path_factory.mktemp("commands") / "run"
    settings = {"train__max_steps": 6, "optim__sharding": "epso", "train__dtype": "bf16"}
    settings |= {"checkpoint__interval": 2, "checkpoint__model_interval": 3}
    train_on(rank_pool.run, 2, tiny_tree(tiny_data, path, **settings))
    return path


@pytest.fixture
def run_dir(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def run_json(capsys, *arguments: object, code: int = 0) -> dict:
    """Assert that a command exits with `code`. Return the JSON object that the command prints."""
    capsys.readouterr()
    assert main(["checkpoint", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_list_describes_all_checkpoints(run_dir, capsys):
    directory = store.checkpoints_dir(run_dir)
    unsealed = files.temporary_name(directory / "step-00000007")
    unsealed.mkdir()
    (unsealed / "shard-00000.bin").write_bytes(b"x" * 100)
    removed = files.temporary_name(directory / "removed-step-00000002")
    removed.mkdir()
    (directory / "set-aside").mkdir()
    (directory / "model-00000003").rename(directory / "set-aside" / "model-00000003")
    result = run_json(capsys, "list", run_dir)
    by_name = {about["name"]: about for about in result["checkpoints"]}
    assert list(by_name) == [
        *("step-00000004", "model-00000006", "step-00000006", "model-00000003"),
        *sorted((unsealed.name, removed.name)),
    ]
    assert [about["state"] for about in by_name.values()] == [*["valid"] * 4, *["unsealed"] * 2]
    assert by_name[unsealed.name]["problem"] == "a save that is in progress or was interrupted"
    assert "removal is in progress or has failed" in by_name[removed.name]["problem"]
    assert by_name[unsealed.name]["bytes"] == 100 and by_name["model-00000003"]["set_aside"]
    full, model = by_name["step-00000006"], by_name["model-00000006"]
    assert result["next_start"] == "step-00000006"
    assert (full["kind"], full["step"], full["tokens"]) == ("full", 6, 6 * 8 * 32)
    assert full["layout"] == "pp1 dp2 ep1 tp1 epso bf16" and full["ranks"] == 2
    assert 0 <= full["age_s"] < 600
    assert full["bytes"] == sum(p.stat().st_size for p in (directory / full["name"]).iterdir())
    shapes = store.read_manifest(directory / full["name"]).index().shapes.values()
    assert full["params"] == model["params"] == sum(torch.Size(shape).numel() for shape in shapes)
    assert result["full_by_model"] == full["bytes"] / model["bytes"]

    assert main(["checkpoint", "list", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 11 and "checkpoint.load = auto resumes from step-00000006" in out


def test_list_gives_the_reason_of_damage(run_dir, capsys):
    directory = store.checkpoints_dir(run_dir)
    shard = directory / "step-00000006" / "shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    flip(directory / "step-00000004" / "manifest.json", 100)
    result = run_json(capsys, "list", run_dir)
    by_name = {about["name"]: about for about in result["checkpoints"]}
    assert result["next_start"] is None
    for name, problem in {
        "step-00000006": "shard-00001.bin: ",
        "step-00000004": "manifest.json: not readable: damaged",
    }.items():
        assert by_name[name]["state"] == "damaged" and problem in by_name[name]["problem"]
    assert main(["checkpoint", "list", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "bytes, but the index says" in out and "resumes from nothing" in out


@pytest.mark.parametrize("action", ["list", "verify"])
def test_a_checkpoint_removed_meanwhile_is_not_reported_as_damaged(
    run_dir, capsys, monkeypatch, action
):
    oldest, plain = store.full_path(run_dir, 4), inspect.read_manifest

    def read_late(path):
        manifest = plain(path)
        if path == oldest:
            shutil.rmtree(path)
        return manifest

    monkeypatch.setattr(inspect, "read_manifest", read_late)
    names = [about["name"] for about in run_json(capsys, action, run_dir)["checkpoints"]]
    assert names == ["model-00000003", "model-00000006", "step-00000006"]


def test_a_header_that_claims_more_than_the_file_is_damage(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(inspect, "_HASHED_BYTES", 0)
    path = store.model_path(run_dir, 3) / "model.safetensors"
    path.write_bytes(b"\xff" * 7 + b"\x3f" + path.read_bytes()[8:])
    (about,) = run_json(capsys, "list", path.parent)["checkpoints"]
    assert about["state"] == "damaged" and "model.safetensors" in about["problem"]


def test_verify_reads_each_byte_once(run_dir, capsys):
    directory = store.full_path(run_dir, 6)
    shard_file.traffic.update(opens=0, bytes=0)
    result = run_json(capsys, "verify", directory, "--threads", "1")
    assert result["valid"] and [about["problems"] for about in result["checkpoints"]] == [[]]
    sizes = [shard.size for shard in store.read_manifest(directory).index().shards]
    assert shard_file.traffic == {"opens": 2, "bytes": sum(sizes) + 2 * shard_file.HEADER_BYTES}
    result = run_json(capsys, "verify", run_dir)
    assert [about["name"] for about in result["checkpoints"]] == [
        *("model-00000003", "step-00000004", "model-00000006", "step-00000006"),
    ]


@pytest.mark.parametrize("threads", ["1", "4"])
def test_verify_names_all_damaged_files(run_dir, capsys, threads, monkeypatch):
    monkeypatch.setattr("optimus.checkpoint.format._BLOCKS_A_TASK", 1)
    directory = store.checkpoints_dir(run_dir)
    damaged = [
        directory / "step-00000004" / "shard-00001.bin",
        directory / "step-00000006" / "shard-00000.bin",
        directory / "step-00000006" / "config.toml",
        directory / "model-00000003" / "model.safetensors",
    ]
    for path in damaged:
        flip(path)
    (directory / "model-00000006" / "config.json").unlink()
    result = run_json(capsys, "verify", run_dir, "--threads", threads, code=1)
    assert len(result["damaged"]) == 4 and not result["valid"]
    problems = [problem for about in result["checkpoints"] for problem in about["problems"]]
    assert len(problems) == 5
    for path in damaged:
        assert sum(str(path) in problem for problem in problems) == 1
    assert main(["checkpoint", "verify", str(run_dir)]) == 1
    assert capsys.readouterr().out.count("DAMAGED") == 4
    assert main(["checkpoint", "verify", str(directory / "step-00000004")]) == 1


def test_show_has_the_balance_of_the_writers(run_dir, capsys):
    about = run_json(capsys, "show", run_dir)
    assert about["name"] == "step-00000006" and about["state"] == "valid"
    assert about["mesh"] == {"pp": 1, "dp": 2, "ep": 1, "tp": 1, "per_node": 2}
    index = store.read_manifest(store.full_path(run_dir, 6)).index()
    sizes = [shard.size for shard in index.shards]
    assert about["writers"]["rank_max_by_mean"] == max(sizes) * 2 / sum(sizes) <= 1.1
    assert about["writers"]["node_max_by_mean"] == 1
    assert about["settings"]["model.hidden_size"] == 32
    assert main(["checkpoint", "show", str(store.model_path(run_dir, 3))]) == 0
    assert "model" in capsys.readouterr().out


def test_show_of_a_damaged_index_has_status_1(run_dir, capsys):
    path = store.full_path(run_dir, 6)
    flip(path / "index.jsonl")
    about = run_json(capsys, "show", path, code=1)
    assert about["state"] == "damaged" and "index.jsonl" in about["problem"]
    assert main(["checkpoint", "show", str(path)]) == 1
    assert "damaged: " in capsys.readouterr().out


def test_balance_is_of_the_ranks_and_nodes_of_a_stage():
    ranks = {"pp": 2, "dp": 4, "ep": 1, "tp": 1, "per_node": 2}
    sizes = dict(enumerate([10, 10, 10, 10, 100, 120, 90]))
    result = balance(sizes, ranks)
    assert result["rank_max_by_mean"] == pytest.approx(120 * 4 / 310)
    assert result["node_max_by_mean"] == pytest.approx(220 * 2 / 310)
    assert (result["largest_bytes"], result["smallest_bytes"]) == (120, 0)


def test_transformers_loads_a_model_only_checkpoint(run_dir, tmp_path, capsys):
    """The checkpoint has bf16 weights and no other tensors. Exports of the model-only checkpoint
    and of the full checkpoint have the same weights, bit by bit."""
    transformers = pytest.importorskip("transformers")
    path = store.model_path(run_dir, 6)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert theirs.dtype is torch.bfloat16
    weights = load_file(path / "model.safetensors")
    count = sum(weight.numel() for weight in weights.values())
    assert count == run_json(capsys, "show", path)["params"]
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    head = int.from_bytes((path / "model.safetensors").read_bytes()[:8], "little")
    assert (path / "model.safetensors").stat().st_size == 8 + head + 2 * count

    out = tmp_path / "hf"
    export = ["checkpoint", "export", str(run_dir), str(out), "--dtype", "bf16"]
    assert main(export) == 0
    exported = load_file(out / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weights[name]) for name in weights)
    assert main(["checkpoint", "export", str(path), str(tmp_path / "again")]) == 0
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert main(export) == 2
    assert "exists already" in capsys.readouterr().err


def test_export_reads_shard_files_once_and_passes_over_damage(run_dir, tmp_path, capsys):
    newest, older = store.full_path(run_dir, 6), store.full_path(run_dir, 4)
    size = sum(path.stat().st_size for path in newest.glob("shard-*"))
    headers = 2 * shard_file.HEADER_BYTES * len(list(newest.glob("shard-*")))
    shard_file.traffic.update(opens=0, bytes=0)
    assert main(["checkpoint", "export", str(run_dir), str(tmp_path / "a")]) == 0
    assert 0 < shard_file.traffic["bytes"] <= size + headers
    flip(newest / "shard-00001.bin")
    assert main(["checkpoint", "export", str(run_dir), str(tmp_path / "b")]) == 0
    output = capsys.readouterr()
    assert "skipping a damaged checkpoint" in output.err and str(older) in output.out
    flip(older / "shard-00000.bin")
    assert main(["checkpoint", "export", str(run_dir), str(tmp_path / "c")]) == 1
    assert "without a valid checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_the_exit_status_is_1_for_damage_and_2_for_wrong_arguments(run_dir, tmp_path, capsys):
    path = store.full_path(run_dir, 6)
    flip(path / "shard-00001.bin")
    out = tmp_path / "hf"
    assert main(["checkpoint", "export", str(path), str(out)]) == 1
    assert capsys.readouterr().err.count("does not match its checksum") == 1 and not out.exists()
    (tmp_path / "empty").mkdir()
    (tmp_path / "unsaved" / "checkpoints").mkdir(parents=True)
    mistakes = {"absent": "no such directory", "empty": "neither a run", "unsaved": "without a"}
    for name, words in mistakes.items():
        for action in ("list", "verify", "show"):
            assert main(["checkpoint", action, str(tmp_path / name)]) == 2
            err = capsys.readouterr().err
            assert words in err and err.count("\n") == 1
    assert main(["checkpoint", "verify", str(path), "--threads", "-1"]) == 2


def test_list_and_show_need_no_torch(run_dir):
    code = "import sys; from optimus.cli import main\n"
    for action in ("list", "show"):
        code += f"assert main(['checkpoint', '{action}', {str(run_dir)!r}]) == 0\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_a_checkpoint_with_deeply_nested_folders_is_listed(run_dir, tmp_path, capsys):
    """`checkpoint list` counts the bytes of a file in 1,200 nested folders. A recursive search
    would raise RecursionError."""
    source = next(run_dir.glob("checkpoints/step-*"))
    checkpoint = tmp_path / source.name
    shutil.copytree(source, checkpoint)
    nested = Path(checkpoint, *["d"] * 1200)
    subprocess.run(["mkdir", "-p", nested], check=True)  # os.makedirs is recursive
    (nested / "x").write_bytes(b"12345")
    try:
        statuses = [main(["checkpoint", "list", str(p), "--json"]) for p in (checkpoint, source)]
    finally:
        subprocess.run(["rm", "-rf", checkpoint / "d"], check=True)
    deep, plain = map(json.loads, capsys.readouterr().out.splitlines())
    sizes = [listed["checkpoints"][0]["bytes"] for listed in (deep, plain)]
    assert statuses == [0, 0] and sizes[0] == sizes[1] + 5


def test_layout_of_settings_of_another_type_is_shown():
    settings = {"optim.sharding": 1, "parallel.pp": "4", "train.dtype": None}
    manifest = SimpleNamespace(settings=settings, ranks=None)
    assert inspect._layout(manifest) == "pp4 dp1 ep1 tp1 1 ? None"
