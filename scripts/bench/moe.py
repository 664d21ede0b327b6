#!/usr/bin/env python3
"""Compare the speed of our MoE block, FastSparseMoE, with the MoE blocks of other libraries.

    python scripts/bench/moe.py [--case SHAPE-DTYPE] [--peers A,B] [--threads N] [--json]

First, the output and gradients of each block are compared with the results of a loop over the
experts. If our block differs, the script ends with an error. For a block of another library (a peer
in moe_peers.py), the script prints the relative error or, if the block fails, the error message.
Then all blocks, including their routers, are timed in turn, with the same weights and input. A pass
is forward and backward.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
import torch.nn.functional as F
from moe_peers import PEERS, Peer, gradient_of
from torch import Tensor, nn

from optimus import platform
from optimus.bench.meters import (
    PeakGemm,
    clear_gradients,
    clocked,
    non_gemm_share,
    paired,
    saved_bytes,
    turns,
)
from optimus.config import make_config
from optimus.errors import ConfigError, OptimusError, counted
from optimus.model.moe import FastSparseMoE

# As in configs/model: hidden size, intermediate size of an expert, experts, experts per token.
SHAPES = {
    "small": (512, 256, 64, 8),
    "mula-7b-a1b": (2048, 1024, 64, 8),
    "mula-20b-a2b": (2048, 1024, 96, 8),
    "mula-100b-a7b": (3072, 1536, 144, 8),
    "mula-220b-a10b": (3072, 1536, 240, 8),
}
CPU_CASES = ("small-fp32", "mula-7b-a1b-fp32", "small-bf16", "mula-7b-a1b-bf16")
GPU_CASES = tuple(f"{shape}-bf16" for shape in SHAPES if shape != "small")
_CPU_TOKENS = {"small": 2048}
_GPU_TOKENS = 16384
_SLOW_S = 15.0
"""Time of a pass, in seconds, above which a block is timed in a single round."""
_TOO_SLOW_ON_A_CPU = "hf-eager"
"""Peer that needs 35 s on a CPU for a pass at the size of Mula-7B. On a CPU, this peer is left out
for large shapes unless --peers contains it."""
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
    "time / time of ours (ratios of rounds: min, median, max)",
)
_LIMITS = {"fp32": 1e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Case:
    """The sizes and the dtype of one MoE block, and the number of tokens in a batch."""

    name: str
    dtype: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: int

    @property
    def forward_flops(self) -> float:
        """FLOPs of a forward pass: the experts' three matrix products and the router. A
        multiply-add is two FLOPs."""
        slots = self.tokens * self.top_k
        return 2.0 * (
            3 * slots * self.hidden * self.inner + self.tokens * self.hidden * self.experts
        )

    @property
    def bytes_needed(self) -> int:
        """Bytes of memory that the measurement of this case needs: the weights, two sets of weight
        gradients, and the activations of a batch."""
        size = 4 if self.dtype == "fp32" else 2
        weights = 3 * self.experts * self.hidden * self.inner
        slots = self.tokens * self.top_k * (4 * self.hidden + 6 * self.inner)
        return size * (3 * weights + 2 * slots)


def make_case(name: str, tokens: int, on_cpu: bool) -> Case:
    """Return the case with the name `name`, in the form SHAPE-DTYPE. `tokens` is the number of
    tokens in a batch. With 0, a batch has 1024 tokens on a CPU (2048 for the shape `small`) and
    16384 on an accelerator."""
    shape, _, dtype = name.rpartition("-")
    if shape not in SHAPES or dtype not in ("fp32", "bf16"):
        raise ConfigError(
            f"--case {name} must be SHAPE-fp32 or SHAPE-bf16 with SHAPE one of {', '.join(SHAPES)}"
        )
    if tokens < 0:
        raise ConfigError(f"--tokens {tokens} must be at least 1")
    default = _CPU_TOKENS.get(shape, 1024) if on_cpu else _GPU_TOKENS
    return Case(name, dtype, *SHAPES[shape], tokens or default)


def make_block(case: Case) -> FastSparseMoE:
    """Return the MoE block of Optimus with the sizes of `case`, on the meta device."""
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


class OurBlock(nn.Module):
    """MoE block of Optimus, including the router and the router's statistics."""

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


class PeerBlock(nn.Module):
    """MoE block that uses the experts of another library (a peer), and a plain implementation of
    OLMoE's router."""

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
    """Measure our MoE block and the blocks of other libraries (peers) for each case. On a CPU,
    measure each case with each thread count; on another device, measure each case once.

    Args:
        cases: Names SHAPE-DTYPE; empty for the default cases of the device.
        peers: Keys of PEERS; empty for all peers except peers that are too slow on a CPU.
        threads: Thread counts for a CPU.
        rounds: Number of timed rounds.
        tokens: Number of tokens in a batch; 0 for the default of the case.
        device: Name of the device, or `auto`.

    Returns:
        The conditions of the measurement and the results of each case, as JSON values. Each time is
        a pair [best, median] of seconds per pass.

    Raises:
        ConfigError: A case or a peer is unknown, or an argument is too small.
        OptimusError: The results of our block and of the loop over the experts differ.
    """
    chosen_device = platform.pick_device(0, device)
    on_cpu = chosen_device.type == "cpu"
    if unknown := [name for name in peers if name not in PEERS]:
        raise ConfigError(f"--peers {','.join(unknown)} is unknown; use {', '.join(PEERS)}")
    if rounds < 1 or min(threads, default=0) < 1:
        raise ConfigError("--rounds and --threads must be at least 1")
    result: dict[str, Any] = {
        "device": platform.device_name(chosen_device),
        "date": time.strftime("%Y-%m-%d"),
        "versions": common.versions(),
        "rounds": rounds,
        "cases": [],
    }
    for name in cases or (CPU_CASES if on_cpu else GPU_CASES):
        case = make_case(name, tokens, on_cpu)
        slow = on_cpu and case.inner * case.hidden > 1 << 20
        names = peers or [name for name in PEERS if not slow or name != _TOO_SLOW_ON_A_CPU]
        for count in threads if on_cpu else threads[:1]:
            with common.on_threads(count):
                measured = _measure_case(case, names, rounds, chosen_device)
            result["cases"].append({**vars(case), "threads": count, **measured})
    return result


def _measure_case(
    case: Case, peers: Sequence[str], rounds: int, device: torch.device
) -> dict[str, Any]:
    if (free := common.free_bytes(device)) < case.bytes_needed:
        return {
            "skipped": f"needs {case.bytes_needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free"
        }
    weights, x, grad = make_tensors(case, device)
    blocks: dict[str, OurBlock | PeerBlock] = {"ours": OurBlock(case, weights)}
    absent: dict[str, str] = {}
    for name in peers:
        try:
            blocks[name] = PeerBlock(case, weights, PEERS[name])
        except common.Absent as error:
            absent[name] = str(error)
    errors, first = _check(case, weights, blocks, x, grad, absent)
    properties = {
        name: {
            "relative_error": errors[name],
            "saved_bytes_per_token": saved_bytes(block, x) / case.tokens,
            "non_gemm_share": non_gemm_share(block, x, grad, device),
        }
        for name, block in blocks.items()
        if first[name] < _SLOW_S or name == "ours"
    }
    times, peak = _race(case, blocks, first, rounds, x, grad, device)
    return {"absent": absent, **_summary(case, properties, times, peak, device)}


def make_tensors(case: Case, device: torch.device) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return random tensors for a case: (weights by name, input [T, D] that requires a gradient,
    gradient [T, D] of the output)."""
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
    blocks: dict[str, OurBlock | PeerBlock],
    x: Tensor,
    grad: Tensor,
    absent: dict[str, str],
) -> tuple[dict[str, float], dict[str, float]]:
    """Compare the output and the gradients of each block with the results of the loop over the
    experts.

    If a block of another library fails, it is removed from `blocks`, and the reason is added to
    `absent`.

    Returns:
        Two dicts with the names of the blocks as keys. The values are the greatest relative error
        of the block, and the seconds of the second pass of the block.

    Raises:
        OptimusError: The relative error of our block is above the limit for the dtype.
    """
    reference = _outputs(PeerBlock(case, weights, PEERS["loop"]), x, grad)
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    errors, first = {}, {}
    for name, block in list(blocks.items()):
        try:
            outputs = _outputs(block, x, grad)
            # Time the second pass, because Triton can compile kernels in the first pass. On a CPU,
            # use the processor time, else the wall-clock time.
            first[name] = clocked(functools.partial(block, x), x.device, grad)[1][x.is_cpu]
        except Exception as error:
            if name == "ours":
                raise
            absent[name] = f"failed: {' '.join(str(error).split())[:200]}"
            del blocks[name]
            continue
        finally:
            clear_gradients(block, x)
        errors[name] = max(
            float(norm(value - expected) / norm(expected))
            for value, expected in zip(outputs, reference, strict=True)
        )
    if not errors["ours"] <= _LIMITS[case.dtype]:
        raise OptimusError(
            f"{case.name}: the relative error of our block is {errors['ours']:.1e} compared with "
            f"the loop over the experts; the limit is {_LIMITS[case.dtype]:.0e}"
        )
    return errors, first


def _outputs(block: OurBlock | PeerBlock, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    out = block(x)
    out.backward(grad)
    result = (out.detach(), gradient_of(x), gradient_of(block.router), *block.gradients())
    clear_gradients(block, x)
    return result


def _batch(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    values = torch.empty_like(like, requires_grad=False).normal_(generator=generator)
    return values.requires_grad_()


def _race(
    case: Case,
    blocks: Mapping[str, OurBlock | PeerBlock],
    first: Mapping[str, float],
    rounds: int,
    x: Tensor,
    grad: Tensor,
    device: torch.device,
) -> tuple[dict, list]:
    """Measure the time of all blocks and of a large matrix product, in turn.

    Returns:
        (times, peak). `times` maps each block to a list with an entry for each round. An entry
        contains two pairs (wall-clock seconds, CPU seconds): for forward, and for forward and
        backward together. `peak` contains the FLOPs of the matrix product, and a list with a pair
        (wall-clock seconds, CPU seconds) for each round.
    """
    # Each timed pass has a new batch and follows an untimed pass with another batch, because oneDNN
    # compiles a product for each new shape, and in each training step the experts have other
    # numbers of rows. With one batch for all rounds, the products of the peers would be compiled
    # only once, and the blocks would remove each other's products from oneDNN's cache.
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
        clear_gradients(blocks[name], x)
        timed = _batch(x, 2 * number + 1)
        measured = clocked(functools.partial(blocks[name], timed), device, grad)
        clear_gradients(blocks[name], x)
        if number:
            times[name].append(measured)
    return times, [peak.flops, peaks[1:]]


def _summary(
    case: Case,
    properties: Mapping[str, dict[str, Any]],
    times: Mapping[str, list],
    peak: Sequence,
    device: torch.device,
) -> dict[str, Any]:
    """Return the speed of each block and the peak FLOP/s of the device. On a CPU with one thread,
    speeds are computed from CPU time. In all other cases, they are computed from wall-clock
    time."""
    clock = int(device.type == "cpu" and torch.get_num_threads() == 1)
    flops, peaks = peak
    peak_flops = flops / min(seconds[clock] for seconds in peaks)
    ours = [whole[clock] for _, whole in times["ours"]]
    rows = {}
    for name, pairs in times.items():
        whole = [pair[1][clock] for pair in pairs]
        forward = [pair[0][clock] for pair in pairs]
        backward = [both - first for first, both in zip(forward, whole, strict=True)]
        speed = 3 * case.forward_flops / min(whole)
        rows[name] = {
            **properties.get(name, {}),
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
        "clock": ("wall", "cpu")[clock],
        "peak_tflops": peak_flops / 1e12,
        "blocks": rows,
    }


def format_result(result: dict[str, Any]) -> str:
    """Return `result` as Markdown text, with a table for each case."""
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
        lines += [f"\n{name}: {reason}" for name, reason in case["absent"].items()]
    return "\n".join(lines)


def _row(name: str, block: dict[str, Any]) -> str:
    def cell(key: str, form: str) -> str:
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
        cell("non_gemm_share", ".0%"),
        cell("saved_bytes_per_token", ",.0f"),
        cell("relative_error", ".1e"),
        f"{block['ours_is_faster']:.2f} ({least:.2f}, {median:.2f}, {most:.2f})",
    ]
    return f"| {' | '.join(cells)} |"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="SHAPE-DTYPE",
        help="such as small-bf16; may be repeated (default: all cases of the device)",
    )
    parser.add_argument(
        "--peers", default="", metavar="A,B", help="only these peers (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default: 5)")
    parser.add_argument(
        "--threads",
        type=int,
        action="append",
        help="thread count on a CPU; may be repeated (default: 1, 2)",
    )
    parser.add_argument(
        "--tokens", type=int, default=0, help="tokens in a batch (0: depends on case and device)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, xpu or auto")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    peers = [name for name in args.peers.split(",") if name]
    result = bench_moe(
        args.case, peers, args.threads or (1, 2), args.rounds, args.tokens, args.device
    )
    print(json.dumps(result) if args.json else format_result(result))


if __name__ == "__main__":
    sys.exit(common.run_script(main))
