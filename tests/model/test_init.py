from __future__ import annotations

import pytest
import torch

from optimus.model.init import draw, initialise_
from optimus.model.transformer import Transformer
from tests.model.small import small_config, small_model


def test_order_of_construction_and_missing_modules_make_no_difference():
    whole = small_model(num_layers=3).state_dict()
    stage = Transformer(small_config(num_layers=3))
    del stage.blocks["0"], stage.embed
    stage.blocks = torch.nn.ModuleDict(reversed(stage.blocks.items()))
    torch.manual_seed(123)
    torch.rand(7)  # the state of torch's generator must not matter
    initialise_(stage, 0)
    for name, value in stage.state_dict().items():
        assert torch.equal(value, whole[name]), name


def test_a_rank_with_some_experts_gets_their_weights():
    whole = small_model()
    local = Transformer(small_config(num_experts=2))
    for block in local.blocks.values():
        block.mlp.experts.first_expert = 3
    initialise_(local, 0)
    for layer in "01":
        ours, theirs = local.blocks[layer].mlp.experts, whole.blocks[layer].mlp.experts
        assert torch.equal(ours.gate_up, theirs.gate_up[3:])
        assert torch.equal(ours.down, theirs.down[3:])


def test_all_parameters_experts_and_seeds_differ():
    drawn = []
    for seed in (0, 1):
        for name, parameter in small_model(seed=seed).named_parameters():
            if "norm" not in name:
                entries = parameter if "experts" in name else [parameter]
                drawn += [tuple(entry.flatten()[:8].tolist()) for entry in entries]
    assert len(drawn) == 2 * (2 + 2 * (4 + 1 + 5 + 5))
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_make_no_difference(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = draw(torch.Size([1_100_003]), 0.02, 1, "x")
        torch.set_num_threads(threads)
        assert torch.equal(draw(torch.Size([1_100_003]), 0.02, 1, "x"), single)
    finally:
        torch.set_num_threads(before)


def test_values_are_a_normal_cut_at_three_deviations():
    values = draw(torch.Size([400, 1000]), 0.5, 0, "x").flatten()
    normal = torch.distributions.Normal(0.0, 0.5)
    assert float(values.abs().max()) <= 1.5
    for quantile in (0.01, 0.25, 0.5, 0.9, 0.999):
        inner = 0.0013498980 + quantile * (1 - 2 * 0.0013498980)  # quantile of the whole normal
        expected = float(normal.icdf(torch.tensor(inner, dtype=torch.float64)))
        assert float((values <= expected).float().mean()) == pytest.approx(quantile, abs=3e-3)


def test_norms_biases_and_padding():
    model = small_model(attention_bias=True, pad_token_id=3)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert (parameter == 0).all(), name
    assert (model.embed.weight[3] == 0).all() and (model.embed.weight[4] != 0).any()


def test_dtype_and_device_round_the_same_values():
    narrow = Transformer(small_config()).bfloat16()
    initialise_(narrow, 0)
    for name, value in small_model().state_dict().items():
        assert torch.equal(narrow.state_dict()[name], value.bfloat16()), name


def test_embedding_init_std_applies_to_the_embedding_only():
    usual = small_model(vocab_size=1000).state_dict()
    wide = small_model(vocab_size=1000, embedding_init_std=0.7).state_dict()
    assert usual["embed.weight"].std() == pytest.approx(0.1 * 0.9866, rel=0.02)  # truncated
    assert wide["embed.weight"].std() == pytest.approx(0.7 * 0.9866, rel=0.02)
    for name in usual.keys() - {"embed.weight"}:
        assert torch.equal(wide[name], usual[name]), name
