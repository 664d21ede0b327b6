"""Functions of torch on parameters and gradients of an offloaded model return the values of a plain
model, in random placements, or are refused."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn

import optimus
from optimus.errors import ConfigError
from tests.offloading import models
from tests.offloading.models import adamw, assert_equal, train, weights
from tests.offloading.test_offload import OPTIONS, SHARES, hostile_memory, smallest_cache

__all__ = ["hostile_memory"]

PLACEMENTS = [(share, seed) for seed in range(2) for share in SHARES]


def place(share: float, seed: int):
    """Return a model in a random placement, its optimizer, a copy of the model, and AdamW."""
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
    """Read parameters of all chunks by single calls of functions."""
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
    ours, optimizer, theirs, reference = place(share, seed)
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
    """A gradient of the second parameter only, and views of parameters of two chunks."""
    ours = models.llama()
    first, second = (layer.mlp.up_proj.weight for layer in ours.model.layers[:2])
    first.requires_grad_(False)
    optimus.offload(ours, host_share=1.0, cache_chunks=2)
    with pytest.raises(ConfigError, match="is used with gradients outside"):
        torch.cat([first, second])
    with pytest.raises(ConfigError, match="returns views of several offloaded parameters"):
        torch.no_grad()(torch.broadcast_tensors)(first, second)
