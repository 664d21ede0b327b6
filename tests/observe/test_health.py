"""Tests of the warnings about unbalanced experts and about gradient-norm spikes."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from optimus.observe.health import Notice, TrainingHealth
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import run_tree
from tests.model.small import small_config

SIXTEEN = small_config(num_experts=16, num_experts_per_tok=2, num_layers=2)
EVEN = torch.full((2, 16), 512)
PAIR = torch.tensor([[512] * 16, [4096, 4096] + [0] * 14])


def notices_of(health, rows=None, norms=(), first=1) -> list[Notice]:
    """Return the notices of consecutive updates, the first of which has the number `first`.

    `rows` has the rows of each expert for each update, by default an even load. `norms` has the
    gradient norms of the updates, 1 by default.
    """
    notices = []
    for number in range(max(len(norms), len(rows or ()))):
        expert_rows = rows[number] if rows else EVEN
        norm = norms[number] if norms else 1.0
        notices += health.after_update(first + number, expert_rows, norm)
    return notices


def lines_of(health, *arguments, **options) -> list[str]:
    return [notice.text for notice in notices_of(health, *arguments, **options)]


def test_collapse_warning_names_layer_and_remedy():
    lines = lines_of(TrainingHealth(SIXTEEN), [PAIR] * 12)
    assert len(lines) == 1
    for words in ("step 10:", "1 of 2 MoE layers", "layer 1", "8.00 times", "at most 8",
                 "14 of 16 experts", "optim.lr", "model.aux_loss_coef"):  # fmt: skip
        assert words in lines[0], words


def test_pairs_of_experts_that_alternate_are_reported_although_sums_are_even():
    rows = [PAIR.roll(2 * step, dims=1) for step in range(10)]
    assert int(torch.stack(rows).sum(0)[1].min()) > 0
    (line,) = lines_of(TrainingHealth(SIXTEEN), rows)
    assert "8.00 times" in line and "0 of 16 experts" in line


def test_single_idle_expert_is_reported():
    idle = EVEN.clone()
    idle[0, 3] = 0
    (line,) = lines_of(TrainingHealth(SIXTEEN), [idle] * 30)
    assert "layer 0" in line and "1 of 16 experts" in line


def test_recovery_is_reported_once():
    health = TrainingHealth(SIXTEEN)
    warning, recovery = notices_of(health, [PAIR] * 12 + [EVEN] * 60)
    assert (warning.level, recovery.level) == (logging.WARNING, logging.INFO)
    assert "step 22: " in recovery.text and "balanced again" in recovery.text
    lines = lines_of(health, norms=[1.0] * 20 + [11.0, 3.0, 1.5] + [1.0] * 20, first=73)
    assert len(lines) == 2 and "near its median again" in lines[1]


def test_gradient_norm_is_compared_with_the_median_of_twenty():
    """A gradient norm above 10 times the median of the last 20 norms causes a warning. With fewer
    than 20 earlier norms, no norm causes a warning."""
    before = [2.0] * 10 + [1.0] * 10
    (line,) = lines_of(TrainingHealth(SIXTEEN), norms=[*before, 51.2])
    for words in ("step 21:", "gradient norm 51.2 is 34 times the median of the last 20",
                 "1.5;", "optim.lr", "optim.warmup_steps", "optim.clip_norm"):  # fmt: skip
        assert words in line, words
    assert not lines_of(TrainingHealth(SIXTEEN), norms=[1.0] * 20 + [9.9])
    assert lines_of(TrainingHealth(SIXTEEN), norms=[1.0] * 20 + [10.1])
    assert not lines_of(TrainingHealth(SIXTEEN), norms=[1.0] * 19 + [1000.0]), "too little history"


def test_skipped_updates_do_not_count_as_norms():
    norms = [1.0, math.nan] * 20 + [math.inf, 11.0]
    (line,) = lines_of(TrainingHealth(SIXTEEN), norms=norms)
    assert "11 times the median of the last 20 updates, 1;" in line


@pytest.mark.parametrize("fault", ["experts", "norm", "both, on and off"])
def test_persistent_or_returning_fault_prints_few_lines(fault):
    health, count = TrainingHealth(SIXTEEN), 3_000
    bad = [step % 60 < 30 if "off" in fault else True for step in range(count)]
    rows = [PAIR if is_bad and fault != "norm" else EVEN for is_bad in bad]
    norms = [1000.0 if fault != "experts" and step % 40 == 39 else 1.0 for step in range(count)]
    lines = lines_of(health, rows, norms)
    # Warnings of one fault (load or norm) are 100, 200, 400, ... updates apart: at most 5 in 3,000
    # updates. Each of the two faults has at most 5 warnings and 5 lines about the recovery.
    assert 0 < len(lines) <= 4 * 5
    if "norm" in fault or "both" in fault:
        assert any("unreported spikes since the last warning" in line for line in lines)


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        pytest.param({"router": "uniform"}, [[512] * 4 + [0] * 12] * 2, id="forced uniform"),
        pytest.param({"num_experts": 1, "num_experts_per_tok": 1}, [[4096]] * 2, id="one expert"),
        pytest.param({"num_experts": 2}, [[4096] * 2] * 2, id="all experts of each token"),
        pytest.param({"num_experts": [0, 16]}, [[700] * 8 + [324] * 8], id="a dense layer"),
        pytest.param({"num_experts": [16, 4]}, [[512] * 16, [2048] * 4 + [0] * 12], id="mixed"),
        pytest.param({}, [[31] * 15 + [0]] * 2, id="too few rows to judge"),
    ],
)
def test_even_load_and_too_few_rows_are_not_reported(fields, rows):
    health = TrainingHealth(small_config(**{"num_experts": 16, **fields}))
    assert not lines_of(health, [torch.tensor(rows)] * 40)


def test_dense_model_is_checked_by_its_norm_only():
    health = TrainingHealth(small_config("olmo"))
    rows = [torch.zeros(0, 0, dtype=torch.int64)] * 21
    assert len(lines_of(health, rows, [1.0] * 20 + [50.0])) == 1


def test_run_that_collapses_warns_and_healthy_run_does_not(tiny_data, tmp_path, capsys):
    """A run with a high learning rate and no auxiliary loss (`collapsing`) must warn about
    unbalanced experts. A run with usual settings (`healthy`) must not warn."""
    settings = {"model__num_experts": 8, "train__max_steps": 14, "train__microbatch_size": 8,
                "checkpoint__interval": 0, "optim__warmup_steps": 0}  # fmt: skip
    healthy = {"optim__lr": 1e-3, "model__embedding_init_std": 1.0}
    collapsing = {"optim__lr": 0.1, "model__aux_loss_coef": 0.0}
    for name, recipe in (("healthy", healthy), ("collapsing", collapsing)):
        run_tree(tiny_tree(tiny_data, tmp_path / name, **settings, **recipe))
        printed = capsys.readouterr().err
        warned = "optimus: warning: step 1" in printed and "experts are unbalanced" in printed
        assert warned == (name == "collapsing"), printed
        assert "expert load 0." in printed
