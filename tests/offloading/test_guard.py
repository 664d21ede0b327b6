"""With random placements, torch functions on parameters and gradients of an offloaded model return
the same values as for a model without offloading, or are refused."""

from __future__ import annotations

import copy
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import optimus
from optimus.chunks.memory import CAN_REFUSE_ACCESS
from optimus.errors import ConfigError
from tests.offloading import models
from tests.offloading.models import adamw, assert_equal, loss_of, train, weights
from tests.offloading.test_offload import OPTIONS, SHARES, hostile_memory, smallest_cache

__all__ = ["hostile_memory"]

PLACEMENTS = [(share, seed) for seed in range(2) for share in SHARES]


def models_of(share: float, seed: int):
    """Return an offloaded model, its optimizer, a copy of the model without offloading, and torch's
    AdamW for the copy. The share `share` of the chunks is on the host. `seed` determines the length
    of the chunks and the size of the cache."""
    draw = random.Random(seed)
    ours = models.llama()
    theirs = copy.deepcopy(ours)
    length = draw.choice([0, 500, 3000])
    cache = smallest_cache(ours, length) + draw.randrange(3)
    optimizer = optimus.offload(
        ours,
        host_share=share,
        chunk_length=length,
        **({"cache_chunks": cache} if share else {}),
        **OPTIONS,
    )
    return ours, optimizer, theirs, adamw(theirs, **OPTIONS)


def read(model: nn.Module) -> list[Tensor]:
    """Call functions that each read several parameters, from different chunks. Return the
    results."""
    parameters = list(model.parameters())
    layers = [layer.mlp.up_proj.weight for layer in model.model.layers]
    return [
        nn.utils.parameters_to_vector(parameters),
        torch.cat([p.view(-1) for p in reversed(parameters)]),
        torch.cat([p.data[..., ::2].flatten() for p in parameters]),
        torch.stack([layer.T for layer in layers]),
        torch.stack(torch._foreach_norm(parameters)),
        torch.stack(torch._foreach_mul(parameters[1:3], [p[0, 0] for p in layers[:2]])[0].unbind()),
        nn.utils.get_total_norm(parameters),
        torch.einsum("ij,kj->ik", layers[0], layers[3]),
        torch.lerp(layers[1], end=layers[2], weight=0.25),
        layers[3].expand_as(layers[0]) + 0,
    ]


@pytest.mark.parametrize(("share", "seed"), PLACEMENTS)
def test_a_function_reads_parameters_of_more_chunks_than_the_cache_has(share, seed):
    ours, optimizer, theirs, reference = models_of(share, seed)
    for step in range(2):
        with torch.no_grad():
            for value, expected in zip(read(ours), read(theirs), strict=True):
                assert torch.equal(value, expected)
        with torch.inference_mode():
            assert torch.equal(read(ours)[0], read(theirs)[0])
        args = ((1,), None, lambda _: None, step)
        assert train(ours, optimizer, *args) == train(theirs, reference, *args)
    assert_equal(weights(ours), weights(theirs))


def test_functions_of_several_parameters_with_gradients_or_views_are_refused():
    """Two cases are refused: a function of two parameters that needs a gradient for only the
    second, and a function that returns views of parameters in two chunks."""
    ours = models.llama()
    first, second = (layer.mlp.up_proj.weight for layer in ours.model.layers[:2])
    first.requires_grad_(False)
    optimus.offload(ours, host_share=1.0, cache_chunks=2)
    with pytest.raises(ConfigError, match="is used with gradients outside"):
        torch.cat([first, second])
    with pytest.raises(ConfigError, match="returns views of several offloaded parameters"):
        torch.no_grad()(torch.broadcast_tensors)(first, second)


def update_averages(averages: dict[str, dict[str, Tensor]], model: nn.Module) -> None:
    """Update moving averages of the weights with functions that change the average in place and
    only read the weight. Keys of `averages`: name of the function, name of the parameter."""
    if not averages:
        for kind in ("lerp", "copy", "add", "index", "plus", "out", "foreach"):
            averages[kind] = {n: p.detach().clone() for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        averages["lerp"][name].lerp_(parameter, 0.1)
        averages["copy"][name].copy_(parameter)
        averages["add"][name].mul_(0.9).add_(parameter.data, alpha=0.1)
        averages["index"][name][:] = parameter.detach()
        averages["plus"][name] += parameter
        torch.add(averages["out"][name], parameter, out=averages["out"][name])
    torch._foreach_lerp_(list(averages["foreach"].values()), list(model.parameters()), 0.1)


@pytest.mark.parametrize(("share", "seed"), PLACEMENTS)
def test_functions_that_update_averages_read_the_weights(share, seed):
    ours, optimizer, theirs, reference = models_of(share, seed)
    averaged = []
    for model, of_model in ((ours, optimizer), (theirs, reference)):
        averages: dict[str, dict[str, Tensor]] = {}
        for step in range(2):
            with torch.no_grad():
                update_averages(averages, model)
            train(model, of_model, (1,), first=step)
        averaged.append(averages)
    for kind, values in averaged[1].items():
        assert_equal(averaged[0][kind], values)
    assert_equal(weights(ours), weights(theirs))


HIDDEN_WRITES = {
    "relu": lambda first, second: nn.functional.relu(first, inplace=True),
    "second": lambda first, second: torch._foreach_copy_([first.clone(), second], [first] * 2),
}


@pytest.mark.parametrize("write", HIDDEN_WRITES)
def test_a_write_that_the_name_of_the_function_does_not_show_is_refused(write):
    """A refused write does not change the values of the parameter."""
    ours, optimizer, theirs, reference = models_of(1.0, 0)
    layers = [layer.mlp.up_proj.weight for layer in ours.model.layers[:2]]
    with torch.no_grad(), pytest.raises(ConfigError, match="is offloaded and cannot be changed"):
        HIDDEN_WRITES[write](*layers)
    with torch.no_grad():
        assert torch.equal(layers[0] + 0, theirs.model.layers[0].mlp.up_proj.weight)
    assert train(ours, optimizer, (1,)) == train(theirs, reference, (1,))


def change_gradients(model: nn.Module) -> list[Tensor]:
    """Change gradients by in-place operators and functions, and read the gradients together with
    parameters. Return the results."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad *= 0.5
            parameter.grad += torch.full_like(parameter, 1e-3)
            parameter.grad -= 1e-3
            parameter.grad.add_(parameter, alpha=0.1)
        gradient = model.model.norm.weight.grad
        gradient[:4] /= 2
        assert gradient.clamp_(max=1.0) is gradient
        return [
            torch.stack([(p * p.grad).sum() for p in model.parameters()]),
            torch.cat([p.grad.add(p, alpha=2.0).flatten() for p in model.parameters()]),
            model.lm_head.weight.double().to(model.lm_head.weight.grad),
        ]


@pytest.mark.parametrize(("share", "seed"), PLACEMENTS)
def test_gradients_are_changed_by_operators(share, seed):
    ours, optimizer, theirs, reference = models_of(share, seed)
    for step in range(2):
        values = []
        for model, of_model in ((ours, optimizer), (theirs, reference)):
            loss_of(model, step).backward()
            values.append(change_gradients(model))
            loss_of(model, step + 5).backward()
            of_model.step()
            of_model.zero_grad()
        assert all(torch.equal(ours_, theirs_) for ours_, theirs_ in zip(*values, strict=True))
    assert_equal(weights(ours), weights(theirs))


def test_functions_of_a_parameter_and_its_gradient_that_lose_values_are_refused():
    ours, *_ = models_of(1.0, 0)
    loss_of(ours, 0).backward()
    weight = ours.lm_head.weight
    with pytest.raises(ConfigError, match="lm_head.weight is offloaded and cannot be changed by"):
        torch.no_grad()(weight.sub_)(weight.grad, alpha=0.1)
    with pytest.raises(ConfigError, match="lm_head.weight is used with gradients outside"):
        weight * weight.grad


@pytest.mark.parametrize("hostile_memory", ["freed"], indirect=True)
@pytest.mark.parametrize(("share", "seed"), PLACEMENTS)
def test_arrays_of_parameters_and_gradients_have_their_values(share, seed):
    """The arrays have the right values, also in hooks during backward, when gradients are on the
    device."""
    ours, optimizer, theirs, reference = models_of(share, seed)
    results = []
    for model, of_model in ((ours, optimizer), (theirs, reference)):
        values: list[np.ndarray] = []

        def append(parameter: Tensor, values=values) -> None:
            values.append(parameter.grad.cpu().numpy().copy())

        handles = [p.register_post_accumulate_grad_hook(append) for p in model.parameters()]
        for step in range(2):
            loss_of(model, step).backward()
            for parameter in model.parameters():
                values.append(parameter.detach().cpu().numpy().copy())
                values.append(np.asarray(parameter.data[..., ::2]).copy())
                values.append(parameter.grad.numpy().copy())
            of_model.step()
            of_model.zero_grad()
        for handle in handles:
            handle.remove()
        results.append(values)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
    assert_equal(weights(ours), weights(theirs))


class Lists(list):
    """A list with an attribute. The constructor has other arguments than the constructor of
    `list`."""

    def __init__(self, scale: float, *elements: Tensor) -> None:
        super().__init__(elements)
        self.scale = scale


class ReadOnlyLists(Lists):
    """A list whose elements cannot be replaced."""

    def __setitem__(self, *_: Any) -> None:
        raise TypeError("the list is read-only")


class Tuples(tuple):
    def __new__(cls, scale: float, *elements: Tensor) -> Tuples:
        created = super().__new__(cls, elements)
        created.scale = scale
        return created


class Pair(NamedTuple):
    first: Tensor
    scale: float


class PairWithDict(Pair):
    """A named tuple that can have further attributes."""


class Returns(nn.Module):
    """A module that returns an object of the class `kind` with a view of its parameter and, for
    torch.return_types.max, also with the parameter."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.weight = kind, nn.Parameter(torch.randn(4, 32))

    def forward(self) -> Any:
        if self.kind is torch.return_types.max:
            return self.kind((self.weight[:2], self.weight))
        if not issubclass(self.kind, Pair):
            return self.kind(0.5, self.weight[:2])
        result = self.kind(self.weight[:2], 0.5)
        if self.kind is PairWithDict:
            result.scale_of_dict = 0.5
        return result


class UniqueLists(Lists):
    """A list that cannot be copied."""

    def __copy__(self) -> UniqueLists:
        raise TypeError("the list is unique")


def test_returned_collection_that_cannot_be_copied_is_refused():
    model = nn.Sequential(Returns(UniqueLists))
    optimus.offload(model, host_share=1.0)
    with pytest.raises(ConfigError, match="UniqueLists cannot be copied .*; use a list") as refused:
        model[0]()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "kind", [Lists, ReadOnlyLists, Tuples, Pair, PairWithDict, torch.return_types.max]
)
def test_returned_collections_keep_their_class_and_attributes(kind):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.positions = Returns(kind)
            self.blocks = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            result = self.positions()
            assert type(result) is kind
            scale = getattr(result, "scale", 0.5) * getattr(result, "scale_of_dict", 1.0)
            assert scale == (0.25 if kind is PairWithDict else 0.5)
            return self.blocks(x + scale * result[0])

    ours = Model()
    theirs = copy.deepcopy(ours)
    optimizer = optimus.offload(ours, host_share=1.0, **OPTIONS)
    reference = adamw(theirs, **OPTIONS)
    for model, of_model in ((ours, optimizer), (theirs, reference)):
        for _ in range(2):
            model(torch.ones(2, 32)).square().mean().backward()
            of_model.step()
            of_model.zero_grad()
    assert_equal(weights(ours), weights(theirs))


def test_exports_and_views_of_freed_memory_are_refused():
    """A NumPy array of an offloaded parameter is a copy. Writes to the array would not change the
    parameter, so the array is read-only. Exports by DLPack, and reads of a gradient's view after
    the gradient is freed on the device, are refused."""
    ours, *_ = models_of(1.0, 0)
    weight, views = ours.lm_head.weight, []
    array = weight.detach().cpu().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array *= 2
    with pytest.raises(ConfigError, match="cannot be exported by __dlpack__"):
        np.from_dlpack(weight.detach())
    weight.register_post_accumulate_grad_hook(lambda p: views.append(p.grad[0].mul_(2.0)))
    loss_of(ours, 0).backward()
    with pytest.raises(
        ConfigError, match=r"the gradient of parameter lm_head\.weight, made during"
    ):
        views[0].sum()


class KeepsView(nn.Linear):
    """A linear layer that keeps a view of its weight, and does not return the view."""

    view: Tensor

    def forward(self, values: Tensor) -> Tensor:
        self.view = self.weight.detach().t()
        return super().forward(values)


def assigned(weight: Tensor) -> Tensor:
    other = torch.zeros_like(weight, requires_grad=False)
    other.data = weight
    return other


@pytest.mark.skipif(
    not CAN_REFUSE_ACCESS, reason="only torch's builds for CUDA refuse accesses to freed memory"
)
@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("hostile_memory", ["freed"], indirect=True)
@pytest.mark.parametrize(
    "read",
    [
        lambda module: torch.tensor(module.weight),
        lambda module: assigned(module.weight).sum(),
        lambda module: module.view.sum(),
        lambda module: module.view.copy_(torch.zeros(8, 8)),
    ],
    ids=["tensor", "data", "view", "write"],
)
def test_accesses_that_python_does_not_see_are_refused(read):
    """An access to freed memory that calls no Python function of the tensor raises an error. After
    the error, training continues and gives the bits of torch."""
    models = [nn.Sequential(*(KeepsView(8, 8) for _ in range(3))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours = optimus.offload(models[0], host_share=1.0, **OPTIONS)
    optimizers = [ours, adamw(models[1], **OPTIONS)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            with pytest.raises(RuntimeError, match="offloaded parameter, or a view of it, and has"):
                read(models[0][0])
    assert_equal(weights(models[0]), weights(models[1]))


@pytest.mark.parametrize("share", SHARES)
def test_gradients_of_chosen_parameters_are_those_of_torch(share):
    """Compute gradients of only two parameters, which are in different chunks: by
    `backward(inputs=...)` and by `torch.autograd.grad`."""
    names = ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    ours, ours_optimizer, theirs, theirs_optimizer = models_of(share, 0)
    for model, optimizer in ((ours, ours_optimizer), (theirs, theirs_optimizer)):
        for _ in range(2):
            chosen = [dict(model.named_parameters())[name] for name in names]
            loss_of(model, 1).backward(inputs=chosen)
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(weights(ours), weights(theirs))
    grads = []
    for model in (ours, theirs):
        chosen = [dict(model.named_parameters())[name] for name in names]
        grads.append(torch.autograd.grad(loss_of(model, 2), chosen))
    for grad, expected in zip(*grads, strict=True):
        assert torch.equal(grad, expected) and grad.abs().sum() > 0


@pytest.mark.parametrize("hostile_memory", ["freed"], indirect=True)
def test_functions_that_read_no_values_accept_freed_parameters():
    model, *_ = models_of(1.0, 0)
    parameter = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    list(model.parameters())[-1].detach().clone()  # now the cache contains another chunk
    assert torch.zeros_like(parameter, requires_grad=True).shape == parameter.shape
    assert parameter.new_ones(2, requires_grad=True).tolist() == [1.0, 1.0]
    freed = 0
    for name, weight in model.named_parameters():
        try:
            assert weight.data_ptr()
        except ConfigError as error:
            assert f"parameter {name} is offloaded, and its memory is freed" in str(error)
            freed += 1
    assert freed
