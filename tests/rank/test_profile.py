"""Tests of the profile on the meta device. The profile equals profiles of real runs, and its bytes
and FLOPs equal values that are computed by hand."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate, pairwise

import pytest
import torch
from torch import nn

from optimus.chunks.segments import ModelSegment, register_module, register_uses
from optimus.config import make_config
from optimus.distributed.groups import plan_groups
from optimus.distributed.mesh import Coordinate, make_mesh
from optimus.model.deferred_gradients import DeferredGradients
from optimus.model.flops import flops_per_token
from optimus.observe.events import Recorder
from optimus.parallel.apply import build_model, make_layout
from optimus.parallel.pipeline.stage import Objective, Stage, backward
from optimus.parallel.recompute import KeptBytes
from optimus.planner.memory import boundary_bytes
from optimus.platform import dtype_of
from optimus.rank import tensor_tracker
from optimus.rank.operations import Pass
from optimus.rank.profile import StageProfile, UseProfile, UseTracker, profile_stages
from optimus.rank.segments import segments_of
from optimus.rank.states import make_states, write_gradients_to
from tests.kit.runs.tiny import DENSE, tiny_tree
from tests.kit.runs.training import make_microbatch, make_updater

WIDE = {
    "model__hidden_size": 128,
    "model__intermediate_size": 192,
    "model__num_layers": 4,
    "train__seq_len": 1024,
    "train__global_batch_tokens": 4096,
}


def profile(rank: int = 0, world: int = 1, **settings):
    config = make_config(tiny_tree("d", "r", **settings))
    mesh = make_mesh(config.parallel, world)
    return profile_stages(config, mesh, mesh.coordinate(rank))


def test_bytes_and_flops_of_a_small_net_by_hand() -> None:
    B, D, F = 8, 16, 32
    net = nn.Sequential(nn.Linear(D, F, bias=False), nn.ReLU(), nn.Linear(F, D, bias=False))
    net.to("meta")
    for p in net.parameters():
        p.grad = torch.empty_like(p)
    x = torch.empty(B, D, device="meta", requires_grad=True)
    tracker = UseTracker()
    segments = [
        ModelSegment(str(n), 0, (), lambda *hooks, m=m: register_module(m, *hooks))
        for n, m in enumerate(net)
    ]
    register_uses(segments, tracker.use, True)
    with tracker:
        out = net(x)
        out.backward(out)
        del out
    first, relu, last, *backward = tracker.uses
    product, wide, narrow = 2 * B * D * F, 4 * B * F, 4 * B * D
    assert first[:5] == (0, False, wide, wide, product)
    # ReLU keeps its output, which the last layer also needs. The input of ReLU is freed after ReLU.
    assert relu[:5] == (1, False, 0, wide, 0)
    assert last[:5] == (2, False, narrow, narrow, product)
    assert [use.segment for use in backward] == [2, 1, 0]
    assert [use.flops for use in backward] == [2 * product, 0, 2 * product]
    # The gradient of the last layer's weight, and the gradient of the last layer's input.
    assert backward[0].peak == 4 * F * D + wide
    assert sum(use.kept for use in tracker.uses) == narrow  # x.grad


MODULES = ["norm", "attention", "moe"]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="moe"),
        pytest.param(DENSE, id="dense"),
        pytest.param({"recompute__modules": MODULES}, id="recomputed-modules"),
        pytest.param({"recompute__modules": ["block"]}, id="recomputed-blocks"),
        pytest.param({"recompute__modules": ["experts"]}, id="recomputed-experts"),
    ],
)
def test_kept_bytes_equal_those_of_a_real_forward(ranks, settings: dict) -> None:
    settings = DENSE | WIDE | settings if settings is DENSE else WIDE | settings
    (kept,) = ranks(1, kept_bytes, tiny_tree("d", "r", **settings), start_world=False)
    (stage,) = profile(**settings).values()
    planned = sum(use.kept for use in stage.forward)
    # A run on a CPU pads the rows of experts.
    assert planned == pytest.approx(kept, rel=0.01)


def kept_bytes(tree: dict) -> int:
    """Return the number of bytes that a real forward keeps for backward, without model states and
    without the rotary tables."""
    setup = make_updater(tree)
    stage = setup.model.executor._stages[0]
    tokens, _ = make_microbatch(0, setup.config.train.seq_len)
    with KeptBytes(setup.model.model) as kept:
        tables = setup.model.model.rotary(tokens.shape[1], tokens.device)  # shared by all uses
        kept._skipped |= {table.untyped_storage()._cdata for table in tables}
        stage.forward(None, tokens)
    return kept.total


@pytest.mark.parametrize("settings", [DENSE, {"recompute__modules": ["block"]}, {}])
def test_peaks_equal_those_of_a_real_run(ranks, settings: dict) -> None:
    settings = {**DENSE, **WIDE, **settings} if settings is DENSE else {**WIDE, **settings}
    (real,) = ranks(1, profile_real_run, tiny_tree("d", "r", **settings), start_world=False)
    (stage,) = profile(**settings).values()
    planned = [*stage.forward, *stage.backward]
    assert [use[:2] for use in planned] == [use[:2] for use in real]
    assert peak_of(planned) == pytest.approx(peak_of(real), rel=0.05)


def peak_of(uses: list[UseProfile]) -> int:
    live = peak = 0
    for use in uses:
        peak, live = max(peak, live + use.peak), live + use.kept
    return peak


def profile_real_run(tree: dict) -> list[UseProfile]:
    """Run forward and backward of one microbatch on the CPU. Return the measured profile of each
    use of a model segment (the forward or the backward of the segment), in order."""
    setup = make_updater(tree)
    tracker = UseTracker()
    register_uses(segments_of(setup.model.model, setup.model.layout), tracker.use, True)
    tokens, _ = make_microbatch(0, setup.config.train.seq_len)
    with tracker:
        output = setup.model.executor._stages[0].forward(None, tokens)
        assert output.objective is not None
        output.objective.backward()
        del output
    return tracker.uses


def test_flops_of_a_forward_are_the_models_flops() -> None:
    config = make_config(tiny_tree("d", "r", **WIDE))
    (stage,) = profile(**WIDE).values()
    seq_len = config.train.seq_len
    forward = flops_per_token(config.model, seq_len) / 3 * seq_len
    # The head computes no logits for the last token of a sequence.
    forward -= 2 * config.model.hidden_size * config.model.vocab_size
    assert sum(use.flops for use in stage.forward) == forward


class Traffic(Recorder):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    def collective(self, axes: str, operation: str, num_bytes: int) -> None:
        self.seen.append((axes, operation, num_bytes))


def test_planned_alltoall_has_the_traffic_and_memory_of_balanced_routing(ranks) -> None:
    layout = {
        **WIDE,
        "model__num_experts": 16,
        "model__num_experts_per_tok": 4,
        "train__deterministic": False,
        "parallel__ep": 2,
        "parallel__ep_dispatch": "alltoall",
    }
    planned = profile(0, 2, **layout)[0]
    seen = ranks(2, record_collectives, tiny_tree("d", "r", **layout), start_world=False)
    uses = (*planned.forward, *planned.backward)
    expected = sum(size for use in uses for *_, size in use.traffic)
    measured = [sum(size for *_, size in of_rank) for of_rank in seen]
    assert expected == pytest.approx(sum(measured) / 2, rel=0.1)


def record_collectives(tree: dict) -> list[tuple[str, str, int]]:
    traffic = Traffic()
    setup = make_updater(tree, recorder=traffic)
    tokens, _ = make_microbatch(0, setup.config.train.seq_len)
    traffic.seen.clear()
    output = setup.model.executor._stages[0].forward(None, tokens)
    assert output.objective is not None
    output.objective.backward()
    return traffic.seen


def test_a_divided_backward_keeps_memory_until_the_weights_action() -> None:
    layout = WIDE | {"parallel__pp": 2, "train__deterministic": False}
    (plain,) = profile(0, 2, **layout).values()
    (divided,) = profile(0, 2, **layout, parallel__schedule="zb-h1").values()
    assert plain.weights is None and divided.weights is not None
    after_input = sum(use.kept for use in (*divided.forward, *divided.backward))
    assert after_input > 0.2 * sum(use.kept for use in divided.forward)
    assert abs(after_input + divided.weights.kept) < 0.01 * after_input
    flops = sum(use.flops for use in plain.backward)
    assert sum(use.flops for use in divided.backward) + divided.weights.flops == flops


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_a_divided_backward_has_the_operations_of_the_whole(dispatch: str, on_cpu: bool) -> None:
    """zb-h1 divides backward into the action I (gradients of inputs) and the action W (gradients of
    weights). I and W together have the operations of the undivided backward, except that W gathers
    the output gradients of the experts' rows again."""
    settings = WIDE | {
        "train__deterministic": False,
        "parallel__pp": 2,
        "parallel__ep": 2,
        "parallel__ep_dispatch": dispatch,
    }

    def figures_of(*uses: UseProfile) -> tuple[float, float, float]:
        """Return the FLOPs, the bytes moved by element-wise passes, and the number of kernel
        launches, summed over `uses`."""
        operations = [op for use in uses for op in use.operations]
        moved = sum(op.num_bytes for op in operations if isinstance(op, Pass))
        return sum(use.flops for use in uses), moved, sum(op.launches for op in operations)

    stages = []
    for schedule in ("1f1b", "zb-h1"):
        config = make_config(tiny_tree("d", "r", **settings, parallel__schedule=schedule))
        mesh = make_mesh(config.parallel, 4)
        (stage,) = profile_stages(config, mesh, mesh.coordinate(0), on_cpu=on_cpu).values()
        stages.append(stage)
    plain, divided = stages
    assert divided.weights is not None
    whole, inputs = figures_of(*plain.backward), figures_of(*divided.backward)
    both = figures_of(*divided.backward, divided.weights)
    assert all(less < all_of for less, all_of in zip(inputs, whole, strict=True))
    layers, width, rows = 2, 128, 1024 * 2  # a row for each of two experts of a token
    gathered = rows * (2 * 4 * width + 8)  # copies of fp32, and two indices of a row
    assert both[0] == whole[0]
    # On a CPU, the operands have the indices of all slots.
    assert both[1] - whole[1] == pytest.approx(layers * gathered, rel=0.004 if on_cpu else 1e-9)
    experts = 2 if on_cpu else 1
    assert both[2] == whole[2] + layers * experts


DIVIDED = {"parallel__schedule": "zb-h1", "train__dtype": "bf16"}
MIXED = {"model__num_experts": [0, 4, 4, 0, 4, 0, 0, 4, 4], "model__dense_intermediate_size": 64}
SEQUENCE = {"parallel__tp": 2, "parallel__sequence_parallel": True}
ATTENTION = {"recompute__modules": ["attention"]}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(MIXED, id="mixed"),
        pytest.param(DENSE | SEQUENCE | DIVIDED | ATTENTION, id="sequence"),
        pytest.param({"recompute__modules": ["norm", "moe"], "parallel__ep": 2}, id="modules"),
        pytest.param({"recompute__modules": ["block"], **MIXED, **DIVIDED}, id="zb-block"),
        pytest.param({"parallel__tp": 2, **DIVIDED}, id="zb-tp"),
        pytest.param({"optim__frozen": ["embed.*", "blocks.[014].*"], **MIXED}, id="frozen"),
    ],
)
def test_a_stage_has_the_figures_of_a_run_of_all_its_layers(settings: dict) -> None:
    """`profile_stages` composes the profile of a stage from profiles of single segments. The
    composed profile has the FLOPs of a run of the whole stage. Its bytes differ from the bytes of
    this run by at most 1000 (scalars of the objective) plus the bytes of the gradient that the
    stage receives."""
    settings = WIDE | {"train__deterministic": False, "parallel__pp": 3} | settings
    settings["model__num_layers"] = 9
    config = make_config(tiny_tree("d", "r", **settings))
    mesh = make_mesh(config.parallel, None)
    for pp in range(3):
        coordinate = Coordinate(pp, 0, 0, 0)
        (stage,) = profile_stages(config, mesh, coordinate).values()
        whole = run_whole_stage(config, mesh, coordinate)
        uses, expected = ([*p.forward, *p.backward] for p in (stage, whole))
        if stage.weights is not None:
            uses.append(stage.weights)
            expected.append(whole.weights)
        assert [use[:2] for use in uses] == [use[:2] for use in expected]
        assert [use.flops for use in uses] == [use.flops for use in expected]
        margin = boundary_bytes(config, mesh.tp if config.parallel.sequence_parallel else 1)
        for (peak, live), (real_peak, real_live) in zip(
            running(uses), running(expected), strict=True
        ):
            assert real_peak - 1000 <= peak <= real_peak + margin + 1000
            assert real_live - 1000 <= live <= real_live + margin + 1000
        assert live == 0


def running(uses: list[UseProfile]) -> list[tuple[int, int]]:
    """Return (peak bytes during the use, bytes after the use) for each use, relative to the start
    of the microbatch."""
    live = [*accumulate((use.kept for use in uses), initial=0)]
    return [
        (before + use.peak, after)
        for use, (before, after) in zip(uses, pairwise(live), strict=True)
    ]


def run_whole_stage(config, mesh, coordinate) -> StageProfile:
    """Run all layers of the rank's stage on the meta device, as the executor does, and return the
    profile of this run. The rank has a single stage."""
    tracker = UseTracker()
    layout = make_layout(config, mesh, coordinate, mesh.pp)
    groups = plan_groups(mesh, mesh.rank_at(coordinate), tracker)
    model = build_model(config, layout, groups, torch.device("meta"))
    states = make_states(config.optim, config.train, config.offload, layout, groups, model)
    write_gradients_to(model, states)
    segments, train = segments_of(model, layout), config.train
    tokens = torch.empty(train.microbatch_size, train.seq_len, dtype=torch.int64, device="meta")
    seq_len = train.seq_len // layout.sequence_shares
    model.rotary(seq_len, tokens.device)
    shape = train.microbatch_size, seq_len, config.model.hidden_size
    received = torch.empty(shape, dtype=dtype_of(train.dtype), device="meta")
    tracker.count_expert_rows(tokens.numel() * config.model.num_experts_per_tok)
    ends = layout.has_first, layout.has_last
    stage = Stage(model, layout.layers[coordinate.pp], *ends, Objective(1, 1, 5, 0.01, 0.001))
    with tracker:
        register_uses(segments, tracker.use, True)
        tracker.use(0, False)
        x = None if ends[0] else torch.empty_like(received).requires_grad_()
        output = stage.forward(x, tokens)
        tracker.end_use()
        middle = len(tracker.uses)
        tracker.use(len(segments) - 1, True)
        grad = None if ends[1] else torch.empty_like(received)
        with DeferredGradients() if layout.schedule.splits_backward else nullcontext() as deferred:
            backward(output, grad)
        del output, x, grad
        tracker.end_use()
        last = len(tracker.uses)
        if deferred is not None:
            tracker.use(0, True)
            deferred.compute()
            tracker.end_use()
    weights = tracker.uses[last] if deferred is not None else None
    return StageProfile(tuple(tracker.uses[:middle]), tuple(tracker.uses[middle:last]), weights)


def test_known_operations_do_not_change_a_profile(monkeypatch) -> None:
    """A later profile, whose operations are already cached, has the same values as the first
    profile."""
    monkeypatch.setattr(tensor_tracker, "_known", {})
    settings = {"parallel__tp": 2, "parallel__ep": 2, "recompute__modules": ["norm", "moe"]}
    first = profile(0, 4, **settings)
    known = dict(tensor_tracker._known)
    assert len(known) > 20 and profile(0, 4, **settings) == first
    assert tensor_tracker._known == known
    assert any(operation.results is None for operation in known.values())


def test_frozen_first_layers_have_no_backward() -> None:
    (stage,) = profile(**WIDE, optim__frozen=["embed.*", "blocks.0.*", "blocks.1.*"]).values()
    assert [use.segment for use in stage.backward] == [5, 4, 3]
