#!/usr/bin/env python3
"""Backward of a MoE block into fp32 gradients: straight to them, against by way of autograd.

    python scripts/bench/expert_gradients.py [--case mula-7b-a1b-bf16] [--threads 1] [--rounds 5]

Both ways add to gradients that stand already, as every microbatch of an update but the first does;
they take turns, and the figure is the paired ratio. Each way then runs in a process of its own,
which tells how far its memory rose over the run's gradients, weights and one forward pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import torch
from torch import Tensor, nn

import optimus_kernels as kernels
from optimus.bench.meters import clocked, device_name, paired, versions
from optimus.bench.moe import make_block, make_tensors
from optimus.bench.moe_cases import CPU_CASES, Case, make_case
from optimus.bench.peak import peak_above

WAYS = ("straight", "autograd")
_CLOCK = 1  # processor time


class Contestant:
    """A block with gradients of its own; weights are shared."""

    def __init__(self, way: str, case: Case, weights: dict[str, Tensor]) -> None:
        self.block = make_block(case)
        self.block.router.weight = nn.Parameter(weights["router"])
        experts = self.block.experts
        experts.gate_up, experts.down = (nn.Parameter(weights[n]) for n in ("gate_up", "down"))
        for parameter in self.block.parameters():
            if parameter.dtype is not torch.float32:
                parameter.grad_dtype = torch.float32
            parameter.grad = torch.zeros(parameter.shape)
        if way == "straight":
            experts.weight_grads = lambda: kernels.WeightGrads(
                experts.gate_up.grad, experts.down.grad, add=True
            )

    def backward(self, x: Tensor, grad: Tensor) -> float:
        """Processor seconds of a backward pass."""
        forward, whole = clocked(lambda: self.block(x)[0], x.device, grad)
        x.grad = None
        return whole[_CLOCK] - forward[_CLOCK]


def race(case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds by way and round; after the first round, which warms up, the sums must agree."""
    weights, x, grad = make_tensors(case, torch.device("cpu"))
    contestants = {way: Contestant(way, case, weights) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS if number % 2 else WAYS[::-1]:
            taken = contestants[way].backward(x, grad)
            if number:
                seconds[way].append(taken)
    one, other = (list(contestants[way].block.parameters()) for way in WAYS)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(one, other, strict=True)), "bits differ"
    return seconds


def rise(way: str, case: Case) -> int:
    """By how many bytes this process grew in two backward passes."""
    weights, x, grad = make_tensors(case, torch.device("cpu"))
    contestant = Contestant(way, case, weights)
    for parameter in contestant.block.parameters():
        parameter.grad.fill_(1e-9)  # so that the memory is there
    contestant.block(x)

    def twice() -> None:
        for _ in range(2):
            contestant.backward(x, grad)

    return peak_above(twice)


def _rise_apart(way: str, args: argparse.Namespace) -> int:
    command = [sys.executable, __file__, "--case", args.case, "--threads", str(args.threads)]
    command += ["--tokens", str(args.tokens), "--rise", way]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="small-bf16", help=f"such as {', '.join(CPU_CASES)}")
    parser.add_argument("--tokens", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rise", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    case = make_case(args.case, args.tokens, on_cpu=True)
    if args.rise:
        print(rise(args.rise, case))
        return
    seconds = race(case, args.rounds)
    result = {
        **vars(case),
        "device": device_name(torch.device("cpu")),
        "threads": args.threads,
        "versions": versions(),
        "backward_s": {way: statistics.median(found) for way, found in seconds.items()},
        "straight_by_autograd": paired(seconds["straight"], seconds["autograd"]),
        "rise_bytes": {way: _rise_apart(way, args) for way in WAYS},
    }
    if args.json:
        print(json.dumps(result))
        return
    least, median, most = result["straight_by_autograd"]
    print(f"{case.name}, {case.tokens} tokens, {args.threads} threads, {args.rounds} rounds")
    print(f"backward, straight / autograd: {median:.2f} ({least:.2f} to {most:.2f})")
    for way in WAYS:
        s, memory = result["backward_s"][way], result["rise_bytes"][way]
        print(f"{way}: {s:.3f} s of processor, memory rises by {memory / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
