"""Tests of sums of gradients over ranks, with all reduction strategies and all kinds of process
groups."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as distributed
from torch import nn

from optimus.chunks.buffers import FurtherUse
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.optimizer import AdamW
from optimus.chunks.residency import Residency
from optimus.chunks.segments import ModelSegment, register_module
from optimus.config import OptimConfig
from optimus.distributed.collectives import ALONE, Group, group_of
from tests.kit.layouts.whole import whole_of
from tests.kit.ranks.worlds import everyone

SHAPE = (5, 7)


class Reduction(NamedTuple):
    """Settings of the reduction of an engine on four ranks."""

    groups: str
    """A key of `make_groups`."""
    deterministic: bool
    overlap: bool = False
    frees_buffers: bool = False
    reduce_dtype: torch.dtype = torch.float32
    on_host: bool = False
    """True if the states are on the host, and copies take place when code waits for them."""


REDUCTIONS = [
    Reduction(groups, *settings)
    for groups in ("replicated", "sharded", "sharded and replicated", "partial")
    for settings in (
        (True,),
        (False,),
        (False, True),
        (True, False, True),
        (False, False, True),
        (False, False, False, torch.bfloat16),
        (True, False, True, torch.float32, True),
        (False, False, True, torch.float32, True),
    )
]


def pairs() -> tuple[Group, Group]:
    """Return two groups that contain this rank, with two of the four ranks each. The first group is
    {0, 1} or {2, 3}. The second group is {0, 2} or {1, 3}."""
    rank = distributed.get_rank()
    groups = {pair: distributed.new_group(pair) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
    near, across = (group for pair, group in groups.items() if rank in pair)
    return group_of(near, "ep"), group_of(across, "dp")


def make_groups() -> dict[str, ParamProcessGroups]:
    """Return process groups of a parameter that all four ranks have.

    In the first three cases, the states of the parameter are replicated, sharded over four ranks,
    or sharded over two. In "partial", gradients are added up over `reduce_group` and over
    `partial_group`, which have two ranks each.
    """
    world, (near, across) = everyone("dp"), pairs()
    return {
        "replicated": ParamProcessGroups(
            reduce_group=world, replica_group=world, is_first_copy=world.rank == 0
        ),
        "sharded": ParamProcessGroups(reduce_group=world, shard_group=world),
        "sharded and replicated": ParamProcessGroups(
            reduce_group=world, shard_group=across, replica_group=near, is_first_copy=near.rank == 0
        ),
        "partial": ParamProcessGroups(
            reduce_group=near,
            replica_group=near,
            partial_group=across,
            is_first_copy=world.rank == 0,
        ),
    }


class Layer(nn.Module):
    """A layer whose weight has the input as its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


def contribution(rank: int, microbatch: int) -> torch.Tensor:
    """Return a gradient that differs for each rank and microbatch. Sums of such gradients are exact
    in bf16."""
    return torch.arange(35.0).view(SHAPE) % 4 + 4 * rank + 16 * microbatch


def sums() -> list[tuple[torch.Tensor, float]]:
    """Return (whole gradient after two microbatches, norm of this gradient) for each of the tested
    reductions."""
    torch.set_num_threads(1)
    world, of_name, results = everyone(), make_groups(), []
    for reduction in REDUCTIONS:
        layer, groups = Layer(), of_name[reduction.groups]
        engine = ChunkEngine(
            {"weight": layer.weight},
            lambda name, groups=groups: groups,
            AdamW(OptimConfig()),
            dtype=torch.float32,
            chunk_length=1,
            deterministic=reduction.deterministic,
            reduce_dtype=reduction.reduce_dtype,
            everyone=world,
            overlap=reduction.overlap,
            residency=Residency(
                reduction.frees_buffers,
                host_share=float(reduction.on_host),
                poison=reduction.on_host,
                copies="late",
            ),
        )
        engine.attach([ModelSegment("layer", 0, ("weight",), partial(register_module, layer))], [])
        engine.start_step()
        for microbatch in (0, 1):
            x = contribution(world.rank, microbatch).requires_grad_()
            loss = layer(x)
            engine.gradients.before_backward(0)
            if microbatch == 1:
                with engine.gradients.last_backward(0):
                    loss.backward()
            else:
                loss.backward()
            if reduction.deterministic or reduction.frees_buffers or microbatch == 1:
                engine.gradients.reduce(0)
        engine.gradients.finish()
        results.append((whole_of(engine, "grad")["weight"].clone(), engine.grad_norm()))
    return results


def sum_of_contributions() -> torch.Tensor:
    return sum(contribution(*numbers) for numbers in itertools.product(range(4), (0, 1)))


def test_gradients_are_sums_over_ranks_and_microbatches_and_count_once_in_the_norm(ranks):
    """Run two microbatches on four ranks with each kind of reduction. All ranks have the sum of all
    contributions, and each element counts once in the norm."""
    expected = sum_of_contributions()
    for results in ranks(4, sums):
        for reduction, (gradient, norm) in zip(REDUCTIONS, results, strict=True):
            assert torch.equal(gradient, expected), reduction
            assert norm == pytest.approx(float(expected.norm()), rel=1e-6), reduction


def tied_sums() -> list[tuple[torch.Tensor, torch.Tensor, float]]:
    """Train tied embeddings on two stages of two ranks each, {0, 1} and {2, 3}.

    Returns:
        The gradient, the parameter after an update, and the norm of each case. The cases are
        with and without deterministic mode, each with sharded and with replicated states.
    """
    torch.set_num_threads(1)
    (stage, tied), world, results = pairs(), everyone(), []
    is_last = tied.rank == 1
    for deterministic, is_sharded in itertools.product((True, False), (True, False)):
        groups = ParamProcessGroups(
            reduce_group=stage,
            shard_group=stage if is_sharded else ALONE,
            replica_group=ALONE if is_sharded else stage,
            stage_group=tied,
            is_first_copy=is_sharded or stage.rank == 0,
        )
        embed = nn.Parameter(torch.ones(SHAPE))
        engine = ChunkEngine(
            {"embed": embed},
            lambda name, groups=groups: groups,
            AdamW(OptimConfig(lr=1e-2, weight_decay=0.0)),
            dtype=torch.float32,
            chunk_length=1,
            deterministic=deterministic,
            everyone=world,
        )
        head = embed.detach().requires_grad_() if is_last else None
        if head is not None:
            engine.add_use(FurtherUse("head", head, "embed"))
        engine.start_step()
        for microbatch in (0, 1):
            used = embed if head is None else head
            (used * contribution(world.rank, microbatch)).sum().backward()
            if deterministic or microbatch == 1:
                engine.gradients.reduce(0)
        engine.gradients.finish()
        gradient = whole_of(engine, "grad")["embed"].clone()
        norm = engine.grad_norm()
        engine.update(1e-2)
        engine.wait()
        results.append((gradient, embed.detach().clone(), norm))
    return results


def test_both_stages_of_a_tied_parameter_have_the_sum_of_its_gradients(ranks):
    """The first stage uses a parameter as embedding, the last as head. Both stages have the sum of
    the two gradients, and the norm counts this sum once. After the update, both stages have the
    same parameter."""
    expected = sum_of_contributions()
    of_ranks = ranks(4, tied_sums)
    for results in of_ranks:
        for (gradient, embed, norm), (_, first, _) in zip(results, of_ranks[0], strict=True):
            assert torch.equal(gradient, expected)
            assert torch.equal(embed, first) and not torch.equal(embed, torch.ones(SHAPE))
            assert math.isclose(norm, float(expected.norm()), rel_tol=1e-6)
