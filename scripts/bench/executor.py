#!/usr/bin/env python3
"""Measure the overhead of the pipeline executor per action. An action is, for example, a send.

    python scripts/bench/executor.py [--microbatches 64] [--repeat 30]

The script prints three measurements, each as median and quartiles:

`interpretation` is the CPU time of the executor's loop if actions do nothing.

`bookkeeping` is the CPU time that the executor adds to forward and backward passes: the time of the
passes with an executor, minus the time of the passes without an executor.

`posting` is the wall-clock time to post a send or a receive of --bytes bytes over gloo. This time
does not include waiting for a message.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.multiprocessing as processes
from torch import Tensor, nn

from optimus.distributed.groups import Channels, join_groups
from optimus.distributed.mesh import Mesh
from optimus.distributed.world import end_world, start_world
from optimus.launch.environment import LaunchEnv
from optimus.observe.events import ActionTrace
from optimus.parallel.pipeline.actions import RECEIVES, SENDS, Kind
from optimus.parallel.pipeline.executor import Executor
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.stage import Output, Terms, backward

STAGES = 4


class OneNumber:
    """Pipeline stage that adds its only parameter, a scalar, to the input."""

    def __init__(self, number: int, stages: int = STAGES) -> None:
        self.is_first, self.is_last = number == 0, number == stages - 1
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor | None, tokens: Tensor, document_ids: Tensor | None) -> Output:
        x = self.weight + (tokens if x is None else x)
        terms = Terms(None, x, x, [])
        return Output(None, x.sum(), terms) if self.is_last else Output(x, None, terms)


class Interpreted(Executor):
    """Executor whose actions do nothing, to measure only the time of the executor's loop."""

    def run_nothing(self, microbatches: list) -> None:
        table = dict.fromkeys(self._table, lambda action: None)
        self._play(self._actions, microbatches, table)

    def keep(self, actions: list) -> None:
        self._actions = actions


def by_hand(stages: dict[int, OneNumber], microbatches: list) -> None:
    """Run the forward and backward passes of all stages without an executor."""
    for tokens, ids in microbatches:
        outputs: list[Any] = []
        inputs: list[Any] = []
        x: Tensor | None = None
        for number in range(STAGES):
            if x is not None:
                x = x.detach().requires_grad_()
            inputs.append(x)
            outputs.append(stages[number].forward(x, tokens, ids))
            x = outputs[-1].x
        grad = None
        for number in reversed(range(STAGES)):
            backward(outputs[number], grad)
            grad = None if inputs[number] is None else inputs[number].grad


def measure(function: Callable[[], Any], repeat: int) -> list[float]:
    function()
    seconds = []
    for _ in range(repeat):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return seconds


def post(rank: int, init_method: str, microbatches: int, repeat: int, length: int) -> None:
    """Run the stage `rank` of a pipeline of two stages. Each stage is a separate process. In stage
    0, print the times to post a send and a receive of `length` fp32 values."""
    torch.set_num_threads(1)
    world = start_world(LaunchEnv(rank, 2, rank, 2, init_method), device="cpu")
    channels = join_groups(Mesh(pp=2), world).channels
    stages: dict[int, Any] = {rank: OneNumber(rank, 2)}
    schedule = make_schedule("1f1b", 2, 1, microbatches)
    trace = ActionTrace()
    executor = Executor(
        schedule, stages, channels, lambda tokens: (1, length), torch.float32, trace
    )
    posted: dict[str, list[float]] = {"send": [], "receive": []}
    for _ in range(repeat):
        trace.events.clear()
        executor.run([(torch.zeros(1, length), None)] * microbatches, lambda *_: None, lambda: None)
        for name, kinds in (("send", SENDS), ("receive", RECEIVES)):
            took = [e.end_ns - e.start_ns for e in trace.events if Kind[e.kind] in kinds]
            posted[name].append(statistics.median(took) / 1e3)
    end_world()
    if rank == 0:
        for name, values in posted.items():
            show(f"posting a {name} of {4 * length} bytes over gloo", values)


def show(name: str, values: list[float]) -> None:
    low, middle, high = statistics.quantiles(values, n=4)
    print(f"{name}: {middle:.2f} us per action (quartiles {low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--bytes", type=int, default=65536, help="of a message between stages")
    args = parser.parse_args()
    torch.set_num_threads(1)
    schedule = make_schedule("interleaved", 1, STAGES, args.microbatches)
    stages: dict[int, Any] = {number: OneNumber(number) for number in range(STAGES)}
    executor = Interpreted(schedule, stages, Channels(), lambda tokens: (1, 1), torch.float32)
    microbatches = [(torch.zeros(1, 1), None)] * args.microbatches
    compute = [a for a in schedule.ranks[0] if a.kind in executor._table]
    executor.keep(compute)
    nothing = measure(lambda: executor.run_nothing(microbatches), args.repeat)
    show("interpretation", [1e6 * s / len(compute) for s in nothing])

    def run() -> None:
        executor.run(microbatches, lambda stage, microbatch: None, lambda: None)

    whole, hand = [], []
    for _ in range(args.repeat):  # in turn, so that other load affects both times
        whole += measure(run, 1)
        hand += measure(lambda: by_hand(stages, microbatches), 1)
    show("executor with autograd", [1e6 * s / len(compute) for s in whole])
    show("the same passes without an executor", [1e6 * s / len(compute) for s in hand])
    overhead = [1e6 * (a - b) / len(compute) for a, b in zip(whole, hand, strict=True)]
    show("bookkeeping (the difference)", overhead)
    with tempfile.TemporaryDirectory() as folder:
        rank = (f"file://{folder}/meeting", args.microbatches, args.repeat, args.bytes // 4)
        processes.spawn(post, rank, nprocs=2)


if __name__ == "__main__":
    main()
