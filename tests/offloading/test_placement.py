"""Segments of models, and the rule that places the states of the segments."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import optimus
from optimus.chunks.memory import Tier
from optimus.errors import ConfigError
from optimus.offloading.checks import check_bytes
from optimus.offloading.placement import Needs, OffloadPlacement, choose_placement
from optimus.offloading.segments import find_segments
from tests.offloading import models
from tests.offloading.models import loss_of, tokens, train

LLAMA = [
    "model.embed_tokens",
    *(f"model.layers.{number}" for number in range(4)),
    "model.norm",
    "lm_head",
]
GPT2 = [
    *("transformer.wte", "transformer.wpe"),
    *(f"transformer.h.{number}" for number in range(4)),
    *("transformer.ln_f", "lm_head"),
]


class Vision(nn.Module):
    """A model with a parameter, a list of parameters, and dicts of modules as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(32))
        self.scales = nn.ParameterList([torch.ones(32), torch.ones(32)])
        self.body = nn.Sequential(
            nn.Linear(32, 32), nn.ModuleDict({"a": nn.Linear(32, 32)}), nn.Linear(32, 32)
        )
        self.heads = nn.ModuleDict({"x": nn.Linear(32, 4), "y": nn.Linear(32, 4)})


def body_in_a_sequence() -> nn.Module:
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    return nn.Sequential(nn.Embedding(64, 64), blocks, nn.Linear(64, 64))


def attributes() -> nn.Module:
    model = nn.Module()
    model.first, model.second = nn.Linear(32, 32), nn.Linear(32, 32)
    return model


@pytest.mark.parametrize(
    ("make", "names", "blocks"),
    [
        (models.llama, LLAMA, 4),
        (models.gpt2, GPT2, 4),
        (partial(models.llama, tie_word_embeddings=True), LLAMA, 4),
        (Vision, ["", "body.0", "body.1.a", "body.2", "heads.x", "heads.y"], 2),
        (body_in_a_sequence, ["0", *(f"1.{n}" for n in range(8)), "2"], 10),
        (attributes, ["first", "second"], 2),
        (partial(nn.Linear, 32, 32), [""], 0),
    ],
    ids=["llama", "gpt2", "tied", "vision", "sequence", "attributes", "linear"],
)
def test_segments_are_blocks_and_the_modules_around_them(make, names, blocks):
    model = make()
    segments = find_segments(model)
    assert [segment.name for segment in segments] == names
    assert sum(segment.is_block for segment in segments) == blocks
    assert {n for s in segments for n in s.parameters} == {n for n, _ in model.named_parameters()}


def test_a_segment_inherits_the_direct_parameters_of_the_modules_above():
    segments = {segment.name: segment for segment in find_segments(Vision())}
    direct = ("token", "scales.0", "scales.1")
    assert segments[""].parameters == direct and segments["body.1.a"].inherited == direct


def test_a_tied_parameter_belongs_to_both_segments():
    segments = {segment.name: segment for segment in find_segments(models.gpt2())}
    assert segments["transformer.wte"].parameters == segments["lm_head"].parameters


NEEDS = Needs(states=1000, chunk=10, num_chunks=20, chunks_per_use=2, gradients=100, largest="body")


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, OffloadPlacement(1.0, 6)),
        (2000, OffloadPlacement(0.0, 6)),  # half of the memory is enough for all states
        (1999, OffloadPlacement(1.0, 20, device_bytes=999)),
        (400, OffloadPlacement(1.0, 10, device_bytes=200)),
        (240, OffloadPlacement(1.0, 2, device_bytes=120)),
    ],
)
def test_states_are_on_the_device_if_all_fit_and_otherwise_the_cache_fills_its_half(
    memory, expected
):
    assert choose_placement(NEEDS, memory) == expected


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5 GiB", 3 * 2**29), ("7", 7), (7, 7), ("2TB", 2 * 10**12)],
)
def test_sizes_are_parsed(text, size):
    assert check_bytes("device_memory", text) == size


@pytest.mark.parametrize(("memory", "tier"), [("1GB", Tier.DEVICE), ("400KB", Tier.HOST)])
def test_device_memory_selects_the_tier_of_the_states(memory, tier):
    model = models.llama()
    optimizer = optimus.offload(model, device_memory=memory)
    assert {state.home for state in optimizer._offloaded.engine.chunks} == {tier}


def test_states_on_the_device_stay_in_half_of_the_smallest_memory():
    """With the smallest `device_memory` that is not refused, the states on the device need at most
    half of this memory, after each forward of a module and after each gradient of a parameter."""
    model = models.llama()
    with pytest.raises(ConfigError, match="use [0-9,]+ bytes") as error:
        optimus.offload(model, device_memory=1)
    least = int(str(error.value).split("use ")[-1].split(" bytes")[0].replace(",", ""))
    optimizer = optimus.offload(model, device_memory=least)
    memory, sizes = optimizer._offloaded.engine.memory, []

    def count(*_: Any) -> None:
        sizes.append(memory.num_bytes[Tier.DEVICE])

    for module in model.modules():
        module.register_forward_hook(count)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    train(model, optimizer, (1, 2, 1))
    assert 0 < max(sizes) <= least // 2
    assert memory.num_bytes[Tier.DEVICE] == 0


def test_after_the_first_step_uploads_follow_the_plan_and_are_the_fewest():
    """An upload is a copy of a chunk to the device. With n blocks of one chunk each, a cache of B
    chunks and k microbatches, each step after the first has 2kn - (2k-1)B uploads."""
    n, slots, count = 6, 2, 3
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(n)))
    optimizer = optimus.offload(model, host_share=1.0, cache_chunks=slots)
    engine = optimizer._offloaded.engine
    uploads = []
    for step in range(3):
        before = engine.memory.num_copied
        for _ in range(count):
            model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gradients = count * n
        uploads.append((engine.memory.num_copied - before) // 4096 - gradients)
        assert engine.params.num_unplanned == (0 if step else 2 * n * count)
    assert uploads[1:] == [2 * count * n - (2 * count - 1) * slots] * 2
    assert uploads[0] >= uploads[1]


def test_another_order_of_use_is_logged_and_recorded(caplog):
    caplog.set_level("INFO")
    model = models.llama()
    optimizer = optimus.offload(model, host_share=1.0)
    for count in (1, 1, 2, 2):
        for number in range(count):
            loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        unplanned = optimizer._offloaded.engine.params.num_unplanned
    assert unplanned == 0
    assert sum("recorded 14 uses of 7 segments" in r.message for r in caplog.records) == 1
    assert not any("in another order than planned" in r.message for r in caplog.records)


def test_training_of_a_model_with_modules_in_dicts():
    class Heads(Vision):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.body[0](x + self.token) * self.scales[0]
            x = self.body[2](self.body[1]["a"](x)) * self.scales[1] + self.token
            return self.heads["x"](x) + self.heads["y"](x)

    results = []
    for share in (0.0, 1.0):
        torch.manual_seed(0)
        model = Heads()
        optimizer = optimus.offload(
            model, host_share=share, cache_chunks=5 if share else 0, chunk_length=32
        )
        for step in range(3):
            model(tokens(step, (4, 32)).float()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(list(model.state_dict().values()))
    assert all(map(torch.equal, *results))
