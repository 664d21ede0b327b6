"""Goodput: the share of a run's time that is spent on training whose result is kept. The rest of
the time is lost to checkpoints, to restarts, and to training that is repeated after a failure.

Failures are a Poisson process. After a failure, the training since the last checkpoint is lost, and
the restart takes a constant time, during which nodes can fail again. Let r be the rate of failures,
w the time of training between two checkpoints, c the time of a checkpoint and d the time of a
restart. The mean time from the end of a checkpoint to the end of the next checkpoint is then
exp(r d) (exp(r (w + c)) - 1) / r (Daly 2006, doi 10.1016/j.future.2004.11.016).
"""

from __future__ import annotations

import math

_LONGEST = 500.0
"""Largest exponent r (w + c + d). With a larger exponent, the goodput is practically 0."""


def goodput(
    interval_s: float, checkpoint_s: float, restart_s: float, failures_per_s: float
) -> float:
    """Return the goodput, between 0 and 1: the share of the time that is spent on training whose
    result is kept.

    Args:
        interval_s: Seconds of training between two checkpoints.
        checkpoint_s: Seconds for which a checkpoint stops the training.
        restart_s: Seconds from a failure until the run trains again.
        failures_per_s: Mean number of failures per second, added up over all nodes of the run.
    """
    if interval_s == 0:
        return 0.0
    if failures_per_s == 0:
        return 1.0 if math.isinf(interval_s) else interval_s / (interval_s + checkpoint_s)
    exponent = failures_per_s * (interval_s + checkpoint_s)
    if exponent + failures_per_s * restart_s > _LONGEST:
        return 0.0
    if exponent < 1e-12:  # practically no failures
        return interval_s / (interval_s + checkpoint_s)
    mean_s = math.exp(failures_per_s * restart_s) * math.expm1(exponent) / failures_per_s
    return interval_s / mean_s


def best_interval(checkpoint_s: float, restart_s: float, failures_per_s: float) -> float:
    """Return the seconds of training between two checkpoints that give the largest goodput.

    If checkpoints are short, the result is close to sqrt(2 c / r), with the time c of a checkpoint
    and the rate r of failures (Young 1974, doi 10.1145/361147.361115). The result does not depend
    on the time of a restart, `restart_s`. Without failures, the result is infinite.
    """
    if failures_per_s == 0:
        return math.inf
    low, high = 0.0, math.sqrt(2 * checkpoint_s / failures_per_s) + checkpoint_s
    # The derivative of the goodput with respect to w has the sign of 1 - exp(-r (w + c)) - r w,
    # which decreases as w grows.
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        exponent = failures_per_s * (middle + checkpoint_s)
        if -math.expm1(-exponent) > failures_per_s * middle:
            low = middle
        else:
            high = middle
    return (low + high) / 2
