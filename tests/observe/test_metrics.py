from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from optimus.errors import DataError
from optimus.observe.metrics import JsonLines, cut_after, read_json_lines
from optimus.observe.report import write_report


def write_steps(path, steps):
    lines = JsonLines(path)
    for step in steps:
        lines.append(
            {"step": step, "loss": 1 / step, "grad_norm": 1.0, "tokens": step, "step_time_s": 1}
        )
    lines.close()


def test_floats_come_back_to_the_last_bit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, range(1, 50))
    assert [r["loss"] for r in read_json_lines(path)] == [1 / step for step in range(1, 50)]


def test_lines_that_wait_for_room_are_not_called_durable(tmp_path, monkeypatch, capsys):
    path, plain = tmp_path / "metrics.jsonl", os.write
    lines = JsonLines(path)

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
        file.write('{"step": 9, "lo')  # torn by a kill
    cut_after(path, 6, log)
    assert [record["step"] for record in read_json_lines(path)] == [1, 2, 3, 4, 5, 6]
    assert log.read_text().splitlines()[-1] == '{"step": 9, "lo'
    assert [json.loads(line)["step"] for line in log.read_text().splitlines()[:2]] == [7, 8]


@pytest.mark.parametrize("damage", [b"\xff", b"}"], ids=["no text", "no JSON"])
def test_a_damaged_line_stops_no_resume_and_is_told(tmp_path, capsys, damage):
    path, log = tmp_path / "metrics.jsonl", tmp_path / "log" / "cut.jsonl"
    write_steps(path, range(1, 9))
    before = path.read_bytes().splitlines()
    spoilt = before[2][:7] + damage + before[2][8:]
    path.write_bytes(b"\n".join([*before[:2], spoilt, *before[3:], b'{"step": 9, "lo']))
    assert [record["step"] for record in read_json_lines(path)] == [1, 2, 4, 5, 6, 7, 8]
    cut_after(path, 8, log)
    assert path.read_bytes().splitlines() == before[:2] + before[3:]
    assert log.read_bytes().splitlines()[0] == spoilt
    told = capsys.readouterr().err
    assert "1 of its lines cannot be read" in told and told.count("\n") == 1


def test_cut_lines_are_durable_before_they_go(tmp_path, monkeypatch):
    path, log = tmp_path / "metrics.jsonl", tmp_path / "log" / "cut.jsonl"
    write_steps(path, range(1, 9))
    plain, synced = os.fsync, []

    def fsync(file):
        plain(file)
        if len(read_json_lines(path)) == 8:
            synced.append(Path(os.readlink(f"/proc/self/fd/{file}")))

    monkeypatch.setattr(os, "fsync", fsync)
    cut_after(path, 6, log)
    assert {log, log.parent, tmp_path} <= set(synced)
    assert synced.index(log) < synced.index(log.parent, synced.index(log))


def test_cut_of_nothing_leaves_the_file_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, [1, 2])
    before = path.stat().st_mtime_ns
    cut_after(path, 2, tmp_path / "cut")
    assert path.stat().st_mtime_ns == before and not (tmp_path / "cut").exists()
    cut_after(tmp_path / "absent.jsonl", 0, tmp_path / "cut")


def test_report_draws_a_picture(tmp_path):
    write_steps(tmp_path / "metrics.jsonl", range(1, 9))
    picture, summary = write_report(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 5000
    assert "8 steps" in summary


def test_report_of_an_empty_directory_is_one_line(tmp_path):
    with pytest.raises(DataError, match=r"metrics.jsonl: no metrics"):
        write_report(tmp_path)
