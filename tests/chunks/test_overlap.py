"""Communication beside computation: no bit changes, and it does begin early."""

from __future__ import annotations

import pytest
import torch

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.optimizer import AdamW
from optimus.chunks.states import Home
from optimus.config import OptimConfig
from optimus.distributed.collectives import Group
from optimus.observe.events import TrafficMeter
from tests.helpers.changed_runs import poison
from tests.helpers.runs import assert_same_run, metrics_of, train_on
from tests.helpers.tiny import tiny_tree
from tests.helpers.whole import whole_of
from tests.helpers.worlds import everyone

FAST = {
    # What "auto" measures may come out otherwise in another run, and has other bits.
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
                "optim__loss_scale": 2.0**36,  # the first updates are skipped
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
    for name, overlap in (("beside", True), ("after", False)):
        settings = {**FAST, "train__eval_interval": 2, **run, "optim__overlap": overlap}
        train_on(ranks, size, tiny_tree(tiny_data, tmp_path / name, **settings))
    assert_same_run(tmp_path / "beside", tmp_path / "after")
    evaluations = [(tmp_path / name / "eval.jsonl").read_text() for name in ("beside", "after")]
    assert evaluations[0] and evaluations[0] == evaluations[1]


def step_by_step() -> dict:
    """Count what is begun when, on four layers of which the first has a weight that is not used."""
    torch.manual_seed(0)
    meter = TrafficMeter()
    group = everyone(recorder=meter)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    model[0].unused = torch.nn.Parameter(torch.ones(8))
    optim = OptimConfig(lr=1e-2, min_lr=0.0)
    home = Home(adders=group, shards=group)
    engine = ChunkEngine(
        dict(model.named_parameters()), lambda name: home, AdamW(optim),
        dtype=torch.float32, chunk_length=1, overlap=True, everyone=group,
    )  # fmt: skip
    engine.wait_in((layer, [f"{number}.weight"]) for number, layer in enumerate(model))
    counts = {}

    def count(when: str, operation: str) -> None:
        counts[when] = meter.counts.get((group.axes, operation), [0])[0]
        meter.clear()

    def backward() -> None:
        model(torch.full((1, 8), group.rank + 1.0)).sum().backward()

    meter.clear()
    engine.gradients.start()
    backward()
    count("a backward before the last", "reduce_scatter")
    with engine.gradients.last_backward(0):
        backward()
    count("within the last backward", "reduce_scatter")
    engine.gradients.reduce(0)
    count("behind it", "reduce_scatter")
    engine.gradients.finish()
    shared = {name: gradient.clone() for name, gradient in whole_of(engine, "grad").items()}
    meter.clear()
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    engine.update(1e-2)
    count("by the update", "all_gather")
    counts["awaited"] = [len(engine._arrivals._under_way)]
    for layer in model:
        layer(torch.ones(1, 8))
        counts["awaited"].append(len(engine._arrivals._under_way))
    moved = all(not torch.equal(before[n], p) for n, p in model.named_parameters() if "un" not in n)
    same = whole_of(engine, "master")
    engine.wait()
    equal = all(torch.equal(same[name], p) for name, p in model.named_parameters())
    twice = {n: 2 * 3 / (group.rank + 1) * p for n, p in gradients_alone(before, group).items()}
    right = all(torch.allclose(shared[name], twice[name], rtol=1e-5) for name in twice)
    return {**counts, "moved": moved, "equal": equal, "right": right, "unused": shared["0.unused"]}


def gradients_alone(weights: dict, group: Group) -> dict:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(4)))
    model.load_state_dict({name: w for name, w in weights.items() if "unused" not in name})
    model(torch.full((1, 8), group.rank + 1.0)).sum().backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_reductions_begin_within_backward_and_gathers_end_within_forward(ranks):
    for told in ranks(2, step_by_step):
        assert told["a backward before the last"] == 0
        # Of five chunks (the unused weight has its own) the last three: the one without a gradient
        # holds back the first. In the opposite order one chunk would be sent.
        assert told["within the last backward"] == 3
        assert told["behind it"] == 2
        assert told["by the update"] == 5
        assert told["awaited"] == [5, 4, 3, 2, 1]  # nobody reads the fifth
        assert told["moved"] and told["equal"] and told["right"]
        assert not told["unused"].any()


@pytest.mark.parametrize("layer", ["q_proj", "mlp_norm", "final_norm"])
def test_a_nan_is_named_before_it_leaves(ranks, tiny_data, tmp_path, layer):
    run = {"parallel__schedule": "1f1b", "parallel__pp": 1, "optim__sharding": "epso"}
    tree = tiny_tree(tiny_data, tmp_path, **{**FAST, **run})
    words = ranks(2, poison, tree, 1, "gradient", layer, 2, start_world=False)
    name, message = words[1].split("|")
    assert f"|{message}" in words[0]
    for part in ("rank 1", "step 2", f"the gradient of {name}"):
        assert part in message


def test_a_nan_is_named_under_zero_bubble(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, **{**FAST, **ZERO_BUBBLE})
    words = ranks(4, poison, tree, 1, "gradient", "mlp_norm", 2, start_world=False)
    name, message = words[1].split("|")
    assert "rank 1" in message and f"the gradient of {name}" in message


def test_bf16_gradients_follow_fp32_ones(ranks, tiny_data, tmp_path):
    runs = {"fp32": "fp32", "bf16": "bf16"}
    for name, dtype in runs.items():
        settings = {**FAST, "train__dtype": "bf16", "optim__grad_dtype": dtype}
        train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / name, **settings))
    a, b = (metrics_of(tmp_path / name) for name in runs)
    assert a != b
    for one, other in zip(a, b, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-3)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2)
