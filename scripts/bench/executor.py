#!/usr/bin/env python3
"""What the pipeline executor itself costs, per action.

    python scripts/bench/executor.py [--microbatches 64] [--repeat 30]

`interpretation`: the loop over a list whose actions do nothing, trace included. `bookkeeping`: one
rank with four stages of a model that adds one number to its input, so that what is left is the
entry into autograd and what the executor keeps; the same forwards and backwards called by hand are
taken off. Sends between processes are not in it. CPU seconds of one thread; medians and quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

from optimus.dist.collectives import ALONE
from optimus.parallel.pipeline.executor import Executor
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.stage import Output, Terms, backward

STAGES = 4


class OneNumber:
    """A stage whose model is a number added to the stream."""

    def __init__(self, number: int) -> None:
        self.is_first, self.is_last = number == 0, number == STAGES - 1
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor | None, tokens: Tensor, document_ids: Tensor | None) -> Output:
        x = self.weight + (tokens if x is None else x)
        terms = Terms(None, x, x, [])
        return Output(None, x.sum(), terms) if self.is_last else Output(x, None, terms)


class Interpreted(Executor):
    """Plays the list with a table of actions that do nothing."""

    def run_nothing(self, microbatches: list) -> None:
        table = dict.fromkeys(self._table, lambda action: None)
        self._play(self._actions, microbatches, table)

    def keep(self, actions: list) -> None:
        self._actions = actions


def by_hand(stages: dict[int, OneNumber], microbatches: list) -> None:
    """The same forwards and backwards with no executor."""
    for tokens, ids in microbatches:
        outputs, inputs, x = [], [], None
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


def measure(function, repeat: int) -> list[float]:
    function()
    taken = []
    for _ in range(repeat):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return taken


def show(name: str, values: list[float]) -> None:
    low, middle, high = statistics.quantiles(values, n=4)
    print(f"{name}: {middle:.2f} us an action (quartiles {low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=30)
    args = parser.parse_args()
    torch.set_num_threads(1)
    schedule = make_schedule("interleaved", 1, STAGES, args.microbatches)
    stages = {number: OneNumber(number) for number in range(STAGES)}
    executor = Interpreted(schedule, stages, ALONE, lambda tokens: (1,), torch.float32)
    microbatches = [(torch.zeros(1), None)] * args.microbatches
    compute = [a for a in schedule.ranks[0] if a.kind in executor._table]
    executor.keep(compute)
    nothing = measure(lambda: executor.run_nothing(microbatches), args.repeat)
    show("interpretation with trace", [1e6 * s / len(compute) for s in nothing])

    def run() -> None:
        executor.run(microbatches, lambda stage, microbatch: None, lambda: None)

    whole, hand = [], []
    for _ in range(args.repeat):  # in turn, so that a noisy machine disturbs both alike
        whole += measure(run, 1)
        hand += measure(lambda: by_hand(stages, microbatches), 1)
    show("with autograd entry, all", [1e6 * s / len(compute) for s in whole])
    show("the same by hand", [1e6 * s / len(compute) for s in hand])
    own = [1e6 * (a - b) / len(compute) for a, b in zip(whole, hand, strict=True)]
    show("bookkeeping (the difference)", own)


if __name__ == "__main__":
    main()
