"""The AdamW step with its casts: ours in one pass against others, and against the memory itself.

A step takes bf16 gradients to updated fp32 states and bf16 parameters, on one flat chunk. All
contestants update the same states in turn, so that a noisy machine disturbs all alike; before, each
is held against ours on a small copy. `bound` moves the same bytes (28 a parameter, half read, half
written) by the best of torch's plain passes, timed in the same turns. The exact norm stands beside.
"""

from __future__ import annotations

import functools
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimus.bench.meters import (
    Absent,
    clocked,
    free_bytes,
    on_threads,
    paired,
    turns,
    versions,
)
from optimus.errors import ConfigError, OptimusError, counted
from optimus.platform import device_name
from optimus_kernels import adamw_, backend
from optimus_kernels.squares import BLOCK, new_bins, square_bins_
from optimus_kernels.squares import reference as square_bins_twin_

BYTES = 28
"""Moved for a parameter: 14 read (master, m, v, gradient), 14 written (states and parameter)."""
_HELD = 16
"""Bytes that the states, gradient and parameter take for a parameter."""
SIZES = (1 << 16, 1 << 26)
"""Parameters: 1 MiB, which a core's own cache holds, and 1 GiB, beyond any."""
_PARAMETERS_A_SAMPLE = 1 << 22
"""Small sizes are repeated so often that the clock's own steps do not count."""
_NUMBERS: dict[str, Any] = {
    "lr": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
}
_OF_A_CLASS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
"""The same as optimizers of torch and DeepSpeed take them."""
PEERS = ("ours", "torch", "deepspeed", "bound")


@dataclass
class Chunk:
    """Flat states of n parameters, and the fp32 gradient that peers without casts need."""

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
    """The fused pass."""
    states = (chunk.master, chunk.exp_avg, chunk.exp_avg_sq, chunk.grad, chunk.param)
    return functools.partial(adamw_, *states, **_NUMBERS, step=10)


def of_torch(chunk: Chunk) -> Callable[[], Any]:
    """torch.optim.AdamW(fused=True) between the two casts, without its bookkeeping."""
    step = torch.tensor(10.0, device=chunk.master.device)  # as if counted already

    def run() -> None:
        chunk.grad32.copy_(chunk.grad)
        torch._fused_adamw_(
            [chunk.master], [chunk.grad32], [chunk.exp_avg], [chunk.exp_avg_sq], [],
            [step], amsgrad=False, maximize=False, **_NUMBERS,
        )  # fmt: skip
        chunk.param.copy_(chunk.master)

    return run


def of_deepspeed(chunk: Chunk) -> Callable[[], Any]:
    """DeepSpeed's cpu_adam between the two casts. Raises Absent."""
    if chunk.master.device.type != "cpu":
        raise Absent("it computes on CPUs")
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        parameter = torch.nn.Parameter(chunk.master)
        optimizer = DeepSpeedCPUAdam([parameter], adamw_mode=True, **_OF_A_CLASS)
    except Exception as error:  # building it fails in many ways
        raise Absent(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
    moments = {"exp_avg": chunk.exp_avg, "exp_avg_sq": chunk.exp_avg_sq}
    parameter.grad = chunk.grad32

    def run() -> None:
        chunk.grad32.copy_(chunk.grad)
        optimizer.state[parameter] = {"step": 9, **moments}
        optimizer.step()
        chunk.param.copy_(chunk.master)

    return run


def bound(chunk: Chunk) -> list[Callable[[], Any]]:
    """Plain passes that read and write a parameter's 14 bytes each way, over as much memory.

    In place: each byte written has been read before, as in an update.
    """
    n = chunk.master.numel()
    memory = torch.zeros(n * _HELD // 4, device=chunk.master.device)
    bytes_each_way = n * BYTES // 2
    part = memory[: bytes_each_way // 4]
    half = bytes_each_way // 8
    parts = [part[:half], part[half : 2 * half]]
    return [part.neg_, lambda: torch._foreach_neg_(parts)]


def bench_optimizer(
    sizes: Sequence[int], threads: Sequence[int], rounds: int, peers: Sequence[str], device: str
) -> dict[str, Any]:
    """Seconds and paired ratios of each size and number of threads. Raises ConfigError."""
    unknown = [name for name in peers if name not in PEERS]
    if unknown:
        raise ConfigError(f"--peers {unknown[0]}: it is one of {', '.join(PEERS)}")
    if rounds < 1 or min(sizes) < 16 or min(threads) < 1:
        raise ConfigError("--rounds and --threads begin at 1, --size at 16")
    place = torch.device(device)
    wanted = list(dict.fromkeys(("ours", "bound", *(peers or PEERS))))
    cases = []
    for size in sizes:
        if 2.5 * _HELD * size > free_bytes(place):
            cases.append({"parameters": size, "skipped": "too little memory"})
            continue
        for count in threads if place.type == "cpu" else (1,):
            with on_threads(count):
                cases.append(_case(size, count, rounds, wanted, place))
    found = backend.active(place)
    return {
        "device": device_name(place),
        "kernels": found.name,
        "load": os.getloadavg()[0],
        "versions": versions(),
        "rounds": rounds,
        "cases": cases,
    }


def _case(
    size: int, threads: int, rounds: int, wanted: Sequence[str], device: torch.device
) -> dict[str, Any]:
    runs: dict[str, list[Callable[[], Any]]] = {}
    absent: dict[str, str] = {}
    makers = {"ours": ours, "torch": of_torch, "deepspeed": of_deepspeed}
    chunk = Chunk.make(size, device)
    for name in wanted:
        try:
            if name != "bound":
                _check(name, makers[name], device)
                runs[name] = [makers[name](chunk)]
        except Absent as why:
            absent[name] = str(why)
    runs["bound"] = bound(chunk)
    # Processor time of one thread, else wall: on a busy machine the former is the one to trust.
    clock = int(device.type == "cpu" and threads == 1)
    times = _race(runs, max(1, _PARAMETERS_A_SAMPLE // size), rounds, clock, device)
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
    """The exact sum of squares of `size` fp32 gradients: seconds by round, on the wall (clock 0) or
    of the processor (1), and paired ratios to ours. `read` is torch's plain sum of the same."""
    flat, bins = torch.randn(max(BLOCK, size - size % BLOCK), device=device), new_bins(device)
    ways: dict[str, list[Callable[[], Any]]] = {
        "ours": [lambda: square_bins_(bins, flat)],
        "twin": [lambda: square_bins_twin_(bins, flat)],
        "read": [flat.sum],
    }
    times = _race(ways, 1, rounds, clock, device)
    ratios = {name: paired(times[name], times["ours"]) for name in ("twin", "read")}
    return {"seconds": times, "ours_is_faster_paired": ratios}


def _check(name: str, make: Callable[[Chunk], Callable[[], Any]], device: torch.device) -> None:
    """Hold a contestant against the twin's formula in fp64. Raises OptimusError."""
    chunk, exact = Chunk.make(4096, device), Chunk.make(4096, device)
    make(chunk)()
    parameter = torch.nn.Parameter(exact.master.double())
    optimizer = torch.optim.AdamW([parameter], **_OF_A_CLASS)
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
        raise OptimusError(f"{name} is off by {error:.1e} of an update from AdamW in fp64")


def _race(
    runs: dict[str, list[Callable[[], Any]]],
    repeat: int,
    rounds: int,
    clock: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """By contestant and round: seconds of one step, of the best of its ways."""

    def repeated(way: Callable[[], Any]) -> None:
        for _ in range(repeat):
            way()

    times: dict[str, list[float]] = {name: [] for name in runs}
    for number, name in turns(runs, rounds):
        found = [clocked(functools.partial(repeated, way), device)[0] for way in runs[name]]
        if number:
            times[name].append(min(seconds[clock] for seconds in found) / repeat)
    return times


def format_result(result: dict[str, Any]) -> str:
    """A table a case, in Markdown."""
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
        twin, read = (case["norm"]["ours_is_faster_paired"][name][1] for name in ("twin", "read"))
        lines.append(
            f"\nThe exact norm's kernel is {twin:.2f} times as fast as its twin in torch, and "
            f"{read:.2f} times as fast as torch's plain sum."
        )
        lines += [f"\n{name}: {why}" for name, why in case["absent"].items()]
    return "\n".join(lines)
