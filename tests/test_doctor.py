"""Tests of `optimus doctor` and `optimus kernels`: packages, devices and compiled kernels."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from optimus.cli import main

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


def test_doctor_prints_a_json_object(capsys):
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"] == torch.__version__
    assert report["machine"]["cores"] >= 1 and report["machine"]["memory_gib"] > 0
    assert report["devices"][-1]["device"] == "cpu"
    assert report["collectives"]["gloo"] is True
    assert set(report["compilers"]) == {"sycl", "cuda", "cpu"}
    assert {entry["backend"] for entry in report["kernels"]["backends"]} == {"sycl", "cuda", "cpu"}


def test_doctor_prints_the_same_as_text(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for line in (f"torch: {torch.__version__}", "gloo: yes", "sycl (for xpu): ", "ipex: "):
        assert line in text


@needs_gxx
def test_kernels_are_built_ahead_of_time_and_listed(capsys):
    assert main(["kernels", "status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    cpu = {entry["backend"]: entry for entry in status["backends"]}["cpu"]
    assert not cpu["built"] and "not built yet" in cpu["why_not"]
    assert main(["kernels", "build", "cpu", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    cpu = {entry["backend"]: entry for entry in status["backends"]}["cpu"]
    assert cpu["usable"] and cpu["built_for"]["torch"] == torch.__version__
    assert main(["kernels", "status"]) == 0
    assert "cpu (for cpu): built for " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "gpu"], "kernels build gpu: unknown backend; use one of sycl, cuda, cpu"),
        (["build", "cpu"], "kernels build cpu: CXX=no-such-compiler: no such compiler"),
        (["status", "cpu"], "kernels status lists all backends; remove 'cpu'"),
    ],
)
def test_failed_build_is_a_single_line_and_status_2(arguments, says, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["kernels", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err


def test_unknown_choice_is_reported(monkeypatch, capsys):
    monkeypatch.setenv("OPTIMUS_KERNELS", "fast")
    assert main(["kernels", "status"]) == 2
    message = "OPTIMUS_KERNELS='fast': unknown backend; use one of auto"
    shown = capsys.readouterr()
    assert message in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert main(["doctor"]) == 0  # doctor reports the error and continues
    assert message in capsys.readouterr().out


def test_doctor_works_without_a_home(homeless, capsys):
    assert main(["doctor"]) == 0
    assert "this user has no home directory; set OPTIMUS_KERNELS_CACHE" in capsys.readouterr().out


def test_ipex_can_be_left_out(monkeypatch):
    from optimus.platform import import_ipex

    monkeypatch.setenv("OPTIMUS_IPEX", "0")
    assert import_ipex() == "left out by OPTIMUS_IPEX=0"
