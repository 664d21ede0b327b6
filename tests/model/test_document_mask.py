"""Tests of document masks: documents in the same sequence do not affect each other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from optimus.model.attention import _within_documents, document_lengths
from tests.model.small import relative, small_model, some_tokens

IDS = torch.tensor(
    [
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2],
        [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2],
        [0] * 16,
    ]
)
LENGTHS = [5, 9, 2, 1, 1, 14, 16]

ARCHITECTURES = [
    pytest.param("olmo", {}, id="dense"),
    pytest.param("olmoe", {"norm_topk_prob": True}, id="moe"),
    pytest.param("olmo", {"num_key_value_heads": 2, "clip_qkv": 0.5}, id="grouped-clipped"),
]


def documents(tokens: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return (row, first, stop) for each document: the document has the positions [first, stop) of
    row `row` of `tokens`. The document ids come from IDS, not from `tokens`."""
    ranges = []
    for row, ids in enumerate(IDS.tolist()):
        begins = [s for s in range(len(ids)) if s == 0 or ids[s] != ids[s - 1]]
        ranges += [(row, *pair) for pair in zip(begins, [*begins[1:], len(ids)], strict=True)]
    return ranges


def test_lengths_add_up_over_sequences():
    assert document_lengths(IDS) == LENGTHS
    assert document_lengths(IDS.to(torch.int32)) == LENGTHS
    assert document_lengths(torch.zeros(2, 1, dtype=torch.int64)) == [1, 1]
    assert document_lengths(torch.tensor([[3, 3, 1, 3]])) == [2, 1, 1]


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2)])
def test_attention_equals_a_block_diagonal_mask(heads, groups):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(3, 16, n, 8, generator=generator, requires_grad=True)
        for n in (heads, groups, groups)
    )
    same = IDS.unsqueeze(-1) == IDS.unsqueeze(-2)
    mask = (same & torch.ones(16, 16, dtype=torch.bool).tril()).unsqueeze(1)
    reference = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, enable_gqa=True
    ).transpose(1, 2)
    weight = torch.randn(reference.shape, generator=generator)
    expected = torch.autograd.grad((reference * weight).sum(), (q, k, v))
    output = _within_documents(q, k, v, LENGTHS)
    assert relative(output, reference) < 1e-6
    gradients = torch.autograd.grad((output * weight).sum(), (q, k, v))
    assert max(relative(a, b) for a, b in zip(gradients, expected, strict=True)) < 1e-6


@pytest.mark.parametrize(("architecture", "fields"), ARCHITECTURES)
def test_loss_and_gradients_are_those_of_separate_documents(architecture, fields):
    model, tokens = small_model(architecture, **fields), some_tokens()
    terms = model.losses(tokens, IDS)
    assert terms.num_targets == 3 * 15
    terms.ce_sum.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    total = torch.zeros(())
    for row, first, stop in documents(tokens):
        logits = model(tokens[row : row + 1, first:stop])[0]
        # The last token of a document predicts the first token of the next document.
        targets = tokens[row, first + 1 : stop + 1]
        total = total + F.cross_entropy(logits[: len(targets)], targets, reduction="sum")
    total.backward()
    assert float(terms.ce_sum.detach()) == pytest.approx(float(total.detach()), rel=1e-6)
    for name, p in model.named_parameters():
        expected = p.grad if p.grad is not None else torch.zeros_like(p)
        close = relative(gradients[name], expected) < 1e-5
        assert torch.equal(gradients[name], expected) or close, name


def test_documents_do_not_affect_each_other():
    """If the tokens of one document change, the logits of the other documents are bit-identical."""
    model, tokens = small_model("olmo"), some_tokens()
    changed = tokens.clone()
    changed[0, :5] = (tokens[0, :5] + 1) % 61
    before, after = (model(x, IDS) for x in (tokens, changed))
    assert torch.equal(before[0, 5:], after[0, 5:]) and torch.equal(before[1:], after[1:])
    assert not torch.equal(before[0, :5], after[0, :5])


def test_a_single_document_is_plain_causal_attention():
    model, tokens = small_model(), some_tokens()
    assert relative(model(tokens, torch.zeros_like(tokens)), model(tokens)) < 1e-6
