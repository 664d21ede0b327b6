"""Accuracy of the gradients of layouts in cases with cancellation, where a gradient is a difference
of almost equal numbers."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import layouts, updates
from tests.helpers.layouts import WIDE, Outcome
from tests.helpers.tiny import tiny_tree

CLIPPED = {"model__clip_qkv": 0.02, "model__num_key_value_heads": 2}
SHORT = {
    "train__deterministic": False,
    "train__threads": 1,
    "train__seq_len": 2,
    "train__global_batch_tokens": 16,
    "model__num_experts_per_tok": 1,
}


def first_step(tree: dict, seed: int | None = None) -> Outcome | None:
    """Run one update and return its outcome. With a seed, the parameters are first multiplied by
    1 + 6e-8 * z, where z is normally distributed. This changes their last bits."""
    plain = updates.initialise_

    def initialise_(model, *rest) -> None:
        plain(model, *rest)
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + 6e-8 * torch.randn(parameter.shape, generator=generator))

    layouts.STEPS, updates.initialise_ = 1, initialise_  # only in this forked rank
    return layouts.run_case(tree)


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
    """The error of a layout must be at most twice the effect of changing the last bits of
    parameters.

    The test has two cases: q, k and v are clipped to 0.02, or instances have two tokens. The
    relative error of gradients can exceed the usual bound of 1e-5. It is 9.7e-6 to 1.3e-5 in the
    first case and 3.2e-4 to 9.7e-4 in the second. The cause is cancellation, not the layout:
    changing the last bits of the parameters on one process (three seeds) changes the same
    gradients, which belong to attention, by 1.6e-5 to 2.6e-5 in the first case and by 3.0e-4 to
    3.7e-4 in the second.

    In both cases the attention scores are almost equal, so the gradient of the softmax is a
    difference that almost vanishes. The gradient of k_norm has a norm of 1e-8 in the first case and
    8e-6 in the second, while the gradient of the embedding has a norm of 0.5 and 3. Without
    clipping, the error of the layout of the first case is at most 8.1e-7.
    """
    tree = WIDE | {"model__num_layers": 4} | model

    def run(size: int, *seed: int, **more) -> Outcome:
        return ranks(
            size, first_step, tiny_tree("d", "r", **tree | more), *seed, start_world=False
        )[0]

    single = run(1)
    rounding = max(worst(single, run(1, seed)) for seed in range(3))
    assert worst(single, run(size, **layout)) < 2 * rounding < 2e-3
