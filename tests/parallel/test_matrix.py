"""Parity tests: a run with any parallel layout agrees with the run of a single process.

The tests use a sample of layouts. Every pair of choices, such as a mesh and a dtype, occurs in at
least one layout of the sample. `scripts/drills/layouts.py` runs all layouts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kit.layouts.matrix import (
    Agreement,
    Case,
    Outcome,
    all_cases,
    check_case,
    compare,
    pairwise,
    run_case,
)

SAMPLE = pairwise(all_cases())
STEPS = 3
"""Number of updates of a run. The metrics of the third update depend on the moments of the second
update. The drill runs more updates."""
_known: dict[str, Outcome] = {}


def agreement_of(ranks, case: Case, **train: Any) -> Agreement:
    """Run a case, and run the same model on a single process. Return the comparison of both runs.

    `train` are settings of the section `[train]` for the run of the case. They do not apply to the
    run on a single process.
    """

    def run_layout(size: int, tree: dict) -> Outcome:
        return run(size, tree | {"train": tree["train"] | train})

    def run(size: int, tree: dict) -> Outcome:
        return ranks(size, run_case, tree, STEPS, start_world=False, timeout_s=120)[0]

    def run_alone(tree: dict) -> Outcome:
        key = repr(tree)
        if key not in _known:
            _known[key] = run(1, tree)
        return _known[key]

    return check_case(case, run_layout, run_alone)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_layout_trains_the_model_of_a_single_process(ranks, case):
    agreement = agreement_of(ranks, case)
    assert not agreement.broken, f"{agreement}"


TIED = "pp2-dp2-ep1-tp2-sequence-1f1b-dense-tied-bias-fp32-m8"
"""Name of a case with tied embeddings, in which both stages contribute to the embedding's
gradient."""
OF_EACH_MESH = {tuple(size > 1 for size in case[:4]): case for case in SAMPLE if not case.is_exact}
WITHOUT_THE_MODE = [*OF_EACH_MESH.values(), *(case for case in SAMPLE if str(case) == TIED)]


@pytest.mark.parametrize("case", WITHOUT_THE_MODE, ids=str)
def test_without_deterministic_mode_the_bounds_hold(ranks, case):
    """Runs without deterministic mode agree, within the bounds of `check_case`, with deterministic
    runs of a single process."""
    agreement = agreement_of(ranks, case, deterministic=False, threads=1)
    assert not agreement.broken, f"{agreement}"


@pytest.mark.parametrize(
    "name",
    [  # dp2, since an error is visible only if gradients are reduced over several ranks
        "pp2-dp2-ep1-tp1-zb-h1-moe-fp32-m4",
        "pp2-dp2-ep1-tp1-zb-h1-dense-tied-bias-fp32-m4",
    ],
)
def test_a_divided_backward_keeps_microbatches_separate(ranks, name):
    """With zb-h1, the action I of a microbatch can run before the action W of an earlier
    microbatch.

    Gradients must nevertheless be added microbatch by microbatch.
    """
    (case,) = (case for case in all_cases() if str(case) == name)
    agreement = agreement_of(ranks, case)
    assert not agreement.broken, f"{agreement}"


NAN, NEAR, FAR = float("nan"), 1e-5, 1e-3


def outcome(
    rerouted_at: int = 0,
    gap: float = NEAR,
    gradient: float = 1.0,
    losses: tuple[float, ...] = (5.0, 4.0),
    aux: float = 1.0,
) -> Outcome:
    """Return an artificial outcome of a run.

    Args:
        rerouted_at: The step at which the router chooses another expert, or 0 for never.
        gap: The difference between the probabilities of the chosen expert and the other expert.
        gradient: The gradient of the parameter w, which has a single element.
        losses: The cross-entropy of each step.
        aux: The auxiliary loss of each step.
    """
    routes = {
        (step, 0, 0): (torch.tensor([[step == rerouted_at]]).long(), torch.tensor([gap]))
        for step in (1, 2, 3)
    }
    gradients = {"v": torch.ones(1), "w": torch.tensor([gradient]), "x": torch.ones(1)}
    return Outcome([(loss, aux, 1.0, 1.0) for loss in losses], {}, {}, gradients, routes)


OFF = (5.1, 4.0)


@pytest.mark.parametrize(
    ("many", "again", "broken"),
    [
        (outcome(), None, ""),
        (outcome(rerouted_at=2, losses=OFF), outcome(), ""),
        (outcome(rerouted_at=2), outcome(rerouted_at=3), "1e-5: 1 tokens were rerouted"),
        (outcome(rerouted_at=2), outcome(losses=OFF), "1e-5: the error of a loss"),
        (outcome(rerouted_at=1), None, "were rerouted"),
        (outcome(rerouted_at=2, gap=FAR), None, "were rerouted"),
        (outcome(rerouted_at=2, gradient=1.1), None, "were rerouted"),
        (outcome(losses=OFF), None, "the error of a loss"),
    ],
)
def test_a_large_eps_is_used_only_if_tokens_are_rerouted_after_an_update(many, again, broken):
    case = next(case for case in all_cases() if case.tp == 2)
    runs, alone = iter([many, again]), outcome(gap=float(many.routes[1, 0, 0][1]))
    agreement = check_case(case, lambda size, tree: next(runs), lambda tree: alone)
    assert broken in " ".join(agreement.broken) and bool(broken) == bool(agreement.broken)
    assert bool(agreement.by_adamw) == (again is not None and not broken)


@pytest.mark.parametrize(
    ("wrong", "broken"),
    [
        ({"gradient": NAN}, "the error of the gradient of w is inf"),
        ({"losses": (NAN, 4.0)}, "the error of a loss is inf"),
        ({"losses": (5.0, NAN)}, "the error of a loss is inf"),
        ({"aux": NAN}, "the error of a loss is inf"),
    ],
)
@pytest.mark.parametrize("both", [False, True])
def test_nan_is_no_agreement(wrong, broken, both):
    """A NaN is an error even if the run of a single process has the same NaN."""
    case = next(case for case in all_cases() if case.tp == 2)
    agreement = compare(case, outcome(**wrong), outcome(**wrong) if both else outcome())
    assert broken in " ".join(agreement.broken)
    exact = next(case for case in all_cases() if case.is_exact)
    assert compare(exact, outcome(**wrong), outcome(**wrong) if both else outcome()).broken


def test_gradients_of_zero_agree():
    case, zero = next(case for case in all_cases() if case.tp == 2), outcome(gradient=0.0)
    assert not compare(case, zero, zero).broken
    assert "error of the gradient of w" in " ".join(compare(case, outcome(), zero).broken)


def test_the_sample_has_all_factorisations_and_all_choices():
    cases = all_cases()
    assert {case[:4] for case in SAMPLE} == {case[:4] for case in cases}
    for field in range(4, len(Case._fields)):
        assert {case[field] for case in SAMPLE} == {case[field] for case in cases}
    assert any(case.batch // (case.dp * case.ep) < case.pp for case in SAMPLE), "m < p"
