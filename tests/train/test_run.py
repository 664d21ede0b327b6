"""Tests of whole runs: data-parallel layouts, resumes, and messages of errors."""

from __future__ import annotations

import errno
from typing import NoReturn

import pytest

from data_prep.cli import main as optimus_data
from optimus.checkpoint import store
from optimus.cli import main as optimus
from optimus.config import make_config
from optimus.distributed.agreement import RunEnded
from optimus.errors import CheckpointError
from optimus.evaluate.checkpoint import evaluate_checkpoint
from optimus.launch.environment import read_launch_env
from optimus.observe.metrics import read_json_lines
from optimus.train import loop
from optimus.train.resolve import resolve
from tests.kit.runs.results import assert_same_run, metrics_of
from tests.kit.runs.tiny import CONTEXT, DENSE, tiny_tree
from tests.kit.runs.training import printed_by, run_and_catch, train_on


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param({}, id="moe"),
        pytest.param({"data__document_mask": True}, id="moe-document-mask"),
        pytest.param(
            DENSE | {"model__tie_embeddings": True, "train__microbatch_size": 2}, id="dense"
        ),
    ],
)
def test_data_parallel_layouts_train_bit_identically(ranks, tiny_data, tmp_path, variant):
    variant = variant | {"train__max_steps": 8, "train__eval_instances": 19}  # batches of 16 and 3
    for size in (1, 2, 4):
        train_on(ranks, size, tiny_tree(tiny_data, tmp_path / str(size), **variant))
    assert len(metrics_of(tmp_path / "1")) == 8
    assert_same_run(tmp_path / "1", tmp_path / "2")
    assert_same_run(tmp_path / "1", tmp_path / "4")
    evaluations = [(tmp_path / str(size) / "eval.jsonl").read_text() for size in (1, 2, 4)]
    assert evaluations[0] and len(set(evaluations)) == 1


def test_samples_are_the_same_on_all_layouts(ranks, tiny_data, tmp_path):
    settings = {"train__max_steps": 4, "train__sample_interval": 2, "train__sample_tokens": 8}
    samples = []
    for size, layout in ((1, {}), (2, {}), (2, {"parallel__pp": 2})):
        tree = tiny_tree(tiny_data, tmp_path / f"run-{len(samples)}", **settings, **layout)
        first, *others = ranks(size, printed_by, tree, start_world=False, timeout_s=120)
        assert not any("sample" in other for other in others)
        lines = first.splitlines()
        logged = [
            lines[n : n + 2] for n, line in enumerate(lines) if line.startswith("optimus: sample")
        ]
        assert [head for head, _ in logged] == [
            f"optimus: sample at step {step}:" for step in (2, 4)
        ]
        assert all(text.startswith("    ") for _, text in logged)
        samples.append(logged)
    assert samples[0] == samples[1] == samples[2]


def test_document_mask_changes_losses(ranks, tiny_data, tmp_path):
    """`data.document_mask` = true changes the losses of training and evaluation. By default, the
    setting is false."""
    short = {"train__max_steps": 5}  # some of the 40 instances contain an EOS
    for name, mask in (("off", {}), ("also-off", {"data__document_mask": False})):
        train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / name, **short, **mask))
    assert_same_run(tmp_path / "off", tmp_path / "also-off")
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "on", data__document_mask=True, **short))
    off, on = (metrics_of(tmp_path / name) for name in ("off", "on"))
    assert off[-1]["loss"] != on[-1]["loss"]
    evaluated = [read_json_lines(tmp_path / name / "eval.jsonl")[-1] for name in ("off", "on")]
    assert evaluated[0]["loss"] != evaluated[1]["loss"]
    # `optimus eval` reads `data.document_mask` from the checkpoint.
    for name, record in zip(("off", "on"), evaluated, strict=True):
        again = evaluate_checkpoint(str(tmp_path / name), f"{tiny_data}/eval", 1, 9)
        assert again["document_mask"] == (name == "on")
        assert again["loss"] == pytest.approx(record["loss"], rel=1e-6)
    assert abs(evaluated[0]["loss"] - evaluated[1]["loss"]) > 1e-5 * evaluated[0]["loss"]


def test_a_mix_trains_bit_identically_and_keeps_its_sources(ranks, tiny_data, tmp_path):
    few = str(tmp_path / "few")
    blend = ["blend", "--source", f"{tiny_data}=1", "--context", str(CONTEXT), "--out", few]
    assert optimus_data([*blend, "--instances", "77", "--seed", "3", "--workers", "1"]) == 0
    mix = [{"path": str(tiny_data), "weight": 0.75}, {"path": few, "weight": 0.25}]
    run = {"train__max_steps": 6, "data__mix": mix, "data__document_mask": True}
    train_on(ranks, 1, tiny_tree("", tmp_path / "1", **run))
    train_on(ranks, 4, tiny_tree("", tmp_path / "4", **run, train__stop_at_step=3))
    train_on(ranks, 2, tiny_tree("", tmp_path / "4", **run))
    assert_same_run(tmp_path / "1", tmp_path / "4")
    mix[1]["weight"] = 0.5
    with pytest.raises(CheckpointError, match=r"data.identity = "):
        config = make_config(tiny_tree("", tmp_path / "4", **run))
        resolve(config, 1)


def test_fast_mode_agrees_with_deterministic_mode(ranks, tiny_data, tmp_path):
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "exact", train__max_steps=5))
    fast = {"train__deterministic": False, "train__max_steps": 5, "train__threads": 1}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "fast", **fast))
    bf16 = fast | {"optim__grad_reduce_dtype": "bf16"}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "bf16", **bf16))
    exact, fast, bf16 = (metrics_of(tmp_path / name) for name in ("exact", "fast", "bf16"))
    for a, b, c in zip(exact, fast, bf16, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)
        assert c["loss"] == pytest.approx(a["loss"], abs=2e-2)
    assert bf16[-1]["loss"] != fast[-1]["loss"]


def start_on_a_failing_disk(tree: dict) -> tuple[int, str]:
    """Train with a run directory in which the search for a checkpoint fails. Return the exit status
    and the error message."""

    def fail(*args: object) -> NoReturn:
        raise OSError(errno.ESTALE, "Stale file handle", "/run/checkpoints")

    loop.find_start = fail
    with pytest.raises(RunEnded) as raised:
        loop.train(make_config(tree), read_launch_env())
    return raised.value.exit_code, str(raised.value)


def test_a_disk_error_of_rank_0_before_the_start_ends_all_ranks(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, parallel__timeout_s=10)
    ends = ranks(2, start_on_a_failing_disk, tree, start_world=False)
    assert ends[0] == ends[1] and ends[0][0] == 1
    assert ends[0][1].startswith("/run/checkpoints: Stale file handle; ")


def test_persistent_models_and_a_return_to_an_earlier_model(ranks, tiny_data, tmp_path):
    settings = {"checkpoint__model_interval": 5, "checkpoint__keep_models": 2}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path, **settings))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("model-*"))
    assert kept == ["model-00000015", "model-00000020"]
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path, checkpoint__load="model@15", **settings))
    lines = metrics_of(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert store.newest_valid(tmp_path).origin == "model@15"
    assert store.newest_valid(tmp_path).updates == 5


def test_an_update_that_overflows_is_never_saved(ranks, tiny_data, tmp_path):
    wild = {"optim__lr": 1e38, "optim__warmup_steps": 0, "checkpoint__interval": 1}
    tree = tiny_tree(tiny_data, tmp_path, **wild)
    words = ranks(2, run_and_catch, tree, start_world=False)
    assert words[0] == words[1] and words[0][0] == 4
    assert words[0][1].startswith("step 1: the update made parameter ")
    assert store.newest_valid(tmp_path) is None


def test_weights_of_another_model_are_refused_before_anything_changes(
    ranks, tiny_data, tmp_path, capsys
):
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "run", train__stop_at_step=2))
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert optimus(["convert", "to-hf", str(tmp_path / "run"), str(tmp_path / "hf")]) == 0
    tree = tiny_tree(
        tiny_data,
        tmp_path / "run",
        model__num_layers=3,
        checkpoint__load=str(tmp_path / "hf"),
    )
    ((status, word),) = ranks(1, run_and_catch, tree, start_world=False)
    assert status == 2 and word.startswith("model.num_layers = 3")
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"truncated")
    tree = tiny_tree(tiny_data, tmp_path / "run", checkpoint__load=str(tmp_path / "hf"))
    ((status, word),) = ranks(1, run_and_catch, tree, start_world=False)
    assert status == 2 and "model.safetensors" in word
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before


def test_a_run_may_become_deterministic(ranks, tiny_data, tmp_path):
    fast = tiny_tree(tiny_data, tmp_path, train__deterministic=False, train__stop_at_step=2)
    train_on(ranks, 1, fast)
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path, train__stop_at_step=4))
    assert len(metrics_of(tmp_path)) == 4


def test_an_evaluation_reads_as_many_instances_as_asked(ranks, tiny_data, tmp_path):
    tree = tiny_tree(
        tiny_data, tmp_path, train__max_steps=4, train__eval_interval=2, train__eval_instances=3
    )
    train_on(ranks, 2, tree)
    lines = read_json_lines(tmp_path / "eval.jsonl")
    assert [(line["step"], line["tokens"]) for line in lines] == [(2, 3 * 32), (4, 3 * 32)]


@pytest.mark.parametrize("has_copy", [True, False], ids=["copy", "older run"])
def test_a_resume_restores_lost_metrics_or_names_them(ranks, tiny_data, tmp_path, has_copy):
    """metrics.jsonl is emptied, and eval.jsonl is cut within a line. If the files have copies, the
    resumed run must restore the lines. Otherwise, it must report the steps whose lines are lost."""
    settings = {"train__max_steps": 6, "checkpoint__interval": 2, "train__eval_interval": 2}
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    train_on(ranks, 1, tree | {"train": tree["train"] | {"stop_at_step": 4}})
    metrics, evaluations = tmp_path / "metrics.jsonl", tmp_path / "eval.jsonl"
    before = metrics.read_bytes(), evaluations.read_bytes()
    metrics.write_bytes(b"")
    evaluations.write_bytes(before[1][:30])
    copies = [tmp_path / ".metrics-copy.jsonl", tmp_path / ".eval-copy.jsonl"]
    assert tuple(copy.read_bytes() for copy in copies) == before
    for copy in copies if not has_copy else ():
        copy.unlink()
    log = ranks(1, printed_by, tree, start_world=False)[0]
    lines = [line for line in log.splitlines() if "jsonl" in line]
    if has_copy:
        assert [line.split(": ")[-1] for line in lines] == [
            f"restored the lines of steps {steps} from {copy}"
            for steps, copy in zip(("1-4", "2, 4"), copies, strict=True)
        ]
        assert metrics.read_bytes().startswith(before[0])
        assert evaluations.read_bytes().startswith(before[1])
    else:
        assert len(lines) == 2
        assert f"{metrics}: the lines of steps 1-4 are missing" in lines[0]
        assert f"{evaluations}: the lines of steps 2, 4 are missing" in lines[1]
    first = 1 if has_copy else 5
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(first, 7))
    steps = [line["step"] for line in read_json_lines(evaluations)]
    assert steps == ([2, 4, 6] if has_copy else [6])
    assert metrics.read_bytes() == copies[0].read_bytes()


def test_a_resume_names_evaluations_missing_in_file_and_copy(ranks, tiny_data, tmp_path):
    """eval.jsonl and its copy are emptied. The resumed run must report the steps whose evaluations
    are missing."""
    settings = {"train__max_steps": 6, "checkpoint__interval": 2, "train__eval_interval": 2}
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    train_on(ranks, 1, tree | {"train": tree["train"] | {"stop_at_step": 4}})
    evaluations = tmp_path / "eval.jsonl"
    for path in (evaluations, tmp_path / ".eval-copy.jsonl"):
        assert path.stat().st_size > 0
        path.write_bytes(b"")
    stderr = ranks(1, printed_by, tree, start_world=False)[0]
    (line,) = (line for line in stderr.splitlines() if "jsonl" in line)
    assert f"{evaluations}: the lines of steps 2, 4 are missing" in line
    assert [record["step"] for record in read_json_lines(evaluations)] == [6]
