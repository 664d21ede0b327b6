"""Timing of the token dispatchers of expert parallelism.

Dims: T tokens of a microbatch, D hidden, K experts per token.
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
    """Measure the time of the first MoE layer's experts with each dispatcher, for one forward and
    backward pass.

    All ranks must call this function. The function does not change `model`.

    Args:
        model: this rank's model, with or without MoE layers.
        shape: the shape [T, D] of a random input: T tokens of hidden size D.
        top_k: K, the number of experts per token.
        dtype: the dtype of activations.
        everyone: the group of all ranks.
        seed: the seed of the input and the routing. All ranks of a tp group pass the same seed.

    Returns:
        A dict from dispatcher name to the dispatcher's time in seconds. Each dispatcher is timed
        several times. The time of one repetition is the time of the slowest rank, and the dict
        contains the median over the repetitions. All ranks return the same dict.
    """
    device = next(model.parameters()).device
    # All MoE layers have the same T, D and K and will use the same dispatcher. Only the numbers of
    # experts can differ between layers.
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
    """Run forward and backward of a layer's experts once, with `dispatcher` and a random input.
    Return the duration in seconds."""
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
