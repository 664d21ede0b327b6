from __future__ import annotations

import pytest
import torch

from tests.model.small import small_model, some_tokens

BOTH = pytest.mark.parametrize("architecture", ["olmo", "olmoe"])


def test_tied_uses_share_the_gradient_until_they_are_separated():
    model, tokens = small_model("olmo", tie_embeddings=True), some_tokens()
    assert model.separated_uses() == {}
    assert "head.weight" not in model.state_dict()
    model.losses(tokens).ce_sum.backward()
    whole = model.embed.weight.grad.clone()

    model.zero_grad()
    model.separate_uses()
    (name, use), *others = model.separated_uses().items()
    assert name == "head.weight" and not others
    assert use.is_leaf and use.data_ptr() == model.embed.weight.data_ptr()
    assert [n for n, _ in model.named_parameters() if "head" in n] == []
    model.losses(tokens).ce_sum.backward()
    assert not torch.equal(model.embed.weight.grad, whole)
    torch.testing.assert_close(model.embed.weight.grad + use.grad, whole)


@pytest.mark.parametrize("change", ["cast", "move", "load", "data"])
def test_separated_uses_share_storage_after_changes_of_the_model(change):
    model = small_model("olmo", tie_embeddings=True)
    model.separate_uses()
    if change == "cast":
        model.to(torch.bfloat16)
    elif change == "move":
        model.to_empty(device="cpu")
        model.load_state_dict(small_model("olmo", tie_embeddings=True).state_dict())
    elif change == "load":
        model.load_state_dict(small_model("olmo", seed=5, tie_embeddings=True).state_dict())
    else:
        model.embed.weight.data = model.embed.weight.data.clone()
        with pytest.raises(AssertionError):  # the head still has the old storage
            model(some_tokens())
        model.separate_uses()
    use = model.separated_uses()["head.weight"]
    assert use.data_ptr() == model.embed.weight.data_ptr()
    assert use.dtype is model.embed.weight.dtype and use.requires_grad
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert torch.equal(use, model.embed.weight)
    model(some_tokens())


def test_untied_model_has_no_tied_uses():
    model = small_model("olmo")
    model.separate_uses()
    assert model.separated_uses() == {}


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (5, 3), (0, 4)])
def test_any_batch_of_tokens(shape):
    terms = small_model().losses(torch.ones(shape, dtype=torch.int64))
    assert terms.num_targets == shape[0] * (shape[1] - 1)
    assert torch.isfinite(terms.ce_sum + terms.aux + terms.z)
    dense = small_model("olmo").losses(torch.ones(shape, dtype=torch.int64))
    assert float(dense.aux) == float(dense.z) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_clip_above_the_largest_number_of_a_dtype_changes_nothing(dtype):
    tokens = some_tokens()
    unclipped, clipped = (
        small_model("olmo", clip_qkv=clip).to(dtype)(tokens) for clip in (0, 1e39)
    )
    assert torch.equal(clipped, unclipped)
