"""`optimus bench step`: compares the time of a training update with a plain torch loop.

Optimus and the plain loop train two copies of a model on the same tokens in this process. The
updates of Optimus and of the plain loop alternate, so that other load on the machine affects
Optimus and the plain loop in the same way. The main result is the median, over all pairs of
updates, of the ratio (time in Optimus) / (time in the plain loop).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimus import platform
from optimus.bench.meters import clocked, turns
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.loader import Microbatch
from optimus.distributed.groups import Groups, join_groups
from optimus.distributed.world import World, start_world
from optimus.errors import counted, refuse_if
from optimus.launch.environment import SINGLE
from optimus.model.flops import flops_per_token
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from optimus.observe.events import NO_RECORDER, Recorder
from optimus.parallel.pipeline.plan import needs_ring
from optimus.rank.model import RankModel
from optimus.train.loop import fix_arithmetic
from optimus.train.resolve import divide
from optimus.train.update import Updater

_WARMUP = 2


class TrainingRank(NamedTuple):
    """A new model on one rank, its optimizer states, and the configuration and process groups of
    the run."""

    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    local: RankModel
    states: ChunkEngine

    def updater(self) -> Updater:
        """Return an `Updater`, which runs training updates. After this call, the backward passes of
        experts and embeddings add gradients directly to the gradient chunks of `states`."""
        return Updater(
            self.config, self.groups, self.local, self.states, self.plan, self.world.device
        )

    def microbatches(self) -> list[Microbatch]:
        """Return the microbatches of this rank for one update. Their tokens are random."""
        plan, seed = self.plan, self.config.train.seed + self.groups.data.rank
        generator = torch.Generator().manual_seed(seed)
        shape = (plan.microbatch_size, plan.seq_len)
        return [
            Microbatch(torch.randint(self.config.model.vocab_size, shape, generator=generator))
            for _ in range(plan.microbatches_per_rank)
        ]


def make_rank(config: Config, world: World, recorder: Recorder = NO_RECORDER) -> TrainingRank:
    """Create the model and the optimizer states of this rank. All ranks must call this function.

    Args:
        config: Configuration of the run.
        world: The world of all ranks, from `start_world`.
        recorder: Recorder that receives the events of collectives and of pipeline actions.
    """
    refuse_if(
        config.offload.mode == "auto",
        "offload.mode = 'auto': bench step does not choose a placement of the states; use "
        "offload.mode = 'manual' with the settings that optimus plan --machine prints",
    )
    mesh, plan = divide(config, world.size)
    groups = join_groups(mesh, world, needs_ring(config, mesh.pp), recorder)
    local = RankModel(config, groups, plan, world.device)
    return TrainingRank(config, world, groups, plan, local, local.make_states())


class PlainLoop:
    """Training loop in plain torch: losses, backward, clip_grad_norm_ and fused AdamW.

    Gradients are accumulated in the dtype of the parameters. If the dtype is not fp32, the loop
    updates fp32 master weights from fp32 copies of the gradients, as Optimus does.
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
        """Return two values for the tokens [B, S] of a microbatch: the microbatch's term of the
        training objective, and the sum of the microbatch's cross-entropies in nats."""
        terms, settings = self._model.losses(tokens), self._config.model
        routers = settings.aux_loss_coef * terms.aux + settings.z_loss_coef * terms.z
        loss = terms.ce_sum / self._plan.targets + routers / self._plan.num_microbatches
        return loss, terms.ce_sum.detach()

    def run(self, microbatches: list[Microbatch]) -> float:
        """Run one update of the weights. Return the mean cross-entropy of the target tokens, in
        nats."""
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
    """Measure the time of pairs of updates on random tokens in this process. A pair contains an
    update of Optimus and an update of the plain loop.

    Args:
        config: Configuration of the run.
        steps: Number of timed pairs.

    Returns:
        A dict with the conditions of the measurement, median seconds, and the ratios (time in
        Optimus) / (time in the plain loop), for wall-clock time and for CPU time of all threads. If
        other programs run, CPU time is more reliable. `ours_tflops` is the speed of an Optimus
        update in TFLOP/s, computed from wall-clock time.
    """
    world = start_world(SINGLE, device=config.train.device)
    threads = fix_arithmetic(config.train, world.launch.local_world_size)
    model, plan = Transformer(config.model).to(world.device), divide(config, world.size)[1]
    initialise_(model, config.train.seed)
    plain = PlainLoop(config, model.to(platform.dtype_of(config.train.dtype)), plan, world.device)
    rank = make_rank(config, world)
    updater, microbatches = rank.updater(), rank.microbatches()
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "plain": []}
    for number, name in turns(times, steps + 1):
        run: Callable[[], object] = functools.partial(plain.run, microbatches)
        if name == "ours":
            run = functools.partial(updater.run, number + 1, microbatches)
        seconds, _ = clocked(run, world.device)
        if number >= _WARMUP:
            times[name].append(seconds)
    result: dict[str, Any] = {
        "device": str(world.device),
        "torch": torch.__version__,
        "threads": threads,
        "dtype": config.train.dtype,
        "tokens_per_update": plan.tokens,
        "pairs": steps,
    }
    for index, clock in enumerate(("wall", "cpu")):
        a, b = ([seconds[index] for seconds in times[name]] for name in ("ours", "plain"))
        ratios = sorted(x / y for x, y in zip(a, b, strict=True))
        result[f"ours_{clock}_s"] = statistics.median(a)
        result[f"plain_{clock}_s"] = statistics.median(b)
        result[f"{clock}_ratio_median"] = statistics.median(ratios)
        result[f"{clock}_ratio_quartiles"] = [ratios[steps // 4], ratios[-1 - steps // 4]]
    flops = flops_per_token(config.model, plan.seq_len) * plan.tokens
    result["ours_tflops"] = flops / result["ours_wall_s"] / 1e12
    return result


def format_result(result: dict[str, Any]) -> str:
    """Return the result of `bench_step` as four lines of text."""
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
    lines.append(f"ours: {result['ours_tflops']:.2f} TFLOP/s")
    return "\n".join(lines)
