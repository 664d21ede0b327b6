"""Pipeline schedules: pure functions that return the forward and backward passes of each rank.

A backward pass is one action B or, in a zero-bubble schedule, two actions: I (gradient of the
stage's input) and W (gradients of the stage's weights). On each stage, the actions of one kind run
in the order of the microbatches. Deterministic mode sums gradients in this order.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise

from optimus.errors import ConfigError
from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.communicate import add_transfers, add_update

Lists = list[list[Action]]
"""The compute actions of each pipeline rank, in order."""


def gpipe(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Lists:
    """Return the GPipe schedule: all forward passes, then all backward passes.

    Each rank keeps the activations of all microbatches.
    """
    ranks = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * virtual_stages, num_ranks)
        forwards = [Action(Kind.F, s, j) for s in stages for j in range(num_microbatches)]
        backwards = [
            Action(Kind.B, s, j) for s in reversed(stages) for j in range(num_microbatches)
        ]
        ranks.append(forwards + backwards)
    return ranks


def pipedream_flush(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Lists:
    """Return the 1F1B schedule PipeDream-Flush (Narayanan et al. 2021, arXiv 2104.04473, figure 4).

    After warm-up forward passes, each rank alternates one forward and one backward pass. With p
    ranks, rank r keeps the activations of at most p - r microbatches.
    """
    assert virtual_stages == 1
    ranks = []
    for rank in range(num_ranks):
        forwards = [Action(Kind.F, rank, j) for j in range(num_microbatches)]
        backwards = [Action(Kind.B, rank, j) for j in range(num_microbatches)]
        ranks.append(_alternate(forwards, backwards, num_ranks - rank - 1))
    return ranks


def interleaved(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Lists:
    """Return the interleaved 1F1B schedule (arXiv 2104.04473, section 2.2).

    The microbatches run in rounds of about `num_ranks` microbatches. Each rank runs a round on the
    rank's first stage, then on its second stage, and so on. The bubble is `virtual_stages` times
    smaller than with one stage per rank.
    """
    rounds = _rounds(num_microbatches, num_ranks)
    ranks = []
    for rank in range(num_ranks):
        stages = list(range(rank, num_ranks * virtual_stages, num_ranks))
        forwards = [Action(Kind.F, s, j) for group in rounds for s in stages for j in group]
        backwards = [Action(Kind.B, s, j) for group in rounds for s in stages[::-1] for j in group]
        longest = max(map(len, rounds))
        warm_up = (virtual_stages - 1) * longest + 2 * (num_ranks - rank - 1)
        ranks.append(_alternate(forwards, backwards, warm_up))
    return ranks


def zero_bubble_h1(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Lists:
    """Return the zero-bubble schedule ZB-H1 (Qi et al. 2023, arXiv 2401.10241).

    ZB-H1 is 1F1B with backward divided into I (gradient of the stage's input) and W (gradients of
    the stage's weights). The actions W fill the time in which a 1F1B rank is idle. Each rank keeps
    the activations of at most `num_ranks` microbatches.
    """
    assert virtual_stages == 1
    ranks = []
    for rank in range(num_ranks):
        forwards = [Action(Kind.F, rank, j) for j in range(num_microbatches)]
        inputs = [Action(Kind.I, rank, j) for j in range(num_microbatches)]
        weights = (Action(Kind.W, rank, j) for j in range(num_microbatches))
        actions = []
        for action in _alternate(forwards, inputs, num_ranks - rank - 1):
            actions.append(action)
            # W of microbatch j follows I of microbatch j + rank.
            if action.kind is Kind.I and action.microbatch >= rank:
                actions.append(next(weights))
        ranks.append([*actions, *weights])
    return ranks


GENERATORS: dict[str, Callable[[int, int, int], Lists]] = {
    "gpipe": gpipe,
    "1f1b": pipedream_flush,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
}
"""Maps a value of `parallel.schedule` to the function that returns the schedule's compute actions.
The function's arguments are `num_ranks`, `virtual_stages` and `num_microbatches`."""
_ONE_STAGE_ONLY = ("1f1b", "zb-h1")


def make_schedule(
    name: str,
    num_ranks: int,
    virtual_stages: int,
    num_microbatches: int,
    reduce_each: bool = False,
) -> Schedule:
    """Return the schedule of one training step, with transfers, gradient reductions and the
    optimizer step.

    Args:
        name: a key of GENERATORS.
        num_ranks: p, the number of pipeline ranks.
        virtual_stages: v, the number of stages per rank.
        num_microbatches: m, the number of microbatches per data-parallel rank.
        reduce_each: True to reduce a stage's gradients after each microbatch, False to reduce the
            gradients only after the last microbatch.

    Raises:
        ConfigError: the schedule does not support `virtual_stages` above 1.
    """
    assert num_ranks >= 1 and num_microbatches >= 1
    check_virtual_stages(name, virtual_stages)
    lists = GENERATORS[name](num_ranks, virtual_stages, num_microbatches)
    complete = add_transfers(lists, num_ranks, virtual_stages)
    ranks = tuple(add_update(actions, reduce_each) for actions in complete)
    return Schedule(name, num_ranks, virtual_stages, num_microbatches, ranks, reduce_each)


def check_virtual_stages(name: str, virtual_stages: int) -> None:
    """Raise ConfigError unless the schedule `name` supports `virtual_stages` stages per rank."""
    if name in _ONE_STAGE_ONLY and virtual_stages > 1:
        raise ConfigError(
            f"parallel.virtual_stages = {virtual_stages}, but parallel.schedule = {name!r} "
            "supports only one stage per rank; use parallel.schedule = 'interleaved' (or 'gpipe'), "
            "or parallel.virtual_stages = 1"
        )


def make_evaluation(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """Return a schedule of forward passes only, for an evaluation.

    The microbatches run in rounds of about `num_ranks` microbatches, so that transfers overlap with
    computation.
    """
    rounds = _rounds(num_microbatches, num_ranks)
    lists = [
        [
            Action(Kind.F, stage, j)
            for group in rounds
            for stage in range(rank, num_ranks * virtual_stages, num_ranks)
            for j in group
        ]
        for rank in range(num_ranks)
    ]
    ranks = tuple(map(tuple, add_transfers(lists, num_ranks, virtual_stages)))
    return Schedule("evaluation", num_ranks, virtual_stages, num_microbatches, ranks)


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """Return one rank's actions in the order of a 1F1B schedule.

    The list has `warm_up` forward passes, then alternately one forward and one backward pass, and
    finally the remaining backward passes.
    """
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = list(chain.from_iterable(pairs))
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def _rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    # The rounds have about equal sizes. Each has at least num_ranks microbatches, unless there are
    # fewer microbatches in total.
    count = max(1, num_microbatches // num_ranks)
    bounds = [num_microbatches * i // count for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
