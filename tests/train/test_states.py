from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch

from optimus.config import OptimConfig
from optimus.dist.collectives import Group
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from optimus.train import states as states_module
from optimus.train.states import ALIGNMENT, Home, ModelStates
from tests.helpers.tiny import tiny_config

OPTIM = OptimConfig(lr=1e-2, min_lr=0.0, weight_decay=0.1)


def make_model(**overrides) -> Transformer:
    torch.set_num_threads(1)
    config = tiny_config("d", "r", **overrides)
    model = Transformer(config.model)
    initialise_(model, seed=3)
    return model


def backward(model, seed=0):
    tokens = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(seed))
    model.losses(tokens).ce_sum.backward()


def test_parameters_become_aligned_views_with_the_same_values():
    model = make_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = ModelStates(model, torch.float32, OPTIM)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.data_ptr() % (4 * ALIGNMENT) == states.masters.data_ptr() % 64
        assert parameter.untyped_storage().data_ptr() == states.masters.untyped_storage().data_ptr()


@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_gradient_buffer_divides_into_aligned_shards(num_shards):
    home = Home(sum_group=Group(num_shards, 0))
    states = ModelStates(make_model(), torch.float32, OPTIM, lambda name: home)
    (section,) = states.sections
    assert (section.start, section.end) == (0, states.grads.numel())
    assert states.grads.numel() % (ALIGNMENT * num_shards) == 0


def test_stages_and_groups_have_sections_of_their_own():
    pair, alone = Group(2, 0), Group(1, 0)

    def home_of(name: str) -> Home:
        return Home(int("blocks.1" in name), alone if "experts" in name else pair)

    states = ModelStates(make_model(), torch.float32, OPTIM, home_of)
    keys = [(section.stage, section.group) for section in states.sections]
    assert sorted(keys, key=str) == sorted([(s, g) for s in (0, 1) for g in (pair, alone)], key=str)
    for before, after in itertools.pairwise(states.sections):
        assert before.end == after.start and before.stage <= after.stage
    for slot in states.slots:
        home = home_of(slot.name)
        (section,) = [s for s in states.sections if s.start <= slot.offset < s.end]
        assert (section.stage, section.group) == (home.stage, home.sum_group)
        assert slot.end <= section.end


def test_update_equals_torch_adamw_to_the_last_bit():
    model = make_model()
    plain = copy.deepcopy(model)
    states = ModelStates(model, torch.float32, OPTIM)
    optimizer = torch.optim.AdamW(
        plain.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, weight_decay=0.1, fused=True
    )
    for step in range(3):
        states.grads.zero_()
        optimizer.zero_grad()
        backward(model, step)
        backward(plain, step)
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert states.grad_norm() == pytest.approx(float(norm), rel=1e-6)
        states.update(OPTIM.lr)
        optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        # A tail shorter than a vector takes another formula in torch; ours never has one.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, msg=name)
        if theirs.numel() % ALIGNMENT == 0:
            assert torch.equal(ours, theirs), name


def test_bf16_parameters_follow_fp32_masters():
    model = make_model()
    states = ModelStates(model, torch.bfloat16, OPTIM)
    states.grads.zero_()
    for seed in range(4):
        backward(model, seed)
    states.check_gradients_in_place()
    assert states.grads.dtype is torch.float32 and states.grads.abs().sum() > 0
    before = states.masters.clone()
    states.update(1e-5)
    moved = (states.masters - before).abs()
    assert 0 < moved.max() < 2e-5  # far below a bf16 step of the weights: kept by the masters
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter, states.named(states.masters)[name].bfloat16())


@pytest.mark.parametrize("natively", [True, False])
def test_bf16_accumulation_over_microbatches_is_fp32(monkeypatch, natively):
    if natively and not states_module._WIDENS_NATIVELY:
        pytest.skip("this torch has no Tensor.grad_dtype")
    monkeypatch.setattr(states_module, "_WIDENS_NATIVELY", natively)
    model, reference = make_model(), make_model()
    states = ModelStates(model, torch.bfloat16, OPTIM)
    reference.to(torch.bfloat16)
    states.grads.zero_()
    total = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
    for seed in range(5):
        backward(model, seed)
        reference.zero_grad()
        backward(reference, seed)
        for name, parameter in reference.named_parameters():
            total[name] += parameter.grad.float()
    for name, gradient in states.named(states.grads).items():
        assert torch.equal(gradient, total[name]), name


def test_tied_embedding_has_one_accumulator_per_use_added_once():
    model = make_model(model__tie_embeddings=True)
    plain = copy.deepcopy(model)
    states = ModelStates(model, torch.float32, OPTIM)
    (slot,) = states.tied_slots
    states.grads.zero_()
    backward(model)
    backward(plain)
    head, embedding = slot.view(states.grads), states.named(states.grads)[slot.owner].clone()
    assert head.abs().sum() > 0 and embedding.abs().sum() > 0
    states.add_tied_uses()
    (together,) = [p.grad for n, p in plain.named_parameters() if n == slot.owner]
    torch.testing.assert_close(
        states.named(states.grads)[slot.owner], together, rtol=1e-5, atol=1e-6
    )
    # The norm counts the owner alone, with both uses in it.
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in plain.parameters()))
    assert states.grad_norm() == pytest.approx(norm, rel=1e-6)
    states.update(OPTIM.lr)
    assert slot.view(states.grads).data_ptr() != states.masters.data_ptr()
    tokens = torch.randint(0, 320, (1, 8))
    untouched = make_model(model__tie_embeddings=True)
    untouched.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), untouched(tokens))


def test_a_replaced_gradient_is_named():
    model = make_model()
    states = ModelStates(model, torch.float32, OPTIM)
    name, parameter = list(model.named_parameters())[3]
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(AssertionError, match=name):
        states.check_gradients_in_place()


def test_norm_survives_gradients_whose_squares_overflow():
    states = ModelStates(make_model(), torch.float32, OPTIM)
    states.grads.zero_()
    states.grads[0] = 1e30
    assert states.grad_norm() == pytest.approx(1e30)
