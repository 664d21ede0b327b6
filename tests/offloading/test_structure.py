"""Models whose modules are shared, or call each other in unusual ways, train the bits of AdamW."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from optimus.offloading.segments import find_segments
from tests.offloading import models
from tests.offloading.models import assert_equal, weights
from tests.offloading.test_offload import SHARES, hostile_memory, pair

__all__ = ["hostile_memory"]


def assert_trains_the_bits_of_adamw(model: nn.Module, share: float) -> None:
    """Train a model, which is placed by `share`, and a copy of it."""
    ours, optimizer, theirs, reference = pair(model, share)
    for trained, of_model in ((ours, optimizer), (theirs, reference)):
        for step, number in itertools.product(range(3), range(2)):
            trained(models.tokens(2 * step + number, (4, 32)) / 64).square().mean().backward()
            if number:
                of_model.step()
                of_model.zero_grad()
    assert_equal(weights(ours), weights(theirs))


class Container(nn.Module):
    """A module without a forward, whose list and parameter enclosing modules use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.shift = nn.Parameter(torch.ones(32))


class Parent(nn.Module):
    """A module with parameters that it uses between the blocks of a container."""

    def __init__(self, container: nn.Module) -> None:
        super().__init__()
        self.container, self.scale = container, nn.Parameter(torch.ones(32))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in getattr(self.container, "blocks", self.container):
            x = block(x) * self.scale + getattr(self.container, "shift", 0.0)
        return self.out(x)


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "ModuleList": lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(2)),
    "Sequential": lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)),
    "without forward": Container,
}


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("share", SHARES)
def test_container_that_two_modules_share_equals_adamw_of_torch(kind, share):
    """Its blocks compute between uses of the parameters of both modules."""
    torch.manual_seed(0)
    shared = CONTAINERS[kind]()
    model = nn.Sequential(Parent(shared), Parent(shared), nn.Linear(32, 32))
    segments = find_segments(model)
    assert len({segment.module for segment in segments}) == len(segments)
    assert_trains_the_bits_of_adamw(model, share)
