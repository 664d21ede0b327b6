"""Tests of runs whose model is divided among ranks: resume under another layout, NaN on a rank, and
lost ranks."""

from __future__ import annotations

import json
import math
import os
import re
import signal

import pytest

from optimus.checkpoint import store
from optimus.config import make_config
from optimus.distributed.agreement import RunEnded
from optimus.errors import LostPeerError, OutcomeKind
from optimus.launch.environment import read_launch_env
from optimus.train import loop
from tests.kit.faults.nonfinite import poison
from tests.kit.ranks.pool import RanksFailed
from tests.kit.runs.results import assert_same_run, metrics_of
from tests.kit.runs.tiny import CONTEXT, tiny_tree
from tests.kit.runs.training import make_run, train_on

FEW = {
    "train__max_steps": 6,
    "train__global_batch_tokens": 4 * CONTEXT,
    "model__num_layers": 4,
    "checkpoint__interval": 3,
}


def sizes(**axes) -> dict:
    return {f"parallel__{axis}": size for axis, size in axes.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_pipelines_and_replicas_may_change_on_resume(ranks, tiny_data, tmp_path, tied):
    model = FEW | {"model__tie_embeddings": tied, "data__document_mask": tied}
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "unbroken", **model))
    layouts = [
        (4, sizes(pp=2, stage_layers=[1, 3]) | {"train__stop_at_step": 2}),
        (2, sizes(dp=2) | {"train__stop_at_step": 3}),
        (4, sizes(pp=4, schedule="zb-h1") | {"train__stop_at_step": 4}),
        (1, sizes(schedule="interleaved", virtual_stages=4) | {"train__stop_at_step": 5}),
        (2, sizes(pp=2, schedule="interleaved", virtual_stages=2)),
    ]
    for size, layout in layouts:
        train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "pieces", **model, **layout))
    assert_same_run(tmp_path / "unbroken", tmp_path / "pieces")


def test_tensor_and_expert_parallelism_may_change_on_resume(ranks, tiny_data, tmp_path):
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "unbroken", **FEW))
    layouts = [
        (4, sizes(ep=2, tp=2) | {"train__stop_at_step": 2}),
        (2, sizes(tp=2, sequence_parallel=True) | {"train__stop_at_step": 3}),
        (4, sizes(pp=2, ep=2) | {"train__stop_at_step": 5}),
        (1, {}),
    ]
    for size, layout in layouts:
        train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "pieces", **FEW, **layout))
    expected, resumed = metrics_of(tmp_path / "unbroken"), metrics_of(tmp_path / "pieces")
    assert [line["step"] for line in resumed] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(expected, resumed, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-5)


CACHE = {"optim__sharding": "epso", "optim__resident": "cache", "optim__chunk_length": 2000}


@pytest.mark.parametrize("target", ["parameter", "gradient"])
@pytest.mark.parametrize(
    ("layout", "layer"),
    [
        pytest.param({}, "final_norm", id="dp2"),
        pytest.param({"train__deterministic": False}, "final_norm", id="dp2-fast"),
        pytest.param(sizes(pp=2), "q_proj", id="pp2"),
        pytest.param(sizes(ep=2), "q_proj", id="ep2"),
        pytest.param(sizes(tp=2), "q_proj", id="tp2"),
    ],
)
def test_nan_of_a_rank_is_reported_on_all_ranks(ranks, tiny_data, tmp_path, layout, layer, target):
    tree = tiny_tree(tiny_data, tmp_path, checkpoint__interval=1, **layout)
    results = ranks(2, poison, tree, 1, target, layer, start_world=False)
    reports = [result.split("|") for result in results]
    assert reports[0][1] == reports[1][1]
    name, message = reports[1]
    for words in ("rank 1", "step 3", target, name):
        assert words in message
    assert store.newest_valid(tmp_path).step == 2  # no state with NaN was saved
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2]
    assert json.loads((tmp_path / "log" / "nonfinite-rank1.json").read_text())["step"] == 3


@pytest.mark.parametrize(
    ("layout", "bad_rank", "layer", "target"),
    [
        (sizes(tp=2), 1, "q_proj", "output"),
        (sizes(tp=2), 1, "q_proj", "slope"),
        (sizes(tp=2), 1, "o_proj", "output"),
        (sizes(tp=2, sequence_parallel=True), 1, "o_proj", "output"),
        (sizes(pp=2), 1, "q_proj", "output"),
        (sizes(pp=2), 1, "q_proj", "slope"),
        (sizes(ep=2), 1, "o_proj", "slope"),
        (sizes(tp=2, pp=2), 3, "q_proj", "output"),
        (sizes(tp=2, pp=2), 1, "o_proj", "slope"),
        (sizes(tp=2) | CACHE, 1, "q_proj", "slope"),
        (sizes(ep=2) | CACHE, 1, "o_proj", "slope"),
        (sizes(dp=2, tp=2) | CACHE, 3, "q_proj", "slope"),
    ],
)
def test_nan_that_collectives_spread_is_reported_with_its_first_rank(
    ranks, tiny_data, tmp_path, layout, bad_rank, layer, target
):
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=3, **layout)
    size = math.prod(layout.get(f"parallel__{axis}", 1) for axis in ("pp", "dp", "ep", "tp"))
    reports = ranks(size, poison, tree, bad_rank, target, layer, start_world=False)
    name, message = reports[bad_rank].split("|")
    assert f"on rank {bad_rank} " in message and "more ranks" not in message
    assert f"layer {name.removesuffix('.weight')} " in message or target == "slope"
    assert len({report.split("|")[1] for report in reports}) == 1
    marked = [path.name for path in (tmp_path / "log").iterdir()]
    assert marked == [f"nonfinite-rank{bad_rank}.json"]


def lose_a_peer(tree: dict, signal_number: int) -> None:
    """Train. Rank 1 sends itself the signal in its sixth forward of a microbatch, which is in the
    middle of an update. SIGKILL ends the rank, and SIGSTOP makes the rank hang."""
    run = make_run(tree)
    forward, calls = run.model.run_blocks, []

    def leave(*args, **kwargs):
        calls.append(1)
        if run.world.rank == 1 and len(calls) == 6:
            os.kill(os.getpid(), signal_number)
        return forward(*args, **kwargs)

    run.model.run_blocks = leave
    run.go()


@pytest.mark.parametrize(
    "signal_number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"]
)
@pytest.mark.parametrize("axis", ["pp", "dp", "ep", "tp"])
def test_rank_that_waits_for_a_lost_rank_reports_its_action(
    ranks, tiny_data, tmp_path, axis, signal_number
):
    tree = tiny_tree(
        tiny_data,
        tmp_path,
        parallel__timeout_s=6.0,
        train__global_batch_tokens=4 * 32,
        **sizes(**{axis: 2}),
    )
    with pytest.raises(RanksFailed) as failed:
        ranks(2, lose_a_peer, tree, signal_number, start_world=False, timeout_s=60, grace_s=4)
    error = failed.value.outcomes[0].value()
    assert isinstance(error, LostPeerError) and error.exit_code == 5
    is_killed = signal_number == signal.SIGKILL
    reason = "another rank has ended" if is_killed else "within parallel.timeout_s"
    action = r"this rank was running (F|B|REDUCE_GRAD)\(stage 0, microbatch \d\)"
    assert re.search(f" over {axis} did not complete: .*{reason}; {action}", str(error)), error


def train_without_the_last(tree: dict) -> RunEnded | None:
    """Train, and kill the last rank in the first update. On each other rank, return the `RunEnded`
    with which the training ends, or None if the training completes."""
    launch = read_launch_env()
    if launch.rank == launch.world_size - 1:
        loop.Run.update = lambda run, step: os.kill(os.getpid(), signal.SIGKILL)
    try:
        loop.train(make_config(tree), launch)
    except RunEnded as ended:
        return ended
    return None


def test_lost_rank_is_reported_by_a_single_rank(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, train__global_batch_tokens=3 * 32)
    with pytest.raises(RanksFailed) as failed:
        ranks(3, train_without_the_last, tree, start_world=False, timeout_s=40, grace_s=8)
    *survivors, killed = failed.value.outcomes
    ends = [survivor.value() for survivor in survivors]
    assert not killed.returned and ends[0].outcome == ends[1].outcome
    assert sorted(ended.prints for ended in ends) == [False, True]
    outcome = ends[0].outcome
    assert (outcome.kind, outcome.step, outcome.phase) == (OutcomeKind.LOST_PEER, 1, "training")
