"""Tests of the profile on the meta device: it equals real runs, and bytes and FLOPs by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optimus.chunks.segments import ModelSegment, register_module, register_uses
from optimus.config import make_config
from optimus.distributed.mesh import make_mesh
from optimus.model.flops import flops_per_token
from optimus.observe.events import Recorder
from optimus.parallel.recompute import KeptBytes
from optimus.rank.profile import UseProfile, UseTracker, profile_stages
from optimus.rank.segments import segments_of
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
    # ReLU keeps its output, which the last layer also needs; its input is freed after it.
    assert relu[:5] == (1, False, 0, wide, 0)
    assert last[:5] == (2, False, narrow, narrow, product)
    assert [use.segment for use in backward] == [2, 1, 0]
    assert [use.flops for use in backward] == [2 * product, 0, 2 * product]
    # The gradient of the last layer's weight and that of its input.
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
    """Return the bytes that a real forward keeps for backward, outside of model states."""
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
    """Profile a forward and a backward of one microbatch on the CPU, with memory."""
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


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"parallel__tp": 2}, id="tp"),
        pytest.param({"parallel__tp": 2, "parallel__sequence_parallel": True}, id="sequence"),
        pytest.param({"parallel__ep": 2, "parallel__ep_dispatch": "allgather"}, id="allgather"),
        pytest.param(
            {"parallel__ep": 2, "parallel__ep_dispatch": "alltoall", "model__router": "uniform"},
            id="alltoall",
        ),
        pytest.param({"parallel__tp": 2, "recompute__modules": ["block"]}, id="recomputed"),
    ],
)
def test_planned_collectives_equal_those_of_a_run(ranks, layout: dict) -> None:
    layout = {"model__num_layers": 3, "train__deterministic": False, **layout}
    planned = profile(0, 2, **layout)[0]
    seen = ranks(2, record_collectives, tiny_tree("d", "r", **layout), start_world=False)
    assert seen[0] == seen[1]
    uses: tuple[UseProfile, ...] = (*planned.forward, *planned.backward)
    assert [traffic for use in uses for traffic in use.traffic] == seen[0]
    assert seen[0]


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


def test_layers_of_a_kind_have_the_figures_of_the_second() -> None:
    short = {"model__num_layers": 2, "model__num_experts": [0, 4]}
    long = {"model__num_layers": 6, "model__num_experts": [0, 4, 4, 0, 4, 0]}
    dense = {"model__dense_intermediate_size": 64}
    (few,) = profile(**{**WIDE, **dense, **short}).values()
    (many,) = profile(**{**WIDE, **dense, **long}).values()
    sparse = [use.kept for use in many.forward if use.segment in (2, 3, 5)]
    assert len(set(sparse)) == 1
    assert len(many.forward) == len(many.backward) == 8
    assert [use.segment for use in many.backward] == list(reversed(range(8)))
    assert few.forward[2].flops == many.forward[5].flops


def test_frozen_first_layers_have_no_backward() -> None:
    (stage,) = profile(**WIDE, optim__frozen=["embed.*", "blocks.0.*", "blocks.1.*"]).values()
    assert [use.segment for use in stage.backward] == [5, 4, 3]
