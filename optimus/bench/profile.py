"""`optimus bench step --profile`: time of an update, by phase and by model component.

Phases are the actions of the executor, timed without a profiler. The times of components are
measured in an additional update with torch's profiler. An event of the forward pass belongs to the
component whose module ran the op. An event of the backward pass belongs to the component whose
forward pass created the autograd node of the event.

Each component is compared with its bound, an estimate of the component's shortest possible time.
The bound is the time of the component's matrix products at the peak FLOP/s. For a component without
matrix products, the bound is the time to read and write the component's data at the memory
bandwidth. The bandwidth is measured with a triad, a = b + 2c, and both the peak and the bandwidth
are measured in the same process as the updates. The measurement needs a CPU and one process.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from optimus import platform
from optimus.bench.meters import GEMMS, PeakGemm
from optimus.bench.step import make_rank
from optimus.config import Config
from optimus.data.batch import BatchPlan
from optimus.distributed.world import start_world
from optimus.errors import ConfigError, counted
from optimus.launch.environment import SINGLE
from optimus.model.attention import Attention
from optimus.model.flops import count_parameters, head_multiply_adds
from optimus.model.layers import MLP, Embedding, LayerNorm, RMSNorm
from optimus.model.moe import Experts
from optimus.model.router import Router
from optimus.model.transformer import Transformer
from optimus.observe.events import ActionTrace
from optimus.train.loop import fix_arithmetic

_WARMUP = 3
_TRIAD = 1 << 25
_MODULES: tuple[tuple[type, str], ...] = (
    (Embedding, "embedding"),
    (RMSNorm, "norms"),
    (LayerNorm, "norms"),
    (Router, "router"),
    (Experts, "experts, rows"),
    (MLP, "feed-forward"),
    (nn.Linear, "projections"),
    (Attention, "rotary"),
)
"""Pairs (module type, component). An op belongs to the component of the innermost module that runs
the op."""
_OPS = {
    "aten::_scaled_dot_product": "attention",
    "_CrossEntropySum": "cross-entropy",
    "optimus::adamw_": "AdamW",
    "torch::autograd::AccumulateGrad": "gradients added",
}
"""Maps a substring of op names to a component. An op with this substring in its name, and all ops
that this op calls, belong to the component. _OPS overrides _MODULES."""
_PHASES = {"F": "forward", "REDUCE_GRAD": "checks and reduction", "OPT_STEP": "norm and update"}
_DISPATCH, _NORM = "Python and dispatch", "norm of gradients"
_PREFIX = "component: "
_RANGES = re.compile(rf"{_PREFIX}|autograd::|[A-Z_]+\(stage")
_VIEWS = re.compile(
    "aten::(t|to|transpose|permute|slice|select|narrow|split|unbind|expand|alias|detach|squeeze|"
    "unsqueeze|view|reshape|flatten|unflatten|linear|matmul|as_strided|_unsafe_view|_reshape_alias|"
    "empty|empty_like|empty_strided|new_empty)"
)
"""Pattern of the names of ops that only call other ops, return views, or allocate memory."""


def profile_step(config: Config, steps: int) -> dict[str, Any]:
    """Measure phases and components in updates on random tokens.

    Args:
        config: Configuration of the run.
        steps: Number of timed updates.

    Returns:
        A dict with the conditions of the measurement, `phases` and `parts`. `phases` has the median
        seconds of each phase. `parts` has an entry for each component: its seconds in forward, in
        backward (with recomputation) and in the rest of an update, and its bound (an estimate of
        the shortest possible time) in seconds. The bound is None for some components.

    Raises:
        ConfigError: The device is not a CPU.
    """
    world = start_world(SINGLE, device=config.train.device)
    if world.device.type != "cpu":
        raise ConfigError(
            f"--profile needs a CPU, but the device is {world.device}; set train.device=cpu"
        )
    threads = fix_arithmetic(config.train, world.launch.local_world_size)
    trace = ActionTrace()
    rank = make_rank(config, world, trace)
    microbatches, updater = rank.microbatches(), rank.updater()
    step_s: list[float] = []
    phases: dict[str, list[float]] = defaultdict(list)
    for step in range(1, steps + 1 + _WARMUP):
        trace.events.clear()
        start = time.perf_counter()
        updater.run(step, microbatches)
        seconds = time.perf_counter() - start
        if step > _WARMUP:
            step_s.append(seconds)
            of_step: dict[str, float] = defaultdict(float)
            for event in trace.events:
                of_step[_PHASES.get(event.kind, "backward")] += event.busy_ns / 1e9
            of_step["other"] = seconds - sum(of_step.values())
            for phase, value in of_step.items():
                phases[phase].append(value)
    peak, bandwidth = _best_speeds(config, world.device)
    bounds = _bounds(config, rank.plan, peak, bandwidth)
    start = time.perf_counter()
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    profiling = torch.profiler.profile(activities=on_cpu)
    with _named_modules(rank.local.model), profiling as profiler:
        updater.run(steps + 1 + _WARMUP, microbatches)
    profiled = time.perf_counter() - start
    return {
        "device": platform.device_name(world.device),
        "torch": torch.__version__,
        "threads": threads,
        "dtype": config.train.dtype,
        "tokens_per_update": rank.plan.tokens,
        "updates": steps,
        "step_s": statistics.median(step_s),
        "fastest_s": min(step_s),
        "profiled_s": profiled,
        "peak_gflops": peak / 1e9,
        "bandwidth_gbytes": bandwidth / 1e9,
        "phases": {phase: statistics.median(values) for phase, values in phases.items()},
        "parts": _rows(profiler.events(), bounds),
    }


def _best_speeds(config: Config, device: torch.device) -> tuple[float, float]:
    """Measure and return two speeds: the FLOP/s of a large matrix product in the dtype of the run,
    and the bytes/s of a triad, a = b + 2c."""
    peak = PeakGemm(platform.dtype_of(config.train.dtype), device)
    flops = peak.flops / min(peak.time(device)[0] for _ in range(5))
    a, b, c = (torch.ones(_TRIAD) for _ in range(3))
    return flops, 3 * a.nbytes / platform.best_of(
        5, lambda: torch.add(b, c, alpha=2, out=a), device
    )


def _bounds(config: Config, plan: BatchPlan, peak: float, bandwidth: float) -> dict[str, float]:
    """Return the bound of each component: the shortest possible time in seconds of the component's
    forward and backward. If a component has no matrix products, the bound assumes a single kernel
    that reads and writes all data once. `peak` is in FLOP/s, `bandwidth` in bytes/s."""
    model, tokens = config.model, plan.tokens
    width = platform.dtype_of(config.train.dtype).itemsize
    dim, slots = model.hidden_size, tokens * model.num_experts_per_tok
    layers = range(model.num_layers)
    q, kv = model.num_attention_heads * model.head_size, model.num_kv_heads * model.head_size
    swiglu = [3 * dim * model.layer(number).intermediate_size for number in layers]
    sparse = sum(swiglu[number] for number in model.sparse_layers)
    flops = {
        "projections": len(layers) * 2 * dim * (q + kv),
        "vocabulary": head_multiply_adds(model),
        "attention": len(layers) * plan.seq_len * q,  # causal: half of S * S
        "feed-forward": sum(swiglu) - sparse,
        "experts, products": sparse * model.num_experts_per_tok,
        "router": dim * sum(model.experts_by_layer),
    }
    normed = (2 * len(layers) + 1) * dim + (
        len(layers) * (q + kv) if model.architecture == "olmoe" else 0
    )
    inner = sum(model.layer(n).intermediate_size for n in model.sparse_layers)
    numbers = {
        "norms": 5 * tokens * normed,  # forward: x, y; backward: x, dy, dx
        "rotary": 4 * tokens * len(layers) * (q + kv),
        # 8 * dim: gather of x in forward, gathers of x and dy in backward, and two sums. 9 * inner:
        # h and a in forward, and h, da, dh and a in backward. h is twice as wide as the activation
        # a, and dh is twice as wide as da.
        "experts, rows": slots * (len(model.sparse_layers) * 8 * dim + 9 * inner),
        "cross-entropy": 3 * tokens * model.vocab_size,
        "embedding": 4 * tokens * dim,
    }
    seconds = {name: 6 * tokens * value / peak for name, value in flops.items()}
    seconds |= {name: width * value / bandwidth for name, value in numbers.items()}
    parameters = count_parameters(model)[0]
    # Bytes of a parameter's master weight, moments and gradient, and of a narrow parameter.
    adamw = 28 if width == 4 else 28 + width
    for name, size in (("AdamW", adamw), ("gradients cleared and looked at", 8), (_NORM, 4)):
        seconds[name] = size * parameters / bandwidth
    return seconds


@contextlib.contextmanager
def _named_modules(model: Transformer) -> Iterator[None]:
    """Context manager. Within the context, the forward of each module is marked in the profile with
    the module's component."""
    handles = []
    for module in model.modules():
        name = next((name for kind, name in _MODULES if isinstance(module, kind)), None)
        if module is model.head:
            name = "vocabulary"
        if name is not None:
            ranges: list[Any] = []
            handles.append(module.register_forward_pre_hook(functools.partial(_open, name, ranges)))
            handles.append(module.register_forward_hook(functools.partial(_close, ranges)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _open(name: str, ranges: list[Any], module: nn.Module, inputs: object) -> None:
    ranges.append(torch.profiler.record_function(_PREFIX + name))
    ranges[-1].__enter__()


def _close(ranges: list[Any], module: nn.Module, inputs: object, output: object) -> None:
    ranges.pop().__exit__(None, None, None)


def _rows(events: Iterable[Any], bounds: dict[str, float]) -> list[dict[str, Any]]:
    """Return a dict for each component, with the component's bound and the total times of its
    events. The component with the longest time is first."""
    ordered = sorted(events, key=lambda event: event.time_range.start)
    in_forward = _components_of_nodes(ordered)
    seconds: dict[str, dict[str, float]] = defaultdict(
        lambda: {"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0}
    )
    for event in ordered:
        component, phase = _classify(event, in_forward)
        column = phase if phase in ("forward", "backward") else "update"
        seconds[component][f"{column}_s"] += event.self_cpu_time_total / 1e6
    rows = [
        {"part": name, **times, "bound_s": bounds.get(name), "seconds": sum(times.values())}
        for name, times in seconds.items()
    ]
    return sorted(rows, key=lambda row: -row["seconds"])


def _components_of_nodes(events: Iterable[Any]) -> dict[int, str]:
    """Return a dict that maps the sequence number of each autograd node to the component whose
    forward created the node."""
    # If several ops have the same sequence number, the last of these ops created the node.
    return {
        event.sequence_nr: name
        for event in events
        if event.sequence_nr >= 0 and (name := _innermost(event))
    }


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _innermost(event: Any) -> str:
    names = (ancestor.name for ancestor in _ancestors(event))
    return next((name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)), "")


def _classify(event: Any, in_forward: dict[int, str]) -> tuple[str, str]:
    """Return the component and the phase to which the self time of an event (without the time of
    its children) belongs."""
    component, phase, backward = _innermost(event), "", False
    for ancestor in _ancestors(event):
        for op, name in _OPS.items():
            if op in ancestor.name:
                component = name
        if ancestor.name.startswith("autograd::engine::evaluate_function"):
            backward = True
            component = component or in_forward.get(ancestor.sequence_nr, "")
        kind, bracket, _ = ancestor.name.partition("(stage")
        if bracket:
            phase = _PHASES.get(kind, "backward")
    if event.name in GEMMS and component.startswith("experts"):
        component = "experts, products"
    elif _VIEWS.fullmatch(event.name) or _RANGES.match(event.name):
        component = _DISPATCH
    if not component:
        component = _NORM if phase == _PHASES["OPT_STEP"] else "other"
        if phase in ("", _PHASES["REDUCE_GRAD"]):
            component = "gradients cleared and looked at"
    return component, "backward" if backward else phase


def format_profile(result: dict[str, Any]) -> str:
    """Return the result of `profile_step` as Markdown."""
    step = result["step_s"]
    lines = [
        f"{result['device']}, torch {result['torch']}, {counted(result['threads'], 'thread')}, "
        f"{result['dtype']}, {result['tokens_per_update']} tokens an update; peak "
        f"{result['peak_gflops']:.0f} GFLOP/s, triad {result['bandwidth_gbytes']:.1f} GB/s",
        f"an update {step:.3f} s (median of {result['updates']}, fastest "
        f"{result['fastest_s']:.3f}; under the profiler {result['profiled_s']:.3f})",
        "",
        "| phase | s | share |",
        "|---|---|---|",
    ]
    for phase, seconds in result["phases"].items():
        lines.append(f"| {phase} | {seconds:.3f} | {seconds / step:.1%} |")
    total = sum(row["seconds"] for row in result["parts"])
    lines += [
        "",
        "| part | forward, s | backward | update | share | bound, s | times the bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["parts"]:
        columns = (row[f"{name}_s"] for name in ("forward", "backward", "update"))
        times = " | ".join(f"{seconds:.3f}" if seconds >= 5e-4 else "" for seconds in columns)
        bound = row["bound_s"]
        ratio = f"{bound:.3f} | {row['seconds'] / bound:.1f}" if bound else " | "
        lines.append(f"| {row['part']} | {times} | {row['seconds'] / total:.1%} | {ratio} |")
    return "\n".join(lines)
