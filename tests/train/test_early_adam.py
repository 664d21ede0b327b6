"""Runs whose host updates chunks during backward (`offload.early_adam`), and whose gradients leave
the device in bf16 (`offload.grad_dtype`)."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from optimus.checkpoint import store
from optimus.chunks.buffers import ChunkState
from optimus.chunks.optimizer import UpdateQueue
from optimus.config import make_config
from optimus.errors import ConfigError, OptimusError
from optimus.model.transformer import Block
from optimus.observe.metrics import read_json_lines
from optimus.train.loop import Run
from tests.kit.faults.nonfinite import train_on_bad_instance
from tests.kit.layouts.matrix import Outcome, run_several
from tests.kit.runs.results import assert_same_run, metrics_of
from tests.kit.runs.tiny import CONTEXT, tiny_tree
from tests.kit.runs.training import Ended, local_batch, make_updater, run_with, train_on
from tests.train.test_skipped_steps import INSTANCE, skipping_tree

SMALL = {"optim__chunk_length": 2000, "train__global_batch_tokens": 8 * CONTEXT}
CLIP = {"optim__clip_norm": 0.58}
"""Clips the norm in some of the first steps of the tiny run."""
MANUAL = {"offload__mode": "manual", "offload__host_share": 1.0}
ALONE = {"start_world": False, "timeout_s": 120}


def count_early(trees: Sequence[dict[str, Any]]) -> tuple[list[Outcome], int]:
    """Run the configurations on this rank, one after the other. Freed buffers and unused spare
    buffers contain NaN. Return the outcome of each run, and the number of early updates that all
    runs together have used."""
    count, exchange = 0, ChunkState.exchange

    def note(state: ChunkState, other: Any) -> None:
        nonlocal count
        count += 1
        exchange(state, other)

    with mock.patch.object(ChunkState, "exchange", note):
        return run_several(trees, [True] * len(trees)), count


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (1, {}),
        (2, {}),
        (4, {"parallel__pp": 2, "model__num_layers": 4, "optim__clip_norm": 0.92}),
    ],
    ids=["1", "dp2", "dp2-pp2"],
)
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_clipped_and_unclipped_steps_have_the_bits_of_states_on_the_device(
    ranks, size, layout, grad_dtype
):
    """With and without early updates, runs have the bits of a run with states on the device. If
    `offload.grad_dtype` is "bf16", this reference run also rounds gradients to bf16."""
    run = {"train__dtype": "bf16", "model__tie_embeddings": True, "optim__sharding": "so"}
    run |= {"train__global_batch_tokens": 4 * CONTEXT, "optim__clip_norm": 0.815} | layout
    rounds = {"offload__grad_dtype": grad_dtype}
    changes = [
        {"offload__grad_dtype": "bf16"} if grad_dtype == "bf16" else {},
        MANUAL | rounds | {"offload__early_adam": "off"},
        MANUAL | rounds | {"offload__early_adam": "on"},
        MANUAL | rounds | {"offload__host_share": 0.5, "optim__cache_chunks": 12},
    ]
    trees = [tiny_tree("d", "r", **SMALL | run | change) for change in changes]
    (whole, *others), count = ranks(size, count_early, trees, **ALONE)[0]
    limit = run["optim__clip_norm"]
    assert {norm > limit for *_, norm in whole.metrics} == {True, False}
    for result in others:
        assert result.metrics == whole.metrics and result.final == whole.final
    assert count


@pytest.mark.parametrize(("early", "clip_norm"), [("auto", 0.58), ("auto", 0.0), ("on", 0.58)])
def test_auto_begins_no_early_update_after_a_clipped_norm(monkeypatch, early, clip_norm):
    """With clipping, early_adam = "auto" expects a clipped norm in the first step. In a later step,
    it expects a clipped norm if the norm of the previous step was clipped. In these steps, the run
    begins no early update. With early_adam = "on", or without clipping, each step begins early
    updates."""
    expected: list[Any] = []
    start = UpdateQueue.start_step

    def note(queue: UpdateQueue, arguments: Any) -> None:
        expected.append(arguments)
        start(queue, arguments)

    monkeypatch.setattr(UpdateQueue, "start_step", note)
    run = {"optim__clip_norm": clip_norm, "offload__early_adam": early}
    _, _, groups, plan, _, _, updater = make_updater(tiny_tree("d", "r", **SMALL, **MANUAL, **run))
    results = []
    for step in range(1, 6):
        batch = local_batch(groups, plan.num_microbatches, step * plan.num_microbatches)
        results.append(updater.run(step, batch))
    clipped = [True, *(0 < clip_norm < result.grad_norm for result in results[:-1])]
    assert clip_norm == 0 or {*clipped[1:]} == {True, False}
    for arguments, was_clipped, result in zip(expected, clipped, results, strict=True):
        waits = early == "auto" and clip_norm > 0 and was_clipped
        assert arguments == (None if waits else (result.lr, 1.0))


def test_bf16_gradients_change_a_run(ranks):
    trees = [tiny_tree("d", "r", **SMALL, offload__grad_dtype=d) for d in ("auto", "bf16")]
    plain, rounded = ranks(1, run_several, trees, [False] * 2, **ALONE)[0]
    assert plain.final != rounded.final
    for actual, expected in zip(rounded.metrics, plain.metrics, strict=True):
        assert actual == pytest.approx(expected, rel=5e-3)


def test_overflows_discard_early_updates(ranks):
    """In fp16, the loss scale is too large in the first step and in a later step, so gradients
    overflow. The early updates of these steps must be discarded."""
    run = {"train__dtype": "fp16", "optim__loss_scale": 2.0**22, "train__deterministic": False}
    run |= CLIP | MANUAL | {"train__threads": 1}
    trees = [tiny_tree("d", "r", **SMALL, **run, offload__early_adam=e) for e in ("off", "on")]
    (late, early), count = ranks(1, count_early, trees, **ALONE)[0]
    norms = [metrics[3] for metrics in late.metrics]
    assert math.isnan(norms[0]) and 0 < sum(map(math.isnan, norms)) < len(norms)
    assert str(early.metrics) == str(late.metrics) and early.final == late.final and count


def test_a_step_with_bad_data_is_skipped_with_the_same_bits(ranks, tiny_data, tmp_path):
    """The gradients of step 3 are NaN, and the run skips the update of step 3. With early updates,
    the run has the bits of a run without early updates."""
    for name, change in (("whole", {}), ("early", MANUAL | {"offload__early_adam": "on"})):
        tree = skipping_tree(tiny_data, tmp_path / name, **CLIP, **change, optim__chunk_length=2000)
        (ended,) = ranks(1, train_on_bad_instance, tree, INSTANCE, start_world=False)
        assert ended.status == 0, ended.message
    norms = [line["grad_norm"] for line in metrics_of(tmp_path / "whole")]
    assert norms[2] is None and len(norms) == 5
    assert_same_run(tmp_path / "early", tmp_path / "whole")


def slow_links(folder: Path) -> str:
    """Write a links file whose rates let the updates of the tiny model take about 0.2 s per step.
    Return the path of the file."""
    file = folder / "links.toml"
    file.write_text("[links]\nto_device = 1e9\nto_host = 1e9\nhost_adam = 2.5e5\n")
    return str(file)


@pytest.mark.parametrize("early", ["off", "on"])
def test_saves_and_evaluations_right_after_an_update_see_all_chunks(
    ranks, tiny_data, tmp_path, early
):
    """Checkpoints, evaluations and generated samples after each step wait until all chunks are
    updated."""
    run = {"train__max_steps": 4, "train__eval_interval": 1, "train__sample_interval": 2}
    run |= CLIP | {"checkpoint__interval": 1, "optim__chunk_length": 2000}
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "whole", **run))
    slow = MANUAL | {"offload__links": slow_links(tmp_path), "offload__early_adam": early}
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "slow", **run, **slow))
    assert_same_run(tmp_path / "slow", tmp_path / "whole")
    evaluations = [read_json_lines(tmp_path / name / "eval.jsonl") for name in ("slow", "whole")]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 4


def run_while_busy(tree: dict[str, Any], reason: str) -> Ended:
    """Train. After update 3, while the host still updates chunks, send SIGTERM to this rank
    (`reason` "SIGTERM"), or let the next forward of the second block raise an error (`reason`
    "error")."""
    forward, fails = Block.forward, False

    def run_block(block: Block, *arguments: Any) -> Any:
        if fails and block is blocks[1]:
            raise OptimusError("no memory")
        return forward(block, *arguments)

    def after(run: Run) -> None:
        nonlocal fails
        blocks[:] = run.model.each_block()
        assert not all(run.states._updates.is_done(c.chunk.number) for c in run.states.chunks)
        if run.step == 3 and reason == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        fails = run.step == 3 and reason == "error"

    blocks: list[Block] = []
    with mock.patch.object(Block, "forward", run_block):
        return run_with(tree, lambda step: None, after)


@pytest.mark.parametrize(("reason", "status", "kept"), [("SIGTERM", 3, 3), ("error", 1, 2)])
def test_a_run_that_ends_during_updates_resumes_with_the_same_bits(
    ranks, tiny_data, tmp_path, reason, status, kept
):
    """The run ends while the host still updates chunks. After SIGTERM, the run saves step 3 with
    the updates of all chunks. After an error, the run does not save step 3. In both cases, the
    resumed run has the bits of an unbroken run."""
    run = {"train__max_steps": 5, "checkpoint__interval": 2, "optim__chunk_length": 2000} | CLIP
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "whole", **run))
    slow = MANUAL | {"offload__links": slow_links(tmp_path), "offload__early_adam": "on"}
    tree = tiny_tree(tiny_data, tmp_path / "slow", **run, **slow)
    (ended,) = ranks(1, run_while_busy, tree, reason, **ALONE)
    assert ended.status == status, ended
    newest = store.newest_valid(tmp_path / "slow")
    assert newest is not None and newest.step == kept
    train_on(ranks, 1, tree)
    assert_same_run(tmp_path / "slow", tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"offload__early_adam": "on"},
            "offload.early_adam = 'on' has no meaning with offload.mode = 'off'; leave it out",
        ),
        (
            {"offload__grad_dtype": "fp32"},
            "offload.grad_dtype = 'fp32' has no meaning with offload.mode = 'off'; leave it out",
        ),
        (
            {
                "offload__grad_dtype": "bf16",
                "optim__grad_dtype": "bf16",
                "train__dtype": "bf16",
                "train__deterministic": False,
            },
            "optim.grad_dtype = 'bf16': offload.grad_dtype = 'bf16' sums gradients in fp32; leave "
            "one of these two settings out",
        ),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ConfigError) as refused:
        make_config(tiny_tree("d", "r", **settings))
    assert str(refused.value) == message


def test_gradients_are_rounded_by_default_only_without_deterministic_mode():
    """By default, a run rounds gradients to bf16 if it offloads states, has the dtype bf16, and is
    not in deterministic mode. `offload.grad_dtype` = "bf16" always rounds gradients."""
    for deterministic, dtype, offload, expected in (
        (False, "bf16", MANUAL, True),
        (True, "bf16", MANUAL, False),
        (False, "fp32", MANUAL, False),
        (False, "bf16", {}, False),
        (True, "fp32", {"offload__grad_dtype": "bf16"}, True),
    ):
        run = {"train__deterministic": deterministic, "train__dtype": dtype}
        config = make_config(tiny_tree("d", "r", **run, **offload))
        assert config.offload.rounds_gradients(config.train) is expected
