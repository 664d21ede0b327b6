"""Measurement of the NaN check for `optimus bench supervision`. The NaN check searches a training
update for non-finite values. The result is the time of the check divided by the time of the
update."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from optimus import platform
from optimus.bench.step import make_rank
from optimus.config import Config, make_config
from optimus.distributed.world import start_world
from optimus.launch.environment import SINGLE
from optimus.resilience.nonfinite import Watch
from optimus.train.loop import fix_arithmetic

_WARMUP = 2
_T95 = 2.1
"""Upper bound of the 97.5th percentile of Student's t for 20 samples or more."""


def measure_nan_check(config: Config | None, updates: int, bar: float) -> dict[str, Any]:
    """Measure the share of an update's time that the NaN check takes, with the 95 % confidence
    interval.

    The check and the update that contains it are timed together, so that other load affects the two
    times equally. On a CPU, times are processor seconds of all threads.

    Args:
        config: Configuration of the run whose updates are measured in this process; None for a
            small model.
        updates: Number of timed updates.
        bar: Upper limit of the share.

    Returns:
        The dict from `share_figure`, with the number of tokens per update, the number of threads
        and the device added.
    """
    config = config or _small_config()
    world = start_world(SINGLE, device=config.train.device)
    threads = fix_arithmetic(config.train, world.launch.local_world_size)
    rank = make_rank(config, world)
    clock = time.process_time if world.device.type == "cpu" else time.perf_counter
    stopwatch = _Stopwatch(clock, lambda: platform.synchronize(world.device))
    before = Watch.look_at, Watch.any_rank_is_nonfinite
    try:
        for name in ("look_at", "any_rank_is_nonfinite"):
            setattr(Watch, name, stopwatch.wrap(getattr(Watch, name)))
        updater, microbatches = rank.updater(), rank.microbatches()
        shares = []
        for step in range(1, updates + 1 + _WARMUP):
            stopwatch.seconds = 0.0
            platform.synchronize(world.device)
            start = clock()
            updater.run(step, microbatches)
            platform.synchronize(world.device)
            if step > _WARMUP:
                shares.append(stopwatch.seconds / (clock() - start))
    finally:
        Watch.look_at, Watch.any_rank_is_nonfinite = before  # type: ignore[method-assign]  # restores it
    return share_figure(shares, bar) | {
        "tokens_per_update": rank.plan.tokens,
        "threads": threads,
        "device": str(world.device),
    }


def share_figure(shares: list[float], bar: float) -> dict[str, Any]:
    """Return statistics of `shares`. Each value of `shares` is the time of the NaN check in an
    update, divided by the time of this update. `bar` is the upper limit of the mean share.

    In the result, `value` is the mean share. `is_met` is None (not decidable) if the 95 %
    confidence interval of the mean contains `bar` or is wider than `bar`. Otherwise, `is_met` is
    True if the mean is at most `bar`, and False if the mean is larger.
    """
    mean = statistics.fmean(shares)
    half = _T95 * statistics.stdev(shares) / len(shares) ** 0.5
    is_met: bool | None = mean <= bar
    if 2 * half > bar or mean - half <= bar <= mean + half:
        is_met = None
    return {
        "figure": "NaN check in an update",
        "unit": "share",
        "bar": bar,
        "is_met": is_met,
        "value": round(mean, 5),
        "interval": [round(mean - half, 5), round(mean + half, 5)],
        "median": round(statistics.median(shares), 5),
        "min": round(min(shares), 5),
        "max": round(max(shares), 5),
        "samples": len(shares),
    }


class _Stopwatch:
    """Stopwatch for the total time of all calls of wrapped functions. See `wrap`."""

    def __init__(self, clock: Callable[[], float], wait: Callable[[], None]) -> None:
        self._clock, self._wait = clock, wait
        self.seconds = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls `call` and adds the time of the call to `self.seconds`."""

        def timed(*args: Any) -> Any:
            self._wait()
            start = self._clock()
            try:
                return call(*args)
            finally:
                self._wait()
                self.seconds += self._clock() - start

        return timed


def _small_config() -> Config:
    """Return a configuration with a model of 7 M parameters and updates of 2048 tokens."""
    return make_config(
        {
            "model": {
                "architecture": "olmoe",
                "num_layers": 4,
                "hidden_size": 256,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "vocab_size": 4096,
            },
            "data": {"path": "unused"},
            "train": {
                "run_dir": "unused",
                "max_steps": 1000,
                "seq_len": 256,
                "global_batch_tokens": 2048,
                "microbatch_size": 4,
                "dtype": "fp32",
            },
            "optim": {"lr": 1e-4, "min_lr": 1e-4, "warmup_steps": 3},
        }
    )
