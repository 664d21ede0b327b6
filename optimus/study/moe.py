"""Table 3 of the Optimus paper: speed-ups of FastSparseMoE and EPSO over a baseline.

The baseline computes the experts in a loop, as the OLMoE block of transformers 4 does, and shards
the optimizer states only along dp ("so"). The experts and the AdamW update of one rank are measured
on this device. The planner predicts the time of all other operations of a step. Each value is
marked as measured or modelled.

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
"""A dict from runs to speed-ups in Table 3 of the Optimus paper, for the columns "passes",
"step_of_passes", "optimizer", "step_of_optimizer" and "both" of COLUMNS. None: the paper has no
value."""
COLUMNS = {
    "experts": "experts",
    "passes": "F+B",
    "step_of_passes": "training with FSMOE",
    "update": "update",
    "optimizer": "optimizer",
    "step_of_optimizer": "training with EPSO",
    "both": "training with both",
}
"""Headings of the speed-ups over the baseline. The keys are the speed-ups:

- "experts", "passes" and "step_of_passes": FastSparseMoE makes the experts (forward and backward),
  the model (forward and backward) and the step faster.
- "update", "optimizer" and "step_of_optimizer": EPSO makes the AdamW update, the update with its
  communication and the step faster.
- "both": FastSparseMoE and EPSO together make the step faster.
"""
_MOST_UPDATED = 1 << 25
"""Maximum number of parameters in a timed update. If one of the two compared updates has more
parameters, both numbers are divided by the same factor. The ratio of the times is assumed to stay
the same."""
_CPU_TOKENS = 256
"""Default number of tokens of a rank on a CPU. A microbatch of the paper would take minutes."""


class Speedup(NamedTuple):
    """A speed-up over the baseline: the ratio of the times, baseline / improved."""

    value: float
    """Median of the measured ratios of all rounds, or the modelled speed-up that follows from this
    median."""
    source: Literal["measured", "modelled"]
    least: float
    """Speed-up that follows from the smallest measured ratio of a round."""
    most: float
    """Speed-up that follows from the largest measured ratio of a round."""


class LoopExperts(nn.Module):
    """Experts that are computed in a Python loop. Each expert has separate parameters, as in
    transformers 4.

    Args:
        gate_up: Weights [E, 2F, D] of the gate and up projections of E experts. The parameters of
            this module share the memory of this tensor.
        down: Weights [E, D, F] of the down projections. The parameters share the memory of this
            tensor.
        first_expert: Index of the first of the E experts among all experts of the layer.
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
        """Return the output [T, D]. The arguments are those of `Experts.forward`."""
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
    module.num_experts = layer.experts  # the other experts are on other ranks
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=0.02)
    return module


def measure_experts(
    config: Config, ep: int, tokens: int, rounds: int, device: torch.device
) -> list[float]:
    """Measure forward and backward of the experts on one rank, alternately with FastSparseMoE and
    with `LoopExperts`.

    Args:
        config: The run.
        ep: Number of ranks over which the experts are divided. The measured rank receives the
            tokens of all these ranks.
        tokens: T, tokens of one rank.
        rounds: Number of timed rounds.
        device: The device.

    Returns:
        Three ratios of times, `LoopExperts` / FastSparseMoE: the smallest, the median and the
        largest of all rounds. The times are processor times on a CPU, and wall-clock times on other
        devices.
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
    """Measure AdamW updates of `sizes[0]` and of `sizes[1]` parameters, alternately. If a size is
    above _MOST_UPDATED, both sizes are divided by the same factor.

    Return the smallest, the median and the largest ratio of the times of a round: time of the first
    update / time of the second update.
    """
    scale = min(1.0, _MOST_UPDATED / max(sizes))
    counts = [max(1, round(scale * size)) for size in sizes]
    # Both updates use the same memory, because the pages of two allocations can differ in size.
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
        tokens: Number of tokens of a rank in the measurement. 0: the tokens of a microbatch or, on
            a CPU, 256.
        rounds: Number of timed rounds.
        device: Device of the measurement.

    Returns:
        A dict from each column of COLUMNS to a `Speedup`. With ep = 1, EPSO has no effect, and the
        value of its columns is None. The key `tokens` has the number of tokens of a rank in the
        measurement.

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
        mesh: Mesh of the run.
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
    """Return the operations and collectives of a step with `sharding` as the value of
    `optim.sharding`. Collectives of gradients and parameters do not overlap with computation."""
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
    """Return the operations of the experts of a layer on a rank for one microbatch with uniform
    routing: a tuple for forward and a tuple for backward. The operations of forward are a gather of
    rows, two grouped products, SwiGLU and a weighted sum.
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
    elif "experts" in modules:  # backward recomputes only the input of SwiGLU
        backward += (moved, up)
    return forward, backward


def format_table(results: dict[str, dict[str, Any]], conditions: str) -> str:
    """Return a Markdown table of speed-ups. Each run has a row with the results of `study_moe` and,
    if the paper has the run, a row with the values of the paper. The sentence `conditions` about
    the measurement precedes the table."""
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
