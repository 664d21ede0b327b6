"""An update of ours against a plain hand-written torch loop of the same model and batch.

Both run in this process on copies of one model with the same tokens, in turn, so that a noisy
machine disturbs both alike; the figure to quote is the median of the paired ratios.
"""

from __future__ import annotations

import functools
import statistics
from typing import Any

import torch
from torch import nn

from optimus import platform
from optimus.bench.meters import clocked, random_microbatches
from optimus.config import Config
from optimus.data.loader import Microbatch
from optimus.dist.groups import join_groups
from optimus.dist.mesh import Mesh
from optimus.dist.world import World, start_world
from optimus.launch_env import SINGLE
from optimus.model.init import initialise_
from optimus.train.batch import BatchPlan
from optimus.train.loop import fix_arithmetic
from optimus.train.preflight import divide
from optimus.train.shard import Shard
from optimus.train.update import Updater

_WARMUP = 2


class PlainLoop:
    """What one writes by hand: losses, backward, clip_grad_norm_, fused AdamW.

    Below fp32 it keeps fp32 masters, as ours does: gradients are widened, the masters are updated
    and copied back. It accumulates microbatches in the parameters' dtype.
    """

    def __init__(self, config: Config, model: nn.Module, plan: BatchPlan, device: torch.device):
        self._config, self._model, self._plan, self._device = config, model, plan, device
        self._params = list(model.parameters())
        self._masters = self._params
        if self._params[0].dtype is not torch.float32:
            self._masters = [nn.Parameter(p.detach().float()) for p in self._params]
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self._masters,
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )

    def run(self, microbatches: list[Microbatch]) -> float:
        self._model.zero_grad()
        total = 0.0
        settings, count = self._config.model, self._plan.num_microbatches
        for microbatch in microbatches:
            terms = self._model.losses(microbatch.tokens.to(self._device))
            loss = terms.ce_sum / self._plan.targets
            if settings.num_experts:
                loss = loss + settings.aux_loss_coef / count * terms.aux
                loss = loss + settings.z_loss_coef / count * terms.z
            loss.backward()
            total += float(terms.ce_sum.detach())
        self._update()
        return total / self._plan.targets

    def _update(self) -> None:
        mixed = self._masters is not self._params
        if mixed:
            for master, param in zip(self._masters, self._params, strict=True):
                master.grad = param.grad.float()
        nn.utils.clip_grad_norm_(self._masters, self._config.optim.clip_norm)
        self._optimizer.step()
        if mixed:
            with torch.no_grad():
                for master, param in zip(self._masters, self._params, strict=True):
                    param.copy_(master)


def bench_step(config: Config, steps: int) -> dict[str, Any]:
    """Time `steps` pairs of updates on random tokens in one process: seconds and paired ratios.

    `wall` is elapsed time, `cpu` processor time of all threads (on a CPU the one to trust where
    other programs run beside).
    """
    _, plan = divide(config, 1)
    world = start_world(SINGLE, device=config.train.device)
    threads = fix_arithmetic(config, world)
    ours, plain, microbatches = _contestants(config, world, plan)
    taken: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
    for step in range(1, steps + 1 + _WARMUP):
        pair = {
            "ours": functools.partial(ours.run, step, microbatches),
            "plain": functools.partial(plain.run, microbatches),
        }
        for name in sorted(pair, reverse=step % 2 == 0):  # neither is always the first
            seconds, _ = clocked(pair[name], world.device)
            if step > _WARMUP:
                taken[name].append(seconds)
    result: dict[str, Any] = {
        "device": str(world.device),
        "torch": torch.__version__,
        "threads": threads,
        "dtype": config.train.dtype,
        "tokens_per_update": plan.tokens,
        "pairs": steps,
    }
    for place, clock in enumerate(("wall", "cpu")):
        a, b = ([seconds[place] for seconds in taken[name]] for name in ("ours", "plain"))
        ratios = sorted(x / y for x, y in zip(a, b, strict=True))
        result[f"ours_{clock}_s"] = statistics.median(a)
        result[f"plain_{clock}_s"] = statistics.median(b)
        result[f"{clock}_ratio_median"] = statistics.median(ratios)
        result[f"{clock}_ratio_quartiles"] = [ratios[steps // 4], ratios[-1 - steps // 4]]
    return result


def _contestants(
    config: Config, world: World, plan: BatchPlan
) -> tuple[Updater, PlainLoop, list[Microbatch]]:
    dtype = platform.dtype_of(config.train.dtype)
    model = Shard(config, join_groups(Mesh(), world), plan, world.device).model
    initialise_(model, config.train.seed)
    ours, _, microbatches = make_ours(config, world, plan)
    return ours, PlainLoop(config, model.to(dtype), plan, world.device), microbatches


def make_ours(
    config: Config, world: World, plan: BatchPlan
) -> tuple[Updater, Shard, list[Microbatch]]:
    """What updates a fresh model in one process, the model, and a batch of random tokens."""
    groups = join_groups(Mesh(), world)
    shard = Shard(config, groups, plan, world.device)
    initialise_(shard.model, config.train.seed)
    ours = Updater(config, groups, shard, shard.make_states(), plan, world.device)
    return ours, shard, random_microbatches(config, plan, config.train.seed)


def format_result(result: dict[str, Any]) -> str:
    """The result in three lines."""
    lines = [
        f"{result['device']}, torch {result['torch']}, {result['threads']} threads, "
        f"{result['dtype']}, {result['tokens_per_update']} tokens an update, "
        f"{result['pairs']} pairs"
    ]
    for clock in ("wall", "cpu"):
        low, high = result[f"{clock}_ratio_quartiles"]
        lines.append(
            f"{clock}: ours {result[f'ours_{clock}_s']:.4f} s, plain loop "
            f"{result[f'plain_{clock}_s']:.4f} s, ours / plain "
            f"{result[f'{clock}_ratio_median']:.3f} (quartiles {low:.3f} to {high:.3f})"
        )
    return "\n".join(lines)
