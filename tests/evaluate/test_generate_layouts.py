"""Tests of generation on several layouts: every rank gets the tokens of a single process."""

from __future__ import annotations

import pytest
import torch

from optimus.evaluate.generate import generate
from tests.kit.runs.tiny import CONTEXT, VOCAB, tiny_tree
from tests.kit.runs.training import make_updater

NEW_TOKENS = 5


def continued(tree: dict) -> tuple[list[list[int]], list[float] | None]:
    """Return the new tokens after several prompts, and the logits after one prompt.

    The logits are None on ranks without the last pipeline stage.
    """
    made = make_updater(tree)
    mesh, texts = made.groups.mesh, []
    source = mesh.rank_at(mesh.coordinate(0)._replace(pp=mesh.pp - 1))
    for length in (1, 13, CONTEXT + 3):
        prompt = torch.arange(length) * 7 % VOCAB
        for temperature in (0.0, 0.8):
            new = generate(
                made.model.logits_after,
                prompt,
                NEW_TOKENS,
                context=CONTEXT,
                temperature=temperature,
                seed=3,
                group=made.groups.everyone,
                source=source,
            )
            texts.append(new.tolist())
    logits = made.model.logits_after((torch.arange(13) * 7 % VOCAB).unsqueeze(0))
    return texts, None if logits is None else logits.flatten().tolist()


@pytest.fixture(scope="module")
def single_process(rank_pool):
    tree = tiny_tree("d", "r", model__num_layers=4)
    ((texts, logits),) = rank_pool.run(1, continued, tree)
    assert len({tuple(text) for text in texts}) > 3  # not always the same token
    return texts, logits


INTERLEAVED = {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2}
ALL_TO_ALL = {"parallel__ep_dispatch": "alltoall", "train__deterministic": False}


@pytest.mark.parametrize(
    ("size", "layout", "exact"),
    [
        pytest.param(3, {}, True, id="dp3"),
        pytest.param(3, {"parallel__pp": 3}, True, id="pp3"),
        pytest.param(2, {"parallel__pp": 2} | INTERLEAVED, True, id="pp2-interleaved"),
        pytest.param(4, {"parallel__pp": 2, "parallel__ep": 2}, False, id="pp2-ep2"),
        pytest.param(2, {"parallel__ep": 2} | ALL_TO_ALL, False, id="ep2-alltoall"),
        pytest.param(4, {"parallel__pp": 2, "parallel__tp": 2}, False, id="pp2-tp2"),
        pytest.param(
            2, {"parallel__tp": 2, "parallel__sequence_parallel": True}, False, id="tp2-sequence"
        ),
    ],
)
def test_continuation_is_that_of_a_single_process(ranks, single_process, size, layout, exact):
    tree = tiny_tree("d", "r", model__num_layers=4, train__global_batch_tokens=0, **layout)
    results = ranks(size, continued, tree, start_world=False)
    texts, logits = single_process
    for rank_texts, _ in results:
        assert rank_texts == texts
    stage_logits = [rank_logits for _, rank_logits in results if rank_logits is not None]
    assert len(stage_logits) == size // layout.get("parallel__pp", 1)
    for rank_logits in stage_logits:
        assert rank_logits == (logits if exact else pytest.approx(logits, rel=1e-4, abs=1e-5))
