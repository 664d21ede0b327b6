"""Tests of docs/runs_planned.md, the page with the plans of the paper's runs."""

from __future__ import annotations

from optimus.config.machine import load_machine
from optimus.study.runs import FOLDER, MULA, format_page, plan_run
from tests.kit.ranks.processes import ROOT


def test_page_has_the_plan_and_the_job_of_a_run():
    run = plan_run(FOLDER / "mula-1b.toml", load_machine("aurora"), "aurora", 256)
    assert run.fits and (run.queue, run.walltime_s) == ("prod", 12 * 3600)
    hours = run.plan["step"]["run_s"] / 3600
    assert 12 * (run.jobs - 1) < 1.2 * hours + 1 and 12 * run.jobs >= 1.2 * hours
    words = run.job_line.split()
    assert words[words.index("--chain") + 1] == str(run.jobs - 1)
    assert words[words.index("--nodes") + 1] == "256"
    page = format_page([run], "aurora", "optimus study runs")
    assert f"| {run.plan['step']['node_hours']:,.5g} |" in page and "all runs fit" in page
    full = run._replace(plan=run.plan | {"device_bytes": run.plan["needed"] - 1})
    assert "do not fit: mula-1b" in format_page([full], "aurora", "optimus study runs")


def test_documentation_has_the_runs_of_the_paper():
    page = (ROOT / "docs" / "runs_planned.md").read_text()
    assert "all runs fit" in page
    for name in MULA:
        assert f"| {name} |" in page and f"configs/run/{name}.toml" in page
