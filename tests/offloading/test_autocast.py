"""Training within torch.autocast: casts of weights, selective checkpoints, and exactness."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.offloading import models
from tests.offloading.models import assert_equal, weights
from tests.offloading.test_offload import SHARES, hostile_memory, pair

__all__ = ["hostile_memory"]


class Casts(TorchDispatchMode):
    """Dispatch mode that records each cast of a [32, 32] weight. `count` returns the number of
    recorded casts whose storages still exist."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: list[weakref.ref] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.shape == (32, 32):
            self._storages.append(weakref.ref(result.untyped_storage()))
        return result

    def count(self) -> int:
        return sum(storage() is not None for storage in self._storages)


@pytest.mark.parametrize("share", SHARES)
def test_autocast_keeps_no_copies_of_weights(share):
    """A single autocast context contains an evaluation and two forwards of five layers. torch's
    autocast keeps the bf16 casts of all weights, with their graphs, until the context ends. For an
    offloaded model, only the cast of the last layer exists at the end of the evaluation."""
    ours, optimizer, theirs, reference = pair(
        nn.Sequential(*(nn.Linear(32, 32) for _ in range(5))), share
    )
    batches = torch.randn(2, 3, 8, 32, generator=torch.Generator().manual_seed(0))
    for model, of_model in ((ours, optimizer), (theirs, reference)):
        for first, second, third in batches:
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad(), Casts() as casts:
                    model(first)
                    if model is ours:
                        assert casts.count() == (1 if share else 5)
                loss, further = model(second).square().mean(), model(third).square().mean()
                loss.backward()
                further.backward()
            of_model.step()
            of_model.zero_grad()
    assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("share", SHARES)
def test_autocast_uses_the_weights_after_each_update(share):
    """A single autocast context contains a step, a load of weights, and an evaluation after each of
    the two. torch's autocast would use casts of the old weights again, so the test clears the cache
    of casts before each evaluation of the model without offloading."""
    ours, optimizer, theirs, reference = pair(nn.Sequential(nn.Linear(32, 32)), share)
    batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    loaded = weights(ours)
    results: list[list] = [[], []]
    for model, of_model, values in ((ours, optimizer, results[0]), (theirs, reference, results[1])):

        def evaluate(model: nn.Module = model, values: list = values) -> None:
            if model is theirs:
                torch.clear_autocast_cache()
            with torch.no_grad():
                values.append(model(batch).tolist())

        with torch.autocast("cpu", torch.bfloat16):
            evaluate()
            model(batch).square().mean().backward()
            evaluate()
            of_model.step()
            evaluate()
            model.load_state_dict(loaded)
            evaluate()
    assert results[0] == results[1]
    assert results[0][0] == results[0][1] != results[0][2]


_CASTS = torch.ops.aten._to_copy.default
_PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.addmm.default


class Checkpointed(nn.Module):
    """A block with a selective checkpoint.

    Args:
        saved: The functions whose results the checkpoint saves.
        use: "block" for a checkpoint of the whole block, "inner" for a checkpoint in the forward of
            the block, "before" for a checkpoint in the forward, after a first use of the weights.
    """

    def __init__(self, saved: Any, use: str) -> None:
        super().__init__()
        self.saved, self.use = saved, use
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def run(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.use == "before":
            x = x + self.down(torch.tanh(self.up(x)))
        return self.run(x) if self.use == "block" else self.checkpoint(self.run, x)

    def checkpoint(self, function: Any, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, list(self.saved))
        return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


class Blocks(nn.Module):
    def __init__(self, saved: Any, use: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Checkpointed(saved, use) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.checkpoint(block, x) if block.use == "block" else block(x)
        return x


def train_blocks(
    model: nn.Module, optimizer: torch.optim.Optimizer, inside: bool, cache: bool
) -> None:
    """Train for two steps of two microbatches. With `inside`, backward runs within the autocast
    context. If `cache` is False, the context keeps no casts."""
    for step in range(2):
        losses = []
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            for number in range(2):
                batch = models.tokens(2 * step + number, (4, 32)) / 64
                losses.append(model(batch).square().mean())
                if inside:
                    losses.pop().backward()
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("use", ["block", "inner"])
@pytest.mark.parametrize("saved", [(_CASTS,), _PRODUCTS, (_CASTS, *_PRODUCTS)])
@pytest.mark.parametrize("share", SHARES)
def test_selective_checkpoints_save_casts(share, saved, use, inside):
    """With the cache of autocast, torch raises an error in most of these cases, because a cast
    comes from the cache either in the forward or in the recomputation, but not in both. The
    offloaded model, with the cache, trains to the bits of torch without the cache."""
    ours, optimizer, theirs, reference = pair(Blocks(saved, use), share)
    train_blocks(ours, optimizer, inside, cache=True)
    train_blocks(theirs, reference, inside, cache=False)
    assert_equal(weights(ours), weights(theirs))


@pytest.mark.parametrize("share", SHARES)
def test_selective_checkpoints_after_a_use_of_their_weights_need_no_cache(share):
    """With the cache of autocast, the checkpointed forward takes the cast of a weight from the
    cache, but the recomputation in backward casts the weight again. With and without offloading,
    this difference raises an error. Without the cache, training gives the bits of torch."""
    ours, optimizer, theirs, reference = pair(Blocks(_PRODUCTS, "before"), share)
    for model, of_model in ((ours, optimizer), (theirs, reference)):
        with pytest.raises(RuntimeError, match="encountered during backward but not found"):
            train_blocks(model, of_model, inside=False, cache=True)
        of_model.zero_grad()
        train_blocks(model, of_model, inside=False, cache=False)
    assert_equal(weights(ours), weights(theirs))


class Uses(nn.Module):
    """Blocks whose weights are used once or several times in a forward.

    Args:
        kind: "once": each weight is used once.
            "loop": each call of a block uses the weight of the block twice.
            "calls": a forward calls each block twice.
            "shared": two blocks share a weight.
            "direct": before each block, the model uses a weight that belongs to no block.
            "tied": the embedding and the last layer share a weight.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.embed = kind, nn.Embedding(models.VOCAB, 32)
        self.blocks = nn.ModuleList(Looped(2 if kind == "loop" else 1) for _ in range(3))
        self.head = nn.Linear(32, models.VOCAB, bias=False)
        if kind == "shared":
            self.blocks[2].linear.weight = self.blocks[0].linear.weight
        elif kind == "direct":
            self.weight = nn.Parameter(torch.randn(32, 32) / 6)
        elif kind == "tied":
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = nn.functional.linear(x, self.weight) if self.kind == "direct" else x
            x = block(block(x)) if self.kind == "calls" else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Looped(nn.Module):
    """A block that uses its weight `count` times."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(32, 32), count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = self.linear(x).tanh()
        return x


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("is_summed", [False, True])
@pytest.mark.parametrize("kind", ["once", "loop", "tied", "calls", "shared", "direct"])
def test_bits_within_autocast_differ_only_for_casts_that_several_calls_use(kind, is_summed, share):
    """With the cache of autocast, the bits differ from torch if several calls of modules use one
    cast (kinds "calls", "shared" and "direct"), or if one backward follows two forwards
    (`is_summed`), as docs/offload_one_gpu.md says. Without the cache, the bits are equal."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, cache: bool) -> dict[str, Tensor]:
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
                losses = [model(models.tokens(2 * step + number)) for number in range(2)]
            for loss in [sum(losses)] if is_summed else losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    ours, theirs = {}, {}
    for cache in (False, True):
        model, optimizer, other, reference = pair(Uses(kind), share)
        ours[cache], theirs[cache] = train(model, optimizer, cache), train(other, reference, cache)
    assert_equal(ours[False], theirs[False])
    is_equal = kind in ("once", "loop", "tied") and not is_summed
    assert is_equal == all(map(torch.equal, ours[True].values(), theirs[True].values()))
    if kind != "loop":
        assert_equal(ours[True], theirs[False])
