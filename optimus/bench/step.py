"""An update of ours against a plain hand-written torch loop of the same model and batch.

Both run in this process on copies of one model with the same tokens, in turn, so that a noisy
machine disturbs both alike; the figure to quote is the median of the paired ratios.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from optimus import platform
from optimus.bench.meters import clocked, turns
from optimus.bench.ours import make_ours
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.loader import Microbatch
from optimus.distributed.world import World, start_world
from optimus.errors import counted
from optimus.launch.environment import SINGLE
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from optimus.train.loop import fix_arithmetic
from optimus.train.resolve import divide

_WARMUP = 2


class PlainLoop:
    """What one writes by hand: losses, backward, clip_grad_norm_, fused AdamW.

    Below fp32 it keeps fp32 masters, as ours does: gradients are widened, the masters are updated
    and copied back. It accumulates microbatches in the parameters' dtype.
    """

    def __init__(self, config: Config, model: Transformer, plan: BatchPlan, device: torch.device):
        self._config, self._model, self._plan, self._device = config, model, plan, device
        self._params = list(model.parameters())
        self._masters = self._params
        if self._params[0].dtype is not torch.float32:
            self._masters = [nn.Parameter(p.detach().float()) for p in self._params]
        optim = config.optim
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=optim.lr, betas=optim.betas, eps=optim.eps,
            weight_decay=optim.weight_decay, fused=True,
        )  # fmt: skip

    def objective(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of a microbatch, and its cross-entropies' sum."""
        terms, settings = self._model.losses(tokens), self._config.model
        routers = settings.aux_loss_coef * terms.aux + settings.z_loss_coef * terms.z
        loss = terms.ce_sum / self._plan.targets + routers / self._plan.num_microbatches
        return loss, terms.ce_sum.detach()

    def run(self, microbatches: list[Microbatch]) -> float:
        self._model.zero_grad()
        total = 0.0
        for microbatch in microbatches:
            loss, ce_sum = self.objective(microbatch.tokens.to(self._device))
            loss.backward()
            total += float(ce_sum)
        self._update()
        return total / self._plan.targets

    def _update(self) -> None:
        mixed = self._masters is not self._params
        if mixed:
            for master, param in zip(self._masters, self._params, strict=True):
                assert param.grad is not None
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
    world = start_world(SINGLE, device=config.train.device)
    threads = fix_arithmetic(config.train, world.launch.local_world_size)
    plain, ours = make_plain(config, world), make_ours(config, world)
    updater, microbatches = ours.updater(), ours.microbatches()
    taken: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
    for number, name in turns(taken, steps + 1):
        run: Callable[[], object] = functools.partial(plain.run, microbatches)
        if name == "ours":
            run = functools.partial(updater.run, number + 1, microbatches)
        seconds, _ = clocked(run, world.device)
        if number >= _WARMUP:
            taken[name].append(seconds)
    result: dict[str, Any] = {
        "device": str(world.device),
        "torch": torch.__version__,
        "threads": threads,
        "dtype": config.train.dtype,
        "tokens_per_update": ours.plan.tokens,
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


def make_plain(config: Config, world: World) -> PlainLoop:
    """On weights as ours begins with."""
    model, plan = Transformer(config.model).to(world.device), divide(config, world.size)[1]
    initialise_(model, config.train.seed)
    return PlainLoop(config, model.to(platform.dtype_of(config.train.dtype)), plan, world.device)


def format_result(result: dict[str, Any]) -> str:
    """The result in three lines."""
    lines = [
        f"{result['device']}, torch {result['torch']}, {counted(result['threads'], 'thread')}, "
        f"{result['dtype']}, {result['tokens_per_update']} tokens an update, "
        f"{counted(result['pairs'], 'pair')}"
    ]
    for clock in ("wall", "cpu"):
        low, high = result[f"{clock}_ratio_quartiles"]
        lines.append(
            f"{clock}: ours {result[f'ours_{clock}_s']:.4f} s, plain loop "
            f"{result[f'plain_{clock}_s']:.4f} s, ours / plain "
            f"{result[f'{clock}_ratio_median']:.3f} (quartiles {low:.3f} to {high:.3f})"
        )
    return "\n".join(lines)
