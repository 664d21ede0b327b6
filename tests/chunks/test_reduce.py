"""Sums of gradients over ranks, in every way in which the engine takes them."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.optimizer import AdamW
from optimus.chunks.residency import Residency
from optimus.chunks.states import Home
from optimus.chunks.tied import Use
from optimus.chunks.units import Unit, watch_module
from optimus.config import OptimConfig
from optimus.distributed.collectives import ALONE, Group, group_of
from tests.helpers.whole import whole_of
from tests.helpers.worlds import everyone

SHAPE = (5, 7)


class Way(NamedTuple):
    """How an engine on four ranks adds up."""

    home: str
    """A key of `homes`."""
    deterministic: bool
    overlap: bool = False
    in_pieces: bool = False
    reduce_dtype: torch.dtype = torch.float32


WAYS = [
    Way(home, *switches)
    for home in ("whole", "divided", "divided twice", "partial")
    for switches in (
        (True,),
        (False,),
        (False, True),
        (True, False, True),
        (False, False, True),
        (False, False, False, torch.bfloat16),
    )
]


def pairs() -> tuple[Group, Group]:
    """Of four ranks, this one's neighbour group ({0, 1} or {2, 3}) and the group across."""
    rank = distributed.get_rank()
    groups = {one: distributed.new_group(one) for one in ((0, 1), (2, 3), (0, 2), (1, 3))}
    near, across = (group for one, group in groups.items() if rank in one)
    return group_of(near, "ep"), group_of(across, "dp")


def homes() -> dict[str, Home]:
    """Groups of a parameter that all four ranks hold: its states whole, divided by four ranks or by
    two, or gradients that are parts of a sum besides."""
    world, (near, across) = everyone("dp"), pairs()
    return {
        "whole": Home(adders=world, spread=world, first_copy=world.rank == 0),
        "divided": Home(adders=world, shards=world),
        "divided twice": Home(
            adders=world, shards=across, spread=near, first_copy=near.rank == 0
        ),
        "partial": Home(
            adders=near, spread=near, partial_over=across, first_copy=world.rank == 0
        ),
    }  # fmt: skip


class Layer(nn.Module):
    """A parameter whose gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def contribution(rank: int, microbatch: int) -> torch.Tensor:
    """Numbers whose sums are exact in bf16 too, and other ones on each rank and microbatch."""
    return torch.arange(35.0).view(SHAPE) % 4 + 4 * rank + 16 * microbatch


def sums() -> list[tuple[torch.Tensor, float]]:
    """In each way: the whole gradient after two microbatches, and its norm."""
    torch.set_num_threads(1)
    world, of_name, found = everyone(), homes(), []
    for way in WAYS:
        layer, home = Layer(), of_name[way.home]
        engine = ChunkEngine(
            {"weight": layer.weight},
            lambda name, home=home: home,
            AdamW(OptimConfig()),
            dtype=torch.float32,
            chunk_length=1,
            deterministic=way.deterministic,
            reduce_dtype=way.reduce_dtype,
            everyone=world,
            overlap=way.overlap,
            residency=Residency(way.in_pieces, False, 0, False),
        )
        engine.follow([Unit("layer", 0, ("weight",), partial(watch_module, layer))], [])
        engine.gradients.start()
        for microbatch in (0, 1):
            x = contribution(world.rank, microbatch).requires_grad_()
            loss = layer(x)
            engine.gradients.before_backward(0)
            if microbatch == 1:
                with engine.gradients.last_backward(0):
                    loss.backward()
            else:
                loss.backward()
            if way.deterministic or way.in_pieces or microbatch == 1:
                engine.gradients.reduce(0)
        engine.gradients.finish()
        found.append((whole_of(engine, "grad")["weight"].clone(), engine.grad_norm()))
    return found


def test_gradients_are_sums_over_ranks_and_microbatches_and_count_once_in_the_norm(ranks):
    every = itertools.product(range(4), (0, 1))
    expected = sum(contribution(rank, microbatch) for rank, microbatch in every)
    for told in ranks(4, sums):
        for way, (gradient, norm) in zip(WAYS, told, strict=True):
            assert torch.equal(gradient, expected), way
            assert norm == pytest.approx(float(expected.norm()), rel=1e-6), way


def tied_sums() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Tied embeddings on two stages of two ranks each, the stages {0, 1} and {2, 3}: whole and
    divided, ordered and not. The gradient and the parameter after an update, and the norm."""
    torch.set_num_threads(1)
    (stage, ends), world, found = pairs(), everyone(), []
    is_last = ends.rank == 1
    for deterministic, divided in itertools.product((True, False), (True, False)):
        home = Home(
            adders=stage,
            shards=stage if divided else ALONE,
            spread=ALONE if divided else stage,
            far_copy=is_last,
            first_copy=divided or stage.rank == 0,
        )
        embed = nn.Parameter(torch.ones(SHAPE))
        engine = ChunkEngine(
            {"embed": embed},
            lambda name, home=home: home,
            AdamW(OptimConfig(lr=1e-2, weight_decay=0.0)),
            dtype=torch.float32,
            chunk_length=1,
            deterministic=deterministic,
            everyone=world,
        )
        head = embed.detach().requires_grad_() if is_last else None
        if head is not None:
            engine.add_use(Use("head", head, "embed"))
        engine.gradients.start()
        for microbatch in (0, 1):
            used = embed if head is None else head
            (used * contribution(world.rank, microbatch)).sum().backward()
            if deterministic or microbatch == 1:
                engine.gradients.reduce(0)
        engine.gradients.finish({"embed": ends})
        gradient = whole_of(engine, "grad")["embed"].clone()
        norm = engine.grad_norm()
        engine.update(1e-2)
        engine.wait()
        found.append((gradient, embed.detach().clone(), norm))
    return found


def test_both_ends_of_tied_parameters_take_the_sum_of_their_gradients(ranks):
    every = itertools.product(range(4), (0, 1))
    expected = sum(contribution(rank, microbatch) for rank, microbatch in every)
    results = ranks(4, tied_sums)
    for told in results:
        for (gradient, embed, norm), (_, first, _) in zip(told, results[0], strict=True):
            assert torch.equal(gradient, expected)
            assert torch.equal(embed, first) and not torch.equal(embed, torch.ones(SHAPE))
            assert math.isclose(norm, float(expected.norm()), rel_tol=1e-6)
