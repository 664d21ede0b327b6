"""Table 3 of the Optimus paper: speed-ups of FastSparseMoE and EPSO over a baseline.

The baseline computes the experts in a loop, as the OLMoE block of transformers 4 does, and shards
the optimizer states along dp alone ("so"). The experts and the AdamW update of one rank are
measured on this device. The planner predicts the time of all other operations of a step. Each value
is therefore marked as measured or modelled.

Dims: T tokens, D hidden, F intermediate of an expert, E experts, K experts per token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus import platform
from optimus.bench.meters import clear_gradients, clocked, paired, turns
from optimus.config import Config
from optimus.config.hardware import BYTES
from optimus.config.machine import Machine
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError
from optimus.model.moe import Experts
from optimus.model.router import uniform
from optimus.parallel.pipeline.plan import plan_stages
from optimus.planner.collectives import slowest_s
from optimus.planner.machine_rates import Rates, UpdateBytes, is_cpu, rates_of
from optimus.planner.step_time import Layers, Step, step_time
from optimus.planner.workload import Works, stage_weights, step_of, updated_parameters
from optimus.rank.operations import Operation, Pass, Product
from optimus.rank.profile import profile_work
from optimus_kernels import adamw_

PAPER: dict[str, tuple[float | None, ...]] = {
    "mula-7b-a1b": (2.83, 1.71, None, None, 1.71),
    "mula-20b-a2b": (1.33, 1.11, 1.36, 1.19, 1.35),
    "mula-100b-a7b": (1.51, 1.31, 1.23, 1.06, 1.41),
    "mula-220b-a10b": (1.66, 1.48, 1.07, 1.01, 1.51),
}
"""Speed-ups in Table 3 of the Optimus paper, by run: the columns passes, step_of_passes, optimizer,
step_of_optimizer and both of COLUMNS. None: the paper has no value."""
COLUMNS = {
    "experts": "experts",
    "passes": "F+B",
    "step_of_passes": "training with FSMOE",
    "update": "update",
    "optimizer": "optimizer",
    "step_of_optimizer": "training with EPSO",
    "both": "training with both",
}
"""Headings of the speed-ups over the baseline. With FastSparseMoE: forward and backward of the
experts (experts), forward and backward of the model (passes), and the step (step_of_passes). With
EPSO: the AdamW update (update), the update with its communication (optimizer), and the step
(step_of_optimizer). With both: the step (both)."""
_MOST_UPDATED = 1 << 25
"""Maximum number of parameters in a timed update. If one of the two compared updates is larger,
both are scaled down by the same factor, which does not change the ratio of their times."""
_CPU_TOKENS = 256
"""Default tokens of a rank on a CPU, where a microbatch of the paper takes minutes."""


class Speedup(NamedTuple):
    """A speed-up over the baseline: the ratio of the times, baseline / improved."""

    value: float
    """Median of the measured ratios of all rounds, or the modelled speed-up for this median."""
    source: Literal["measured", "modelled"]
    least: float
    """Speed-up in the round with the smallest measured ratio."""
    most: float
    """Speed-up in the round with the largest measured ratio."""


class LoopExperts(nn.Module):
    """Experts that are computed in a Python loop. Each expert has separate parameters, as in
    transformers 4.

    Args:
        gate_up: Weights [E, 2F, D] of the gate and up projections of E experts. The parameters
            share its memory.
        down: Weights [E, D, F] of the down projection. The parameters share its memory.
        first_expert: Index of the first of these experts among all experts of the layer.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, first_expert: int = 0) -> None:
        super().__init__()
        inner = down.shape[2]
        self._first = first_expert

        def parameters(rows: Tensor) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(weight.detach()) for weight in rows)

        self.gate = parameters(gate_up[:, :inner])
        self.up = parameters(gate_up[:, inner:])
        self.down = parameters(down)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the output [T, D]. Arguments as for `Experts.forward`."""
        out = torch.zeros_like(x)
        matrices = zip(self.gate, self.up, self.down, strict=True)
        for index, (gate, up, down) in enumerate(matrices, self._first):
            token, slot = (chosen == index).nonzero(as_tuple=True)
            rows = x[token]
            hidden = F.silu(F.linear(rows, gate)) * F.linear(rows, up)
            out.index_add_(0, token, F.linear(hidden, down) * weights[token, slot, None])
        return out


def local_experts(config: Config, ep: int, device: torch.device) -> Experts:
    """Return the experts of a layer on one rank: 1/ep of the experts of the layer, with random
    weights."""
    layer = config.model.layer(config.model.sparse_layers[0])
    share = layer.model_copy(update={"num_experts": layer.experts // ep})
    with device:
        module = Experts(share).to(platform.dtype_of(config.train.dtype))
    module.num_experts = layer.experts  # the others are on other ranks
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=0.02)
    return module


def measure_experts(
    config: Config, ep: int, tokens: int, rounds: int, device: torch.device
) -> list[float]:
    """Measure forward and backward of the experts on one rank, alternately with FastSparseMoE and
    in a loop.

    Args:
        config: The run.
        ep: Number of ranks over which the experts are divided. The measured rank receives the
            tokens of all these ranks.
        tokens: T, tokens of one rank.
        rounds: Number of timed rounds.
        device: The device.

    Returns:
        The smallest, the median and the largest ratio of the times loop / FastSparseMoE over the
        rounds. The times are processor time on a CPU, otherwise wall-clock time.
    """
    model, dtype = config.model, platform.dtype_of(config.train.dtype)
    ours = local_experts(config, ep, device)
    loop = LoopExperts(ours.gate_up, ours.down, ours.first_expert)
    blocks: dict[str, nn.Module] = {"ours": ours, "loop": loop}
    generator = torch.Generator().manual_seed(0)
    shape = (tokens * ep, model.hidden_size)
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    probs = torch.rand(tokens * ep, ours.num_experts, generator=generator).softmax(-1).to(device)
    weights, chosen = uniform(probs, model.num_experts_per_tok)
    grad, clock = torch.ones_like(x), int(device.type == "cpu")
    times: dict[str, list[float]] = {name: [] for name in blocks}
    for number, name in turns(blocks, rounds):
        run = functools.partial(blocks[name], x, weights.to(dtype), chosen)
        _, both = clocked(run, device, grad)
        if number:
            times[name].append(both[clock])
        clear_gradients(blocks[name], x)
    return paired(times["loop"], times["ours"])


def measure_updates(sizes: tuple[float, float], rounds: int, device: torch.device) -> list[float]:
    """Measure AdamW updates of `sizes[0]` and of `sizes[1]` parameters, alternately. Sizes above
    _MOST_UPDATED are reduced: both by the same factor.

    Return the smallest, the median and the largest ratio of the times of a round, first / second.
    """
    scale = min(1.0, _MOST_UPDATED / max(sizes))
    counts = [max(1, round(scale * size)) for size in sizes]
    # Both updates use the same memory, because the pages of two allocations may differ in size.
    states = [torch.full((max(counts),), 0.01, device=device) for _ in range(4)]
    states.append(states[0].bfloat16())
    runs: dict[str, Callable[[], Any]] = {
        name: functools.partial(_update, [state[:count] for state in states])
        for name, count in zip(("first", "second"), counts, strict=True)
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    clock = int(device.type == "cpu")
    for number, name in turns(runs, rounds):
        seconds, _ = clocked(runs[name], device)
        if number:
            times[name].append(seconds[clock])
    return paired(times["first"], times["second"])


def _update(states: list[Tensor]) -> None:
    master, mean, square, grad, param = states
    adamw_(master, mean, square, grad, param, 1e-3, 0.9, 0.95, 1e-8, 0.1, step=1)


def study_moe(
    config: Config,
    mesh: Mesh,
    machine: Machine,
    machine_name: str,
    tokens: int,
    rounds: int,
    device: torch.device,
) -> dict[str, Any]:
    """Return the columns of Table 3 for a run.

    Args:
        config: The run, with experts.
        mesh: Mesh of the run.
        machine: Machine for which the time of a step is predicted.
        machine_name: Name of the machine, for messages.
        tokens: Tokens of a rank in the measurement; 0: those of a microbatch, or 256 on a CPU.
        rounds: Number of timed rounds.
        device: Device of the measurement.

    Returns:
        A dict with a `Speedup` for each column of COLUMNS, or None for a column without effect
        because ep is 1; and with `tokens`, the number of tokens of a rank in the measurement.

    Raises:
        ConfigError: The model has no experts, or the step cannot be planned.
    """
    train, model = config.train, config.model
    if not model.sparse_layers:
        raise ConfigError(
            "model.architecture = 'olmo': the model has no experts to compare; use a configuration "
            "with model.architecture = 'olmoe'"
        )
    if not tokens:
        tokens = _CPU_TOKENS if device.type == "cpu" else train.microbatch_size * train.seq_len
    rates = rates_of(machine, train.dtype, machine_name)
    experts = measure_experts(config, mesh.ep, tokens, rounds, device)
    fullest = max(stage_weights(config, mesh), key=sum)
    sizes = tuple(updated_parameters(name, mesh, fullest) for name in ("so", "epso"))
    updates = [1.0, 1.0, 1.0]
    if mesh.ep > 1:
        updates = measure_updates((sizes[0], sizes[1]), rounds, device)
    spread = zip(experts, updates, strict=True)
    works: Works = {False: profile_work(config, mesh, is_cpu(machine))}
    rows = [_speedups(config, mesh, rates, works, loop, update) for loop, update in spread]
    columns: dict[str, Any] = {"tokens": tokens}
    for name in COLUMNS:
        least, value, most = (row[name] for row in rows)
        source: Literal["measured", "modelled"] = "modelled"
        if name in ("experts", "update"):
            source = "measured"
        of_epso = name in ("update", "optimizer", "step_of_optimizer")
        shown = None if of_epso and mesh.ep == 1 else Speedup(value, source, least, most)
        columns[name] = shown
    return columns


def _speedups(
    config: Config, mesh: Mesh, rates: Rates, works: Works, experts: float, update: float
) -> dict[str, float]:
    """Return a dict from each column of COLUMNS to its speed-up over the baseline.

    Args:
        config: The run.
        mesh: Its mesh.
        rates: Rates of the machine.
        works: Argument of `step_of`.
        experts: Measured speed-up of the experts of a rank.
        update: Measured speed-up of the AdamW update of a rank.
    """
    fast = _step_with("epso", config, mesh, works)
    slow = _step_with("so", config, mesh, works)
    passes_s = _passes_s(fast, rates)
    loop_s = _passes_s(_with_slower_experts(fast, config, mesh, experts), rates)
    update_s = rates.update_s(fast.update)
    epso_s = update_s + reductions_s(fast, rates)
    so_s = update * update_s + reductions_s(slow, rates)
    return {
        "experts": experts,
        "passes": loop_s / passes_s,
        "step_of_passes": (loop_s + so_s) / (passes_s + so_s),
        "update": update,
        "optimizer": so_s / epso_s,
        "step_of_optimizer": (loop_s + so_s) / (loop_s + epso_s),
        "both": (loop_s + so_s) / (passes_s + epso_s),
    }


def _step_with(sharding: str, config: Config, mesh: Mesh, works: Works) -> Step:
    """Return the operations and collectives of a step with another value of `optim.sharding`, in
    which collectives of gradients and parameters do not overlap with computation."""
    optim = config.optim.model_copy(update={"sharding": sharding, "overlap": False})
    return step_of(config.model_copy(update={"optim": optim}), mesh, works=works)


def _passes_s(step: Step, rates: Rates) -> float:
    """Return the seconds of all forwards and backwards of a step, including the pipeline bubble."""
    passes = dataclasses.replace(step, reductions=(), update=UpdateBytes())
    return step_time(passes, rates).total_s


def reductions_s(step: Step, rates: Rates) -> float:
    """Return the seconds of the reductions of gradients and the gathers of parameters in a step."""
    seconds = 0.0
    for reduction in step.reductions:
        groups = step.groups[reduction.axis]
        once_s = slowest_s(
            reduction.name, reduction.size_bytes, groups, rates.links, rates.algorithm
        )
        seconds += reduction.repeats * once_s
    return seconds


def _with_slower_experts(step: Step, config: Config, mesh: Mesh, experts: float) -> Step:
    """Return the step with additional operations, so that the experts take `experts` times as
    long."""
    forward, backward = expert_work(config, mesh)
    sparse = set(config.model.sparse_layers)
    stages = []
    for stage, layers in zip(step.stages, plan_stages(config, mesh.pp), strict=True):
        number = (experts - 1) * len(sparse.intersection(layers))
        more = [Layers(forward, backward, number)] if number else []
        stages.append((*stage, *more))
    return dataclasses.replace(step, stages=tuple(stages))


def expert_work(config: Config, mesh: Mesh) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Return the operations of the experts of a layer on a rank for one microbatch, in forward and
    in backward, with uniform routing: gather of rows, two grouped products, SwiGLU, weighted sum.
    """
    train, layer = config.train, config.model.layer(config.model.sparse_layers[0])
    rows = train.microbatch_size * train.seq_len * layer.num_experts_per_tok
    local, d, f = layer.experts // mesh.ep, layer.hidden_size, layer.intermediate_size // mesh.tp
    each, e = rows / local, BYTES[train.dtype]

    def product(m: float, k: float, n: float) -> Product:
        return Product(m, k, n, repeats=local, launches=1)

    up, down = product(each, d, 2 * f), product(each, f, d)
    moved, activation = Pass(2 * e * rows * d), Pass(3 * e * rows * f)
    forward: tuple[Operation, ...] = (moved, up, activation, down, moved)
    of_up = product(each, 2 * f, d), product(2 * f, each, d)  # gradients of input and weights
    of_down = product(each, d, f), product(d, each, f)
    backward: tuple[Operation, ...]
    backward = (*of_up, *of_down, moved, Pass(5 * e * rows * f), moved)
    modules = set(config.recompute.modules)
    if modules & {"moe", "block"}:
        backward += forward
    elif "experts" in modules:  # recomputes only the pre-activation
        backward += (moved, up)
    return forward, backward


def format_table(results: dict[str, dict[str, Any]], conditions: str) -> str:
    """Return a Markdown table of speed-ups with the rows of each run: the results of `study_moe`,
    and the values of the paper. `conditions` is a sentence about the measurement, which precedes
    the table."""
    lines = [
        conditions,
        "",
        f"| run | {' | '.join(COLUMNS.values())} |",
        f"|{'---|' * (1 + len(COLUMNS))}",
    ]
    for name, result in results.items():
        cells = []
        for column in COLUMNS:
            speedup: Speedup | None = result[column]
            cell = "no effect (ep = 1)"
            if speedup is not None:
                spread = f"{speedup.least:.2f} to {speedup.most:.2f}"
                cell = f"{speedup.value:.2f} {speedup.source} ({spread})"
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
        if name in PAPER:
            passes, of_passes, optimizer, of_optimizer, both = (
                "" if value is None else f"{value:.2f}" for value in PAPER[name]
            )
            cells = ["", passes, of_passes, "", optimizer, of_optimizer, both]
            lines.append(f"| {name}, paper | {' | '.join(cells)} |")
    return "\n".join(lines)
