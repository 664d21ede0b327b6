"""Which dispatcher of expert parallelism is faster here: measured, all ranks at once.

Dims: T tokens of a microbatch, D hidden, K experts a token.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from optimus import platform
from optimus.distributed.collectives import Group, all_reduce_max, barrier
from optimus.parallel.expert import DISPATCHES, ExpertParallel, dispatchers

_ROUNDS = 5
_WARMUP = 2


def measure_dispatches(
    model: nn.Module,
    shape: tuple[int, int],
    top_k: int,
    dtype: torch.dtype,
    everyone: Group,
    seed: int,
) -> dict[str, float]:
    """Seconds of one layer's experts, forward and backward, by dispatcher; alike on every rank.

    x [T, D] of `shape` is random and each token goes to `top_k` random experts. The dispatchers
    take turns; each round counts with its slowest rank, and the median of the rounds is returned. A
    collective of `everyone`; ranks of one tp group give the same `seed`. Parameters' gradients are
    not added to, and the dispatchers are left as they were.
    """
    device = next(model.parameters()).device
    wired = dispatchers(model)[:1]  # a pipeline stage may have none
    taken = torch.zeros(_WARMUP + _ROUNDS, len(DISPATCHES), dtype=torch.float64)
    before = [one.dispatch for one in wired]
    for turn in range(_WARMUP + _ROUNDS):
        for place, dispatch in enumerate(DISPATCHES):
            barrier(everyone)
            for one in wired:
                one.dispatch = dispatch
                taken[turn, place] = _pass(one, shape, top_k, dtype, seed + turn)
    for one, dispatch in zip(wired, before, strict=True):
        one.dispatch = dispatch
    slowest = taken.to(device)
    all_reduce_max(slowest, everyone)
    columns = slowest[_WARMUP:].t().tolist()
    return {
        name: statistics.median(column) for name, column in zip(DISPATCHES, columns, strict=True)
    }


def _pass(
    one: ExpertParallel, shape: tuple[int, int], top_k: int, dtype: torch.dtype, seed: int
) -> float:
    """Seconds of a forward and a backward pass, through the module and so through the sums over tp
    as well."""
    device = next(one.experts.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens, _ = shape
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    chance = torch.rand(tokens, one.num_experts, generator=generator)
    chosen = chance.topk(top_k, dim=1).indices.to(device)
    weights = torch.full_like(chosen, 1 / top_k, dtype=dtype).requires_grad_()
    grad = torch.ones_like(x)
    platform.synchronize(device)
    start = time.perf_counter()
    out = one.experts(x, weights, chosen)
    learning = [p for p in one.experts.parameters() if p.requires_grad]
    torch.autograd.grad([out], [x, weights, *learning], [grad])
    platform.synchronize(device)
    return time.perf_counter() - start
