from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from optimus.model.transformer import Transformer
from tests.model.small import relative, small_model, some_tokens

BOTH = pytest.mark.parametrize("architecture", ["olmo", "olmoe"])


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@BOTH
def test_losses_are_the_cross_entropy_of_the_next_tokens(architecture):
    model, tokens = small_model(architecture), some_tokens()
    terms = model.losses(tokens)
    logits = model(tokens)
    expected = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    assert logits.shape == (3, 16, 61)
    assert terms.num_targets == 3 * 15
    assert terms.ce_sum.dtype is torch.float32
    torch.testing.assert_close(terms.ce_sum, expected)
    if architecture == "olmo":
        assert float(terms.aux) == float(terms.z) == 0


@BOTH
def test_no_token_sees_what_follows_it(architecture):
    model, tokens = small_model(architecture, init_std=0.3), some_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(dim=(0, 2)).min() > 1e-4


@BOTH
def test_stages_of_a_pipeline_are_the_model_with_blocks_deleted(architecture):
    """Chained by hand, two stages give the whole model's loss and gradients."""
    whole, tokens = small_model(architecture), some_tokens()
    terms = whole.losses(tokens)
    (terms.ce_sum + terms.aux + terms.z).backward()
    first, last = copy.deepcopy(whole), copy.deepcopy(whole)
    del first.blocks["1"], first.final_norm, first.head
    del last.blocks["0"], last.embed
    for stage in (first, last):
        stage.zero_grad()

    x, before = first.run_blocks(first.embed(tokens))
    handed = x.detach().requires_grad_()
    y, after = last.run_blocks(handed)
    ce_sum, _ = last.token_loss(y, tokens)
    near, far = first.router_losses(before), last.router_losses(after)
    (ce_sum + far[0] + far[1]).backward()
    own = [loss for loss in near[:2] if loss.requires_grad]
    torch.autograd.backward([x, *own], [handed.grad, *(None for _ in own)])

    assert torch.equal(ce_sum, terms.ce_sum)
    torch.testing.assert_close(near[0] + far[0], terms.aux)
    parts = gradients(first) | gradients(last)
    assert parts.keys() == gradients(whole).keys()
    for name, gradient in gradients(whole).items():
        assert relative(parts[name], gradient) < 1e-6, name


def test_tied_model_is_ordinary_until_its_uses_are_separated():
    model, tokens = small_model("olmo", tie_embeddings=True), some_tokens()
    assert model.tied_uses() == {}
    assert "head.weight" not in model.state_dict()
    model.losses(tokens).ce_sum.backward()
    whole = model.embed.weight.grad.clone()

    model.zero_grad()
    model.separate_tied_uses()
    (name, use), *others = model.tied_uses().items()
    assert name == "head.weight" and not others
    assert use.is_leaf and use.data_ptr() == model.embed.weight.data_ptr()
    assert [n for n, _ in model.named_parameters() if "head" in n] == []
    model.losses(tokens).ce_sum.backward()
    assert not torch.equal(model.embed.weight.grad, whole)
    torch.testing.assert_close(model.embed.weight.grad + use.grad, whole)


@pytest.mark.parametrize("change", ["cast", "move", "load", "data"])
def test_separated_uses_share_storage_whatever_happens_to_the_model(change):
    model = small_model("olmo", tie_embeddings=True)
    model.separate_tied_uses()
    if change == "cast":
        model.to(torch.bfloat16)
    elif change == "move":
        model.to_empty(device="cpu")
        model.load_state_dict(small_model("olmo", tie_embeddings=True).state_dict())
    elif change == "load":
        model.load_state_dict(small_model("olmo", seed=5, tie_embeddings=True).state_dict())
    else:
        model.embed.weight.data = model.embed.weight.data.clone()
        with pytest.raises(AssertionError):  # an alias of forgotten storage is never used
            model(some_tokens())
        model.separate_tied_uses()
    use = model.tied_uses()["head.weight"]
    assert use.data_ptr() == model.embed.weight.data_ptr()
    assert use.dtype is model.embed.weight.dtype and use.requires_grad
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert torch.equal(use, model.embed.weight)
    model(some_tokens())


def test_untied_model_has_no_tied_uses():
    model = small_model("olmo")
    model.separate_tied_uses()
    assert model.tied_uses() == {}


@BOTH
def test_padding_row_is_trained_by_a_tied_head_only(architecture):
    model, tokens = small_model(architecture, pad_token_id=4), some_tokens()
    tokens[0, :3] = 4
    model.losses(tokens).ce_sum.backward()
    assert model.embed.weight.grad[4].abs().sum() == 0
    assert model.head.weight.grad[4].abs().sum() > 0


@BOTH
def test_runs_where_torch_forbids_what_is_not_deterministic(architecture):
    model = small_model(architecture, tie_embeddings=True).bfloat16()
    before = torch.get_deterministic_debug_mode()
    try:
        torch.set_deterministic_debug_mode("error")
        model.losses(some_tokens()).ce_sum.backward()
    finally:
        torch.set_deterministic_debug_mode(before)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (5, 3), (0, 4)])
def test_any_batch_of_tokens(shape):
    terms = small_model().losses(torch.ones(shape, dtype=torch.int64))
    assert terms.num_targets == shape[0] * (shape[1] - 1)
    assert torch.isfinite(terms.ce_sum + terms.aux + terms.z)
