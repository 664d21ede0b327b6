"""Tests of scripts/bench/planner_here.py: mistakes of users, and results of the measurement."""

from __future__ import annotations

import common
import planner_here
import pytest

from optimus.config.machine import Machine


@pytest.fixture
def no_measurement(monkeypatch):
    """Fail the test if the script starts a measurement."""

    def measured(*_):
        raise AssertionError("the measurement began")

    for name in ("measure_peaks", "measure_machine", "measure_round"):
        monkeypatch.setattr(planner_here, name, measured)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--machine", "absent"], "--machine absent: no such machine; use one of"),
        (["--machine", "/absent.toml"], "/absent.toml"),
        (["--only", "dense", "dens"], "--only 'dens': no such layout; use one of ['dense', "),
        (["--rounds", "0"], "--rounds 0 must be at least 1"),
        (["--out", "/absent/page.md"], "--out /absent/page.md: No such file or directory"),
    ],
)
def test_mistakes_are_refused_before_the_measurement(
    no_measurement, tmp_path, capsys, options, message
):
    arguments = ["--out", str(tmp_path / "page.md"), *options]
    assert common.run_script(planner_here.main, arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_machine_without_a_rate_is_refused_before_the_measurement(no_measurement, tmp_path, capsys):
    path = tmp_path / "m.toml"
    path.write_text("ranks_per_node = 2\n")
    arguments = ["--machine", str(path), "--out", str(tmp_path / "page.md")]
    assert common.run_script(planner_here.main, arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{path}: device.products.fp32 is missing; add it" in line


@pytest.mark.parametrize("machine_file", [None, "given"])
def test_each_layout_has_its_plan_peak_and_times(monkeypatch, machine_file):
    """All values of a layout contain the number of the layout. The last rank has the highest peak,
    so the planned bytes must be those of the last rank. If each round measures a machine file, the
    planned times of the three rounds differ."""
    cases = planner_here.CASES[:8]
    number = {case.name: n for n, case in enumerate(cases, 1)}
    loaded = []

    def plan(case, machine, name):
        factor = len(loaded)
        return (
            factor * float(number[case.name]),
            [10 * number[case.name] + r for r in range(case.ranks)],
        )

    def peaks(case, folder):
        return [100 * number[case.name] + r for r in range(case.ranks)]

    def measure_round(group, clock, folder):
        assert len(loaded) >= 1
        return [[1000.0 * number[case.name]] for case in group]

    monkeypatch.setattr(planner_here, "load_machine", lambda name: loaded.append(name) or Machine())
    monkeypatch.setattr(planner_here, "measure_machine", lambda folder: "measured")
    monkeypatch.setattr(planner_here, "planned", plan)
    monkeypatch.setattr(planner_here, "measure_peaks", peaks)
    monkeypatch.setattr(planner_here, "measure_round", measure_round)
    results, _ = planner_here.run(cases, machine_file, "wall", 3)
    assert loaded == (["given"] if machine_file else ["measured"] * 3)
    assert [result.case for result in results] == list(cases)
    for n, result in enumerate(results, 1):
        last = result.case.ranks - 1
        assert result.plans_s == ([n, n, n] if machine_file else [n, 2 * n, 3 * n])
        assert result.measured == [[1000 * n]] * 3
        assert (result.planned_bytes, result.peak_bytes) == (10 * n + last, 100 * n + last)


def test_error_is_the_median_of_the_errors_of_the_rounds():
    """In a round, the machine is slow, so that both times of this round are twice as long."""
    case = planner_here.CASES[0]
    result = planner_here.Result(case, [1.0, 2.0, 1.0], [[0.8], [1.6, 1.6, 9.0], [2.0]], 1, 1)
    assert result.error == pytest.approx(0.25)
    assert (result.planned_s, result.step_s) == (1.0, 1.6)
    assert result.spread == pytest.approx((2.0 - 0.8) / 1.6)
    lines = planner_here.verdict([result])
    assert f"- Largest error of a step time in a single round: 50.0% ({case.name})." in lines


@pytest.mark.parametrize("machine_file", [None, "given"])
def test_page_names_the_machine_files_of_the_plans(machine_file):
    results = [planner_here.Result(case, [1.0], [[1.0]], 100, 100) for case in planner_here.CASES]
    page = planner_here.report(results, Machine(), machine_file, "wall", "")
    assert ("All layouts are planned with the machine file `given`." in page) == bool(machine_file)
    assert ("it measures a machine file with" in page) == (machine_file is None)
