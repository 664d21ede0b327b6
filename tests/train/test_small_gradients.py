"""Accuracy of gradients that are differences of almost equal numbers, under several layouts."""

from __future__ import annotations

import zlib

import pytest
import torch

from optimus.rank import states
from tests.kit.layouts.matrix import WIDE, Outcome, run_case
from tests.kit.runs.tiny import tiny_tree

CLIPPED = {"model__clip_qkv": 0.02, "model__num_key_value_heads": 2}
SHORT = {
    "train__deterministic": False,
    "train__threads": 1,
    "train__seq_len": 2,
    "train__global_batch_tokens": 16,
    "model__num_experts_per_tok": 1,
}


def first_step(tree: dict, seed: int | None = None) -> Outcome:
    """Run one update and return its outcome. With `seed`, random relative changes of about 6e-8
    change the last bits of the initial parameters."""
    plain = states.initial_value

    def initial_value(model, name: str, *rest) -> torch.Tensor:
        value = plain(model, name, *rest)
        if seed is None:
            return value
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        return value * (1 + 6e-8 * torch.randn(value.shape, generator=generator))

    states.initial_value = initial_value  # only in this forked rank
    return run_case(tree, steps=1)


def worst(single: Outcome, other: Outcome) -> float:
    errors = ((other.gradients[n] - g).norm() / g.norm() for n, g in single.gradients.items())
    return max(map(float, errors))


@pytest.mark.parametrize(
    ("size", "model", "layout"),
    [
        pytest.param(2, CLIPPED, {"parallel__tp": 2}, id="clipped-tp2"),
        pytest.param(
            4, SHORT, {"parallel__ep": 4, "parallel__ep_dispatch": "alltoall"}, id="short-ep4"
        ),
    ],
)
def test_layout_error_is_of_the_size_of_rounding(ranks, size, model, layout):
    """If the last bits of the initial parameters change, the gradients of a single rank have an
    error. The error of the gradients under a layout must be less than twice this error.

    In both tested models, the attention scores of a query are almost equal, so the gradient of the
    softmax is a difference of almost equal numbers.
    """
    tree = WIDE | {"model__num_layers": 4} | model

    def run(size: int, *seed: int, **more) -> Outcome:
        return ranks(
            size, first_step, tiny_tree("d", "r", **tree | more), *seed, start_world=False
        )[0]

    single = run(1)
    rounding = max(worst(single, run(1, seed)) for seed in range(3))
    assert worst(single, run(size, **layout)) < 2 * rounding < 2e-3
