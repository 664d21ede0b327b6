from __future__ import annotations

import itertools
import math
import re

import pytest

from optimus.config import OptimConfig
from optimus.train.schedule import learning_rate, rate_change

PAPER = OptimConfig(lr=4e-4, min_lr=4e-5, warmup_steps=2500, clip_after_warmup=True)


def test_warmup_is_linear_and_starts_above_zero():
    assert learning_rate(1, PAPER, 100_000) == 4e-4 / 2500
    assert learning_rate(1250, PAPER, 100_000) == pytest.approx(2e-4)
    assert learning_rate(2500, PAPER, 100_000) == 4e-4


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_goes_from_peak_to_minimum_and_stays(schedule):
    optim = PAPER.model_copy(update={"schedule": schedule})
    rates = [learning_rate(step, optim, 10_000) for step in range(2500, 10_001)]
    assert rates[0] == 4e-4
    assert all(a > b for a, b in itertools.pairwise(rates))
    assert rates[-1] == 4e-5 == learning_rate(20_000, optim, 10_000)
    assert learning_rate(6250, optim, 10_000) == pytest.approx((4e-4 + 4e-5) / 2)


def test_cosine_quarter_point():
    quarter = 2500 + (10_000 - 2500) // 4
    expected = 4e-5 + 3.6e-4 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(quarter, PAPER, 10_000) == pytest.approx(expected)


def test_constant_never_falls():
    optim = PAPER.model_copy(update={"schedule": "constant"})
    assert learning_rate(9_999_999, optim, 10) == 4e-4


def test_decay_steps_override_max_steps():
    optim = PAPER.model_copy(update={"decay_steps": 5000})
    assert learning_rate(5000, optim, 10_000) == 4e-5


def test_clipping_waits_for_the_end_of_the_warmup_only_if_asked():
    assert not PAPER.clips_at(2500)
    assert PAPER.clips_at(2501)
    assert PAPER.model_copy(update={"clip_after_warmup": False}).clips_at(1)
    assert not PAPER.model_copy(update={"clip_norm": 0.0}).clips_at(9999)


STORED = {"lr": 4e-3, "min_lr": 4e-4, "warmup_steps": 5, "decay_steps": 0, "schedule": "cosine"}


@pytest.mark.parametrize(
    ("stored", "changes", "max_steps", "keep"),
    [
        ({}, {}, 200, "optim.decay_steps=100"),
        ({"decay_steps": 80}, {"decay_steps": 0}, 100, "optim.decay_steps=80"),
        ({}, {"decay_steps": 80}, 100, "optim.decay_steps=100"),
        ({}, {"lr": 5e-3}, 100, "optim.lr=0.004"),
        ({}, {"min_lr": 0.0}, 100, "optim.min_lr=0.0004"),
        ({}, {"warmup_steps": 60}, 100, "optim.warmup_steps=5"),
        ({}, {"schedule": "linear"}, 100, "optim.schedule=cosine"),
        ({}, {"schedule": "constant"}, 300, "optim.decay_steps=100 optim.schedule=cosine"),
        (
            {"schedule": "constant"},
            {"schedule": "linear", "decay_steps": 90},
            200,
            "optim.decay_steps=0 optim.schedule=constant",
        ),
        # Only the number of steps changed, and these schedules do not depend on it.
        ({"decay_steps": 80}, {}, 300, None),
        ({"schedule": "constant"}, {}, 300, None),
        # The learning rates of the next update are equal, but those of later updates differ.
        ({"warmup_steps": 60}, {"warmup_steps": 60}, 200, "optim.decay_steps=100"),
        ({}, {"decay_steps": 100}, 300, None),
        ({}, {"weight_decay": 0.3}, 100, None),
    ],
)
def test_another_rate_on_resume_is_reported_with_the_settings_that_keep_it(
    stored, changes, max_steps, keep
):
    before = OptimConfig(**STORED | stored)
    after = before.model_copy(update=changes)
    settings = {f"optim.{key}": value for key, value in before.model_dump().items()}
    line = rate_change(51, after, max_steps, settings | {"train.max_steps": 100})
    if keep is None:
        assert line == ""
        return
    step = 61 if before.warmup_steps == after.warmup_steps == 60 else 51
    rates = learning_rate(step, before, 100), learning_rate(step, after, max_steps)
    head, _, overrides = line.partition("; to keep the old rate, set ")
    assert head == f"learning rate of step {step}: {rates[0]:.6g} before, {rates[1]:.6g} now"
    assert sorted(overrides.split()) == keep.split()
    kept = {
        key: type(STORED[key])(value) for key, value in re.findall(r"optim\.(\w+)=(\S+)", overrides)
    }
    again = after.model_copy(update=kept)
    assert learning_rate(step, again, max_steps) == rates[0]


def test_rates_of_a_change_differ_in_the_digits_that_are_shown():
    optim = OptimConfig(lr=3e-4, min_lr=3e-5, warmup_steps=2000)
    line = rate_change(1001, optim, 200_000, {"train.max_steps": 100_000})
    rates = [learning_rate(50_500, optim, steps) for steps in (100_000, 200_000)]
    expected = "learning rate of step 50500: {:.6g} before, {:.6g} now".format(*rates)
    assert line.startswith(expected) and rates[1] > 1.5 * rates[0]


def test_a_checkpoint_without_settings_changes_no_rate():
    assert rate_change(1, PAPER, 100, {}) == ""
