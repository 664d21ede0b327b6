"""Tests of the commands `optimus bench links`, `optimus bench disk` and `optimus bench offload`."""

from __future__ import annotations

import json
import re
import statistics
import time

import pytest

from optimus.bench import disk, links
from optimus.bench.offload import Mix, measure_uses, run_mix
from optimus.chunks.param_store import ParamStore
from optimus.cli import main as optimus
from optimus.config.machine import load_links
from optimus.peak import Peak, setup_of


def test_step_of_a_mix_takes_at_least_the_shortest_time():
    """The emulated device computes and copies with the times of the mix, so a measured step takes
    at least the predicted shortest time. The test tolerates 2 % less, because sleeps can end
    slightly early."""
    mix = Mix(3, 2, 2, forward_s=0.002, upload_s=0.004, download_s=0.003, adam_s=0.005)
    times, predicted = run_mix(mix, 2)
    assert min(times) >= 0.98 * predicted.shortest


@pytest.mark.parametrize("changes", [{"read_s": 0.02}, {"write_s": 0.02}], ids=["read", "write"])
def test_step_with_states_on_disk_takes_at_least_the_time_of_the_disk(tmp_path, changes):
    mix = Mix(4, 2, 1, 0.002, 0.001, 0.001, 0.001, read_s=0.001, write_s=0.001)._replace(**changes)
    times, predicted = run_mix(mix, 2, str(tmp_path))
    assert predicted.limit == pytest.approx(4 * 0.02)
    assert min(times) >= 0.98 * predicted.shortest


@pytest.mark.parametrize("in_threads", [False, True])
def test_uses_are_measured_in_processor_time(monkeypatch, in_threads):
    """`measure_uses` returns the processor time of each call of `ParamStore.use`: one call for each
    of 2 steps, 2 passes (forward and backward) and 16 segments. In the second measurement, the
    calls in forward compute for 5 ms more, and the calls in backward sleep for 5 ms. Only the calls
    in forward must take longer."""
    count, use = 2 * 2 * 16, ParamStore.use
    before = measure_uses(2, in_threads)

    def slow(store: ParamStore, segment: int, backward: bool) -> None:
        use(store, segment, backward)
        if backward:
            time.sleep(0.005)
        else:
            end = time.thread_time() + 0.005
            while time.thread_time() < end:
                pass

    monkeypatch.setattr(ParamStore, "use", slow)
    after = measure_uses(2, in_threads)
    assert len(before) == len(after) == count and min(before) > 0
    assert sum(seconds >= 0.005 for seconds in after) >= count // 2
    assert statistics.median(after[16:32]) < 0.004 < statistics.median(after[:16])


def test_offload_prints_its_figures(tmp_path, capsys):
    command = ["bench", "offload", "--mixes", "1", "--steps", "1", "--disk", str(tmp_path)]
    assert optimus(command) == 0
    assert "step time / predicted time: median" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert optimus(["bench", "offload", "--mixes", "2", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["mixes"]) == 2 and result["of_prediction"]["bar"] == 1.1
    use, in_threads = result["use_s"], result["use_in_threads_s"]
    assert 0 < use["min"] <= use["median"] and use["bar"] == 2e-5 and in_threads["median"] > 0
    assert optimus(["bench", "offload", "--mixes", "1", "--steps", "1"]) == 0
    text = capsys.readouterr().out
    assert "step time / predicted time: median" in text
    assert re.search(r"use of a segment: median [0-9.]+ us \(bar 20 us\), with copies in", text)


def test_links_are_written_to_a_file_that_a_run_reads(tmp_path, capsys):
    out = tmp_path / "links.toml"
    assert optimus(["bench", "links", "--out", str(out), "--disk", str(tmp_path), "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["links"]
    assert {"disk_read", "disk_write"} < rates.keys()
    for name, rate in rates.items():
        assert getattr(load_links(str(out)), name) == pytest.approx(rate, rel=1e-3)
    assert list(tmp_path.iterdir()) == [out]


def test_disk_prints_its_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(disk, "_CHUNKS", 2)
    monkeypatch.setattr(disk, "_ELEMENTS", 1 << 20)
    command = ["bench", "disk", "--disk", str(tmp_path), "--rounds", "2"]
    assert optimus([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bytes"] == 2 * 12 << 20 and len(result["ratio"]) == 2
    for ratio, raw, tier in zip(result["ratio"], result["raw"], result["tier"], strict=True):
        assert ratio == pytest.approx(tier / raw)
    assert optimus(command) == 0
    assert "ratio" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["offload", "--out", "f"], "--out has no effect on bench offload; remove --out"),
        (["links", "--mixes", "3"], "--mixes has no effect on bench links; remove --mixes"),
        (["offload", "--mixes", "0"], "--mixes 0 must be at least 1"),
        (["offload", "c.toml"], "bench offload chooses its workloads at random; remove the config"),
        (["links", "--out", "/absent/f"], "--out /absent/f: No such file or directory; use"),
        (["links", "--disk", "/absent"], "--disk /absent: No such file or directory; use"),
        (["disk"], "bench disk needs --disk DIR, a directory on the disk"),
        (["disk", "c.toml", "--disk", "d"], "bench disk has no settings; remove the configuration"),
        (["disk", "--disk", "d", "--rounds", "1"], "--rounds 1 must be at least 2"),
        (["disk", "--disk", "/absent"], "cannot create /absent/optimus-states-rank00000: No such"),
    ],
)
def test_mistakes_are_refused(options, message, capsys):
    assert optimus(["bench", *options]) == 2
    assert message in capsys.readouterr().err


def test_json_of_links_is_the_only_output_on_a_busy_machine(monkeypatch, tmp_path, capsys):
    """The warning about other programs is printed on standard error, not on standard output."""

    def noisy(device, dtype, library, log):
        log("other programs use this machine")
        return Peak(setup_of(device, dtype, library), 1e12, 0.5, "", "")

    monkeypatch.setattr(links, "find_peak", noisy)
    monkeypatch.setattr(links, "measure_links", lambda *_: {"to_host": [1.0, 2.0, 3.0]})
    assert optimus(["bench", "links", "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["links"] == {"to_host": 2.0, "flops": 1e12, "flops_fp32": 1e12}
    assert "other programs use this machine" in output.err
