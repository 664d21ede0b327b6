"""Where an update's time goes: by phase, and by part of the model beside what the machine can do.

Phases are the executor's actions, timed without a profiler. Parts come from one more update under
torch's profiler, whose events are told apart by the module that ran them; a backward's by the
module whose forward made them. The bound of a part is the time its products take at the peak of a
large product, or what it must read and write at the speed of a triad, each measured in this run.
On a CPU, in one process.
"""

from __future__ import annotations

import contextlib
import functools
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from optimus import platform
from optimus.bench.meters import GEMMS, PeakGemm
from optimus.bench.ours import make_ours
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
from optimus.observe.events import ActionEvent, ActionTrace
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
"""Of the innermost module around an op; what no module and no name below claims is `other`."""
_NAMES = {
    "aten::_scaled_dot_product": "attention",
    "_CrossEntropySum": "cross-entropy",
    "optimus::adamw_": "AdamW",
    "torch::autograd::AccumulateGrad": "gradients added",
}
_PHASES = {"F": "forward", "REDUCE_GRAD": "checks and reduction", "OPT_STEP": "norm and update"}
_DISPATCH, _NORM = "Python and dispatch", "norm of gradients"
_PREFIX = "part: "
_RANGES = re.compile(rf"{_PREFIX}|autograd::|[A-Z_]+\(stage")
_VIEWS = re.compile(
    "aten::(t|to|transpose|permute|slice|select|narrow|split|unbind|expand|alias|detach|squeeze|"
    "unsqueeze|view|reshape|flatten|unflatten|linear|matmul|as_strided|_unsafe_view|_reshape_alias|"
    "empty|empty_like|empty_strided|new_empty)"
)
"""What only leads to other ops, or looks at memory in another way."""


class Row(NamedTuple):
    """A part of the model."""

    part: str
    forward_s: float
    backward_s: float
    """With what is computed again in it."""
    update_s: float
    """And all else outside of the passes."""
    bound_s: float | None
    """None where the part has none."""

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


def profile_step(config: Config, steps: int) -> dict[str, Any]:
    """Phases as the median of `steps` updates on random tokens, parts of one under the profiler.

    Raises ConfigError where the model is not computed on a CPU.
    """
    world = start_world(SINGLE, device=config.train.device)
    if world.device.type != "cpu":
        raise ConfigError(f"--profile is of CPUs, and this is {world.device}; set train.device=cpu")
    threads = fix_arithmetic(config.train, world.launch.local_world_size)
    trace = ActionTrace()
    ours = make_ours(config, world, trace)
    plan, part, microbatches = ours.plan, ours.part, ours.microbatches()
    updater = ours.updater()
    taken: list[float] = []
    phases: dict[str, list[float]] = defaultdict(list)
    for step in range(1, steps + 1 + _WARMUP):
        trace.events.clear()
        start = time.perf_counter()
        updater.run(step, microbatches)
        seconds = time.perf_counter() - start
        if step > _WARMUP:
            taken.append(seconds)
            for phase, value in _by_phase(trace.events, seconds).items():
                phases[phase].append(value)
    peak, bandwidth = _best_speeds(config, world.device)
    bounds = _bounds(config, plan, peak, bandwidth)
    start = time.perf_counter()
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    profiling = torch.profiler.profile(activities=on_cpu)
    with _named_modules(part.model), profiling as profiler:
        updater.run(steps + 1 + _WARMUP, microbatches)
    profiled = time.perf_counter() - start
    rows = _rows(profiler.events(), bounds)
    return {
        "device": platform.device_name(world.device),
        "torch": torch.__version__,
        "threads": threads,
        "dtype": config.train.dtype,
        "tokens_per_update": plan.tokens,
        "updates": steps,
        "step_s": statistics.median(taken),
        "fastest_s": min(taken),
        "profiled_s": profiled,
        "peak_gflops": peak / 1e9,
        "bandwidth_gbytes": bandwidth / 1e9,
        "phases": {phase: statistics.median(values) for phase, values in phases.items()},
        "parts": [row._asdict() | {"seconds": row.seconds} for row in rows],
    }


def _by_phase(events: list[ActionEvent], seconds: float) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for event in events:
        found[_PHASES.get(event.kind, "backward")] += event.busy_ns / 1e9
    found["other"] = seconds - sum(found.values())
    return found


def _best_speeds(config: Config, device: torch.device) -> tuple[float, float]:
    """FLOP/s of a large product in the run's dtype, and bytes/s of a = b + 2c."""
    peak = PeakGemm(platform.dtype_of(config.train.dtype), device)
    flops = peak.flops / min(peak.time(device)[0] for _ in range(5))
    a, b, c = (torch.ones(_TRIAD) for _ in range(3))
    return flops, 3 * a.nbytes / platform.best_of(
        5, lambda: torch.add(b, c, alpha=2, out=a), device
    )


def _bounds(config: Config, plan: BatchPlan, peak: float, bandwidth: float) -> dict[str, float]:
    """Least seconds by part, forward and backward: of products from FLOPs, of the rest from what a
    kernel that did it in one go would read and write."""
    model, tokens = config.model, plan.tokens
    width = platform.dtype_of(config.train.dtype).itemsize
    dim, slots = model.hidden_size, tokens * model.num_experts_per_tok
    layers = range(model.num_layers)
    of_experts = len(model.sparse_layers)
    q, kv = model.num_attention_heads * model.head_size, model.num_kv_heads * model.head_size
    swiglu = [3 * dim * model.layer(number).intermediate_size for number in layers]
    sparse = sum(swiglu[number] for number in model.sparse_layers)
    flops = {
        "projections": len(layers) * 2 * dim * (q + kv),
        "vocabulary": head_multiply_adds(model),
        "attention": len(layers) * plan.seq_len * q,  # the causal half
        "feed-forward": sum(swiglu) - sparse,
        "experts, products": sparse * model.num_experts_per_tok,
        "router": dim * sum(model.experts_by_layer),
    }
    normed = (2 * len(layers) + 1) * dim + (
        len(layers) * (q + kv) if model.architecture == "olmoe" else 0
    )
    inner = sum(model.layer(n).intermediate_size for n in model.sparse_layers)
    numbers = {
        "norms": 5 * tokens * normed,  # x, y; x, dy, dx
        "rotary": 4 * tokens * len(layers) * (q + kv),
        # Copies of x, then of x and dy, and the sums of two results; h, a; h, da, dh, a.
        "experts, rows": slots * (of_experts * 8 * dim + 9 * inner),
        "cross-entropy": 3 * tokens * model.vocab_size,
        "embedding": 4 * tokens * dim,
    }
    seconds = {part: 6 * tokens * value / peak for part, value in flops.items()}
    seconds |= {part: width * value / bandwidth for part, value in numbers.items()}
    parameters = count_parameters(model)[0]
    adamw = 28 if width == 4 else 28 + width  # master, moments, gradient; the parameter
    for part, size in (("AdamW", adamw), ("gradients cleared and looked at", 8), (_NORM, 4)):
        seconds[part] = size * parameters / bandwidth
    return seconds


@contextlib.contextmanager
def _named_modules(model: Transformer) -> Iterator[None]:
    """Within, each forward of a module that has a part is a range of its name."""
    handles = []
    for module in model.modules():
        part = next((part for kind, part in _MODULES if isinstance(module, kind)), None)
        if module is model.head:
            part = "vocabulary"
        if part is not None:
            ranges: list[Any] = []
            handles.append(module.register_forward_pre_hook(functools.partial(_open, part, ranges)))
            handles.append(module.register_forward_hook(functools.partial(_close, ranges)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _open(part: str, ranges: list[Any], module: nn.Module, inputs: object) -> None:
    ranges.append(torch.profiler.record_function(_PREFIX + part))
    ranges[-1].__enter__()


def _close(ranges: list[Any], module: nn.Module, inputs: object, output: object) -> None:
    ranges.pop().__exit__(None, None, None)


def _rows(events: Iterable[Any], bounds: dict[str, float]) -> list[Row]:
    """The profiler's events added up by part, the longest first."""
    ordered = sorted(events, key=lambda event: event.time_range.start)
    part_of = _parts_of_forward(ordered)
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in ordered:
        part, phase = _place(event, part_of)
        column = {"forward": 0, "backward": 1}.get(phase, 2)
        seconds[part][column] += event.self_cpu_time_total / 1e6
    rows = [
        Row(part, forward, backward, update, bounds.get(part))
        for part, (forward, backward, update) in seconds.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)


def _parts_of_forward(events: Iterable[Any]) -> dict[int, str]:
    """The part in which the op that made each node of the graph ran, by the node's number."""
    return {
        event.sequence_nr: part
        for event in events
        if event.sequence_nr >= 0 and (part := _innermost(event))
    }  # of several with a number the last made the node


def _ancestors(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _innermost(event: Any) -> str:
    names = (one.name for one in _ancestors(event))
    return next((name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)), "")


def _place(event: Any, part_of: dict[int, str]) -> tuple[str, str]:
    """The part and the phase of an event's own time."""
    part, phase, backward = _innermost(event), "", False
    for one in _ancestors(event):
        for name, named in _NAMES.items():
            if name in one.name:
                part = named
        if one.name.startswith("autograd::engine::evaluate_function"):
            backward = True
            part = part or part_of.get(one.sequence_nr, "")
        kind, bracket, _ = one.name.partition("(stage")
        if bracket:
            phase = _PHASES.get(kind, "backward")
    if event.name in GEMMS and part.startswith("experts"):
        part = "experts, products"
    elif _VIEWS.fullmatch(event.name) or _RANGES.match(event.name):
        part = _DISPATCH
    if not part:
        part = _NORM if phase == _PHASES["OPT_STEP"] else "other"
        if phase in ("", _PHASES["REDUCE_GRAD"]):
            part = "gradients cleared and looked at"
    return part, "backward" if backward else phase


def format_profile(result: dict[str, Any]) -> str:
    """In Markdown."""
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
    total = sum(part["seconds"] for part in result["parts"])
    lines += [
        "",
        "| part | forward, s | backward | update | share | bound, s | times the bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for part in result["parts"]:
        columns = (part[f"{name}_s"] for name in ("forward", "backward", "update"))
        told = " | ".join(f"{seconds:.3f}" if seconds >= 5e-4 else "" for seconds in columns)
        bound = part["bound_s"]
        against = f"{bound:.3f} | {part['seconds'] / bound:.1f}" if bound else " | "
        lines.append(f"| {part['part']} | {told} | {part['seconds'] / total:.1%} | {against} |")
    return "\n".join(lines)
