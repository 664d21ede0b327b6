"""A change of the parameters of an offloaded model, or of the model itself, has the same effect as
in a model without offloading, or is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import optimus
from optimus.errors import ConfigError
from tests.offloading import models
from tests.offloading.models import adamw, assert_equal, loss_of, tokens, train, weights
from tests.offloading.test_offload import hostile_memory, pair

__all__ = ["hostile_memory"]


WRITES = {
    "mul_": lambda p: p.mul_(0.5),
    "copy_": lambda p: p.data.copy_(torch.zeros(32)),
    "zero_": lambda p: p.detach().zero_(),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "imul": lambda p: p.__imul__(2),
    "view": lambda p: p.data.view(4, 8).add_(1),
    "out": lambda p: torch.add(torch.ones(32), 1, out=p.data),
    "foreach": lambda p: torch._foreach_mul_([p], 2.0),
    "data": lambda p: setattr(p, "data", torch.zeros(32)),
    "init": lambda p: nn.init.ones_(p),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_an_offloaded_parameter_is_refused(write):
    ours, *_ = pair("llama", 1.0)
    before = weights(ours)
    with torch.no_grad(), pytest.raises(ConfigError, match="model.norm.weight is offloaded"):
        WRITES[write](ours.model.norm.weight)
    assert_equal(weights(ours), before)


CHANGED_VALUES = {
    "parameter": lambda model, name: model.get_parameter(name).fill_(2.0),
    "data": lambda model, name: model.get_parameter(name).data.fill_(2.0),
    "state_dict": lambda model, name: model.state_dict()[name].fill_(2.0),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGED_VALUES)
def test_changed_values_of_a_parameter_on_the_device_are_trained(change, dtype):
    """For a bf16 parameter, the changed values are copied to its fp32 master. The masters of
    unchanged parameters keep their bits."""
    model = models.llama().to(dtype)
    optimizer = optimus.offload(model, lr=1e-3, host_share=0.0)
    with torch.enable_grad():
        train(model, optimizer, (1,))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    CHANGED_VALUES[change](model, "model.norm.weight")
    expected = {**before, "model.norm.weight": torch.full((32,), 2.0, dtype=dtype)}
    assert not torch.equal(before["model.norm.weight"], expected["model.norm.weight"])
    masters = [values.get("master") for values in state.values()]
    number = [name for name, _ in model.named_parameters()].index("model.norm.weight")
    masters[number] = None if dtype is torch.float32 else torch.full((32,), 2.0)
    optimizer.param_groups[0]["lr"] = 0.0
    with torch.enable_grad():
        train(model, optimizer, (1,))
    assert_equal(weights(model), expected)
    for master, values in zip(masters, optimizer.state_dict()["state"].values(), strict=True):
        assert master is None or torch.equal(master, values["master"])
    CHANGED_VALUES[change](model, "lm_head.weight")
    if dtype is torch.bfloat16:
        assert optimizer.state_dict()["state"][number + 1]["master"].eq(2.0).all()
    optimizer.close()
    assert type(model.lm_head.weight) is nn.Parameter


class Normed(nn.Module):
    def __init__(self, max_norm: float | None = 0.5) -> None:
        super().__init__()
        embedding = nn.Embedding(64, 32, max_norm=max_norm)
        self.blocks = nn.ModuleList([embedding, nn.Linear(32, 32)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](batch)).square().mean()


@pytest.mark.parametrize("change", ["module", "state_dict"])
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_change_inplace_has_an_effect_or_is_refused(change, share):
    """Code changes the memory of a parameter without a call of a torch function on the parameter.
    With states on the device, the change has the same effect as in torch. With states on the host,
    `step` raises an error."""
    max_norm = 0.5 if change == "module" and not share else None
    ours, theirs = Normed(max_norm), Normed(max_norm)
    theirs.load_state_dict(ours.state_dict())
    optimizer, reference = optimus.offload(ours, host_share=share), adamw(theirs)
    if change == "module":  # a user can also set `max_norm`, or call F.embedding
        ours.blocks[0].max_norm = theirs.blocks[0].max_norm = 0.5
    for model in (ours, theirs):
        if change == "state_dict":
            model.state_dict()["blocks.0.weight"].mul_(0.5)
        model(tokens(0)).backward()
    reference.step()
    if share:
        with pytest.raises(ConfigError, match="blocks.0.weight is offloaded and was changed"):
            optimizer.step()
        ours.load_state_dict(ours.state_dict())
    optimizer.step()
    if not share:
        assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_offloaded_embedding_with_max_norm_is_refused_before_any_change(kind):
    """An embedding with max_norm is refused if its chunk is on the host. With host_share = 0.5,
    only the second of two chunks is on the host, so an embedding in the first chunk is accepted."""
    layers = [kind(8, 32, max_norm=2.0), nn.Linear(32, 32)]
    optimus.offload(nn.Sequential(*layers), host_share=0.5)
    model = nn.Sequential(nn.Linear(32, 32), kind(8, 32, max_norm=2.0).requires_grad_(False))
    for share in (0.5, 1.0):
        with pytest.raises(ConfigError, match="1 has max_norm = 2.0 .* use max_norm=None, or"):
            optimus.offload(model, host_share=share)
    optimus.offload(model, host_share=0.0)  # the refusals have changed nothing


def test_views_of_an_offloaded_parameter_are_read_after_later_steps():
    """A view that was made before a step shows the values after the step, as in torch."""
    ours, optimizer, theirs, reference = pair("llama", 1.0, cache={"cache_chunks": 2})
    views = [m.model.layers[0].mlp.up_proj.weight.data[:3] for m in (ours, theirs)]
    train(ours, optimizer)
    train(theirs, reference)
    assert torch.equal(views[0] + 0, views[1] + 0)


CHANGES = {
    "half": lambda model: model.half(),
    "half before backward": lambda model: (model.half(), loss_of(model, 1).backward()),
    "resize": lambda model: (model.resize_token_embeddings(80), loss_of(model, 1).backward()),
    "swap": lambda model: (
        torch.utils.swap_tensors(model.model.norm.weight, nn.Parameter(torch.ones(32))),
        loss_of(model, 1).backward(),
    ),
    "freeze": lambda model: model.model.norm.requires_grad_(False),
    "add": lambda model: model.model.norm.add_module("more", nn.Linear(32, 32)),
    "extend": lambda model: setattr(model.model, "norm", nn.LayerNorm(32)),
    "replace": lambda model: setattr(model.model.norm.weight, "data", torch.ones(32)),
}


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused(change, share):
    ours, optimizer, *_ = pair("llama", share)
    loss_of(ours, 0).backward()
    with pytest.raises(ConfigError) as error:
        CHANGES[change](ours)
        optimizer.step()
    assert "\n" not in str(error.value)
    if change == "add":  # refused again: the check has not recorded the module
        with pytest.raises(ConfigError, match="parameter weight of Linear was added"):
            optimizer.step()


def test_conversions_that_change_nothing_are_possible():
    ours, optimizer, theirs, reference = pair("llama", 1.0)
    assert ours.to("cpu").float() is ours and ours.device.type == "cpu"
    assert ours.to(torch.float32).num_parameters() == theirs.num_parameters()
    assert train(ours, optimizer) == train(theirs, reference)
