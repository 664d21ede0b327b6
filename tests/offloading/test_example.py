"""Tests of placements that are chosen with an example batch: they need no more device memory than
the limit, and training gives the same bits."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from torch import Tensor, nn

import optimus
from optimus.chunks.memory import Tier
from optimus.errors import ConfigError
from optimus.offloading.placement import profile_step
from tests.planner.test_memory import _Peak

TOKENS = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(0))
EXAMPLE = {"input_ids": TOKENS, "labels": TOKENS}


def make_model(checkpoints: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config)
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(256, (4, 32), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("checkpoints", "limit"), [(False, "6MB"), (True, "3MB")])
def test_the_limit_holds_and_the_bits_are_those_of_the_device(checkpoints, limit):
    plain = make_model(checkpoints)
    expected = train(plain, optimus.offload(plain, clip_norm=1.0, host_share=0.0))
    model = make_model(checkpoints)
    optimizer = optimus.offload(model, clip_norm=1.0, device_memory=limit, example=EXAMPLE)
    engine = optimizer._offloaded.engine
    assert 0 < engine.residency.host_share < 1
    peak = _Peak(engine.memory)
    with peak:
        trained = train(model, optimizer)
    assert all(torch.equal(expected[name], trained[name]) for name in expected)
    assert 0.7 * int(limit[0]) * 10**6 < peak.most <= int(limit[0]) * 10**6


def share_with(size: int) -> float:
    """Return the share of the chunks on the host with `size` bytes of device memory."""
    optimizer = optimus.offload(make_model(), device_memory=f"{size}B", example=EXAMPLE)
    return optimizer._offloaded.engine.residency.host_share


def test_a_model_that_fits_to_the_byte_stays_on_the_device():
    uses, live, activations = profile_step(make_model(), EXAMPLE), 0, 0
    for use in uses:
        activations = max(activations, live + use.peak)
        live += use.kept
    engine = optimus.offload(make_model(), host_share=0.0)._offloaded.engine
    size = engine.memory.num_bytes[Tier.DEVICE] + activations
    assert share_with(size) == 0 < share_with(size - 1)


def test_a_limit_that_lacks_a_byte_is_refused():
    with pytest.raises(ConfigError) as refused:
        share_with(10**6)
    (missing,) = re.findall(r"by ([0-9,]+) bytes", str(refused.value))
    size = 10**6 + int(missing.replace(",", ""))
    assert share_with(size) > 0
    with pytest.raises(ConfigError, match="by 1 byte"):
        share_with(size - 1)


def test_the_order_of_a_profile_is_that_of_a_step():
    model = make_model(checkpoints=True)
    profiled = [use[:2] for use in profile_step(model, EXAMPLE)]
    optimizer = optimus.offload(model, host_share=1.0)
    train(model, optimizer)
    plan = optimizer._offloaded.engine.params.plan
    assert plan is not None
    assert profiled == [step.use[:2] for step in plan.steps]


def test_a_larger_batch_is_refused_in_training_only():
    model = make_model()
    optimus.offload(model, device_memory="6MB", example=EXAMPLE)
    larger = torch.cat([TOKENS, TOKENS])
    for batch in (larger, TOKENS.reshape(2, 64)):
        with pytest.raises(ConfigError, match="the batch has input_ids of the shape"):
            model(input_ids=batch)
    with pytest.raises(ConfigError, match="the batch has input_ids of the shape"):
        model(larger)
    model(TOKENS[:2])
    with torch.no_grad():
        model(input_ids=larger)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_in_half_precision_are_placed(dtype):
    model = make_model().to(dtype).eval()
    optimizer = optimus.offload(model, device_memory="4MB", example=EXAMPLE)
    assert 0 < optimizer._offloaded.engine.residency.host_share <= 1
    peak = _Peak(optimizer._offloaded.engine.memory)
    model.train()
    with peak:
        model(**EXAMPLE).loss.backward()
        optimizer.step()
    assert peak.most <= 4 * 10**6


def test_an_output_without_a_loss_is_profiled_with_a_cross_entropy():
    with_loss = profile_step(make_model(), EXAMPLE)
    without = profile_step(make_model(), {"input_ids": TOKENS})
    peaks = [max(use.peak for use in uses) for uses in (with_loss, without)]
    assert peaks[1] >= 0.9 * peaks[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device_memory": "1MB"}, "device_memory is too small by .* for the example"),
        ({}, "example needs device_memory"),
        ({"device_memory": "6MB", "example": {"words": TOKENS}}, "cannot be profiled"),
        ({"device_memory": "6MB", "example": [TOKENS]}, "example is a list"),
    ],
)
def test_wrong_examples_are_refused_and_leave_the_model_unchanged(arguments, message):
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        optimus.offload(model, **{"example": EXAMPLE, **arguments})
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
