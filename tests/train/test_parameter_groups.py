"""Weight decay and learning rates by parameter name, and frozen parameters."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch
from safetensors.torch import load_file

from optimus.checkpoint import store
from optimus.config import make_config
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from tests.kit.layouts.whole import whole_of
from tests.kit.ranks.pool import RanksFailed
from tests.kit.runs.results import assert_same_run, weights_of
from tests.kit.runs.tiny import CONTEXT, tiny_tree
from tests.kit.runs.training import make_microbatch, make_rank_model, make_updater, train_on

GROUPS = [
    {"pattern": "*norm*", "weight_decay": 0.0},
    {"pattern": "*experts*", "lr_scale": 0.25, "weight_decay": 0.5},
]
FROZEN = ["embed.*", "blocks.0.attention.*_proj.weight"]
RUN = {"optim__groups": GROUPS, "optim__frozen": FROZEN, "optim__chunk_length": 2000}
FEW = {"train__max_steps": 5, "train__global_batch_tokens": 4 * CONTEXT}


def is_frozen(name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in FROZEN)


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
def test_updates_equal_those_of_torch_with_the_same_groups(clip_norm):
    """Two updates with parameter groups equal two updates of torch.optim.AdamW with the same
    groups. Clipping uses the norm over the trained parameters of all groups."""
    run = {**RUN, "optim__eps": 1e-3, "train__global_batch_tokens": 32}
    tree = tiny_tree("d", "r", **run, optim__clip_norm=clip_norm)
    config, _, _, _, shard, _, updater = make_updater(tree)
    tokens = make_microbatch(0).tokens
    plain = Transformer(config.model)
    initialise_(plain, 0)
    optim = config.optim
    by_name = dict(plain.named_parameters())
    decay = {name: 0.0 if "norm" in name else 0.5 if "experts" in name else 0.1 for name in by_name}
    rate = {name: 0.25 if "experts" in name else 1.0 for name in by_name}
    adamw = torch.optim.AdamW(
        [
            {"params": [p], "weight_decay": decay[name], "name": name}
            for name, p in by_name.items()
            if not is_frozen(name)
        ],
        betas=optim.betas,
        eps=optim.eps,
    )
    for step in (1, 2):
        norm = updater.run(step, [make_microbatch(0)]).grad_norm
        adamw.zero_grad()
        terms = plain.losses(tokens)
        (terms.ce_sum / 31 + 0.01 * terms.aux + 0.001 * terms.z).backward()
        trained = [group["params"][0] for group in adamw.param_groups]
        limit = clip_norm or 1e9
        torch_norm = float(torch.nn.utils.clip_grad_norm_(trained, limit))
        assert norm == pytest.approx(torch_norm, rel=1e-5) and norm > 0.2
        for group in adamw.param_groups:
            group["lr"] = optim.lr * step / optim.warmup_steps * rate[group["name"]]
        adamw.step()
    for name, parameter in shard.model.named_parameters():
        torch.testing.assert_close(parameter, by_name[name], rtol=0, atol=2e-6, msg=name)
    assert all((p.grad is None) is is_frozen(name) for name, p in shard.model.named_parameters())


def test_chunk_has_parameters_of_equal_settings():
    shard = make_rank_model(tiny_tree("d", "r", **RUN)).model
    states = shard.make_states()
    for chunk_state in states.chunks:
        names = [slot.name for slot in chunk_state.chunk.slots]
        assert len({("norm" in name, "experts" in name) for name in names}) == 1
        assert not any(map(is_frozen, names))
    frozen = [slot.name for c in states.frozen.chunks for slot in c.chunk.slots]
    assert frozen and all(map(is_frozen, frozen))
    names = {name for name, _ in shard.model.named_parameters()}
    assert set(whole_of(states, "exp_avg")) == {name for name in names if not is_frozen(name)}


def test_layouts_train_to_the_same_bits(ranks, tiny_data, tmp_path):
    model = {"model__tie_embeddings": True, "train__dtype": "bf16"}
    single = tmp_path / "single"
    train_on(ranks, 1, tiny_tree(tiny_data, single, **RUN, **FEW, **model))
    for size, layout in (
        (2, {"optim__sharding": "so"}),
        (2, {"parallel__pp": 2, "parallel__schedule": "zb-h1"}),
        (4, {"parallel__pp": 2, "optim__sharding": "epso"}),
        (2, {"optim__resident": "parameters"}),
        (4, {"parallel__pp": 2, "optim__sharding": "epso", "optim__resident": "cache"}),
        (1, {"offload__mode": "manual", "offload__host_share": 0.6}),
        (2, {"offload__mode": "manual", "offload__host_share": 1, "optim__sharding": "so"}),
    ):
        other = tmp_path / "-".join([str(size), *map(str, layout.values())])
        train_on(ranks, size, tiny_tree(tiny_data, other, **RUN, **FEW, **model, **layout))
        assert_same_run(single, other)


def test_run_with_frozen_parameters_resumes_on_other_ranks(ranks, tiny_data, tmp_path):
    run = RUN | {"train__max_steps": 6, "train__dtype": "bf16"}
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "one", **run))
    for size, sharding, stop in ((2, "epso", 3), (1, "none", 0)):
        more = {"optim__sharding": sharding, "train__stop_at_step": stop}
        train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "two", **run, **more))
    assert_same_run(tmp_path / "one", tmp_path / "two")
    initial = Transformer(make_config(tiny_tree("d", "r")).model)
    initialise_(initial, 0)
    tensors = weights_of(tmp_path / "two")
    for name, parameter in initial.named_parameters():
        assert torch.equal(tensors[f"master.{name}"], parameter.bfloat16().float()) is is_frozen(
            name
        ) or (
            "norm" in name  # weights near 1: an update can be too small for bf16
        )
        assert (f"exp_avg.{name}" in tensors) is not is_frozen(name)


@pytest.mark.parametrize("recomputed", [[], ["block"], ["norm", "moe"]], ids=str)
def test_first_stage_may_be_frozen_completely(ranks, tiny_data, tmp_path, recomputed):
    run = FEW | {"optim__frozen": ["embed.*", "blocks.0.*"], "checkpoint__model_interval": 5}
    run |= {"recompute__modules": recomputed}
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "one", **run))
    pipeline = {"parallel__pp": 2, "parallel__stage_layers": [1, 1]}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "two", **run, **pipeline))
    assert_same_run(tmp_path / "one", tmp_path / "two")
    saved = load_file(store.model_path(tmp_path / "two", 5) / "model.safetensors")
    assert "model.embed_tokens.weight" in saved


def test_frozen_experts_are_timed_and_not_changed(ranks, tiny_data, tmp_path):
    run = {"train__max_steps": 1, "train__deterministic": False, "optim__warmup_steps": 0}
    run |= {"optim__frozen": ["*experts*"]}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "run", **run, parallel__ep=2))
    initial = Transformer(make_config(tiny_tree("d", "r")).model)
    initialise_(initial, 0)
    tensors = weights_of(tmp_path / "run")
    for name, parameter in initial.named_parameters():
        changed = not torch.equal(tensors[f"master.{name}"], parameter)
        assert changed is ("experts" not in name), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optim__frozen": ["embed.*"]}, r"optim.frozen = .*must keep the"),
        ({"optim__groups": []}, r"optim.groups = \[\].*must keep the.*allow_change"),
    ],
)
def test_change_of_groups_is_refused_on_resume(ranks, tiny_data, tmp_path, change, message):
    run = {"train__max_steps": 2, "optim__warmup_steps": 0}
    run |= {"optim__groups": [{"pattern": "*norm*", "weight_decay": 0.0}]}
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "run", **run, train__stop_at_step=1))
    with pytest.raises(RanksFailed, match=message):
        train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "run", **(run | change)))


def test_pattern_without_a_match_is_refused_at_the_start(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run", optim__frozen=["*nrom*"])
    with pytest.raises(RanksFailed, match=r"optim.frozen names '\*nrom\*', which matches no"):
        train_on(ranks, 1, tree)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
