"""Tests of the measured peak FLOP/s, the denominator of MFU. The peak is measured once, and cached
only if the measurement is reliable."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus import peak
from optimus.doctor import examine, format_examination
from optimus.io import files
from optimus.io.workspace import Workspace
from optimus.launch.environment import available_cores
from optimus.observe.metrics import read_json_lines
from optimus.peak import Peak, RunPeak, find_peak, read_peak, setup_of, write_peak
from tests.kit.faults.formats import with_self_hash
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import printed_by, run_tree

CPU = torch.device("cpu")
FP32 = (CPU, torch.float32, "MKL")


def run_peak(run_dir, *args):
    """Return the RunPeak that a start of the run in `run_dir` creates."""
    return RunPeak(run_dir, Workspace.open(run_dir / "checkpoints"), *args)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OPTIMUS_PEAK_CACHE", str(tmp_path / "cache" / "peaks"))
    return tmp_path / "cache" / "peaks"


@pytest.fixture
def measured(monkeypatch) -> list[Peak]:
    """Replace `peak.measure`, so that call n returns a peak of n TFLOP/s. Return the list to which
    each call appends its peak."""
    peaks: list[Peak] = []

    def measure(device, dtype, setup) -> Peak:
        peaks.append(Peak(setup, (len(peaks) + 1) * 1e12, 0.02, "measured", "2026-01-01T00:00:00Z"))
        return peaks[-1]

    monkeypatch.setattr(peak, "measure", measure)
    return peaks


def unexpected(line: str) -> None:
    raise AssertionError(line)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2])
def test_measurement_restores_the_threads_and_is_positive(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        setup = setup_of(CPU, dtype, "x")
        result = peak.measure(CPU, dtype, setup)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert setup.threads == threads and result.flops > 1e8
    assert result.spread is None or 0 <= result.spread <= 1
    assert result.is_reliable == (result.spread is not None and result.spread <= 0.1)


def test_time_of_other_programs_does_not_count(monkeypatch):
    """A wall clock that runs ten times as fast must change the measured peak by less than a factor
    of 5. Such a clock simulates other programs that use 90 % of the processor time."""
    setup, plain = setup_of(*FP32), time.perf_counter
    quiet = peak.measure(*FP32[:2], setup)
    monkeypatch.setattr(time, "perf_counter", lambda: 10 * plain())
    busy = peak.measure(*FP32[:2], setup)
    assert 0.2 < busy.flops / quiet.flops < 5


def test_threads_above_the_number_of_cores_do_not_count(monkeypatch):
    monkeypatch.setattr(peak, "_uninterrupted_times", lambda *_: [])
    setup = replace(setup_of(*FP32), threads=1000)
    assert f"of one thread, times {available_cores()}" in peak.measure(*FP32[:2], setup).method


def test_interrupted_threads_do_not_count(monkeypatch):
    """Simulate that other programs interrupt every matrix product that is measured with two
    threads. `measure` must then measure with one thread, multiply the rate by the number of
    threads, and mark the peak as unreliable."""
    monkeypatch.setattr(peak, "_uninterrupted_times", lambda *_: [])
    setup = replace(setup_of(*FP32), threads=2)
    result = peak.measure(*FP32[:2], setup)
    assert result.spread is None and not result.is_reliable
    assert "of one thread, times 2" in result.method


def test_peak_is_measured_once_for_each_setup(measured, cache):
    before = os.umask(0o002)  # new files are group-writable; a peak must not be
    try:
        first = find_peak(*FP32, unexpected)
    finally:
        os.umask(before)
    assert find_peak(*FP32, unexpected) == first and len(measured) == 1
    for folder in (cache, cache.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(list(cache.iterdir())) == 1
    for other in ((CPU, torch.bfloat16, "MKL"), (CPU, torch.float32, "oneDNN")):
        assert find_peak(*other, unexpected) != first
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    find_peak(*FP32, unexpected)
    torch.set_num_threads(before)
    assert len(measured) == 4


@pytest.mark.parametrize(
    ("spread", "text"), [(0.3, "measured with a spread of 30%"), (None, "is only an estimate")]
)
def test_unreliable_measurement_is_used_and_not_cached(monkeypatch, cache, spread, text):
    poor = Peak(setup_of(*FP32), 1e12, spread, "measured", "2026-01-01T00:00:00Z")
    monkeypatch.setattr(peak, "measure", lambda *_: poor)
    lines: list[str] = []
    assert find_peak(*FP32, lines.append) == poor and not cache.exists()
    assert len(lines) == 1 and text in lines[0] and "not cached" in lines[0]


def spoil(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content.replace(b"1000000000000.0", b"9000000000000.0"))


def rewrite(path: Path, **fields: Any) -> None:
    """Replace fields of the cached peak in the file `path`, and update the hash in this file."""
    tree = json.loads(path.read_bytes())
    del tree["self_xxh3"]
    setup = tree["setup"] | fields.pop("setup", {})
    path.write_bytes(files.checked_json(tree | {"setup": setup} | fields))


NESTED = b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BROKEN = {
    "changed": (spoil, "damaged"),
    "emptied": (lambda path: path.write_bytes(b""), "damaged"),
    "no object": (lambda path: path.write_bytes(b"7"), "damaged"),
    "writable": (lambda path: path.chmod(0o666), "can be written by others"),
    "folder writable": (lambda path: path.parent.chmod(0o777), "can be written by others"),
    "other type": (lambda path: rewrite(path, spread="x"), "damaged"),
    "other type of setup": (lambda path: rewrite(path, setup={"threads": "x"}), "damaged"),
    "no threads": (lambda path: rewrite(path, setup={"threads": -2}), "damaged"),
    "false threads": (lambda path: rewrite(path, setup={"threads": True}), "damaged"),
    "terminal escape": (lambda path: rewrite(path, method="\x1b[2J"), "damaged"),
    "not a number": (lambda path: rewrite(path, spread=math.nan), "damaged"),
    "nested": (lambda path: path.write_bytes(with_self_hash(NESTED)), "damaged"),
    "directory": (lambda path: path.unlink() or path.mkdir(), "is not a file"),
    "link": (lambda path: path.rename(path.parent / "x") and path.symlink_to("x"), ""),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_untrusted_file_is_ignored_with_a_log_line(measured, cache, damage):
    find_peak(*FP32, unexpected)
    (path,) = cache.iterdir()
    apply, word = BROKEN[damage]
    apply(path)
    lines: list[str] = []
    assert find_peak(*FP32, lines.append).flops == 2e12
    assert str(cache) in lines[0] and word in lines[0] and "is ignored" in lines[0]


def test_file_of_another_user_is_ignored(measured, cache, monkeypatch):
    find_peak(*FP32, unexpected)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    lines: list[str] = []
    assert find_peak(*FP32, lines.append).flops == 2e12
    assert "belongs to another user" in lines[0]


def test_unwritable_cache_gives_a_log_line(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OPTIMUS_PEAK_CACHE", str(tmp_path / "file" / "peaks"))
    lines: list[str] = []
    find_peak(*FP32, lines.append)
    assert "is not cached" in lines[-1] and "set OPTIMUS_PEAK_CACHE" in lines[-1]


def test_without_a_home_directory_no_peak_is_cached(measured, homeless, monkeypatch):
    monkeypatch.delenv("OPTIMUS_PEAK_CACHE")
    assert find_peak(*FP32, unexpected).flops == 1e12 and peak.kept_peaks() == []


def test_peak_of_a_data_sheet_is_not_measured(measured, monkeypatch):
    monkeypatch.setattr(peak, "device_name", lambda device: "NVIDIA H100 80GB HBM3")
    result = find_peak(torch.device("cuda", 0), torch.bfloat16, "cuda", unexpected)
    assert result.flops == 989e12 and "data sheet" in str(result) and not measured


def test_resumed_run_keeps_its_peak(measured, cache, tmp_path):
    lines: list[str] = []
    first = run_peak(tmp_path, False, *FP32, lines.append)
    next(cache.iterdir()).unlink()
    resumed = run_peak(tmp_path, True, *FP32, lines.append)
    assert resumed.peak == first.peak and "as before in this run" in lines[-1]
    assert (
        RunPeak(
            tmp_path, Workspace.open(tmp_path / "checkpoints"), False, *FP32, lines.append
        ).peak.flops
        == 2e12
    )
    changed = RunPeak(
        tmp_path,
        Workspace.open(tmp_path / "checkpoints"),
        True,
        CPU,
        torch.float32,
        "oneDNN",
        lines.append,
    )
    assert changed.peak.flops == 3e12
    assert "MFU refers to 3 TFLOP/s" in lines[-1]
    assert "before, MFU referred to 2 TFLOP/s" in lines[-1]


def test_resumed_run_does_not_keep_an_unreliable_peak(measured, cache, tmp_path):
    """A peak that was measured on a busy machine can be too high. A resumed run must measure such a
    peak again. Otherwise, the MFU of the run would remain too low."""
    lines: list[str] = []
    poor = Peak(setup_of(*FP32), 9e12, 1.0, "measured", "2026-01-01T00:00:00Z")
    write_peak(tmp_path / "peak.json", poor)
    assert (
        RunPeak(
            tmp_path, Workspace.open(tmp_path / "checkpoints"), True, *FP32, lines.append
        ).peak.flops
        == 1e12
    )
    assert "before, MFU referred to 9 TFLOP/s" in lines[-1]


def test_rate_above_the_peak_raises_it_and_is_logged_once(measured, cache, tmp_path):
    lines: list[str] = []
    run = run_peak(tmp_path, False, *FP32, lines.append)
    assert run.mfu(5e11) == 0.5 and run.mfu(1e12) == 1.0 and len(lines) == 1
    assert run.mfu(4e12) is None and run.mfu(2e12) == 0.5 and run.mfu(5e12) is None
    assert len(lines) == 2 and "a step reached 4 TFLOP/s" in lines[1]
    assert not list(cache.iterdir()), "the next run measures again"
    assert (
        RunPeak(
            tmp_path, Workspace.open(tmp_path / "checkpoints"), True, *FP32, lines.append
        ).peak.flops
        == 5e12
    )


def test_run_writes_null_for_an_mfu_above_unity(tiny_data, tmp_path, cache, monkeypatch):
    setup = setup_of(*FP32)
    low = Peak(setup, 1.0, 0.0, "measured", "2026-01-01T00:00:00Z")
    monkeypatch.setattr(peak, "measure", lambda device, dtype, setup: replace(low, setup=setup))
    tree = tiny_tree(tiny_data, tmp_path / "run", train__max_steps=4)
    log = printed_by(tree)
    assert log.count("MFU refers to 1e-12 TFLOP/s per device (measured, float32, ") == 1
    assert log.count("the peak FLOP/s for MFU was too low") == 1
    values = [line["mfu"] for line in read_json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert values[0] is None and all(value is None or value <= 1 for value in values)


def test_resumed_run_logs_the_same_peak(measured, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run", train__max_steps=4)
    tree["train"]["stop_at_step"] = 2
    run_tree(tree)
    recorded = (tmp_path / "run" / "peak.json").read_bytes()
    del tree["train"]["stop_at_step"]
    assert "as before in this run" in printed_by(tree)
    assert (tmp_path / "run" / "peak.json").read_bytes() == recorded


def test_doctor_reports_cached_peaks(measured, cache):
    cached = find_peak(*FP32, unexpected)
    reported = examine()["peaks"]
    (path,) = cache.iterdir()
    assert reported == {str(path): f"{cached}; {cached.setup.name}"}
    assert "spread 2.0%, 2026-01-01" in format_examination({"peaks": reported})
    json.dumps(reported)


def test_written_peak_is_read_again(tmp_path):
    written = Peak(setup_of(*FP32), 1.5e12, 0.01, "measured", "2026-01-01T00:00:00Z")
    write_peak(tmp_path / "p.json", written)
    assert read_peak(tmp_path / "p.json", private=False) == written
