"""Tests of `--fused`: the shards are the same as without `--fused`, also after kills, but a run
writes fewer bytes and needs less disk space."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.layout import npy_header
from data_prep.pipeline.verify import verify
from data_prep.tokenize import packed, writer
from data_prep.tokenize.packed import BLOCK_TOKENS, PackedArray, PackedStore
from optimus.errors import DataError
from optimus.io import files
from tests.data_prep.corpus import (
    in_child,
    killed_until_done,
    refused,
    run_arguments,
    run_killed_at,
    tree,
)
from tests.data_prep.test_ranks import start_rank, statuses
from tests.kit.faults.disk import flip
from tests.kit.ranks.processes import python


def arrays(out) -> list[str]:
    """Return the names of the token arrays, packed or plain."""
    return [name for name in tree(out) if name.endswith((".npy", ".packed"))
            and name.count("unit-") and ".docs." not in name and ".ids." not in name]  # fmt: skip


def test_fused_has_the_shards_of_a_plain_run(made, tmp_path, capsys):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    assert main(arguments) == 0
    assert arrays(out) == [] and len(arrays(made.data)) > 4
    stored, expected = tree(out), tree(made.data)
    for name in ("tokens/removed.json", "eval/tokens/removed.json"):
        del stored[name]
    assert stored == {name: expected[name] for name in expected if name not in arrays(made.data)}
    assert list(verify(out)) == []
    capsys.readouterr()
    assert main(["inspect", str(out), "3"]) == 0 and main(["inspect", str(made.data), "3"]) == 0
    fused_output, plain_output = capsys.readouterr().out.split("instance 3")[1:]
    assert fused_output == plain_output
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert main(arguments) == 0 and main(arguments[:-1]) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_tokenize_after_fused_restores_the_arrays(made, tmp_path, capsys):
    out, new = tmp_path / "data", tmp_path / "new"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    assert main(arguments) == 0
    tokenize = ["tokenize", "--input", str(made.text), "--tokenizer", str(made.tokenizer)]
    tokenize += ["--out", str(out), "--eval-fraction", "0.15", "--unit-size", "6000"]
    assert main([*tokenize, "--workers", "1"]) == 0
    assert tree(out) == tree(made.data)
    assert main(["shuffle", str(out), "--to", str(new), "--context", "8"]) == 0
    assert list(verify(out)) == []


def test_run_does_not_print_files_of_a_folder_in_an_order(made, tmp_path, capsys):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    assert main(arguments) == 0
    order = json.loads((out / "order.json").read_text())
    del order["self_xxh3"]
    (out / "order.json").write_bytes(files.checked_json(order | {"tokens_dir": "../outside"}))
    (tmp_path / "outside").mkdir()
    secret = files.checked_json({"format": "a-secret", "version": 1})
    (tmp_path / "outside" / "unit-00000.json").write_bytes(secret)
    main(arguments)
    assert "a-secret" not in "".join(capsys.readouterr())


def test_fused_data_set_refuses_another_order(made, tmp_path, capsys):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    assert main(arguments) == 0
    for command, needle in (
        (["shuffle", str(out), "--to", str(tmp_path / "x"), "--context", "8"], "by --fused"),
        ([*arguments, "--seed", "6"], "seed = 5, now 6"),
        ([*arguments, "--shard-size", "4096"], "instances_per_shard"),
        ([*arguments, "--eval-fraction", "0.2"], "eval_fraction"),
    ):
        refused(capsys, command, needle)
    assert arrays(out) == []
    (out / "shards" / "shard-00001.npy").unlink()
    assert any("shard-00001" in line for line in verify(out))
    assert main(arguments) == 0, "arrays and shards are made again"
    assert list(verify(out)) == [] and arrays(out) == []


def test_fused_run_killed_before_removal_removes_later(made, tmp_path, monkeypatch):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    monkeypatch.setattr("data_prep.pipeline.run.remove_arrays", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(arguments)
    monkeypatch.undo()
    assert len(arrays(out)) > 4 and list(verify(out)) == []
    assert main(arguments) == 0 and arrays(out) == []


def test_fused_on_three_ranks_has_the_same_bytes(made, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "data"
    assert main(run_arguments(made.text, made.tokenizer, whole, "--fused")) == 0
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused", "--world", "3")
    assert statuses([start_rank([*arguments, "--rank", str(rank)]) for rank in range(3)]) == [0] * 3
    assert main(arguments[:-2]) == 0  # removes temporary files
    assert tree(out) == tree(whole)


def standard_library(count: int) -> list[str]:
    """Return the paths of the `count` largest modules of Python's standard library."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"), key=lambda path: -path.stat().st_size)
    return list(map(str, modules[:count]))


def written_and_peak(arguments: list[str]) -> tuple[int, int]:
    """Run a command in a new process. Return (number of bytes that the process writes, largest size
    of the output directory in bytes). The size is measured before token arrays are removed, or at
    the end if none are removed."""
    out = Path(arguments[arguments.index("--out") + 1])
    measured = out.with_name(f"{out.name}.json")

    def work() -> int:
        from data_prep.pipeline import run

        drop, peak = run.drop_arrays, []

        def note(folder: Path) -> None:
            peak.append(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
            drop(folder)

        run.drop_arrays = note
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        status = main(arguments)
        kept = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        measured.write_text(json.dumps([int(facts["wchar"]), *(peak or [kept])]))
        return status

    assert in_child(work) == 0  # the count of a fork begins at 0
    written, peak_bytes = json.loads(measured.read_text())
    return written, peak_bytes


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io (Linux)")
def test_fused_writes_less_and_needs_less_disk(tmp_path, monkeypatch):
    """In an earlier measurement with 2.3 MB of Python code, a run with `--fused` wrote 0.75 times
    the bytes of a run without `--fused` (0.65 times with checkpoints within units), and needed 0.75
    times the disk space."""
    texts, tokenizer = standard_library(24), str(tmp_path / "tokenizer.json")
    assert (
        main(["train-tokenizer", "--input", *texts, "--vocab-size", "3000", "--out", tokenizer])
        == 0
    )
    for checkpoints, unit, bar in ((False, "1MB", 0.78), (True, "100MB", 0.68)):
        monkeypatch.setattr(writer, "SEGMENT_BYTES", (100_000 if checkpoints else 1 << 30))
        figures = []
        for more in ([], ["--fused"]):
            out = tmp_path / f"{checkpoints}{len(more)}"
            arguments = ["run", "--input", *texts, "--tokenizer", tokenizer, "--out", str(out)]
            arguments += ["--context", "512", "--workers", "1", "--unit-size", unit, *more]
            figures.append(written_and_peak(arguments))
        (plain_written, plain_peak), (written, peak) = figures
        assert written < bar * plain_written, (written, plain_written)
        assert peak < 0.78 * plain_peak, (peak, plain_peak)


def test_fused_killed_at_each_commit_has_the_same_bytes(made, tmp_path, monkeypatch):
    """Each unit is written with several checkpoints."""
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 3000)
    monkeypatch.setattr(packed, "BLOCK_TOKENS", 300)
    whole, out = tmp_path / "whole", tmp_path / "data"
    more = ("--fused", "--unit-size", "20000")
    assert main(run_arguments(made.text, made.tokenizer, whole, *more)) == 0
    assert killed_until_done(run_arguments(made.text, made.tokenizer, out, *more))[0] > 20
    assert tree(out) == tree(whole)


@pytest.mark.parametrize("first", [[], ["--fused"]])
def test_killed_run_continues_with_or_without_fused(made, tmp_path, monkeypatch, first):
    """If only the first command has `--fused`, the second command makes new plain arrays for the
    arrays that exist only in packed form. If only the second command has `--fused`, the second
    command uses the plain arrays of the first command, and then removes these arrays."""
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 3000)
    whole, out = tmp_path / "whole", tmp_path / "data"
    second = [] if first else ["--fused"]
    command = run_arguments(made.text, made.tokenizer, out, "--unit-size", "20000")
    assert run_killed_at([*command, *first], 25, before=False) == -signal.SIGKILL
    assert arrays(out) and list((out / "tokens").glob("*.part-*"))
    whole_command = run_arguments(made.text, made.tokenizer, whole, "--unit-size", "20000")
    assert main([*command, *second]) == 0 and main([*whole_command, *second]) == 0
    assert tree(out) == tree(whole)


def test_damaged_packed_array_is_named_and_stops_the_shards(made, tmp_path, monkeypatch, capsys):
    """`verify` also reads packed arrays, which exist until a run removes them."""
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--fused")
    monkeypatch.setattr("data_prep.pipeline.run.drop_arrays", lambda _: None)
    assert main(arguments) == 0 and list(verify(out)) == []
    flip(out / "tokens" / "unit-00001.packed", 40)
    assert any("unit-00001.packed" in line for line in verify(out))
    for shard in (out / "shards").iterdir():
        shard.unlink()
    (out / "manifest.json").unlink()
    assert main(arguments) == 1
    assert "unit-00001.packed: " in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_packed_array_has_the_ids_and_hash_of_npy(tmp_path, dtype):
    """The test also truncates the array, restores saved ids, and reads ids of several frames."""
    rng = np.random.default_rng(0)
    top = np.iinfo(dtype).max
    ids = rng.integers(0, top, 3 * BLOCK_TOKENS + 77, dtype=dtype)
    path = tmp_path / "unit.packed"
    with files.atomic_writer(path) as file:
        store = PackedStore(file, dtype)
        store.append(ids[: BLOCK_TOKENS + 5])
        store.append(rng.integers(0, top, 2 * BLOCK_TOKENS, dtype=dtype))
        store.truncate(BLOCK_TOKENS - 9)
        assert np.array_equal(store.read(100, BLOCK_TOKENS - 10), ids[100 : BLOCK_TOKENS - 10])
        with open(tmp_path / "other", "w+b") as other:
            again = PackedStore(other, dtype)
            again.append(ids[BLOCK_TOKENS - 9 : 2 * BLOCK_TOKENS + 3])
            saved = again.save(0, BLOCK_TOKENS + 12)
        for block in store.saved_ids(saved):
            store.append(block)
        store.append(ids[2 * BLOCK_TOKENS + 3 :])
        described = store.finish()
    data = npy_header((len(ids),), dtype) + ids.tobytes()
    assert described == {"size": len(data), "xxh3": files.xxh3_bytes(data)}
    with PackedArray(path, dtype) as array:
        assert array.tokens == len(ids)
        for start, count in [(0, len(ids)), (5, 10), (BLOCK_TOKENS - 1, 2), (len(ids) - 1, 1)]:
            out = np.empty(count, dtype)
            array.read_into(out, start)
            assert np.array_equal(out, ids[start : start + count])
        with pytest.raises(DataError, match="fewer tokens than its sidecar"):
            array.read_into(np.empty(5, dtype), len(ids) - 4)


def test_fused_without_zstandard_is_refused(made, tmp_path):
    """The message contains the name of the missing package, and no file is written."""
    script = "import sys; sys.modules['zstandard'] = None; from data_prep.cli import main; "
    arguments = run_arguments(made.text, made.tokenizer, tmp_path / "data", "--fused")
    script += f"sys.exit(main({arguments!r}))"
    done = python("-c", script)
    assert done.returncode == 2 and "pip install zstandard" in done.stderr
    assert not (tmp_path / "data").exists()


def test_fused_does_not_remove_a_damaged_plain_array(made, tmp_path, capsys, monkeypatch):
    """The check at the start of a run reads only a sample of the arrays and can miss damage.
    `--fused` therefore checks all token arrays completely before it removes one of them."""
    monkeypatch.setattr("data_prep.tokenize.tokenize.are_whole", lambda promised: True)
    monkeypatch.setattr("data_prep.pipeline.shard.damaged", lambda promised: [])
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out)
    begin = arguments.index("--context")
    assert main(["tokenize", *arguments[1:begin], "--eval-fraction", "0.15",
                 "--unit-size", "6000"]) == 0  # fmt: skip
    path = out / "tokens" / "unit-00000.npy"
    flip(path, 328)
    capsys.readouterr()
    assert main([*arguments, "--fused"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        f"{path}: its content is damaged" in message
        and f"remove this file, {out / 'shards'} and" in message
    )
    assert path.exists() and not (out / "tokens" / "removed.json").exists()
    path.unlink()
    shutil.rmtree(out / "shards")
    assert str(out / "manifest.json") in message
    (out / "manifest.json").unlink()
    assert main([*arguments, "--fused"]) == 0 and arrays(out) == []
    expected = tree(made.data)
    assert all(expected[name] == data for name, data in tree(out).items() if "shard-" in name)


def test_fused_quarantines_the_same_duplicates(made, tmp_path):
    """Units with duplicate documents are packed again without the duplicates."""
    text = tmp_path / "text"
    shutil.copytree(made.text, text)
    (text / "z.jsonl").write_text('{"id": "a.jsonl-3", "text": "again"}\n')
    base = run_arguments(text, made.tokenizer, tmp_path / "one", "--on-error", "quarantine")
    assert main(base) == 0
    assert main([*base, "--fused", "--out", str(tmp_path / "two")]) == 0
    plain, fused = tree(tmp_path / "one"), tree(tmp_path / "two")
    assert "duplicate id" in plain["quarantine.jsonl"].decode()
    gone = [name for name in plain if name not in fused]
    assert gone and all(name in arrays(tmp_path / "one") for name in gone)
    assert all(plain[name] == content for name, content in fused.items() if "removed" not in name)


def test_packed_array_is_removed_if_a_plain_array_exists(made, tmp_path, monkeypatch):
    """A run with `--fused` failed after it had written packed arrays. Then a run without `--fused`
    failed after it had written a plain array. The next run without `--fused` removes the packed
    arrays."""
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out)
    monkeypatch.setattr("data_prep.pipeline.run.shuffle", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*arguments, "--fused"])
    monkeypatch.undo()
    for folder in ("tokens", "eval/tokens"):
        shutil.copy(made.data / folder / "unit-00001.npy", out / folder / "unit-00001.npy")
    assert main(arguments) == 0
    assert tree(out) == tree(made.data)


def test_run_during_the_removal_of_arrays_succeeds(made, tmp_path, monkeypatch):
    arguments = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    real, ended = files.commit, []

    def commit(temporary, final):
        if str(final).endswith("removed.json"):
            ended.append(python("-m", "data_prep.cli", *arguments).returncode)
        real(temporary, final)

    monkeypatch.setattr(files, "commit", commit)
    assert main([*arguments, "--fused"]) == 0
    assert ended == [0, 0]
