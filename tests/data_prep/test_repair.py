"""Tests that `verify` names a repair for each damage, and that the repair restores the same
bytes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.pipeline.verify import verify
from data_prep.tokenize import token_set
from tests.data_prep.corpus import run_arguments, tree
from tests.kit.faults.disk import flip


def damage(path, how: str) -> None:
    if how == "flipped":
        flip(path, 0.6)
    else:
        path.unlink()


def follow_repairs(dataset: str | os.PathLike, commands: dict[str, list[list[str]]]) -> None:
    """Run `verify`, do the repairs that `verify` names, and repeat both steps once. The second
    `verify` is needed if a file that lists other files is damaged: the first `verify` can then
    report only the repair of this file. `commands` maps each directory to the commands that made
    it."""
    for _ in range(2):
        lines = [line.partition("; repair: ")[2] for line in verify(Path(dataset))]
        elsewhere = [re.fullmatch("optimus-data verify (.+), or the .+", line) for line in lines]
        for out in {os.path.normpath(match[1]) for match in elsewhere if match}:
            follow_repairs(out, commands)
        repairs = [line.partition("; then ") for line in lines if "; then " in line]
        for remove in dict.fromkeys(remove for remove, _, _ in repairs):
            subprocess.run(shlex.split(remove), check=True)
        for command in dict.fromkeys(command for _, _, command in repairs):
            if command.startswith("optimus-data "):
                assert main(shlex.split(command)[1:]) == 0, command
                continue
            match = re.fullmatch(r"the same optimus-data (.+) command that made (.+)", command)
            kind, out = match.groups()
            for words in commands[out]:
                assert words[0] in kind and ("--fused" in words) == ("--fused" in kind), command
                assert main(words) == 0, (command, words)
    assert list(verify(Path(dataset))) == []


@pytest.fixture
def kinds(all_kinds):
    """Return the result of `all_kinds`. The data sets are restored after each test."""
    base, _ = all_kinds
    before = tree(base)
    yield all_kinds
    for name in tree(base).keys() - before.keys():
        (base / name).unlink()
    for name, content in before.items():
        if not (base / name).exists() or (base / name).read_bytes() != content:
            (base / name).write_bytes(content)


@pytest.fixture(scope="module")
def all_kinds(made, tmp_path_factory):
    """Return a folder with data sets of all kinds, and a dict that maps each data set to the
    commands that made it."""
    base = tmp_path_factory.mktemp("kinds")
    text = base / "text"
    shutil.copytree(made.text, text)
    (text / "bad.txt").write_bytes(b"\xff")  # makes a quarantine.jsonl
    more = ["--on-error", "quarantine", "--unit-size", "40000", "--context", "32"]
    plain = run_arguments(text, made.tokenizer, base / "plain", *more)
    fused = run_arguments(text, made.tokenizer, base / "fused", *more, "--fused")
    other = ["shuffle", str(base / "plain"), "--context", "8", "--to", str(base / "other")]
    blend = ["blend", "--source", f"{base / 'plain'}=1", "--context", "16"]
    blend += ["--out", str(base / "blend")]
    for words in (plain, fused, other, ["shard", str(base / "other")], blend):
        assert main(words) == 0
    again = {"plain": [plain], "fused": [fused], "other": [other], "blend": [blend]}
    return base, {str(base / name): words for name, words in again.items()}


FILES = {
    "plain": (
        *("manifest.json", "order.json", "tokenizer.json", "quarantine.jsonl"),
        *("shards/shard-00000.npy", "shards/shard-00001.json", "tokens/plan.json"),
        *("tokens/unit-00000.npy", "tokens/unit-00000.docs.npy", "tokens/unit-00000.ids.npy"),
        *("tokens/unit-00001.json", "tokens/duplicates.json", "eval/manifest.json"),
        *("eval/order.json", "eval/tokenizer.json", "eval/shards/shard-00000.npy"),
        *("eval/tokens/unit-00000.npy", "eval/tokens/plan.json", "eval/tokens/unit-00001.json"),
    ),
    "fused": (
        *("manifest.json", "order.json", "shards/shard-00000.npy", "shards/shard-00001.json"),
        *("tokens/plan.json", "tokens/unit-00000.docs.npy", "tokens/removed.json"),
        *("eval/shards/shard-00000.npy", "eval/tokens/unit-00000.docs.npy"),
    ),
    "other": ("manifest.json", "order.json", "tokenizer.json", "shards/shard-00000.npy"),
    "blend": ("manifest.json", "order.json", "tokenizer.json", "shards/shard-00000.npy"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in FILES.items() for name in names]
)
def test_repair_of_verify_restores_the_bytes(kinds, kind, name):
    """Flip a bit of a file, or remove the file. The repair restores all bytes of the data sets."""
    base, commands = kinds
    before = tree(base)
    for how in ("flipped", "gone"):
        damage(base / kind / name, how)
        follow_repairs(base / kind, commands)
        assert tree(base) == before, how


def test_token_array_of_a_blend_is_repaired_in_its_source(kinds):
    base, commands = kinds
    before = tree(base)
    flip(base / "plain" / "tokens" / "unit-00001.npy", 0.5)
    (line,) = verify(base / "blend")
    assert f"; repair: optimus-data verify {base / 'blend/../plain'}, or" in line
    follow_repairs(base / "blend", commands)
    assert tree(base) == before


def test_repair_of_imported_arrays_names_import(made, tmp_path):
    import numpy as np

    ids = np.array([5, 6, 7, 0] * 200, "<u2")
    ids.tofile(tmp_path / "ids.npy")
    out = tmp_path / "out"
    words = ["import", "--input", str(tmp_path / "ids.npy"), "--dtype", "uint16"]
    words += ["--tokenizer", str(made.tokenizer), "--out", str(out)]
    assert main(words) == 0 and main(["shuffle", str(out), "--context", "16"]) == 0
    assert main(["shard", str(out)]) == 0
    before = tree(out)
    flip(out / "tokens" / "unit-00000.npy", 0.5)
    follow_repairs(out, {str(out): [words]})
    assert tree(out) == before


@pytest.mark.parametrize(
    "name",
    ["shards/shard-00001.npy", "tokens/unit-00001.npy", "eval/tokens/unit-00001.docs.npy"],
)
@pytest.mark.parametrize("at", [20, 0.7])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_run_makes_a_damaged_file_again(made, tmp_path, capfd, name, at, workers):
    """The damage is in the header or in the content of the file. The next run makes the file
    again."""
    out = tmp_path / "data"
    shutil.copytree(made.data, out)
    flip(out / name, at)
    assert main(run_arguments(made.text, made.tokenizer, out, "--workers", workers)) == 0
    assert tree(out) == tree(made.data)
    problem = "" if at == 20 else "its content is damaged"
    lines = [
        line for line in capfd.readouterr().err.splitlines() if f"{out / name}: {problem}" in line
    ]
    assert len(lines) == 1 and lines[0].endswith(" is made again")


@pytest.mark.parametrize("name", ["unit-00001.npy", "unit-00001.docs.npy"])
def test_run_reports_a_missing_file_of_a_unit_that_it_makes_again(made, tmp_path, capfd, name):
    out = tmp_path / "data"
    shutil.copytree(made.data, out)
    (out / "tokens" / name).unlink()
    assert main(run_arguments(made.text, made.tokenizer, out)) == 0
    assert tree(out) == tree(made.data)
    assert re.search(rf"{name}.*; the unit is made again", capfd.readouterr().err)


@pytest.mark.parametrize("size", [None, 1000])
def test_run_reports_a_missing_or_short_shard_that_it_makes_again(made, tmp_path, capfd, size):
    out = tmp_path / "data"
    shutil.copytree(made.data, out)
    shard = out / "shards" / "shard-00001.npy"
    if size is None:
        shard.unlink()
    else:
        os.truncate(shard, size)
    assert main(run_arguments(made.text, made.tokenizer, out)) == 0
    assert tree(out) == tree(made.data)
    error = capfd.readouterr().err
    problem = "is missing" if size is None else f"has {size} bytes, but its sidecar "
    assert f"{shard}: {problem}" in error and "the shard is made again" in error


def test_run_makes_a_damaged_shard_of_a_fused_data_set_again(kinds, capsys):
    base, commands = kinds
    before = tree(base)
    flip(base / "fused" / "shards" / "shard-00001.npy", 0.5)
    assert main(commands[str(base / "fused")][0]) == 0
    assert "1 damaged shard; the token arrays that --fused removed" in capsys.readouterr().err
    assert tree(base) == before


def test_shards_are_not_made_from_a_damaged_token_array(made, tmp_path, capsys, monkeypatch):
    """In the first run, the check at the start detects the damage. In the second run, the check
    misses the damage, but the new shard differs from the hash in the manifest."""
    out = tmp_path / "data"
    shutil.copytree(made.data, out)
    shard = out / "shards" / "shard-00001.npy"
    for array in (out / "tokens").glob("unit-?????.npy"):
        flip(array, 0.5)
    shard.unlink()
    for needle in ("unit-0000", "shard-00001.npy: the new shard differs"):
        assert main(["shard", str(out), "--workers", "1"]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert needle in error and f"run optimus-data verify {out} to see" in error
        assert not shard.exists()
        shard.with_suffix(".json").unlink(missing_ok=True)  # the manifest contains the hash too
        monkeypatch.setattr("data_prep.pipeline.shard.damaged", lambda promised: [])


def test_start_of_a_run_checks_a_sample_and_names_verify(made, tmp_path, capsys, monkeypatch):
    """Each start of a run checks the hashes of a random sample of the files. The samples differ, so
    a later start detects the damage."""
    out = tmp_path / "data"
    shutil.copytree(made.data, out)
    monkeypatch.setattr(token_set, "HASH_BYTES", 10_000)
    flip(out / "shards" / "shard-00001.npy", 0.5)
    detected = []
    for seed in range(40):
        monkeypatch.setattr(token_set, "_SEED", bytes([seed]))
        assert main(["shard", str(out), "--workers", "1"]) == 0
        error = capsys.readouterr().err
        assert f"optimus-data verify {out} compares all hashes" in error
        detected.append("damaged" in error)
        if detected[-1]:
            break
    assert detected[-1] and tree(out) == tree(made.data)


def test_verify_prints_repairs_in_json(made, tmp_path, capsys):
    out = tmp_path / "data"
    shutil.copytree(made.data, out)
    (out / "manifest.json").unlink()
    assert main(["verify", str(out), "--json"]) == 1
    (line,) = json.loads(capsys.readouterr().out)["damage"]
    manifest = shlex.quote(str(out / "manifest.json"))
    assert line.endswith(f"; repair: rm -f {manifest}; then optimus-data shard {out}")


def test_unfinished_data_set_has_no_repair(made, tmp_path):
    shutil.copytree(made.data / "tokens", tmp_path / "data" / "tokens")
    (line,) = verify(tmp_path / "data")
    assert "is not finished; make it with optimus-data run" in line and "repair" not in line


def test_sample_has_a_large_file_alone():
    large = token_set.HASH_BYTES + 1
    assert token_set.sample([large]) == {0}
    assert len(token_set.sample([large, large])) == 1
    assert token_set.sample([1, 2, 3]) == {0, 1, 2}
    sizes = 100 * [large // 10]
    assert token_set.sample(sizes, "a") == token_set.sample(sizes, "a")
    assert token_set.sample(sizes, "a") != token_set.sample(sizes, "b")


def test_repair_removes_no_file_of_a_linked_folder(made, tmp_path):
    """A folder of token arrays is a link. The arrays at the target of the link can belong to
    another data set, so the repair must not remove these arrays."""
    dataset = tmp_path / "data"
    shutil.copytree(made.data, dataset)
    shutil.move(dataset / "tokens", tmp_path / "elsewhere")
    (dataset / "tokens").symlink_to(tmp_path / "elsewhere")
    flip(tmp_path / "elsewhere" / "plan.json", 0.6)
    lines = list(verify(dataset))
    assert lines and not any("rm -f" in line and "tokens/" in line for line in lines), lines
