"""Choice of kernels. All ranks agree on the choice, and a resumed run keeps the choice."""

from __future__ import annotations

import os
import shutil
import time
import tomllib
from pathlib import Path

import pytest
import torch

from optimus.checkpoint import store
from optimus.cli import main as optimus
from optimus.config import dump_toml, make_config
from optimus.distributed.agreement import RunEnded
from optimus.distributed.collectives import ALONE
from optimus.distributed.world import World
from optimus.errors import OutcomeKind
from optimus.launch.environment import LaunchEnv, read_launch_env
from optimus.train import autotune
from optimus.train.autotune import Answer, disagreement
from optimus.train.loop import train
from optimus_kernels import backend, experts_grouped, experts_loop
from optimus_kernels.backend import Backend
from optimus_kernels.grouped_mm import form
from tests.kernels.op_checks import TORCH_FORM_WORKS, needs_torch_form
from tests.kit.runs.tiny import DENSE, tiny_config, tiny_tree

FAST = {
    "train__deterministic": False,
    "train__threads": 1,
    "train__max_steps": 2,
    "optim__warmup_steps": 1,
}


def run_with(tree: dict, environ: dict[str, dict[str, str]]) -> str:
    """Train with the environment variables `environ[rank]` on each rank. Return the message of the
    usage error with which the run ends, or "" if the run completes."""
    os.environ.update(environ.get(os.environ.get("RANK", "0"), {}))
    try:
        train(make_config(tree), read_launch_env())
    except RunEnded as ended:
        assert ended.kind is OutcomeKind.USAGE
        return str(ended)
    return ""


def recorded(run_dir: Path) -> dict:
    return tomllib.loads((run_dir / "config.toml").read_text())["kernels"]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([Answer("cpu", "cpu-1")] * 3, ""),
        ([Answer("torch", why_not="no g++"), Answer("torch", why_not="no clang")], ""),
        ([Answer(failure="no nvcc")], "no nvcc"),
        ([Answer("cpu", "k"), Answer(failure="no g++"), Answer(failure="x")], "ranks 1-2: no g++"),
        (
            [
                *[Answer("cpu", "cpu-1")] * 2,
                Answer("torch", why_not="no g++"),
                Answer("cpu", "cpu-1"),
            ],
            "ranks differ in their kernels: cpu-1 on ranks 0-1, 3, torch on rank 2 (no g++); ",
        ),
        ([Answer("cpu", "cpu-1"), Answer("cpu", "cpu-2")], "cpu-1 on rank 0, cpu-2 on rank 1; "),
    ],
)
def test_ranks_that_differ_are_named(answers, message):
    text = disagreement(answers)
    assert text == message or (message and message in text and "OPTIMUS_KERNELS_CACHE" in text)


def test_ranks_with_different_kernels_do_not_train(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run", **FAST)
    environ = {"0": {"OPTIMUS_KERNELS": "torch"}, "1": {"OPTIMUS_KERNELS": "cuda"}}
    errors = ranks(2, run_with, tree, environ, start_world=False, timeout_s=120)
    assert len(set(errors)) == 1 and errors[0].startswith(
        "rank 1: OPTIMUS_KERNELS = cuda: this backend runs on cuda"
    )
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fast", "rank 1: OPTIMUS_KERNELS='fast': unknown backend; use one of auto"),
        ("cuda", "rank 1: OPTIMUS_KERNELS = cuda: this backend runs on cuda"),
    ],
)
def test_unavailable_kernels_on_a_rank_end_a_dense_run(ranks, tiny_data, tmp_path, name, message):
    """OPTIMUS_KERNELS selects unavailable kernels on rank 1. The run must fail on all ranks, even
    if its dense model uses no kernels for experts."""
    tree = tiny_tree(tiny_data, tmp_path / "run", **{**FAST, **DENSE})
    environ = {"1": {"OPTIMUS_KERNELS": name}}
    errors = ranks(2, run_with, tree, environ, start_world=False, timeout_s=120)
    assert len(set(errors)) == 1 and errors[0].startswith(message)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize(
    ("setting", "of_host"), [("auto", "cpu"), ("cuda", "cpu"), ("torch", "torch")]
)
def test_host_of_an_accelerator_uses_the_kernels_of_its_cpu(monkeypatch, setting, of_host):
    monkeypatch.setattr(backend, "_active", {})
    monkeypatch.setattr(backend, "_configured", "auto")
    gpu = Backend("cuda", "cuda-1")
    find = backend.find

    def find_without_gpu(kind, *args, **kwargs):
        return gpu if kind == "cuda" else find(kind, *args, **kwargs)

    monkeypatch.setattr(backend, "find", find_without_gpu)
    offload = {"offload__mode": "manual", "offload__host_share": 1.0}
    config = tiny_config("d", "r", **DENSE, **offload, kernels__backend=setting)
    launch = LaunchEnv(0, 1, 0, 1, "")
    autotune.autotune_kernels(config, World(launch, torch.device("cuda"), "", ALONE), None)
    assert backend.active("cpu").name == of_host


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_ranks_share_a_build_and_record_it(ranks, tiny_data, tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_CACHE", str(tmp_path / "cache"))
    tree = tiny_tree(tiny_data, tmp_path / "run", **FAST)
    cache = {"OPTIMUS_KERNELS_CACHE": str(tmp_path / "cache")}
    environ = {"0": cache, "1": cache}
    assert ranks(2, run_with, tree, environ, start_world=False, timeout_s=120) == ["", ""]
    assert recorded(tmp_path / "run")["backend"] == "cpu"
    assert recorded(tmp_path / "run")["grouped_gemm"] in ("torch", "loop")
    assert len(list((tmp_path / "cache").glob("cpu-*"))) == 1


def test_unavailable_explicit_choice_is_refused_with_status_2(
    tiny_data, tmp_path, monkeypatch, capsys
):
    config = tmp_path / "c.toml"
    config.write_text(dump_toml(tiny_config(tiny_data, tmp_path / "run", **FAST)))
    monkeypatch.setenv("OPTIMUS_KERNELS", "sycl")
    for number, more in enumerate(([], ["kernels.backend=torch"])):  # the variable overrides it
        run_dir = f"train.run_dir={tmp_path}/{number}"
        assert optimus(["train", str(config), run_dir, *more]) == 2
        first, error = capsys.readouterr().err.splitlines()
        assert first == "optimus: importing torch" and "OPTIMUS_KERNELS = sycl" in error


def test_measured_form_is_kept_on_resume(ranks, tiny_data, tmp_path, monkeypatch):
    settings = {**FAST, "kernels__backend": "torch"}
    other = "torch" if TORCH_FORM_WORKS else "loop"
    tree = tiny_tree(tiny_data, tmp_path, **settings, kernels__grouped_gemm=other)
    assert ranks(1, run_with, tree, {}, start_world=False, timeout_s=120) == [""]
    assert recorded(tmp_path) == {"backend": "torch", "grouped_gemm": other}
    tree = tiny_tree(tiny_data, tmp_path, **{**settings, "train__max_steps": 4})
    assert ranks(1, run_and_look, tree, start_world=False, timeout_s=120) == [(0, other)]
    assert recorded(tmp_path)["grouped_gemm"] == other
    stored = store.newest_valid(tmp_path).settings
    assert stored["kernels.grouped_gemm"] == other and stored["kernels.backend"] == "torch"
    fresh = tiny_tree(tiny_data, tmp_path / "fresh", **settings)
    measured = ranks(1, run_and_look, fresh, start_world=False, timeout_s=120)
    assert measured == [(1, recorded(tmp_path / "fresh")["grouped_gemm"])]


def run_and_look(tree: dict, finds: dict[str, str] | None = None) -> tuple[int, str]:
    """Train. Return the number of measurements of grouped products on this rank, and the
    implementation of grouped products that the run selected. With `finds`, nothing is measured: the
    result of the measurement on a rank is `finds[str(rank)]`."""
    measure, calls = autotune.measure_grouped_gemm, []
    if finds:
        measure = lambda *_: finds[os.environ["RANK"]]  # noqa: E731
    autotune.measure_grouped_gemm = lambda *a: calls.append(1) or measure(*a)
    assert run_with(tree, {}) == ""
    return len(calls), form(torch.empty(0), 16)


@needs_torch_form
def test_first_rank_measures_for_all(ranks, tiny_data, tmp_path):
    for first, second in (("torch", "loop"), ("loop", "torch")):
        tree = tiny_tree(tiny_data, tmp_path / first, **FAST)
        finds = {"0": first, "1": second}
        outcome = ranks(2, run_and_look, tree, finds, start_world=False, timeout_s=120)
        assert outcome == [(1, first), (0, first)]


def test_deterministic_run_takes_the_loop_unmeasured(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, **{**FAST, "train__deterministic": True})
    assert ranks(1, run_and_look, tree, start_world=False, timeout_s=120) == [(0, "loop")]
    assert recorded(tmp_path)["grouped_gemm"] == "loop"


def test_another_backend_on_resume_is_logged(tiny_data, tmp_path, monkeypatch, capfd):
    for name, steps in (("torch", 2), ("auto", 4)):
        tree = tiny_tree(tiny_data, tmp_path, **{**FAST, "train__max_steps": steps})
        monkeypatch.setenv("OPTIMUS_KERNELS", name)
        train(make_config(tree), read_launch_env({}))
    backend = recorded(tmp_path)["backend"]
    change = f"changed on resume: kernels.backend = {backend!r} (checkpoint of step 2: 'torch')"
    assert (change in capfd.readouterr().err) == (backend != "torch")


def measure(config) -> str:
    tokens = config.train.microbatch_size * config.train.seq_len
    return autotune.measure_grouped_gemm(config.model, 1, tokens, torch.empty(0))


def test_faster_form_is_measured(tiny_data, tmp_path, capfd):
    config = tiny_config(tiny_data, tmp_path, **FAST, model__num_experts=[0, 4])
    faster = measure(config)
    err = capfd.readouterr().err
    assert faster in ("torch", "loop") and "4 experts, 32 tokens: " in err


@needs_torch_form
@pytest.mark.parametrize(("slow", "expected"), [(experts_loop, "torch"), (experts_grouped, "loop")])
def test_slower_form_is_rejected(tiny_data, tmp_path, monkeypatch, slow, expected):
    forward = slow.forward
    monkeypatch.setattr(slow, "forward", lambda *a: time.sleep(0.3) or forward(*a))
    config = tiny_config(tiny_data, tmp_path, **FAST)
    assert measure(config) == expected


def test_dense_model_uses_no_kernels(tiny_data, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CXX", "no-such-compiler")
    tree = tiny_tree(tiny_data, tmp_path, **{**DENSE, **FAST})
    train(make_config(tree), read_launch_env({}))
    assert recorded(tmp_path) == {"backend": "auto", "grouped_gemm": "auto"}
    assert "kernels" not in capfd.readouterr().err


@needs_torch_form
def test_sizes_that_the_torch_form_lacks_are_refused_or_take_the_loop(tiny_data, tmp_path, capfd):
    """torch's grouped products require that the size of a row is a multiple of 16 bytes. For other
    sizes, the run must refuse the setting "torch", and the setting "auto" must select "loop"."""
    odd = {**FAST, "train__dtype": "bf16", "model__intermediate_size": 20}
    tree = tiny_tree(tiny_data, tmp_path / "torch", **odd, kernels__grouped_gemm="torch")
    with pytest.raises(RunEnded, match=r"kernels.grouped_gemm 'torch': .* 16 bytes") as refusal:
        train(make_config(tree), read_launch_env({}))
    assert "\n" not in str(refusal.value) and refusal.value.kind is OutcomeKind.USAGE
    train(make_config(tiny_tree(tiny_data, tmp_path / "auto", **odd)), read_launch_env({}))
    assert recorded(tmp_path / "auto")["grouped_gemm"] == "loop"


@needs_torch_form
def test_form_supports_the_tensor_parallel_slices_of_experts(ranks, tiny_data, tmp_path):
    """With parallel.tp = 2, each rank has half of each row of an expert. Half a row is too small
    for torch's grouped products, so the run must refuse the setting "torch", and the setting "auto"
    must select "loop", even if the checkpoint has "torch"."""
    narrow = {**FAST, "model__intermediate_size": 4}
    whole = tiny_tree(tiny_data, tmp_path, **narrow, kernels__grouped_gemm="torch")
    assert ranks(1, run_with, whole, {}, start_world=False, timeout_s=120) == [""]
    halves = {**narrow, "train__max_steps": 4, "parallel__tp": 2}
    # The first run resumes from a checkpoint that records "torch"; the second run measures.
    for run_dir in (tmp_path, tmp_path / "fresh"):
        tree = tiny_tree(tiny_data, run_dir, **halves)
        assert ranks(2, run_with, tree, {}, start_world=False, timeout_s=120) == ["", ""]
        assert recorded(run_dir)["grouped_gemm"] == "loop"
    tree = tiny_tree(tiny_data, tmp_path / "asked", **halves, kernels__grouped_gemm="torch")
    errors = ranks(2, run_with, tree, {}, start_world=False, timeout_s=120)
    assert all(line.startswith("kernels.grouped_gemm 'torch': ") for line in errors)
