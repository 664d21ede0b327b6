"""Every layout trains the model of one process, by CONTRACT.md's promise for it.

A sample in which every two choices meet; `scripts/drills/layouts.py` runs all of them.
"""

from __future__ import annotations

import pytest
import torch

from tests.helpers.layouts import Agreement, Case, Outcome, agree, all_cases, pairwise, run_case

SAMPLE = pairwise(all_cases())
_known: dict[str, Outcome] = {}


def agreement_of(ranks, case: Case) -> Agreement:
    """The run of one process is made once for each model, dtype and batch."""

    def run(size: int, tree: dict) -> Outcome:
        return ranks(size, run_case, tree, start_world=False, timeout_s=120)[0]

    def alone(tree: dict) -> Outcome:
        key = repr(tree)
        if key not in _known:
            _known[key] = run(1, tree)
        return _known[key]

    return agree(case, run, alone)


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_layout_trains_the_model_of_one_process(ranks, case):
    agreement = agreement_of(ranks, case)
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


def outcome(turned_at: int = 0, gradient: float = 1.0, loss: float = 5.0) -> Outcome:
    """Of a run in which the one token went elsewhere at a step, its choice clear by 1e-5."""
    routes = {
        (step, 0, 0): (torch.tensor([[step == turned_at]]).long(), torch.tensor([1e-5]))
        for step in (1, 2, 3)
    }
    return Outcome([(loss, 1.0, 1.0, 1.0)], {}, {}, {"w": torch.tensor([gradient])}, routes)


@pytest.mark.parametrize(
    ("many", "again", "broken"),
    [
        (outcome(), None, ""),
        (outcome(turned_at=2, loss=5.1), outcome(), ""),
        (outcome(turned_at=2), outcome(turned_at=3), "went elsewhere"),
        (outcome(turned_at=2), outcome(loss=5.1), "losses are off"),
        (outcome(turned_at=1), None, "went elsewhere"),
        (outcome(turned_at=2, gradient=1.1), None, "went elsewhere"),
        (outcome(loss=5.1), None, "losses are off"),
    ],
)
def test_a_case_is_run_gently_only_where_tokens_turn_behind_an_update(many, again, broken):
    case = next(case for case in all_cases() if case.tp == 2)
    runs = iter([many, again])
    agreement = agree(case, lambda size, tree: next(runs), lambda tree: outcome())
    assert broken in " ".join(agreement.broken) and bool(broken) == bool(agreement.broken)
    assert bool(agreement.by_adamw) == (again is not None)


def test_the_sample_has_every_factorisation_and_every_choice():
    everything = all_cases()
    assert {case[:4] for case in SAMPLE} == {case[:4] for case in everything}
    for field in range(4, len(Case._fields)):
        assert {case[field] for case in SAMPLE} == {case[field] for case in everything}
    assert any(case.batch // (case.dp * case.ep) < case.pp for case in SAMPLE), "m < p"
