"""`optimus doctor` and `optimus kernels`: what is here, what is built, and why not."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from optimus.cli import main

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)


def test_doctor_prints_one_json_object(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] >= 1 and found["machine"]["memory_gib"] > 0
    assert found["devices"][-1]["device"] == "cpu"
    assert found["collectives"]["gloo"] is True
    assert set(found["compilers"]) == {"sycl", "cuda", "cpu"}
    assert {one["backend"] for one in found["kernels"]["backends"]} == {"sycl", "cuda", "cpu"}


def test_doctor_tells_people_the_same(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (f"torch: {torch.__version__}", "gloo: yes", "sycl (for xpu): ", "ipex: "):
        assert part in text


@needs_gxx
def test_kernels_are_built_ahead_of_time_and_listed(capsys):
    assert main(["kernels", "status", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    cpu = {one["backend"]: one for one in status["backends"]}["cpu"]
    assert not cpu["built"] and "not built yet" in cpu["why_not"]
    assert main(["kernels", "build", "cpu", "--json"]) == 0
    cpu = {one["backend"]: one for one in json.loads(capsys.readouterr().out)["backends"]}["cpu"]
    assert cpu["usable"] and cpu["built_for"]["torch"] == torch.__version__
    assert main(["kernels", "status"]) == 0
    assert "cpu (for cpu): built for " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["build", "gpu"], "kernels build gpu: it is one of sycl, cuda, cpu"),
        (["build", "cpu"], "kernels build cpu: CXX=no-such-compiler: no such compiler"),
        (["status", "cpu"], "kernels status cpu: it lists them all"),
    ],
)
def test_what_cannot_be_built_is_one_line_and_status_2(arguments, says, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert main(["kernels", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err


def test_an_unknown_choice_is_told(monkeypatch, capsys):
    monkeypatch.setenv("OPTIMUS_KERNELS", "fast")
    assert main(["kernels", "status"]) == 2
    told = "OPTIMUS_KERNELS='fast': it is one of auto"
    shown = capsys.readouterr()
    assert told in shown.err and shown.err.count("\n") == 1 and not shown.out
    assert main(["doctor"]) == 0  # which is there to tell what is wrong
    assert told in capsys.readouterr().out


def test_doctor_works_without_a_home(homeless, capsys):
    assert main(["doctor"]) == 0
    assert "this user has no home directory; set OPTIMUS_KERNELS_CACHE" in capsys.readouterr().out


def test_ipex_can_be_left_out(monkeypatch):
    from optimus.platform import import_ipex

    monkeypatch.setenv("OPTIMUS_IPEX", "0")
    assert import_ipex() == "left out by OPTIMUS_IPEX=0"
