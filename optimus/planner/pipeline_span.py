"""Time of a pipeline step without transfers, from closed formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optimus.parallel.pipeline.actions import Action, Kind
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.simulate import simulate


def pipeline_s(
    schedule: str,
    num_ranks: int,
    virtual_stages: int,
    num_microbatches: int,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    weights_s: Sequence[float] = (),
) -> float:
    """Return the seconds of a pipeline step without transfers.

    For gpipe, 1f1b and interleaved, the result is a closed formula: the busiest rank runs all
    microbatches, and one microbatch passes through the other ranks. It is exact for equal stages,
    where the bubble is (p-1)/v microbatches (arXiv 2104.04473). For zb-h1 with m >= p, the action
    W fills a part of the bubble, and the bubble is (p-1) (F + I - W) (arXiv 2401.10241, table 2).
    If m < p, zb-h1 is simulated.

    Args:
        schedule: Name of the schedule.
        num_ranks: p.
        virtual_stages: v.
        num_microbatches: m.
        forward_s, backward_s: Seconds of each stage for one microbatch, p*v values.
        weights_s: Seconds of the action W of each stage, which are included in `backward_s`; by
            default half of them.
    """
    p, v, m = num_ranks, virtual_stages, num_microbatches
    if schedule == "gpipe":
        return _filled(forward_s, p, v, m) + _filled(backward_s, p, v, m)
    if p == 1 or schedule in ("1f1b", "interleaved"):
        both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
        return _filled(both, p, v, m)
    if schedule == "zb-h1" and m >= p:
        both = [f + b for f, b in zip(forward_s, backward_s, strict=True)]
        weights = weights_s or [seconds / 2 for seconds in backward_s]
        busiest = both.index(max(both))
        idle = sum(both) - both[busiest] - 2 * (sum(weights) - weights[busiest])
        return m * both[busiest] + max(0.0, idle)
    return simulate(make_schedule(schedule, p, v, m), _costs(forward_s, backward_s)).end


def _filled(stage_s: Sequence[float], p: int, v: int, m: int) -> float:
    """Return the seconds of m microbatches on the busiest rank, plus the seconds in which one
    microbatch passes through one of the v stages of each other rank."""
    of_ranks = [sum(stage_s[rank::p]) for rank in range(p)]
    busiest = max(of_ranks)
    return m * busiest + (sum(of_ranks) - busiest) / v


def _costs(forward_s: Sequence[float], backward_s: Sequence[float]) -> Callable[[Action], float]:
    """Return the costs of actions. The two halves of a divided backward pass take equal times."""

    def cost(action: Action) -> float:
        if action.kind is Kind.F:
            return forward_s[action.stage]
        if action.kind is Kind.B:
            return backward_s[action.stage]
        return backward_s[action.stage] / 2 if action.kind in (Kind.I, Kind.W) else 0.0

    return cost
