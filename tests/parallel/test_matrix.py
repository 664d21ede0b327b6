"""Every layout trains the model of one process, by CONTRACT.md's promise for it.

A sample in which every two choices meet; `scripts/drills/layouts.py` runs all of them.
"""

from __future__ import annotations

import pytest

from tests.helpers.layouts import (
    TOLERANCE,
    Case,
    Outcome,
    all_cases,
    compare,
    gently,
    pairwise,
    run_case,
)

SAMPLE = pairwise(all_cases())
TURNS = {"pp1-dp1-ep1-tp4-1f1b-moe-fp32-m8"}
"""Cases whose tokens turn later than at near-ties; see `gently`."""
_known: dict[str, Outcome] = {}


def alone(ranks, tree: dict) -> Outcome:
    """The run of one process, once for each model, dtype and batch."""
    key = repr(tree)
    if key not in _known:
        (_known[key],) = ranks(1, run_case, tree, start_world=False)
    return _known[key]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_layout_trains_the_model_of_one_process(ranks, case):
    def agreement_of(change):
        many = ranks(case.size, run_case, change(case.tree()), start_world=False, timeout_s=120)[0]
        return compare(case, many, alone(ranks, change(case.one_process())))

    agreement = agreement_of(lambda tree: tree)
    if str(case) in TURNS:
        assert agreement.gradient_error < TOLERANCE and agreement.widest < TOLERANCE, f"{agreement}"
        agreement = agreement_of(gently)
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
    many = ranks(case.size, run_case, case.tree(), start_world=False, timeout_s=120)[0]
    agreement = compare(case, many, alone(ranks, case.one_process()))
    assert not agreement.broken, f"{agreement}"


def test_the_sample_has_every_factorisation_and_every_choice():
    everything = all_cases()
    assert {case[:4] for case in SAMPLE} == {case[:4] for case in everything}
    for field in range(4, len(Case._fields)):
        assert {case[field] for case in SAMPLE} == {case[field] for case in everything}
    assert any(case.batch // (case.dp * case.ep) < case.pp for case in SAMPLE), "m < p"
