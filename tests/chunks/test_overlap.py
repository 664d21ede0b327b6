"""Tests of the overlap of communication with computation: results have the same bits as without
overlap, and collectives are launched at the right time."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from optimus.chunks import reductions
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.optimizer import AdamW
from optimus.chunks.segments import ModelSegment, register_module
from optimus.config import OptimConfig
from optimus.distributed.collectives import Group, reduce_scatter_sum
from optimus.observe.events import TrafficMeter
from tests.kit.faults.nonfinite import poison
from tests.kit.layouts.whole import whole_of
from tests.kit.ranks.worlds import everyone
from tests.kit.runs.results import assert_same_run, metrics_of
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import train_on

FAST = {
    # "auto" chooses an implementation by measured times. Two runs can make different choices, whose
    # results differ in some bits.
    "kernels__grouped_gemm": "loop",
    "parallel__ep_dispatch": "allgather",
    "train__max_steps": 4,
    "train__deterministic": False,
    "train__threads": 1,
    "optim__chunk_length": 2000,
}
ZERO_BUBBLE = {"parallel__pp": 2, "parallel__schedule": "zb-h1", "optim__sharding": "epso"}
INTERLEAVED = {
    "parallel__pp": 2,
    "parallel__schedule": "interleaved",
    "parallel__virtual_stages": 2,
    "model__num_layers": 4,
    "optim__sharding": "so",
}


@pytest.mark.parametrize(
    ("size", "run"),
    [
        pytest.param(2, {}, id="dp2"),
        pytest.param(4, {"parallel__ep": 2, "optim__sharding": "so"}, id="dp2-ep2-so"),
        pytest.param(
            4,
            {
                "parallel__ep": 2,
                "optim__sharding": "epso",
                "train__dtype": "bf16",
                "optim__grad_dtype": "bf16",
                "optim__grad_reduce_dtype": "bf16",
            },
            id="dp2-ep2-epso-bf16",
        ),
        pytest.param(2, {"parallel__ep": 2, "optim__sharding": "epso"}, id="ep2-epso"),
        pytest.param(4, {**ZERO_BUBBLE, "model__tie_embeddings": True}, id="zb-h1-tied"),
        pytest.param(
            4,
            {
                **ZERO_BUBBLE,
                "model__tie_embeddings": True,
                "train__dtype": "fp16",
                "optim__loss_scale": 2.0**36,  # fp16 overflows, so the first updates are skipped
                "optim__frozen": ["embed.*", "blocks.0.attention.*_proj.weight"],
                "optim__groups": [{"pattern": "*norm*", "weight_decay": 0.0}],
            },
            id="zb-h1-tied-frozen-fp16",
        ),
        pytest.param(
            4,
            {
                **ZERO_BUBBLE,
                "train__dtype": "fp16",
                "optim__loss_scale": 2.0**36,
                "optim__resident": "cache",
                "optim__cache_chunks": 4,
            },
            id="zb-h1-cache-fp16",
        ),
        pytest.param(
            4, {**INTERLEAVED, "recompute__modules": ["block"]}, id="interleaved-recomputed"
        ),
        pytest.param(
            2,
            {"train__deterministic": True, "optim__sharding": "epso", "train__sample_interval": 2},
            id="deterministic",
        ),
    ],
)
def test_overlap_changes_no_bit(ranks, tiny_data, tmp_path, size, run):
    """Train with and without overlap, in several layouts. Metrics, checkpoints and evaluations have
    the same bits."""
    for name, overlap in (("overlap", True), ("serial", False)):
        settings = {**FAST, "train__eval_interval": 2, **run, "optim__overlap": overlap}
        train_on(ranks, size, tiny_tree(tiny_data, tmp_path / name, **settings))
    assert_same_run(tmp_path / "overlap", tmp_path / "serial")
    evaluations = [(tmp_path / name / "eval.jsonl").read_text() for name in ("overlap", "serial")]
    assert evaluations[0] and evaluations[0] == evaluations[1]


def four_layers(group: Group) -> tuple[torch.nn.Sequential, ChunkEngine]:
    """Return (model of four layers, engine of the model). The first layer also has a weight that is
    not used."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    model[0].unused = torch.nn.Parameter(torch.ones(8))
    optim = OptimConfig(lr=1e-2, min_lr=0.0)
    groups = ParamProcessGroups(reduce_group=group, shard_group=group)
    engine = ChunkEngine(
        dict(model.named_parameters()), lambda name: groups, AdamW(optim),
        dtype=torch.float32, chunk_length=1, overlap=True, everyone=group,
    )  # fmt: skip
    segments = [
        ModelSegment(f"layer {number}", 0, (f"{number}.weight",), partial(register_module, layer))
        for number, layer in enumerate(model)
    ]
    engine.attach(segments, [], overlap=True)
    return model, engine


def count_launches() -> dict:
    """Run a step and an update on `four_layers`. Return a dict that maps each phase to the number
    of collectives launched in the phase, and each check of gradients or parameters to its
    result."""
    meter = TrafficMeter()
    group = everyone(recorder=meter)
    model, engine = four_layers(group)
    counts: dict[str, Any] = {"before a launch": []}
    strategy: Any = engine.gradients._strategy

    def launch(*args: Any, **options: Any) -> Any:
        counts["before a launch"].append(len(strategy._in_flight))
        return reduce_scatter_sum(*args, **options)

    reductions.reduce_scatter_sum = launch

    def count(phase: str, operation: str) -> None:
        counts[phase] = meter.counts.get((group.axes, operation), [0])[0]
        meter.clear()

    def backward() -> None:
        model(torch.full((1, 8), group.rank + 1.0)).sum().backward()

    meter.clear()
    engine.start_step()
    backward()
    count("a backward before the last", "reduce_scatter")
    with engine.gradients.last_backward(0):
        backward()
    count("in the last backward", "reduce_scatter")
    engine.gradients.reduce(0)
    count("after the last backward", "reduce_scatter")
    engine.gradients.finish()
    reduced = {name: gradient.clone() for name, gradient in whole_of(engine, "grad").items()}
    meter.clear()
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    engine.update(1e-2)
    count("in the update", "all_gather")
    counts["in flight"] = [engine.params.num_in_flight]
    for layer in model:
        layer(torch.ones(1, 8))
        counts["in flight"].append(engine.params.num_in_flight)
    updated = all(
        not torch.equal(before[name], parameter)
        for name, parameter in model.named_parameters()
        if "un" not in name
    )
    masters = whole_of(engine, "master")
    engine.wait()
    counts["in flight"].append(engine.params.num_in_flight)
    gathered = all(torch.equal(masters[name], p) for name, p in model.named_parameters())
    engine.sync_params()
    counts["in flight"].append(engine.params.num_in_flight)
    engine.start_step()
    with engine.gradients.last_backward(0):
        backward()
    strategy._max_in_flight = 0  # as without `overlap`
    engine.start_step()  # abandons the step in progress
    counts["in flight"].append(len(strategy._in_flight))
    engine.gradients.reduce(0)
    counts["in flight"].append(len(strategy._in_flight))
    # The gradient of a rank is proportional to its input, rank + 1. The inputs of two microbatches
    # on two ranks have the sum 2 * (1 + 2).
    expected = {n: 2 * 3 / (group.rank + 1) * p for n, p in local_gradients(before, group).items()}
    summed = all(torch.allclose(reduced[name], expected[name], rtol=1e-5) for name in expected)
    return {
        **counts,
        "updated": updated,
        "gathered": gathered,
        "summed": summed,
        "unused": reduced["0.unused"],
    }


def local_gradients(weights: dict, group: Group) -> dict:
    """Return the gradients of one microbatch on this rank, without an engine."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    model.load_state_dict({name: w for name, w in weights.items() if "unused" not in name})
    model(torch.full((1, 8), group.rank + 1.0)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_reductions_begin_in_backward_and_gathers_end_in_forward(ranks):
    """Run a step of two microbatches and an update on two ranks. The last backward launches the
    reductions that are complete, and each layer of the next forward waits for its own gather.
    Gradients and parameters have the right values."""
    for counts in ranks(2, count_launches):
        assert counts["a backward before the last"] == 0
        # One of the five chunks contains only the unused weight. This chunk has no gradient, so its
        # reduction and the later reduction of the first layer wait for the end of backward. If
        # reductions were launched in the order of forward, backward would launch only one.
        assert counts["in the last backward"] == 3
        assert counts["after the last backward"] == 2
        assert counts["in the update"] == 5
        assert counts["before a launch"] == [0, 1, 1, 1, 1] + [0, 1, 1] + [0] * 5
        in_flight = [5, 4, 3, 2, 1]  # no layer reads the fifth chunk
        assert counts["in flight"] == [*in_flight, 0, 0, 0, 0]
        assert counts["updated"] and counts["gathered"] and counts["summed"]
        assert not counts["unused"].any()


@pytest.mark.parametrize("layer", ["q_proj", "mlp_norm", "final_norm"])
def test_nan_in_a_gradient_is_reported_with_its_rank(ranks, tiny_data, tmp_path, layer):
    """A gradient of rank 1 is NaN. The error on both ranks contains rank 1, the step and the
    parameter: the NaN is detected before the reduction adds it to the gradients of the other
    rank."""
    run = {"parallel__schedule": "1f1b", "parallel__pp": 1, "optim__sharding": "epso"}
    tree = tiny_tree(tiny_data, tmp_path, **{**FAST, **run})
    errors = ranks(2, poison, tree, 1, "gradient", layer, 2, start_world=False)
    name, message = errors[1].split("|")
    assert f"|{message}" in errors[0]
    for text in ("rank 1", "step 2", f"the gradient of {name}"):
        assert text in message


def test_nan_in_a_gradient_under_zero_bubble_is_reported_with_its_rank(ranks, tiny_data, tmp_path):
    """A gradient of rank 1 is NaN, and weight gradients are deferred. The error contains rank 1 and
    the parameter."""
    tree = tiny_tree(tiny_data, tmp_path, **{**FAST, **ZERO_BUBBLE})
    errors = ranks(4, poison, tree, 1, "gradient", "mlp_norm", 2, start_world=False)
    name, message = errors[1].split("|")
    assert "rank 1" in message and f"the gradient of {name}" in message


def test_bf16_gradients_are_close_to_fp32_gradients(ranks, tiny_data, tmp_path):
    """Train a bf16 model with fp32 and with bf16 gradients. Losses differ by at most 0.2 %, and
    norms by at most 2 %."""
    runs = {"fp32": "fp32", "bf16": "bf16"}
    for name, dtype in runs.items():
        settings = {**FAST, "train__dtype": "bf16", "optim__grad_dtype": dtype}
        train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / name, **settings))
    fp32, bf16 = (metrics_of(tmp_path / name) for name in runs)
    assert fp32 != bf16
    for reference, metrics in zip(fp32, bf16, strict=True):
        assert metrics["loss"] == pytest.approx(reference["loss"], rel=2e-3)
        assert metrics["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2e-2)
