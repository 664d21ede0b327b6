"""Pipeline schedules: pure functions that return the forward and backward passes of each rank.

Every stage runs its backward passes (and its W) in microbatch order, since bit-identical sums of
gradients need one order (CONTRACT.md, "Deterministic mode"). The functions of `communicate` then
add communication, reductions and the update to the passes of any schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise

from optimus.errors import ConfigError
from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.communicate import add_transfers, add_update

Lists = list[list[Action]]
"""Compute actions by pipeline rank."""


def gpipe(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Lists:
    """Return all forwards, then all backwards: the simplest order, but it keeps all activations."""
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
    """Return forwards until the first backward is possible, then one backward and one forward in
    turn: rank r keeps at most p - r microbatches alive (PipeDream-Flush; Narayanan et al. 2021,
    arXiv 2104.04473, figure 4)."""
    assert virtual_stages == 1
    ranks = []
    for rank in range(num_ranks):
        forwards = [Action(Kind.F, rank, j) for j in range(num_microbatches)]
        backwards = [Action(Kind.B, rank, j) for j in range(num_microbatches)]
        ranks.append(_alternate(forwards, backwards, num_ranks - rank - 1))
    return ranks


def interleaved(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Lists:
    """Return 1F1B over v stages a rank. A round of about p microbatches passes through the first
    stage of each rank, then through the second, and so on, which divides the bubble by v (arXiv
    2104.04473, section 2.2).

    If p does not divide m, the rounds are as equal as possible. None is smaller than p, unless
    there are fewer than p microbatches.
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
    """Return ZB-H1 (Qi et al. 2023, arXiv 2401.10241): 1F1B with backward in two halves, I and W.

    Rank r runs W r microbatches later than I, in time that is idle in 1F1B. So every rank keeps at
    most p microbatches alive, as the first rank does in 1F1B.
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
"""Schedules by the names that `parallel.schedule` takes."""
_ONE_STAGE_ONLY = ("1f1b", "zb-h1")


def make_schedule(
    name: str,
    num_ranks: int,
    virtual_stages: int,
    num_microbatches: int,
    reduce_each: bool = False,
) -> Schedule:
    """Return the schedule of one step, with communication, reductions and the update.

    Args:
        name: a key of GENERATORS.
        num_ranks: p, the number of pipeline ranks.
        virtual_stages: v, the number of stages of a rank.
        num_microbatches: m, the number of microbatches of one data rank.
        reduce_each: reduce a stage's gradients after each microbatch (as deterministic mode needs),
            rather than once after the last.

    Raises:
        ConfigError: the schedule has one stage a rank, and `virtual_stages` is larger.
    """
    assert num_ranks >= 1 and num_microbatches >= 1
    if name in _ONE_STAGE_ONLY and virtual_stages > 1:
        raise ConfigError(
            f"parallel.virtual_stages = {virtual_stages}: schedule {name!r} holds one stage a "
            "rank; use parallel.schedule = 'interleaved' (or 'gpipe'), or virtual_stages = 1"
        )
    lists = GENERATORS[name](num_ranks, virtual_stages, num_microbatches)
    complete = add_transfers(lists, num_ranks, virtual_stages)
    ranks = tuple(add_update(actions, reduce_each) for actions in complete)
    return Schedule(name, num_ranks, virtual_stages, num_microbatches, ranks, reduce_each)


def make_evaluation(num_ranks: int, virtual_stages: int, num_microbatches: int) -> Schedule:
    """Return a schedule of forwards only, for an evaluation. They run in rounds of about p
    microbatches, as in `interleaved`, so that every rank computes while results travel."""
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
    """Return `warm_up` forwards, then one forward and one backward in turn, then the remaining
    backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    steady = list(chain.from_iterable(pairs))
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


def _rounds(num_microbatches: int, num_ranks: int) -> list[range]:
    count = max(1, num_microbatches // num_ranks)
    bounds = [num_microbatches * i // count for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]
