#!/usr/bin/env python3
"""Compare the shardings "epso" and "so", compare Optimus with FSDP2, and measure peak memory.

    python scripts/bench/sharding.py [--ranks N] [--hidden N] [--rounds N] [--json]

"so" and "epso" are values of the setting optim.sharding. The local ranks train a model in which
experts and other parameters have the same proportions as in Mula-7B-A1B. The compared programs run
in turn. Each measured time is the maximum over all ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn

from optimus.bench.meters import paired
from optimus.bench.step import PlainLoop, make_rank
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.optimizer import AdamW
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.data.loader import Microbatch
from optimus.distributed.collectives import all_gather_objects, all_reduce_sum
from optimus.distributed.world import World
from optimus.errors import ConfigError, OptimusError, counted
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from optimus.parallel.recompute import KeptBytes

_WARMUP = 2


class FsdpLoop(PlainLoop):
    """Training loop in which FSDP2 shards each transformer block and the remaining parameters.

    Parameters stay gathered between forward and backward (`reshard_after_forward=False`). This mode
    of FSDP2 is faster than `reshard_after_forward=True` and more similar to Optimus.
    """

    def __init__(self, config: Config, plan: BatchPlan, world: World) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        model, self._world = Transformer(config.model), world
        initialise_(model, 0)
        mesh = init_device_mesh("cpu", (world.size,))
        for module in (*model.blocks.values(), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
            assert isinstance(module, FSDPModule)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no mean
            module.set_gradient_divide_factor(1.0)  # the loss is already scaled
        super().__init__(config, model, plan, world.device)
        root: nn.Module = model
        root.forward = super().objective

    def objective(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._model(tokens)  # this call runs the hooks of FSDP2

    def run(self, microbatches: list[Microbatch]) -> float:
        """Run one training step. Return the mean cross-entropy over the tokens of all ranks."""
        loss = torch.tensor([super().run(microbatches)])
        all_reduce_sum(loss, self._world.everyone)
        return float(loss)


def measure_ranks(world: World, folder: Path, hidden: int, rounds: int) -> dict[str, Any]:
    """Measure the peak memory of a training step, compare optim.sharding "epso" with "so", and
    compare Optimus with FSDP2. All ranks must call this function. Return the results as a dict."""
    size = world.size
    peak = measure_peak(
        common.mula_config(hidden, size, sharding="epso"),
        common.mula_config(64, size, sharding="epso"),
        world,
    )
    shardings = []
    for ep in dict.fromkeys((2, size // 2)):
        so, epso = (common.mula_config(hidden, size, ep, sharding=name) for name in ("so", "epso"))
        shardings.append(compare_shardings(so, epso, world, rounds))
    fsdp = compare_fsdp(common.mula_config(hidden, size, sharding="epso"), world, rounds)
    return {
        "ranks": size, "torch": torch.__version__,
        "peak": peak, "shardings": shardings, "fsdp": fsdp,
    }  # fmt: skip


def measure_peak(config: Config, small: Config, world: World) -> dict[str, Any]:
    """Measure the peak of resident memory in a training step. All ranks must call this function.

    Args:
        config: Configuration of the model.
        small: Configuration of a small model, which is trained first. Memory that libraries and
            process groups allocate once is then allocated before the measurement.
        world: All ranks.

    Returns:
        A dict with three keys. `measured`: resident bytes at the peak of a training step, minus the
        resident bytes before the model was built, on the rank with the largest difference. `parts`:
        bytes that the calling rank needs for the states, for the activations, and for two chunks of
        gradients. `formula`: sum of `parts`.
    """
    meter = common.MemoryMeter()
    _train(small, world, meter)
    before = meter.start()
    peak, terms = _train(config, world, meter)
    worst = max(all_gather_objects(peak - before, world.everyone, int))
    return {"measured": worst, "formula": sum(terms.values()), "parts": terms}


def _train(config: Config, world: World, meter: common.MemoryMeter) -> tuple[int, dict[str, int]]:
    """Run three training steps. Return two values in bytes: the peak of resident memory in the last
    step, and a dict of terms whose sum predicts this peak."""
    ours = make_rank(config, world)
    states, microbatches, updater = ours.states, ours.microbatches(), ours.updater()
    for step in range(1, 1 + _WARMUP):
        updater.run(step, microbatches)
    states.wait()
    meter.reset_peak()
    updater.run(1 + _WARMUP, microbatches)
    states.wait()
    peak = meter.peak()
    with KeptBytes(ours.local.model) as kept:
        ours.local.model.losses(microbatches[0].tokens)
    two_chunks = 2 * max(chunk.grads.nbytes for chunk in states.chunks)
    state_bytes = states.state_bytes()["total"]
    return peak, {"states": state_bytes, "activations": kept.total, "two_chunks": two_chunks}


def compare_shardings(so: Config, epso: Config, world: World, rounds: int) -> dict[str, Any]:
    """Compare `optim.sharding` "epso" with "so". All ranks must call this function.

    Returns:
        A dict with three keys. `update`: CPU seconds of the AdamW update of a rank's shard. `step`:
        wall-clock seconds of the work between backward and the next forward: reduction of
        gradients, norm, update of parameters, and gather of parameters. `update` and `step` contain
        the seconds for each sharding and the ratios "epso" / "so". `predicted`: ratio of the sizes
        of the shards, "epso" / "so".
    """
    ranks = {"so": make_rank(so, world), "epso": make_rank(epso, world)}
    updates = {name: _make_update(rank.states, rank.config) for name, rank in ranks.items()}
    steps = {name: _make_step(rank.states) for name, rank in ranks.items()}
    update_s = common.race(updates, rounds, world, time.thread_time)
    step_s = common.race(steps, rounds, world)
    sizes = {name: slot.stop - slot.start for name, slot in ranks["so"].states.slots.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    others = sum(sizes.values()) - experts
    dp, ep = ranks["so"].groups.mesh.dp, ranks["so"].groups.mesh.ep
    return {
        "dp": dp,
        "ep": ep,
        "experts": experts,
        "others": others,
        "predicted": (experts / dp + others / (dp * ep)) / (experts / dp + others / dp),
        "shard_elements": [rank.states.layout.shard_length for rank in ranks.values()],
        "update": _with_ratios(update_s),
        "step": _with_ratios(step_s),
    }


def _with_ratios(seconds: dict[str, list[float]]) -> dict[str, Any]:
    so, epso = seconds["so"], seconds["epso"]
    return {"so_s": so, "epso_s": epso, "paired": paired(epso, so)}


def _make_update(states: ChunkEngine, config: Config) -> Callable[[], None]:
    optimizer = AdamW(config.optim)

    def update() -> None:
        optimizer.num_updates += 1
        for chunk in states.chunks:
            optimizer.update(chunk, 1e-4, 1.0)

    return update


def _make_step(states: ChunkEngine) -> Callable[[], None]:
    def step() -> None:
        states.gradients.reduce(0)
        states.gradients.finish()
        states.grad_norm()
        states.update(1e-4)
        states.wait()

    states.start_step()
    for chunk in states.chunks:
        chunk.grads.fill_(1e-3)
    return step


def compare_fsdp(config: Config, world: World, rounds: int) -> dict[str, Any]:
    """Compare the times of a training step in Optimus and in FSDP2. All ranks must call this
    function.

    Returns:
        A dict with the seconds of a training step in each library, the ratios Optimus / FSDP2 of
        these times, and the largest relative difference between the losses of the libraries.

    Raises:
        OptimusError: The relative difference of the losses is 1e-3 or more.
    """
    ours = make_rank(config, world)
    updater, microbatches = ours.updater(), ours.microbatches()
    fsdp = FsdpLoop(config, ours.plan, world)
    losses: tuple[list[float], list[float]] = ([], [])
    contestants = {
        "ours": lambda: losses[0].append(updater.run(len(losses[0]) + 1, microbatches).loss),
        "fsdp2": lambda: losses[1].append(fsdp.run(microbatches)),
    }
    seconds = common.race(contestants, rounds, world)
    difference = max(abs(a / b - 1) for a, b in zip(*losses, strict=True))
    if not difference < 1e-3:
        raise OptimusError(
            f"the relative difference of the losses of Optimus and FSDP2 is {difference:.1e} in "
            f"{counted(rounds, 'update')}; it must be below 1e-3"
        )
    return {
        "ours_s": seconds["ours"], "fsdp2_s": seconds["fsdp2"],
        "paired": paired(seconds["ours"], seconds["fsdp2"]), "losses_differ_by": difference,
    }  # fmt: skip


def format_result(result: dict[str, Any]) -> str:
    """Return `result` as a Markdown table. For each ratio, the table contains the least, the median
    and the greatest value over all rounds."""
    lines = [
        "| ranks | dp x ep | EPSO / SO: update alone (predicted) | EPSO / SO: with collectives | "
        "Optimus / FSDP2: a step | measured peak / formula |",
        "|---|---|---|---|---|---|",
    ]
    for measured in result["ranks"]:
        fsdp, peak = measured["fsdp"], measured["peak"]
        for row in measured["shardings"]:
            update, step, whole = (
                ", ".join(f"{ratio:.3f}" for ratio in timed["paired"])
                for timed in (row["update"], row["step"], fsdp)
            )
            lines.append(
                f"| {measured['ranks']} | {row['dp']} x {row['ep']} | {update} "
                f"({row['predicted']:.3f}) | {step} | {whole} | "
                f"{peak['measured'] / peak['formula']:.3f} |"
            )
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks",
        type=int,
        action="append",
        help="number of local ranks; may be repeated (default: 4, 8)",
    )
    parser.add_argument(
        "--hidden", type=int, default=256, help="hidden size of the model (default: 256)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    counts = args.ranks or (4, 8)
    if args.hidden < 64 or args.hidden % 64 or any(count < 2 or count % 2 for count in counts):
        raise ConfigError("--ranks must be even numbers, and --hidden must be a multiple of 64")
    if args.rounds < 1:
        raise ConfigError(f"--rounds {args.rounds} must be at least 1")
    result = {
        "versions": common.versions(),
        "ranks": [
            common.run_ranks(count, measure_ranks, args.hidden, args.rounds) for count in counts
        ],
    }
    print(json.dumps(result) if args.json else format_result(result))


if __name__ == "__main__":
    sys.exit(common.run_script(main))
