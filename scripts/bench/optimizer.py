#!/usr/bin/env python3
"""Compare the time of our AdamW step with other libraries and with the memory bandwidth limit.

    python scripts/bench/optimizer.py [--size N] [--threads N] [--rounds N] [--peers A,B] [--json]

A step reads bf16 gradients and updates fp32 states and bf16 parameters. All tensors are flat. The
compared programs update the same states in turn. First, the result of each program on small tensors
is compared with AdamW in fp64.

`ours` is the fused op of Optimus. `torch` is torch's fused AdamW, and `deepspeed` is DeepSpeed's
cpu_adam. `torch` and `deepspeed` need two additional ops, which cast the gradients to fp32 and the
parameters to bf16.

`bound` is the limit by memory bandwidth: a simple in-place op of torch that reads and writes the
same number of bytes as a step. Two ops of this type are timed, and `bound` is the time of the
faster op.

The script also measures the time to compute the exact norm of gradients.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
from torch import Tensor

from optimus.bench.meters import clocked, paired, turns
from optimus.errors import ConfigError, OptimusError, counted
from optimus.platform import device_name
from optimus_kernels import adamw_, backend
from optimus_kernels.squares import BLOCK, new_bins, square_bins_
from optimus_kernels.squares import reference as square_bins_reference_

BYTES = 28
"""Bytes moved per parameter: 14 read (master, moments, gradient), 14 written (master, moments,
parameter)."""
_STORED = 16
"""Bytes stored per parameter: states, gradient and parameter."""
SIZES = (1 << 16, 1 << 26)
"""Default sizes of a chunk, in parameters. The small chunk needs 1 MiB and fits in the cache of a
core. The large chunk needs 1 GiB and does not fit in a cache."""
_PARAMETERS_PER_SAMPLE = 1 << 22
"""Minimum number of parameters that are updated in a timed sample. For small sizes, a sample
repeats the update, because a single update is too short for the resolution of the clock."""
_HYPERPARAMETERS: dict[str, Any] = {
    "lr": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
_CLASS_HYPERPARAMETERS: dict[str, Any] = {
    "lr": 1e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
}
"""The values of _HYPERPARAMETERS, with the argument names of torch's and DeepSpeed's optimizer
classes."""
PEERS = ("ours", "torch", "deepspeed", "bound")


@dataclass
class Chunk:
    """Flat tensors [n] for the update of n parameters: fp32 master weights and moments, and bf16
    gradient and parameters. Other libraries need an fp32 copy of the gradient, and `grad32` is the
    memory for this copy."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    param: Tensor
    grad32: Tensor

    @classmethod
    def make(cls, size: int, device: torch.device) -> Chunk:
        generator = torch.Generator(device).manual_seed(0)
        master = torch.randn(size, device=device, generator=generator)
        grad = torch.empty_like(master).normal_(generator=generator).bfloat16()
        zeros = torch.zeros_like(master), torch.zeros_like(master)
        return cls(master, *zeros, grad, master.bfloat16(), torch.zeros_like(master))


def ours(chunk: Chunk) -> Callable[[], Any]:
    states = (chunk.master, chunk.exp_avg, chunk.exp_avg_sq, chunk.grad, chunk.param)
    return functools.partial(adamw_, *states, **_HYPERPARAMETERS, step=10)


def torch_adamw(chunk: Chunk) -> Callable[[], Any]:
    """Return a function that casts the gradient of `chunk` to fp32, updates the states with the
    kernel of torch.optim.AdamW(fused=True), and casts the parameters to bf16."""
    step = torch.tensor(
        10.0, device=chunk.master.device
    )  # AdamW counts the step before it calls the kernel

    def run() -> None:
        chunk.grad32.copy_(chunk.grad)
        torch._fused_adamw_(
            [chunk.master], [chunk.grad32], [chunk.exp_avg], [chunk.exp_avg_sq], [],
            [step], amsgrad=False, maximize=False, **_HYPERPARAMETERS,
        )  # fmt: skip
        chunk.param.copy_(chunk.master)

    return run


def deepspeed_adam(chunk: Chunk) -> Callable[[], Any]:
    """Return a function that casts the gradient of `chunk` to fp32, updates the states with
    DeepSpeed's cpu_adam, and casts the parameters to bf16. Raise Absent if cpu_adam cannot run on
    this machine."""
    if chunk.master.device.type != "cpu":
        raise common.Absent("DeepSpeed's cpu_adam runs only on the CPU")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(chunk.master)
        optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **_CLASS_HYPERPARAMETERS)
    except Exception as error:  # the build of cpu_adam raises errors of many types
        raise common.Absent(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
    moments = {"exp_avg": chunk.exp_avg, "exp_avg_sq": chunk.exp_avg_sq}
    parameter.grad = chunk.grad32

    def run() -> None:
        chunk.grad32.copy_(chunk.grad)
        optimizer.state[parameter] = {"step": 9, **moments}
        optimizer.step()
        chunk.param.copy_(chunk.master)

    return run


def bound(chunk: Chunk) -> list[Callable[[], Any]]:
    """Return two functions that each call a simple in-place op of torch. For each parameter of
    `chunk`, an op reads 14 bytes and writes 14 bytes, like an AdamW step."""
    n = chunk.master.numel()
    memory = torch.zeros(n * _STORED // 4, device=chunk.master.device)
    bytes_each_way = n * BYTES // 2
    moved = memory[: bytes_each_way // 4]
    half = bytes_each_way // 8
    halves = [moved[:half], moved[half : 2 * half]]
    return [moved.neg_, lambda: torch._foreach_neg_(halves)]


def bench_optimizer(
    sizes: Sequence[int], threads: Sequence[int], rounds: int, peers: Sequence[str], device: str
) -> dict[str, Any]:
    """Measure AdamW steps on chunks of each size. On a CPU, measure each size with each thread
    count; on another device, measure each size once.

    Args:
        sizes: Sizes of the chunk, in parameters.
        threads: Thread counts for a CPU.
        rounds: Number of timed rounds.
        peers: Elements of PEERS; empty for all.
        device: Name of the device, such as `cpu`.

    Returns:
        The conditions of the measurement and the results of each case, as JSON values.

    Raises:
        ConfigError: A peer is unknown, or an argument is too small.
        OptimusError: The result of a compared program differs from AdamW in fp64.
    """
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise ConfigError(f"--peers {unknown[0]} is unknown; use {', '.join(PEERS)}")
    if rounds < 1 or min(sizes) < 16 or min(threads) < 1:
        raise ConfigError("--rounds and --threads must be at least 1, and --size at least 16")
    torch_device = torch.device(device)
    names = list(dict.fromkeys(("ours", "bound", *(peers or PEERS))))
    cases = []
    for size in sizes:
        if 2.5 * _STORED * size > common.free_bytes(torch_device):
            cases.append({"parameters": size, "skipped": "not enough free memory"})
            continue
        for count in threads if torch_device.type == "cpu" else (1,):
            with common.on_threads(count):
                cases.append(_measure_case(size, count, rounds, names, torch_device))
    return {
        "device": device_name(torch_device),
        "kernels": backend.active(torch_device).name,
        "load": os.getloadavg()[0],
        "versions": common.versions(),
        "rounds": rounds,
        "cases": cases,
    }


def _measure_case(
    size: int, threads: int, rounds: int, names: Sequence[str], device: torch.device
) -> dict[str, Any]:
    runs: dict[str, list[Callable[[], Any]]] = {}
    absent: dict[str, str] = {}
    makers = {"ours": ours, "torch": torch_adamw, "deepspeed": deepspeed_adam}
    chunk = Chunk.make(size, device)
    for name in names:
        try:
            if name != "bound":
                _check(name, makers[name], device)
                runs[name] = [makers[name](chunk)]
        except common.Absent as reason:
            absent[name] = str(reason)
    runs["bound"] = bound(chunk)
    # On a busy machine, CPU time is more reliable than wall-clock time, but CPU time is the sum
    # over all threads.
    clock = int(device.type == "cpu" and threads == 1)
    times = _race(runs, max(1, _PARAMETERS_PER_SAMPLE // size), rounds, clock, device)
    return {
        "parameters": size,
        "threads": threads,
        "clock": ("wall", "cpu")[clock],
        "absent": absent,
        "contestants": {
            name: {
                "seconds": [min(seconds), statistics.median(seconds)],
                "giga_parameters_s": size / min(seconds) / 1e9,
                "gb_s": BYTES * size / min(seconds) / 1e9,
                "ours_is_faster": min(seconds) / min(times["ours"]),
                "ours_is_faster_paired": paired(seconds, times["ours"]),
            }
            for name, seconds in times.items()
        },
        "norm": bench_norm(size, rounds, clock, device),
    }


def bench_norm(size: int, rounds: int, clock: int, device: torch.device) -> dict[str, Any]:
    """Measure the time to compute the exact sum of squares of `size` fp32 gradients.

    Args:
        size: Number of gradients.
        rounds: Number of timed rounds.
        clock: 0 for wall-clock time, 1 for CPU time.
        device: Device of the gradients.

    Returns:
        A dict with two keys. `seconds`: seconds of each round for the op (`ours`), its reference
        implementation (`twin`) and torch's plain sum (`read`). `ours_is_faster_paired`: for `twin`
        and for `read`, the minimum, median and maximum of (time) / (time of `ours`) over the
        rounds.
    """
    flat, bins = torch.randn(max(BLOCK, size - size % BLOCK), device=device), new_bins(device)
    runs: dict[str, list[Callable[[], Any]]] = {
        "ours": [lambda: square_bins_(bins, flat)],
        "twin": [lambda: square_bins_reference_(bins, flat)],
        "read": [flat.sum],
    }
    times = _race(runs, 1, rounds, clock, device)
    ratios = {name: paired(times[name], times["ours"]) for name in ("twin", "read")}
    return {"seconds": times, "ours_is_faster_paired": ratios}


def _check(name: str, make: Callable[[Chunk], Callable[[], Any]], device: torch.device) -> None:
    """Run one step of the program `name` on a small chunk, and compare the result with torch's
    AdamW in fp64. Raise OptimusError if the results differ."""
    chunk, exact = Chunk.make(4096, device), Chunk.make(4096, device)
    make(chunk)()
    parameter = torch.nn.Parameter(exact.master.double())
    optimizer = torch.optim.AdamW([parameter], **_CLASS_HYPERPARAMETERS)
    optimizer.state[parameter] = {
        "step": torch.tensor(9.0),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
    parameter.grad = exact.grad.double()
    optimizer.step()
    moved = (parameter.detach() - exact.master).abs().max()
    error = float((chunk.master - parameter.detach()).abs().max() / moved)
    if not error < 1e-2 or not torch.equal(chunk.param, chunk.master.bfloat16()):
        raise OptimusError(
            f"{name} does not compute AdamW: its fp32 master weights differ from AdamW in fp64 by "
            f"{error:.1e} of the largest change of a parameter (limit 1e-2), or its bf16 "
            "parameters differ from the rounded master weights"
        )


def _race(
    runs: dict[str, list[Callable[[], Any]]],
    repeat: int,
    rounds: int,
    clock: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Measure the time of the programs in `runs`, in turn. Return a dict that maps each program to
    the seconds of a step in each round. If a program has several functions, the time of the fastest
    function is used."""

    def repeated(run: Callable[[], Any]) -> None:
        for _ in range(repeat):
            run()

    times: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in turns(runs, rounds):
        timed = [clocked(functools.partial(repeated, run), device)[0] for run in runs[name]]
        if number:
            times[name].append(min(seconds[clock] for seconds in timed) / repeat)
    return times


def format_result(result: dict[str, Any]) -> str:
    """Return `result` as Markdown text, with a table for each case."""
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"{result['device']}, {packages}, kernels {result['kernels']}, "
        f"{counted(result['rounds'], 'round')}, "
        f"load {result['load']:.1f}"
    ]
    for case in result["cases"]:
        if "skipped" in case:
            lines.append(f"\n{case['parameters']:,} parameters: skipped, {case['skipped']}")
            continue
        lines += [
            f"\n{case['parameters']:,} parameters, {counted(case['threads'], 'thread')}, "
            f"{case['clock']} clock",
            "",
            "| step | ms, best | median | G parameters/s | GB/s of 28 B | "
            "ours is faster, best (paired: least, median, most) |",
            "|---|---|---|---|---|---|",
        ]
        for name, row in case["contestants"].items():
            least, median, most = row["ours_is_faster_paired"]
            best, middle = (1e3 * seconds for seconds in row["seconds"])
            lines.append(
                f"| {name} | {best:.3f} | {middle:.3f} | {row['giga_parameters_s']:.2f} | "
                f"{row['gb_s']:.1f} | {row['ours_is_faster']:.2f} ({least:.2f}, {median:.2f}, "
                f"{most:.2f}) |"
            )
        reference, plain_sum = (
            case["norm"]["ours_is_faster_paired"][name][1] for name in ("twin", "read")
        )
        lines.append(
            f"\nThe kernel of the exact norm is {reference:.2f} times as fast as its reference "
            f"implementation in torch, and {plain_sum:.2f} times as fast as torch's plain sum."
        )
        lines += [f"\n{name}: {reason}" for name, reason in case["absent"].items()]
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--size",
        type=int,
        action="append",
        help="number of parameters; may be repeated (default: 2^16, 2^26)",
    )
    parser.add_argument(
        "--peers", default="", metavar="A,B", help="only these peers (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default: 7)")
    parser.add_argument(
        "--threads",
        type=int,
        action="append",
        help="thread count on a CPU; may be repeated (default: 1, 2)",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    peers = [name for name in args.peers.split(",") if name]
    result = bench_optimizer(
        args.size or SIZES, args.threads or (1, 2), args.rounds, peers, args.device
    )
    print(json.dumps(result) if args.json else format_result(result))


if __name__ == "__main__":
    sys.exit(common.run_script(main))
