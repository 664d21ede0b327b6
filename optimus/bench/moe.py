"""FastSparseMoE against other MoE blocks: forward and backward with the router, in one process.

All contestants share weights and input and take turns, so that a noisy machine disturbs all alike.
Each is first held against a plain loop over the experts; a wrong one of ours ends the benchmark.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus import platform
from optimus.bench.meters import (
    Absent,
    PeakGemm,
    clocked,
    forget,
    free_bytes,
    non_gemm_share,
    on_threads,
    paired,
    saved_bytes,
    turns,
    versions,
)
from optimus.bench.moe_cases import CPU_CASES, GPU_CASES, Case, make_case
from optimus.bench.moe_peers import PEERS, Peer, gradient_of
from optimus.config import make_config
from optimus.errors import ConfigError, OptimusError, counted
from optimus.model.moe import FastSparseMoE

_SLOW_S = 15.0
"""A contestant that takes longer for a pass is timed once only."""
_TOO_SLOW_ON_A_CPU = "hf-eager"
"""35 s a pass at the size of Mula-7B: left out there unless asked for."""
_COLUMNS = (
    "block",
    "forward ms",
    "backward ms",
    "both, best",
    "median",
    "TFLOP/s",
    "of peak",
    "not GEMM",
    "saved B/token",
    "error",
    "ours is faster (paired: least, median, most)",
)
_LIMITS = {"fp32": 1e-5, "bf16": 1e-2}


def make_block(case: Case) -> FastSparseMoE:
    """Our block at a case's sizes, on the meta device."""
    model = {
        "architecture": "olmoe",
        "num_layers": 1,
        "hidden_size": case.hidden,
        "intermediate_size": case.inner,
        "num_attention_heads": 1,
        "num_experts": case.experts,
        "num_experts_per_tok": case.top_k,
        "vocab_size": 2,
    }
    with torch.device("meta"):
        return FastSparseMoE(make_config({"model": model}).model)


class Ours(nn.Module):
    """Our block, router and its statistics included."""

    def __init__(self, case: Case, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.block = make_block(case)
        self.block.router.weight = self.router = nn.Parameter(weights["router"])
        self.block.experts.gate_up = nn.Parameter(weights["gate_up"])
        self.block.experts.down = nn.Parameter(weights["down"])

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)[0]

    def gradients(self) -> tuple[Tensor, Tensor]:
        experts = self.block.experts
        return gradient_of(experts.gate_up), gradient_of(experts.down)


class Theirs(nn.Module):
    """A peer behind the plain router of OLMoE."""

    def __init__(self, case: Case, weights: dict[str, Tensor], make: Callable[..., Peer]) -> None:
        super().__init__()
        self.router, self.top_k = nn.Parameter(weights["router"]), case.top_k
        self.peer = make(weights["gate_up"], weights["down"], case.top_k)
        self.gradients = self.peer.gradients

    def forward(self, x: Tensor) -> Tensor:
        probs = F.softmax(F.linear(x, self.router), dim=-1, dtype=torch.float)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        return self.peer(x, weights.to(x.dtype), chosen)


def bench_moe(
    cases: Sequence[str] = (),
    peers: Sequence[str] = (),
    threads: Sequence[int] = (1, 2),
    rounds: int = 5,
    tokens: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """Measure each case with each number of threads (on a CPU); the result is ready for JSON.

    Seconds are [best, median] a pass. ConfigError for an unknown case or peer.
    """
    chosen_device = platform.pick_device(0, device)
    on_cpu = chosen_device.type == "cpu"
    if unknown := [name for name in peers if name not in PEERS]:
        raise ConfigError(f"--peers {','.join(unknown)}: known are {', '.join(PEERS)}")
    if rounds < 1 or min(threads, default=0) < 1:
        raise ConfigError("--rounds and --threads must be at least 1")
    result: dict[str, Any] = {
        "device": platform.device_name(chosen_device),
        "date": time.strftime("%Y-%m-%d"),
        "versions": versions(),
        "rounds": rounds,
        "cases": [],
    }
    for name in cases or (CPU_CASES if on_cpu else GPU_CASES):
        case = make_case(name, tokens, on_cpu)
        names = peers or _standard_peers(case, on_cpu)
        for count in threads if on_cpu else threads[:1]:
            with on_threads(count):
                measured = _bench_case(case, names, rounds, chosen_device)
            result["cases"].append({**vars(case), "threads": count, **measured})
    return result


def _standard_peers(case: Case, on_cpu: bool) -> list[str]:
    slow = on_cpu and case.inner * case.hidden > 1 << 20
    return [name for name in PEERS if not slow or name != _TOO_SLOW_ON_A_CPU]


def _bench_case(
    case: Case, peers: Sequence[str], rounds: int, device: torch.device
) -> dict[str, Any]:
    if (free := free_bytes(device)) < case.bytes_needed:
        return {"skipped": f"needs {case.bytes_needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"}
    weights, x, grad = make_tensors(case, device)
    blocks: dict[str, Ours | Theirs] = {"ours": Ours(case, weights)}
    absent: dict[str, str] = {}
    for name in peers:
        try:
            blocks[name] = Theirs(case, weights, PEERS[name])
        except Absent as error:
            absent[name] = str(error)
    errors, first = _check(case, weights, blocks, x, grad, absent)
    facts = {
        name: {
            "relative_error": errors[name],
            "saved_bytes_per_token": saved_bytes(block, x) / case.tokens,
            "non_gemm_share": non_gemm_share(block, x, grad, device),
        }
        for name, block in blocks.items()
        if first[name] < _SLOW_S or name == "ours"
    }
    times, peak = _race(case, blocks, first, rounds, x, grad, device)
    return {"absent": absent, **_summary(case, facts, times, peak, device)}


def make_tensors(case: Case, device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights by name, an input [T, D] that learns, and the gradient of the output."""
    dtype = platform.dtype_of(case.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, std: float) -> Tensor:
        values = torch.empty(*shape, dtype=dtype, device=device)
        return values.normal_(std=std, generator=generator)

    weights = {
        "router": normal(case.experts, case.hidden, std=case.hidden**-0.5),
        "gate_up": normal(case.experts, 2 * case.inner, case.hidden, std=case.hidden**-0.5),
        "down": normal(case.experts, case.hidden, case.inner, std=case.inner**-0.5),
    }
    x = normal(case.tokens, case.hidden, std=1.0).requires_grad_()
    return weights, x, normal(case.tokens, case.hidden, std=1.0)


def _check(
    case: Case,
    weights: dict[str, Tensor],
    blocks: dict[str, Ours | Theirs],
    x: Tensor,
    grad: Tensor,
    absent: dict[str, str],
) -> tuple[dict[str, float], dict[str, float]]:
    """Largest relative error of output and gradients to the loop, and seconds of the second pass.

    A peer that fails is taken out of `blocks` and named in `absent`; ours may not fail.
    """
    reference = _outputs(Theirs(case, weights, PEERS["loop"]), x, grad)
    errors, first = {}, {}
    for name, block in list(blocks.items()):
        try:
            found = _outputs(block, x, grad)
            first[name] = _seconds(block, x, grad)
        except Exception as error:
            if name == "ours":
                raise
            absent[name] = f"failed: {' '.join(str(error).split())[:200]}"
            del blocks[name]
            continue
        finally:
            forget(block, x)
        errors[name] = max(map(_relative, found, reference))
    if not errors["ours"] <= _LIMITS[case.dtype]:
        raise OptimusError(f"{case.name}: ours is off by {errors['ours']:.1e} from the plain loop")
    return errors, first


def _seconds(block: nn.Module, x: Tensor, grad: Tensor) -> float:
    """A pass in seconds, on a CPU of the processor. Not the first, in which Triton may compile."""
    return clocked(functools.partial(block, x), x.device, grad)[1][x.is_cpu]


def _outputs(block: Ours | Theirs, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    out = block(x)
    out.backward(grad)
    result = (out.detach(), gradient_of(x), gradient_of(block.router), *block.gradients())
    forget(block, x)
    return result


def _relative(value: Tensor, reference: Tensor) -> float:
    size = torch.linalg.vector_norm(reference, dtype=torch.float32)
    return float(torch.linalg.vector_norm(value - reference, dtype=torch.float32) / size)


def _batch(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    values = torch.empty_like(like, requires_grad=False).normal_(generator=generator)
    return values.requires_grad_()


def _race(
    case: Case,
    blocks: Mapping[str, Ours | Theirs],
    first: Mapping[str, float],
    rounds: int,
    x: Tensor,
    grad: Tensor,
    device: torch.device,
) -> tuple[dict, list]:
    """By block and round (wall, cpu) of forward and of the whole pass; FLOPs and (wall, cpu) of
    the peak's product.

    Every round has a batch of its own, and before it each block passes over another one untimed:
    oneDNN compiles for shapes, and in training each step routes differently. With one batch for
    all rounds the unrounded shapes of the peers would be compiled once, and blocks would push
    each other's out of its cache.
    """
    peak = PeakGemm(x.dtype, device)
    times: dict[str, list] = {name: [] for name in blocks}
    peaks = []
    for number, name in turns((*blocks, "the peak"), rounds):
        if name not in blocks:
            peaks.append(peak.time(device))
            continue
        if first[name] > _SLOW_S and number != 1:
            continue
        blocks[name](_batch(x, 2 * number)).backward(grad)
        forget(blocks[name], x)
        timed = _batch(x, 2 * number + 1)
        measured = clocked(functools.partial(blocks[name], timed), device, grad)
        forget(blocks[name], x)
        if number:
            times[name].append(measured)
    return times, [peak.flops, peaks[1:]]


def _summary(
    case: Case,
    facts: Mapping[str, dict[str, Any]],
    times: Mapping[str, list],
    peak: Sequence,
    device: torch.device,
) -> dict[str, Any]:
    """Figures of each block by the clock to trust: processor time of one thread, else wall."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = int(alone)
    flops, peaks = peak
    peak_flops = flops / min(seconds[clock] for seconds in peaks)
    ours = [whole[clock] for _, whole in times["ours"]]
    rows = {}
    for name, pairs in times.items():
        whole = [pair[1][clock] for pair in pairs]
        forward = [pair[0][clock] for pair in pairs]
        backward = [both - one for one, both in zip(forward, whole, strict=True)]
        speed = 3 * case.forward_flops / min(whole)
        rows[name] = {
            **facts.get(name, {}),
            "rounds": len(pairs),
            "forward_s": [min(forward), statistics.median(forward)],
            "backward_s": [min(backward), statistics.median(backward)],
            "forward_backward_s": [min(whole), statistics.median(whole)],
            "tflops": speed / 1e12,
            "of_peak": speed / peak_flops,
            "ours_is_faster": min(whole) / min(ours),
            "ours_is_faster_paired": paired(whole, ours),
        }
    return {
        "clock": "cpu" if alone else "wall",
        "peak_tflops": peak_flops / 1e12,
        "blocks": rows,
    }


def format_result(result: dict[str, Any]) -> str:
    """A table a case, in Markdown."""
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{result['device']}, {packages}, {result['date']}, {counted(result['rounds'], 'round')}"
    ]
    for case in result["cases"]:
        title = "{name}: D{hidden} F{inner} E{experts} K{top_k} T{tokens}".format(**case)
        if "skipped" in case:
            lines.append(f"\n{title}: skipped, {case['skipped']}")
            continue
        lines += [
            f"\n{title}, {counted(case['threads'], 'thread')}, {case['clock']} clock, "
            f"peak {case['peak_tflops']:.3g} TFLOP/s",
            "",
            f"| {' | '.join(_COLUMNS)} |",
            "|---" * len(_COLUMNS) + "|",
        ]
        lines += [_row(name, block) for name, block in case["blocks"].items()]
        lines += [f"\n{name}: {why}" for name, why in case["absent"].items()]
    return "\n".join(lines)


def _row(name: str, block: dict[str, Any]) -> str:
    def fact(key: str, form: str) -> str:
        return format(block[key], form) if key in block else "-"

    both = block["forward_backward_s"]
    least, median, most = block["ours_is_faster_paired"]
    cells = [
        name,
        f"{block['forward_s'][0] * 1e3:.1f}",
        f"{block['backward_s'][0] * 1e3:.1f}",
        f"{both[0] * 1e3:.1f}",
        f"{both[1] * 1e3:.1f}",
        f"{block['tflops']:.3g}",
        f"{block['of_peak']:.0%}",
        fact("non_gemm_share", ".0%"),
        fact("saved_bytes_per_token", ",.0f"),
        fact("relative_error", ".1e"),
        f"{block['ours_is_faster']:.2f} ({least:.2f}, {median:.2f}, {most:.2f})",
    ]
    return f"| {' | '.join(cells)} |"
