"""Tests of placements that `optimus.offload` chooses with an example batch. The placements need no
more device memory than the limit, and training gives the bits of states on the device."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import optimus
from optimus.chunks.memory import Tier
from optimus.errors import ConfigError
from optimus.offloading.placement import profile_step
from tests.offloading import models
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


MODELS = {
    "llama": make_model,
    # Its dropout of attention has no fused kernel on a CPU.
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=256, use_cache=False)
    ),
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(
            num_hidden_layers=2,
            hidden_size=64,
            intermediate_size=64,
            num_attention_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            vocab_size=256,
            use_cache=False,
        )
    ).bfloat16(),
}


def profiled_peak(model: nn.Module, example: dict[str, Tensor]) -> int:
    """Return the peak, in bytes, of the activations in the profile of a model on a CPU."""
    live = most = 0
    for use in profile_step(model, example, on_cpu=True):
        most = max(most, live + use.peak)
        live += use.kept
    return most


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_profiled_activations_are_those_of_a_real_step(name, checkpoints):
    model = MODELS[name]().train()
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    profiled = profiled_peak(model, EXAMPLE)
    memory = optimus.offload(model, host_share=0.0)._offloaded.engine.memory
    states, peak = memory.num_bytes[Tier.DEVICE], _Peak(memory)
    with peak:
        out = model(**EXAMPLE)
        out.loss.backward()
    assert profiled == pytest.approx(peak.most - states, rel=0.01)


class Attention(nn.Module):
    """Attention that has no fused kernel on a CPU, or whose mask torch converts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, width = kind, 128 if kind == "wide values" else 64
        self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)
        self.value = nn.Linear(64, width)
        self.mask = nn.Parameter(torch.zeros(96, 96), requires_grad=kind == "trained mask")

    def forward(self, input: Tensor) -> Tensor:
        heads = 1 if self.kind == "three dims" else 4
        q, k, v = (
            layer(input).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if heads == 1:
            q, k, v = q[:, 0], k[:, 0], v[:, 0]
        mask = self.mask if self.kind == "trained mask" else None
        mask = self.mask.detach()[None] if self.kind == "mask of three dims" else mask
        if self.kind == "broadcast heads":
            k, v = k[:, :1], v[:, :1]
        mask = self.mask.detach() >= 0 if self.kind == "bool mask" else mask
        dropout = 0.1 if self.kind == "dropout" else 0.0
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout)


@pytest.mark.parametrize(
    "kind",
    [
        *("plain", "dropout", "trained mask", "bool mask", "wide values", "three dims"),
        *("mask of three dims", "broadcast heads"),
    ],
)
def test_profiled_attention_has_the_memory_of_a_cpu(kind):
    model = nn.Sequential(nn.Linear(64, 64), Attention(kind), nn.Flatten())
    x = torch.ones(4, 96, 64)
    profiled = profiled_peak(model, {"input": x})
    memory = optimus.offload(model, host_share=0.0)._offloaded.engine.memory
    states, peak = memory.num_bytes[Tier.DEVICE], _Peak(memory)
    with peak:
        out = model(x)
        loss = torch.stack([out.float().log_softmax(-1).sum()]).sum()
        loss.backward()
    assert profiled == pytest.approx(peak.most - states, rel=0.02)


def test_the_least_limit_holds_with_dropout_of_attention():
    model = MODELS["gpt2"]().train()
    with pytest.raises(ConfigError) as refused:
        optimus.offload(model, device_memory=10**5, example=EXAMPLE)
    (missing,) = re.findall(r"by ([0-9,]+) bytes", str(refused.value))
    limit = 10**5 + int(missing.replace(",", ""))
    optimizer = optimus.offload(model, device_memory=limit, example=EXAMPLE)
    peak = _Peak(optimizer._offloaded.engine.memory)
    with peak:
        train(model, optimizer)
    assert 0.7 * limit < peak.most <= limit


def share_with(size: int) -> float:
    """Return the share of the chunks that are on the host if `device_memory` is `size` bytes."""
    optimizer = optimus.offload(make_model(), device_memory=f"{size}B", example=EXAMPLE)
    return optimizer._offloaded.engine.residency.host_share


def test_a_model_that_fits_to_the_byte_stays_on_the_device():
    activations = profiled_peak(make_model(), EXAMPLE)
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
        ({}, "example needs device_memory and"),
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


def add_output(called: nn.Module, module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    return inputs[0] + called(inputs[0]).tanh()


class Ordered(nn.Sequential):
    """A Sequential that calls its blocks in the order `order`, a sequence of their indices."""

    order: Sequence[int] = range(6)

    def forward(self, input: Tensor) -> Tensor:
        for number in self.order:
            input = self[number](input)
        return input


def peak_with_calls(
    calls: Sequence[tuple[int, int]],
    limit: int,
    order: Sequence[int] = range(6),
    microbatches: int = 1,
    **options: Any,
) -> tuple[int, int, bool]:
    """Train six blocks, which are called in the order `order`, with `limit` bytes of device memory.
    For each (caller, called) in `calls`, a forward pre-hook of block `caller`, registered after
    `offload`, calls block `called`. `options` are further options of `offload`.

    Return the largest number of bytes of states on the device, the number of slots of the cache,
    and True if the trained weights equal the weights that torch's AdamW trains.
    """
    torch.manual_seed(0)
    layers = ((nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(6))
    ours = Ordered(*(nn.Sequential(*layer) for layer in layers))
    ours.order = order
    theirs, options = copy.deepcopy(ours), {"weight_decay": 0.0, **options}
    example = {"input": torch.ones(1, 32)}
    optimizer = optimus.offload(ours, device_memory=limit, example=example, **options)
    engine, reference = optimizer._offloaded.engine, models.adamw(theirs, weight_decay=0.0)
    allocate, most = engine.memory.allocate, 0

    def count(flat: Tensor) -> None:
        nonlocal most
        allocate(flat)
        most = max(most, engine.memory.num_bytes[Tier.DEVICE])

    engine.memory.allocate = count
    for model, of_model in ((ours, optimizer), (theirs, reference)):
        for caller, called in calls:
            model[caller].register_forward_pre_hook(partial(add_output, model[called]))
        for _ in range(3):
            for number in range(microbatches):
                model(torch.full((1, 32), 1.0 + number)).square().mean().backward()
            of_model.step()
            of_model.zero_grad()
    is_equal = all(map(torch.equal, ours.state_dict().values(), theirs.state_dict().values()))
    return most, engine.residency.slots, is_equal


@pytest.mark.parametrize("calls", [[(3, 0)], [(5, 0), (4, 1)]])
def test_the_limit_holds_if_blocks_call_others(calls):
    """The backward of a calling block also computes gradients of the called block. These gradients
    stay on the device until backward has also reached the regular call of the called block. Until
    then, gradients of other blocks are copied to the host early enough to stay below the limit."""
    slots_seen = set()
    for limit in range(96_000, 126_000, 6_000):
        most, slots, is_equal = peak_with_calls(calls, limit)
        slots_seen.add(slots)
        assert most <= limit and is_equal, limit
    assert 2 in slots_seen


@pytest.mark.parametrize("early_adam", ["off", "on"])
@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 4, 5, 0, 1, 2], [0, 5, 1, 4, 0, 2, 3]])
def test_the_limit_holds_if_blocks_are_not_called_in_the_order_of_registration(order, early_adam):
    """If blocks were called in the order of registration, backward would copy the gradients of the
    last registered blocks to the host first. In the tested orders, backward computes another block
    before these blocks."""
    for limit in (102_000, 114_000, 126_000):
        for count in (1, 2):
            most, _, is_equal = peak_with_calls([], limit, order, count, early_adam=early_adam)
            assert most <= limit and is_equal, (limit, count)


@pytest.mark.parametrize("early_adam", ["on", "auto"])
def test_example_without_uses_of_some_blocks(early_adam):
    """The model uses only the blocks 0, 2 and 4. The unused blocks have no gradients and are not
    updated."""
    for limit in (96_000, 120_000):
        most, _, is_equal = peak_with_calls([], limit, [0, 2, 4], early_adam=early_adam)
        assert most <= limit and is_equal, limit


def test_gradients_of_called_blocks_leave_the_device_before_the_limit_is_exceeded():
    """Block 5 calls four blocks, one after the other. At any time, at most two blocks have
    gradients on the device, so the memory for two slots of the cache is enough."""
    most, slots, is_equal = peak_with_calls([(5, 4), (5, 3), (5, 2), (5, 1)], 96_000)
    assert most <= 96_000 and slots == 2 and is_equal


def test_calls_whose_gradients_exceed_the_limit_are_refused():
    calls = [(5, 4), (4, 3), (3, 2), (2, 1)]  # block 5 calls a block that calls a block, and so on
    with pytest.raises(ConfigError, match="exceed device_memory by") as refused:
        peak_with_calls(calls, 150_000)
    assert "\n" not in str(refused.value)
    most, _, is_equal = peak_with_calls(calls, 600_000)  # all states are on the device
    assert most <= 600_000 and is_equal


def test_example_of_a_model_whose_hook_calls_a_module_is_refused_with_the_remedy():
    """`offload` runs the example on a copy of the model on the meta device. A copy of a model has
    the same hook functions, so the hook calls a module of the original model, which is not on the
    meta device."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
    example = {"input": torch.ones(1, 32)}

    def hook(module: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return add_output(model[0], module, inputs)

    handle = model[1].register_forward_pre_hook(hook)
    with pytest.raises(ConfigError, match="call optimus.offload before you register hooks"):
        optimus.offload(model, device_memory=30_000, example=example)
    handle.remove()
    optimus.offload(model, device_memory=30_000, example=example)
    model[1].register_forward_pre_hook(hook)
    model(torch.ones(1, 32)).sum().backward()
