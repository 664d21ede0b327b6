"""Every layout trains the model of one process, by CONTRACT.md's promise for it.

A sample in which every two choices meet; `scripts/drills/layouts.py` runs all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.layouts import (
    Agreement,
    Case,
    Outcome,
    agree,
    all_cases,
    compare,
    pairwise,
    run_case,
)

SAMPLE = pairwise(all_cases())
_known: dict[str, Outcome] = {}


def agreement_of(ranks, case: Case, **train: Any) -> Agreement:
    """The run of one process is made once for each model, dtype and batch; `train`: settings that
    it does not share."""

    def many(size: int, tree: dict) -> Outcome:
        return run(size, tree | {"train": tree["train"] | train})

    def run(size: int, tree: dict) -> Outcome:
        return ranks(size, run_case, tree, start_world=False, timeout_s=120)[0]

    def alone(tree: dict) -> Outcome:
        key = repr(tree)
        if key not in _known:
            _known[key] = run(1, tree)
        return _known[key]

    return agree(case, many, alone)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_layout_trains_the_model_of_one_process(ranks, case):
    agreement = agreement_of(ranks, case)
    assert not agreement.broken, f"{agreement}"


TIED = "pp2-dp2-ep1-tp2-sequence-1f1b-dense-tied-bias-fp32-m8"
"""Both ends of the pipeline add to one embedding, each to its rows."""
OF_EACH_MESH = {tuple(size > 1 for size in case[:4]): case for case in SAMPLE if not case.is_exact}
WITHOUT_THE_MODE = [*OF_EACH_MESH.values(), *(case for case in SAMPLE if str(case) == TIED)]


@pytest.mark.parametrize("case", WITHOUT_THE_MODE, ids=str)
def test_without_the_mode_it_is_as_near(ranks, case):
    """Where gradients add up in place and leave while backward goes on."""
    agreement = agreement_of(ranks, case, deterministic=False, threads=1)
    assert not agreement.broken, f"{agreement}"


@pytest.mark.parametrize(
    "name",
    [
        "pp2-dp2-ep1-tp1-zb-h1-moe-fp32-m4",
        "pp2-dp2-ep1-tp1-zb-h1-dense-tied-bias-fp32-m4",
    ],
)
def test_a_split_backward_keeps_microbatches_apart(ranks, name):
    """Norms, biases and embeddings have their gradients beside the inputs', while the weights of an
    earlier microbatch still wait to be added up: seen only where several ranks add."""
    (case,) = (case for case in all_cases() if str(case) == name)
    agreement = agreement_of(ranks, case)
    assert not agreement.broken, f"{agreement}"


NAN, NEAR, FAR = float("nan"), 1e-5, 1e-3


def outcome(
    turned_at: int = 0,
    gap: float = NEAR,
    gradient: float = 1.0,
    losses: tuple[float, ...] = (5.0, 4.0),
    aux: float = 1.0,
) -> Outcome:
    """Of a run in which the one token went elsewhere at a step, its choice clear by `gap`."""
    routes = {
        (step, 0, 0): (torch.tensor([[step == turned_at]]).long(), torch.tensor([gap]))
        for step in (1, 2, 3)
    }
    gradients = {"v": torch.ones(1), "w": torch.tensor([gradient]), "x": torch.ones(1)}
    return Outcome([(loss, aux, 1.0, 1.0) for loss in losses], {}, {}, gradients, routes)


OFF = (5.1, 4.0)


@pytest.mark.parametrize(
    ("many", "again", "broken"),
    [
        (outcome(), None, ""),
        (outcome(turned_at=2, losses=OFF), outcome(), ""),
        (outcome(turned_at=2), outcome(turned_at=3), "1e-5: 1 tokens went elsewhere"),
        (outcome(turned_at=2), outcome(losses=OFF), "1e-5: losses are off"),
        (outcome(turned_at=1), None, "went elsewhere"),
        (outcome(turned_at=2, gap=FAR), None, "went elsewhere"),
        (outcome(turned_at=2, gradient=1.1), None, "went elsewhere"),
        (outcome(losses=OFF), None, "losses are off"),
    ],
)
def test_a_case_is_run_gently_only_where_tokens_turn_behind_an_update(many, again, broken):
    case = next(case for case in all_cases() if case.tp == 2)
    runs, one = iter([many, again]), outcome(gap=float(many.routes[1, 0, 0][1]))
    agreement = agree(case, lambda size, tree: next(runs), lambda tree: one)
    assert broken in " ".join(agreement.broken) and bool(broken) == bool(agreement.broken)
    assert bool(agreement.by_adamw) == (again is not None and not broken)


@pytest.mark.parametrize(
    ("wrong", "broken"),
    [
        ({"gradient": NAN}, "the gradient of w is off by inf"),
        ({"losses": (NAN, 4.0)}, "losses are off by inf"),
        ({"losses": (5.0, NAN)}, "losses are off by inf"),
        ({"aux": NAN}, "losses are off by inf"),
    ],
)
@pytest.mark.parametrize("both", [False, True])
def test_what_is_not_a_number_is_no_agreement(wrong, broken, both):
    """Nor where one process has it too."""
    case = next(case for case in all_cases() if case.tp == 2)
    agreement = compare(case, outcome(**wrong), outcome(**wrong) if both else outcome())
    assert broken in " ".join(agreement.broken)
    exact = next(case for case in all_cases() if case.is_exact)
    assert compare(exact, outcome(**wrong), outcome(**wrong) if both else outcome()).broken


def test_gradients_that_are_nothing_agree():
    case, nothing = next(case for case in all_cases() if case.tp == 2), outcome(gradient=0.0)
    assert not compare(case, nothing, nothing).broken
    assert "w is off" in " ".join(compare(case, outcome(), nothing).broken)


def test_the_sample_has_every_factorisation_and_every_choice():
    everything = all_cases()
    assert {case[:4] for case in SAMPLE} == {case[:4] for case in everything}
    for field in range(4, len(Case._fields)):
        assert {case[field] for case in SAMPLE} == {case[field] for case in everything}
    assert any(case.batch // (case.dp * case.ep) < case.pp for case in SAMPLE), "m < p"
