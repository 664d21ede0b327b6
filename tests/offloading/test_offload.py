"""With any placement of the states, training with `optimus.offload` gives the bits of
torch.optim.AdamW."""

from __future__ import annotations

import copy
import itertools
import operator
import random
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import optimus
from optimus.chunks.buffers import ShardBuffers
from optimus.chunks.memory import Tier
from optimus.chunks.optimizer import UpdateQueue
from optimus.config.machine import Links
from optimus.errors import NonFiniteError
from optimus.offloading.optimizer import Hyperparameters
from optimus.offloading.placement import needs_of
from optimus.offloading.segments import chunk_keys, default_chunk_length, find_segments
from tests.offloading import models
from tests.offloading.models import MODELS, adamw, assert_equal, loss_of, train, weights

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
SHARES = (0.0, 0.5, 1.0)
MODELS_AND_SHARES = [*((name, 1.0) for name in MODELS), ("llama", 0.0), ("gpt2", 0.5)]


@pytest.fixture(autouse=True, params=["random"])
def hostile_memory(request, monkeypatch):
    """Fill freed memory with NaN, and do each copy at a random time between the call that starts
    the copy and the call that waits for the copy. With the parameter "freed": free the memory
    instead of filling it, and do each copy when code waits for it."""
    torch.set_num_threads(1)
    poison, copies = request.param != "freed", request.param.replace("freed", "late")
    models.set_residency(monkeypatch, poison=poison, copies=copies)


def pair(name: str, share: float, **options):
    """Return a model, its offloading optimizer, a copy of the model, and torch's AdamW for the
    copy. The share `share` of the model's chunks is on the host."""
    ours = MODELS[name]() if isinstance(name, str) else name
    theirs = copy.deepcopy(ours)
    cache = {} if share == 0 else {"cache_chunks": 0, **options.pop("cache", {})}
    optimizer = optimus.offload(ours, host_share=share, **cache, **OPTIONS, **options)
    return ours, optimizer, theirs, adamw(theirs, **OPTIONS)


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
def test_these_tests_use_the_settings_of_hostile_memory(request):
    """Check that the patches of `hostile_memory` take effect. Other tests would also pass without
    the patches."""
    memory = pair("llama", 1.0)[1]._offloaded.engine.memory
    is_freed = "freed" in request.node.name
    assert memory.poison != is_freed and memory.copies == ("late" if is_freed else "random")


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_adamw_of_torch_bit_for_bit(name, share):
    """Losses, gradient norms and weights are equal. The number of microbatches differs between
    steps, and torch's clip_grad_norm_ clips the gradients of both models."""
    ours, optimizer, theirs, reference = pair(name, share)
    assert train(ours, optimizer) == train(theirs, reference)
    assert_equal(weights(ours), weights(theirs))
    moved = optimizer._offloaded.engine.memory.num_bytes[Tier.HOST]
    assert (moved > 0) == (share > 0)


@pytest.mark.parametrize(
    ("hostile_memory", "slots"),
    [
        ("early", 2),
        ("late", 2),
        ("random", 2),
        ("freed", 2),
        ("early", 0),
        ("late", 3),
        ("freed", 100),
    ],
    indirect=["hostile_memory"],
)
def test_times_of_copies_and_sizes_of_the_cache_change_no_bit(hostile_memory, slots):
    ours, optimizer, theirs, reference = pair("gpt2", 1.0, cache={"cache_chunks": slots})
    assert train(ours, optimizer) == train(theirs, reference)
    assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("seed", range(12))
def test_random_placements_change_no_bit(seed):
    """Draw at random: the model, the share of the chunks on the host, the length of chunks, the
    size of the cache, whether backward recomputes activations, the number of microbatches of each
    step, and the steps after which the model generates text and its weights are read."""
    draw = random.Random(seed)
    ours = MODELS[draw.choice(list(MODELS))]()
    theirs = copy.deepcopy(ours)
    length = draw.choice([0, 500, 3000, 20_000])
    share = draw.choice([draw.random(), 1.0])
    least = smallest_cache(ours, length)
    optimizer = optimus.offload(
        ours,
        host_share=share,
        chunk_length=length,
        cache_chunks=draw.choice([0, least, least + draw.randrange(1, 6)]),
        **OPTIONS,
    )
    counts = [draw.randrange(1, 5) for _ in range(5)]
    recomputes, used = draw.random() < 0.5, {draw.randrange(5) for _ in range(2)}
    results = []
    for model, of_model in ((ours, optimizer), (theirs, adamw(theirs, **OPTIONS))):
        if recomputes:
            model.gradient_checkpointing_enable()

        def use(step: int, model=model) -> None:
            if step in used:
                model.generate(models.tokens(step), max_new_tokens=2, pad_token_id=0)
                weights(model)

        results.append(train(model, of_model, counts, after=use))
    assert results[0] == results[1]
    assert_equal(weights(ours), weights(theirs))


def smallest_cache(model: nn.Module, length: int) -> int:
    """Return the smallest cache that `optimus.offload` accepts."""
    segments = find_segments(model)
    named = dict(model.named_parameters())
    length = length or default_chunk_length(named, segments)
    return needs_of(named, segments, chunk_keys(named, segments), length).chunks_per_use


def test_emulated_links_change_no_bit(monkeypatch):
    """Copies and updates run in background threads, at the emulated rates of a slow link and of a
    slow host. Training has the bits of torch's AdamW."""
    links = Links(to_device=2e7, to_host=2e7, host_adam=2e7)
    models.set_residency(monkeypatch, poison=True, links=links)
    ours, optimizer, theirs, reference = pair("llama", 1.0, cache={"cache_chunks": 2})
    assert train(ours, optimizer) == train(theirs, reference)
    assert_equal(weights(ours), weights(theirs))


def enable(model: nn.Module, reentrant: bool) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()


@pytest.mark.parametrize(
    ("name", "reentrant", "slots"),
    [
        *(("llama", reentrant, 2) for reentrant in (False, True, None)),
        *(("gpt2", reentrant, 0) for reentrant in (False, True, None)),
        ("gpt2", True, 2),
        *(("olmoe", reentrant, 2) for reentrant in (False, True)),
    ],
)
def test_gradient_checkpointing_changes_no_bit(name, reentrant, slots):
    """If `reentrant` is None, checkpointing uses the default of transformers."""
    ours, optimizer, theirs, reference = pair(name, 1.0, cache={"cache_chunks": slots})
    for model in (ours, theirs):
        if reentrant is None:
            model.gradient_checkpointing_enable()
        else:
            enable(model, reentrant)
        model.train()
    assert train(ours, optimizer, (1, 3)) == train(theirs, reference, (1, 3))
    assert_equal(weights(ours), weights(theirs))


_saves_products = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": _saves_products},
}
"""Arguments of torch's `checkpoint`."""


class Tower(nn.Module):
    """A model with a parameter outside of its modules (`scale`), a block that is used twice, and an
    unused module. With `checkpoints`, backward recomputes `region` successive blocks together."""

    def __init__(self, checkpoints: str = "", region: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpoints, self.region = checkpoints, region
        self.scale = nn.Parameter(torch.ones(32))
        self.embed = nn.Embedding(models.VOCAB, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(6)
        )
        self.unused = nn.Linear(32, 32)
        self.head = nn.Linear(32, models.VOCAB, bias=False)

    def run(self, first: int, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[first : first + self.region]:
            x = x + block(x) * self.scale
        return x

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) * self.scale
        for first in range(0, 6, self.region):
            if not self.checkpoints:
                x = self.run(first, x)
            else:
                x = checkpoint(self.run, first, x, **CHECKPOINTS[self.checkpoints])
        x = x + self.blocks[1](x)  # a second use
        return self.head(x)


def train_tower(model: Tower, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for step, number in itertools.product(range(3), range(count)):
        batch = models.tokens(10 * step + number)
        loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
        loss.backward()
        losses.append(loss.item())
        if number == count - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("region", [1, 2, 3])
@pytest.mark.parametrize("checkpoints", ["", *CHECKPOINTS])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_plain_modules_equal_adamw_of_torch(checkpoints, region, share):
    """The module `unused` has no gradient. As in torch, its weights do not change, not even by
    weight decay.

    Several reentrant checkpoints use `scale`, and each of them adds a separate contribution to the
    gradient of `scale`. torch adds each contribution directly to the sum of the earlier
    microbatches. The engine first sums the contributions of a microbatch, and then adds this sum.
    With several microbatches, the two results are rounded differently.
    """
    ours, optimizer, theirs, reference = pair(Tower(checkpoints, region), share)
    before = weights(ours.unused)
    count = 1 if checkpoints == "reentrant" else 2
    assert train_tower(ours, optimizer, count) == train_tower(theirs, reference, count)
    assert_equal(weights(ours), weights(theirs))
    assert_equal(weights(ours.unused), before)


class InplaceBlock(nn.Module):
    """A block that adds to its input in place and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.linear(x.clone())
        return x


class Scaled(nn.Module):
    """A model of in-place blocks. The parameter `scale` is outside of the blocks. The model
    multiplies the input of the first block by `scale` and, with `last`, also the output of the last
    block."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.scale = last, nn.Parameter(torch.full((32,), 1.1))
        self.blocks = nn.ModuleList(InplaceBlock() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x * self.scale if self.last else x


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("last", [False, True])
def test_inplace_blocks_and_direct_parameters_equal_adamw_of_torch(last, slots):
    """With `last`, the model uses its parameter `scale` after the last block. Without `last`, the
    model returns the output of the last block unchanged."""
    ours, optimizer, theirs, reference = pair(Scaled(last), 1.0, cache={"cache_chunks": slots})
    for step, (model, of_model) in itertools.product(
        range(4), ((ours, optimizer), (theirs, reference))
    ):
        for number in range(2):
            model(models.tokens(2 * step + number, (4, 32)) / 64).square().mean().backward()
        of_model.step()
        of_model.zero_grad()
    assert_equal(weights(ours), weights(theirs))


class Values(dict):
    positions = property(operator.itemgetter("positions"))


@dataclass(frozen=True)
class View:
    positions: torch.Tensor


class Positions(nn.Module):
    """A module that returns an object that contains the parameter of the module. If `is_view` is
    True, the object contains a view of the parameter instead."""

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        self.is_view, self.weight = is_view, nn.Parameter(torch.randn(8, 32))

    def forward(self) -> Any:
        return View(self.weight[:4]) if self.is_view else Values(positions=self.weight)


class Views(nn.Module):
    """Blocks whose outputs are changed in place, and a module that returns its parameter. The
    outputs of the blocks are views, because their inputs have three dims. A hook of torch's
    spectral_norm computes the weight of `last`. Another hook calls the first block before each call
    of the second block."""

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.positions = Positions(is_view)
        self.blocks = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.act = nn.ReLU(inplace=True)
        self.last = nn.utils.spectral_norm(nn.Linear(32, 32))
        self.scripted = torch.jit.script(nn.GELU())
        self.blocks[1].register_forward_pre_hook(self.add_first)

    def add_first(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return inputs[0] + self.blocks[0](inputs[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.positions().positions
        for block in self.blocks:
            x = self.act(block(x + positions[:4]))
        x = self.last(self.scripted(x))
        x *= positions.mean()
        return x


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_views_that_modules_return_equal_adamw_of_torch(is_view, share):
    """The model changes the outputs of its blocks, which are views, in place. After the call of the
    module `positions`, the model uses the parameter that this module has returned."""
    ours, optimizer, theirs, reference = pair(Views(is_view), share)
    results = []
    for model, of_model in ((ours, optimizer), (theirs, reference)):
        losses = []
        for step, number in itertools.product(range(3), range(2)):
            loss = model(models.tokens(2 * step + number, (2, 4, 32)) / 64).square().mean()
            loss.backward()
            if number:
                of_model.step()
                of_model.zero_grad()
            with torch.no_grad():
                losses += [float(loss), float(model(torch.ones(1, 4, 32)).sum())]
        results.append(losses)
    assert results[0] == results[1]
    assert_equal(weights(ours), weights(theirs))


class Lora(nn.Module):
    """A frozen linear layer with a trained addition of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def with_lora(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = models.llama().to(dtype).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Lora(layer.self_attn.q_proj)
        layer.mlp.down_proj = Lora(layer.mlp.down_proj)
    return model


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_trains_the_bits_of_torch_and_never_copies_frozen_weights_back(dtype, checkpointing):
    """Frozen weights are in fp32 or bf16, and trained weights are in fp32."""
    ours, optimizer, theirs, reference = pair(with_lora(dtype), 1.0)
    for model in (ours, theirs):
        if checkpointing:
            model.gradient_checkpointing_enable()
            model.enable_input_require_grads()
        if dtype is torch.bfloat16:  # as accelerate does
            model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    engine = optimizer._offloaded.engine
    to_host = []
    copy_of = engine.memory.copy

    def record(into, values, after=None, then=None):
        if engine.memory.tier_of(into) is Tier.HOST:
            to_host.append(values.nbytes)
        return copy_of(into, values, after, then)

    engine.memory.copy = record
    assert train(ours, optimizer, (1, 3, 2)) == train(theirs, reference, (1, 3, 2))
    assert_equal(weights(ours), weights(theirs))
    trained = sum(state.chunk.length for state in engine.chunks)
    assert engine.frozen.chunks and all(not c.groups.options.frozen for c in engine.chunks)
    assert sum(to_host) == 4 * trained * 6  # six backward passes


def test_bf16_placements_train_equal_bits_with_fp32_masters():
    """For a bf16 model, torch's AdamW would have bf16 states, so this test compares the bits of
    training only between placements."""
    results = []
    for share in SHARES:
        model = models.llama().bfloat16()
        optimizer = optimus.offload(model, host_share=share, lr=1e-4, clip_norm=0.5)
        losses = train(model, optimizer, max_norm=None)
        state = optimizer.state_dict()["state"]
        masters = {str(n): s["master"] for n, s in state.items()}
        changed = sum(int((m != m.bfloat16()).sum()) for m in masters.values())
        assert changed > sum(m.numel() for m in masters.values()) // 2
        results.append((losses, weights(model), copy.deepcopy(masters)))
    for losses, of_model, masters in results[1:]:
        assert losses == results[0][0]
        assert_equal(of_model, results[0][1])
        assert_equal(masters, results[0][2])


def test_clip_norm_equals_torch_to_rounding_and_all_placements_to_the_bit():
    """The engine's norm is exact, and torch's norm has rounding errors. The two clipping factors
    therefore differ by at most a few units in the last place."""
    results = []
    for share in SHARES:
        ours, optimizer, theirs, reference = pair("llama", share, clip_norm=0.5)
        losses = train(ours, optimizer, (2, 1), max_norm=None)
        expected = train(theirs, reference, (2, 1), max_norm=0.5)
        assert losses[:2] == expected[:2]
        assert optimizer.grad_norm == pytest.approx(expected[-1], rel=1e-4)
        for name, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5)
        results.append((losses, optimizer.grad_norm, weights(ours)))
    for losses, norm, of_model in results[1:]:
        assert (losses, norm) == results[0][:2]
        assert_equal(of_model, results[0][2])


@pytest.mark.parametrize("share", SHARES)
def test_a_gradient_that_is_not_finite_changes_nothing(share):
    ours, optimizer, theirs, reference = pair("llama", share, clip_norm=1e9)
    before = weights(ours)
    (loss_of(ours, 0) * torch.inf).backward()
    with pytest.raises(NonFiniteError, match="nothing was updated"):
        optimizer.step()
    assert_equal(weights(ours), before)
    optimizer.zero_grad()
    assert train(ours, optimizer, max_norm=None) == train(theirs, reference, max_norm=None)
    assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("share", SHARES)
def test_groups_and_a_scheduler_equal_torch(share):
    """The two parameter groups differ in weight decay, learning rate and eps. OneCycleLR changes
    the learning rates and beta1."""
    ours = models.gpt2()
    theirs = copy.deepcopy(ours)
    losses = []
    for model, make in ((ours, partial(optimus.offload, ours, host_share=share)), (theirs, None)):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0, "lr": 3e-3, "eps": 1e-6},
        ]
        make = make or partial(torch.optim.AdamW, fused=True)
        optimizer = make(groups, lr=1e-2, betas=(0.8, 0.99))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-3], total_steps=8)
        rates: list = []

        def advance(step: int, schedule=schedule, rates=rates) -> None:
            schedule.step()
            rates.append(schedule.get_last_lr())

        losses.append(train(model, optimizer, (2, 1, 2), after=advance) + rates)
    assert losses[0] == losses[1]
    assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_into_other_buffers_equals_an_inplace_update(dtype):
    """A third of the parameters have no hyperparameters. Both updates keep the values of these
    parameters."""
    model = models.llama().to(dtype)
    optimizer = optimus.offload(model, host_share=1.0, **OPTIONS)
    train(model, optimizer, (2,))
    engine = optimizer._offloaded.engine
    engine.wait()
    rule, names = engine.optimizer, list(optimizer._offloaded.trained)
    values = Hyperparameters(1e-2, 0.9, 0.99, 1e-8, 0.1, 2)
    updated = dict.fromkeys(names[::3] + names[1::3], values)
    rule.expect(engine.chunks, updated)
    assert rule.set(engine.chunks, updated)
    changes = []
    for state in engine.chunks:
        before = [tensor.clone() for tensor in state.buffers.tensors]
        shard, master, moments = state.buffers
        copies = {name: torch.full_like(moment, torch.nan) for name, moment in moments.items()}
        other = torch.full_like(shard, torch.nan)
        into = ShardBuffers(other, other if master is shard else torch.zeros_like(master), copies)
        rule.update_into(into, state, 0.0, 0.5, rule.num_updates + 1)
        assert all(map(torch.equal, state.buffers.tensors, before))
        rule.update(state, 0.0, 0.5)
        assert all(map(torch.equal, state.buffers.tensors, into.tensors))
        changes.append(not all(map(torch.equal, state.buffers.tensors, before)))
    assert any(changes)


@pytest.mark.parametrize(
    ("dtype", "share"),
    [(torch.float32, 0.0), (torch.float32, 1.0), (torch.bfloat16, 0.5), (torch.bfloat16, 1.0)],
)
def test_resume_continues_with_equal_bits(tmp_path, dtype, share):
    """Save after two steps. For each placement, a new model loads the file and continues with the
    losses and weights of the first model."""
    model = models.llama().to(dtype)
    optimizer = optimus.offload(model, host_share=share, **OPTIONS)
    train(model, optimizer, (2, 3))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "f")
    expected = train(model, optimizer, (1, 2), first=2)
    for other in SHARES:
        again = models.llama().to(dtype)
        loaded = torch.load(tmp_path / "f")
        optimizer2 = optimus.offload(again, host_share=other, lr=5.0)
        # bf16 weights that are loaded after the states do not replace the fp32 masters.
        if other != 0.5:
            again.load_state_dict(loaded["model"])
        optimizer2.load_state_dict(loaded["optimizer"])
        if other == 0.5:
            again.load_state_dict(loaded["model"])
        assert train(again, optimizer2, (1, 2), first=2) == expected
        assert_equal(weights(again), weights(model))


def test_state_dict_waits_for_updates(monkeypatch):
    """The updates of the chunks on the host begin late. The weights that `state_dict` returns
    directly after a step must be those after the updates."""
    submit = UpdateQueue._submit

    def submit_late(queue, job, size):
        return submit(queue, lambda: (time.sleep(0.05), job())[1], size)

    model = models.llama()
    optimizer = optimus.offload(model, host_share=1.0, **OPTIONS)
    monkeypatch.setattr(UpdateQueue, "_submit", submit_late)
    train(model, optimizer, (2, 3))
    saved = weights(model)
    optimizer.state_dict()  # waits for the updates
    assert_equal(saved, weights(model))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_states_are_interchangeable_with_adamw_of_torch(share):
    ours, optimizer, theirs, reference = pair("llama", share)
    train(theirs, reference, (2, 1))
    ours.load_state_dict(theirs.state_dict())
    optimizer.load_state_dict(reference.state_dict())
    assert train(ours, optimizer, (1, 2), first=2) == train(theirs, reference, (1, 2), first=2)
    states = get_state_dict(ours, optimizer)
    assert_equal(
        states[1]["state"]["lm_head.weight"], list(optimizer.state_dict()["state"].values())[-1]
    )
    set_state_dict(ours, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
    third = copy.deepcopy(theirs)
    third.load_state_dict(ours.state_dict())
    back = adamw(third, **OPTIONS)
    back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert train(ours, optimizer, (2,), first=4) == train(third, back, (2,), first=4)
    assert_equal(weights(ours), weights(third))
