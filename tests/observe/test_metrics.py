"""Tests of the files metrics.jsonl and eval.jsonl, of the repair of these files when a run starts,
and of the report of a run."""

from __future__ import annotations

import errno
import json
import os

import pytest

from optimus.errors import DataError
from optimus.io.workspace import Workspace
from optimus.observe.metrics import JsonLines, read_json_lines
from optimus.observe.report import write_report


def opened(path, copy=None, step=1 << 60, log=None, expected=()):
    """Open the file `path` of JSON lines, and repair the file, as a run does when it starts. By
    default, the file keeps all its lines."""
    copy, log = copy or path.with_name(f".{path.name}-copy"), log or path.with_name("cut")
    return JsonLines.open(
        Workspace.open(path.parent / "checkpoints"), path, copy, step, log, expected
    )


def cut_after(path, step, log, copy=None, expected=()):
    """Repair the file `path` as a run does when it starts: move the lines after `step` to the file
    `log`. `copy` is the path of the file's copy, or None if there is no copy. `expected` are the
    steps whose lines the file should have."""
    opened(path, copy or path.with_name("absent"), step, log, expected).close()


def write_steps(path, steps):
    lines = opened(path)
    for step in steps:
        lines.append(
            {
                "step": step,
                "loss": 1 / step,
                "grad_norm": 1.0,
                "tokens": 10 * step,
                "step_time_s": 2,
                "tokens_per_s": 5,
            }
        )
    lines.close()


def test_floats_are_read_back_exactly(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 50))
    assert [r["loss"] for r in read_json_lines(path)] == [1 / step for step in range(1, 50)]


def test_sync_raises_while_lines_wait_for_room(tmp_path, monkeypatch, capsys):
    path, plain = tmp_path / "metrics.jsonl", os.write
    lines = opened(path)

    def full(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    lines.append({"step": 1})
    assert "wait in memory" in capsys.readouterr().err
    with pytest.raises(OSError, match=r"No space left on device: .*metrics.jsonl"):
        lines.sync()
    monkeypatch.setattr(os, "write", plain)
    lines.sync()
    assert read_json_lines(path) == [{"step": 1}]
    lines.close()


def test_cut_keeps_each_step_once_and_loses_nothing(tmp_path):
    path, log = tmp_path / "metrics.jsonl", tmp_path / "log" / "cut.jsonl"
    write_steps(path, range(1, 9))
    with open(path, "a") as file:
        file.write('{"step": 9, "lo')  # a kill cut the line short
    cut_after(path, 6, log)
    assert [record["step"] for record in read_json_lines(path)] == [1, 2, 3, 4, 5, 6]
    assert log.read_text().splitlines()[-1] == '{"step": 9, "lo'
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()[:2]] == [7, 8]


@pytest.mark.parametrize("damage", [b"\xff", b"}"], ids=["not UTF-8", "not JSON"])
def test_cut_moves_a_damaged_line_and_warns(tmp_path, capsys, damage):
    path, log = tmp_path / "metrics.jsonl", tmp_path / "log" / "cut.jsonl"
    write_steps(path, range(1, 9))
    before = path.read_bytes().splitlines()
    damaged = before[2][:7] + damage + before[2][8:]
    path.write_bytes(b"\n".join([*before[:2], damaged, *before[3:], b'{"step": 9, "lo']))
    assert [record["step"] for record in read_json_lines(path)] == [1, 2, 4, 5, 6, 7, 8]
    cut_after(path, 8, log)
    assert path.read_bytes().splitlines() == before[:2] + before[3:]
    assert log.read_bytes().splitlines()[0] == damaged
    printed = capsys.readouterr().err
    assert "1 of its lines cannot be read" in printed and printed.count("\n") == 1


def test_cut_lines_are_durable_before_they_go(tmp_path, monkeypatch):
    path, log = tmp_path / "metrics.jsonl", tmp_path / "log" / "cut.jsonl"
    write_steps(path, range(1, 9))
    plain, synced = os.fsync, []

    def fsync(file):
        plain(file)
        if len(read_json_lines(path)) == 8:
            synced.append(os.readlink(f"/proc/self/fd/{file}"))

    monkeypatch.setattr(os, "fsync", fsync)
    cut_after(path, 6, log)
    (content,) = (name for name in synced if "/.cut.jsonl." in name)
    assert str(log.parent) in synced[synced.index(content) :] and str(tmp_path) in synced


def test_cut_of_nothing_keeps_the_content(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    before = path.read_bytes()
    cut_after(path, 2, tmp_path / "cut")
    assert path.read_bytes() == before and not (tmp_path / "cut").exists()
    cut_after(tmp_path / "absent.jsonl", 0, tmp_path / "cut")
    assert (tmp_path / "absent.jsonl").read_bytes() == b""


def test_lines_of_an_earlier_start_do_not_reach_the_file(tmp_path):
    path, copy = tmp_path / "metrics.jsonl", tmp_path / ".metrics-copy.jsonl"
    earlier = opened(path, copy)
    earlier.append({"step": 1})
    later = opened(path, copy)
    earlier.append({"step": 2, "of": "the earlier start"})
    later.append({"step": 2})
    earlier.sync()
    later.sync()
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}] == read_json_lines(copy)
    earlier.close()
    later.close()


def test_report_draws_a_picture(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", range(1, 9))
    picture, summary = write_report(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert "8 steps" in summary


def test_report_from_a_deleted_working_directory(tmp_path, monkeypatch):
    write_steps(tmp_path / "metrics.jsonl", [1])
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    picture, _ = write_report(tmp_path)
    assert picture.is_file() and os.stat(".").st_nlink == 0


def test_report_counts_damaged_lines(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", [1, 2])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": "x"}\n{"step": -1}\n[3]\n\x00\n{"step": 4, "lo')
    (tmp_path / "eval.jsonl").write_text("{}\n")
    _, summary = write_report(tmp_path)
    assert summary.startswith("2 steps, ") and summary.endswith("; 5 damaged lines left out")


def test_report_of_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"metrics.jsonl: no metrics"):
        write_report(tmp_path)


def kept_with_copy(tmp_path, steps=range(1, 9)):
    """Write the same lines to a file and to its copy. Return the path of the file, the path of the
    copy, and their common content."""
    path, copy = tmp_path / "metrics.jsonl", tmp_path / ".metrics-copy.jsonl"
    lines = opened(path, copy)
    for step in steps:
        lines.append({"step": step, "loss": 1 / step})
    lines.sync()
    assert copy.read_bytes() == path.read_bytes()
    lines.close()
    return path, copy, path.read_bytes()


def delete(path):
    path.unlink()


def empty(path):
    path.write_bytes(b"")


def tear(path):
    """Truncate the file in the middle of line 3."""
    path.write_bytes(path.read_bytes()[:70])


def remove_lines(path):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[5:]))


def write_nuls(path):
    """Replace some bytes of the file by zeros, as a power failure can do."""
    data = path.read_bytes()
    path.write_bytes(data[:40] + bytes(60) + data[100:])


@pytest.mark.parametrize("break_file", [delete, empty, tear, remove_lines, write_nuls])
def test_cut_restores_lost_lines_from_the_copy(tmp_path, capsys, break_file):
    path, copy, before = kept_with_copy(tmp_path)
    break_file(path)
    cut_after(path, 8, tmp_path / "log" / "cut.jsonl", copy, range(1, 9))
    assert path.read_bytes() == before == copy.read_bytes()
    printed = capsys.readouterr().err
    assert f"{path}: restored the lines of steps " in printed and "missing" not in printed
    cut_after(path, 8, tmp_path / "log" / "cut.jsonl", copy, range(1, 9))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("break_file", "steps"),
    [
        (delete, "steps 1-8"),
        (empty, "steps 1-8"),
        (tear, "steps 3-8"),
        (remove_lines, "steps 3-5"),
        (write_nuls, "steps 2-4"),
    ],
)
def test_cut_without_a_copy_names_missing_steps(tmp_path, capsys, break_file, steps):
    """Lines of metrics.jsonl are lost, and the file has no copy: earlier versions of Optimus wrote
    no copies. A warning names the steps whose lines are lost."""
    path, copy, _ = kept_with_copy(tmp_path)
    copy.unlink()
    break_file(path)
    present = [record["step"] for record in read_json_lines(path)]
    cut_after(path, 8, tmp_path / "log" / "cut.jsonl", copy, range(1, 9))
    printed = capsys.readouterr().err.splitlines()
    (line,) = (line for line in printed if "missing" in line)
    assert f"{path}: the lines of {steps} are missing, in {copy} too; " in line
    assert "put the lines back from a backup" in line
    assert [record["step"] for record in read_json_lines(path)] == present
    assert not present or copy.read_bytes() == path.read_bytes()


def test_cut_keeps_the_last_line_of_a_repeated_step(tmp_path, capsys):
    path, copy, before = kept_with_copy(tmp_path)
    again = b'{"step": 3, "loss": 0.25}'
    path.write_bytes(before + again + b"\n" + before.splitlines()[4] + b"\n")
    log = tmp_path / "log" / "cut.jsonl"
    cut_after(path, 8, log, copy, range(1, 9))
    lines = before.splitlines()
    assert path.read_bytes().splitlines() == [*lines[:2], again, *lines[3:]]
    assert copy.read_bytes() == path.read_bytes()
    assert sorted(log.read_bytes().splitlines()) == sorted([lines[2], lines[4]])
    assert not capsys.readouterr().err


def test_new_start_moves_lines_of_the_copy_to_the_log(tmp_path, capsys):
    path, copy, before = kept_with_copy(tmp_path)
    path.unlink()
    log = tmp_path / "log" / "cut.jsonl"
    cut_after(path, 0, log, copy, range(1, 1))
    assert log.read_bytes() == before and not copy.read_bytes()
    assert not capsys.readouterr().err


def test_lines_for_an_unwritable_copy_wait(tmp_path, capsys, monkeypatch):
    path, copy, plain = tmp_path / "metrics.jsonl", tmp_path / ".metrics-copy.jsonl", os.write
    lines = opened(path, copy)

    def full(fd, data):
        if os.path.samefile(f"/proc/self/fd/{fd}", copy):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(fd, data)

    monkeypatch.setattr(os, "write", full)
    for step in (1, 2):
        lines.append({"step": step})
        lines.sync()
    assert capsys.readouterr().err.count("its new lines wait in memory") == 1
    monkeypatch.setattr(os, "write", plain)
    lines.close()
    assert copy.read_bytes() == path.read_bytes() and len(read_json_lines(copy)) == 2


def test_copy_is_written_in_batches_between_checkpoints(tmp_path):
    path, copy = tmp_path / "metrics.jsonl", tmp_path / ".metrics-copy.jsonl"
    lines = opened(path, copy)
    for step in range(1, 500):
        lines.append({"step": step, "text": "x" * 200})
    assert 200 < len(read_json_lines(copy)) < 499
    lines.close()
    assert copy.read_bytes() == path.read_bytes()


def test_cut_keeps_evaluations_of_several_sources(tmp_path):
    path = tmp_path / "eval.jsonl"
    lines = opened(path)
    for step, source in ((2, "a"), (2, "b"), (4, "a")):
        lines.append({"step": step, "source": source})
    lines.close()
    before = path.read_bytes()
    cut_after(path, 4, tmp_path / "cut")
    assert path.read_bytes() == before


def test_report_names_steps_that_are_missing(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", [1, 2, 5, 6, 8])
    _, summary = write_report(tmp_path)
    assert summary.startswith("8 steps, 80 tokens; 10 s of steps (5 tokens/s); ")
    assert "the lines of steps 3-4, 7 are missing" in summary


STEP = {
    "step": 2,
    "loss": 0.5,
    "grad_norm": 1.0,
    "tokens": 20,
    "step_time_s": 2,
    "tokens_per_s": 5,
}


@pytest.mark.parametrize(
    "line",
    [
        "[1]",
        "[" * 100_000,
        json.dumps({k: v for k, v in STEP.items() if k != "grad_norm"}),
        json.dumps(STEP | {"step": "2"}),
        json.dumps(STEP | {"step": -2}),
        json.dumps(STEP | {"step": 2**70}),
        json.dumps(STEP | {"loss": "x"}),
        json.dumps(STEP | {"loss": 10**400}),
        json.dumps(STEP | {"tokens": 1.5}),
        json.dumps(STEP | {"step_time_s": None}),
        json.dumps(STEP | {"tokens_per_s": float("nan")}),
    ],
    ids=lambda line: line[:60],
)
def test_report_skips_a_line_that_no_run_wrote(tmp_path, monkeypatch, line):
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setattr("optimus.observe.report._draw", lambda *_: None)
    write_steps(path, [1, 3])
    first, last = path.read_text().splitlines()
    path.write_text(f"{first}\n{line}\n{last}\n")
    _, summary = write_report(tmp_path)
    assert "the lines of step 2 are missing" in summary


def test_report_shows_losses_that_are_nan(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", [1])
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + json.dumps(STEP | {"loss": float("nan")}) + "\n")
    (tmp_path / "eval.jsonl").write_text('{"step": 2, "loss": NaN}\n')
    _, summary = write_report(tmp_path)
    assert "missing" not in summary and "last training loss nan" in summary
    assert "held-out loss nan at step 2" in summary


def test_report_of_steps_far_apart_takes_no_memory(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", [1, 2, 1 << 50])
    _, summary = write_report(tmp_path)
    assert f"the lines of steps 3-{(1 << 50) - 1} are missing" in summary


def test_a_line_without_an_end_is_refused(tmp_path):
    """Line 2 consists of 40 GiB of zeros in a sparse file, more than fits into memory. Reading and
    repairing the file both raise an error."""
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1])
    os.truncate(path, 40 << 30)
    for read in (read_json_lines, lambda path: cut_after(path, 1, tmp_path / "cut")):
        with pytest.raises(DataError, match=r"metrics.jsonl: line 2 is longer than 1,048,576 byte"):
            read(path)


def test_a_fifo_is_refused_and_a_link_is_not_followed(tmp_path):
    path, target = tmp_path / "metrics.jsonl", tmp_path / "elsewhere"
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"metrics.jsonl: not a regular file"):
        read_json_lines(path)
    path.unlink()
    path.symlink_to(target)
    lines = opened(tmp_path / "other", path)
    lines.append({"step": 1})
    lines.close()
    assert not target.exists() and not path.is_symlink()


def test_search_for_missing_steps_is_limited(tmp_path, capsys, monkeypatch):
    """A damaged manifest can contain a huge step number. Optimus must look for missing lines of at
    most _MOST_STEPS steps."""
    monkeypatch.setattr("optimus.observe.metrics._MOST_STEPS", 10)
    write_steps(tmp_path / "metrics.jsonl", [1, 2])
    cut_after(tmp_path / "metrics.jsonl", 1 << 55, tmp_path / "cut", None, range(1, 1 << 55))
    assert "the lines of steps 3-10 are missing" in capsys.readouterr().err


def test_cut_does_not_follow_a_link(tmp_path):
    """The path of the file for removed lines is a symbolic link. The repair must replace the link
    with a file, and must not change the target of the link."""
    path, log, victim = tmp_path / "metrics.jsonl", tmp_path / "cut.jsonl", tmp_path / "victim"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    victim.write_text("x")
    log.symlink_to(victim)
    cut_after(path, 1, log)
    assert victim.read_text() == "x" and log.read_text() == '{"step": 2}\n'
