"""Timing of the dispatchers of expert parallelism, on all ranks at the same time.

Dims: T tokens of a microbatch, D hidden, K experts a token.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from optimus import platform
from optimus.distributed.collectives import Group, all_reduce_max, barrier
from optimus.model.moe import FastSparseMoE
from optimus.parallel.expert import DISPATCHERS, DispatchedExperts

_ROUNDS = 5
_WARMUP = 2


def time_dispatchers(
    model: nn.Module,
    shape: tuple[int, int],
    top_k: int,
    dtype: torch.dtype,
    everyone: Group,
    seed: int,
) -> dict[str, float]:
    """Time one layer's experts, forward and backward, with each dispatcher.

    In each round every dispatcher runs once, and the slowest rank's time counts. Gradients of
    parameters and the dispatcher in use do not change. All ranks of `everyone` must call this.

    Args:
        model: this rank's model; a pipeline stage without experts takes part without timing.
        shape: [T, D], of a random input x; each of its tokens goes to random experts.
        top_k: K.
        dtype: of activations.
        everyone: all ranks.
        seed: of x and of the choice of experts; the ranks of a tp group must pass the same seed.

    Returns:
        Median time of a round in seconds, by the name of the dispatcher; the same on every rank.
    """
    device = next(model.parameters()).device
    layers = [module for module in model.modules() if isinstance(module, FastSparseMoE)][:1]
    seconds = torch.zeros(_WARMUP + _ROUNDS, len(DISPATCHERS), dtype=torch.float64)
    for turn in range(_WARMUP + _ROUNDS):
        for column, name in enumerate(DISPATCHERS):
            barrier(everyone)
            for layer in layers:
                seconds[turn, column] = _time_pass(layer, name, shape, top_k, dtype, seed + turn)
    slowest = seconds.to(device)
    all_reduce_max(slowest, everyone)
    columns = slowest[_WARMUP:].t().tolist()
    return {
        name: statistics.median(column) for name, column in zip(DISPATCHERS, columns, strict=True)
    }


def _time_pass(
    layer: FastSparseMoE,
    dispatcher: str,
    shape: tuple[int, int],
    top_k: int,
    dtype: torch.dtype,
    seed: int,
) -> float:
    """Return the seconds of one forward and backward pass, including the all-reduces over tp."""
    experts = layer.experts
    assert isinstance(experts, DispatchedExperts)
    device = experts.down.device
    generator = torch.Generator().manual_seed(seed)
    tokens, _ = shape
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    chance = torch.rand(tokens, experts.num_experts, generator=generator)
    chosen = chance.topk(top_k, dim=1).indices.to(device)
    weights = torch.full_like(chosen, 1 / top_k, dtype=dtype).requires_grad_()
    grad = torch.ones_like(x)
    used = experts.dispatcher
    experts.use_dispatcher(dispatcher)
    platform.synchronize(device)
    start = time.perf_counter()
    out = layer.run_experts(x, weights, chosen)
    trained = [p for p in experts.parameters() if p.requires_grad]
    torch.autograd.grad([out], [x, weights, *trained], [grad])
    platform.synchronize(device)
    end = time.perf_counter()
    experts.use_dispatcher(used)
    return end - start
