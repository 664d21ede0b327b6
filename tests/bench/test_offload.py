"""The commands `optimus bench links` and `optimus bench offload`."""

from __future__ import annotations

import json

import pytest

from optimus.bench.offload import Mix, run_mix
from optimus.cli import main as optimus
from optimus.config.machine import load_links


def test_step_of_a_mix_takes_at_least_the_shortest_time():
    """The emulated device keeps the rates of the mix. The limit is 2 % lower, because a sleep may
    end slightly early."""
    mix = Mix(3, 2, 2, forward_s=0.002, upload_s=0.004, download_s=0.003, adam_s=0.005)
    times, predicted = run_mix(mix, 2)
    assert min(times) >= 0.98 * predicted.shortest


def test_offload_prints_its_figures(capsys):
    assert optimus(["bench", "offload", "--mixes", "2", "--steps", "2", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["mixes"]) == 2 and result["of_prediction"]["bar"] == 1.1
    assert optimus(["bench", "offload", "--mixes", "1", "--steps", "1"]) == 0
    assert "step by predicted step: median" in capsys.readouterr().out


def test_links_are_written_to_a_file_that_a_run_reads(tmp_path, capsys):
    out = tmp_path / "links.toml"
    assert optimus(["bench", "links", "--out", str(out), "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)["links"]
    assert load_links(str(out)).model_dump() == pytest.approx(rates, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["offload", "--out", "f"], "--out has no effect on bench offload; remove --out"),
        (["links", "--mixes", "3"], "--mixes has no effect on bench links; remove --mixes"),
        (["offload", "--mixes", "0"], "--mixes 0 must be at least 1"),
        (["offload", "c.toml"], "bench offload draws its work; remove the configuration"),
        (["links", "--out", "/absent/f"], "--out /absent/f: No such file or directory; use"),
    ],
)
def test_mistakes_are_refused(options, message, capsys):
    assert optimus(["bench", *options]) == 2
    assert message in capsys.readouterr().err
