"""Training of models whose modules are shared, or call each other in unusual ways, gives the bits
of torch's AdamW."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import re
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import optimus
from optimus.errors import ConfigError
from optimus.offloading.checks import MARK
from optimus.offloading.segments import find_segments
from tests.offloading import models
from tests.offloading.models import adamw, assert_equal, weights
from tests.offloading.test_offload import CHECKPOINTS, OPTIONS, SHARES, hostile_memory

__all__ = ["hostile_memory"]


def assert_trains_the_bits_of_adamw(
    model: nn.Module,
    share: float = 1.0,
    before: Callable[[nn.Module], None] = lambda model: None,
    after: Callable[[nn.Module], None] = lambda model: None,
    count: int = 2,
    **cache: int,
) -> None:
    """Train a model with the placement `share`, and a copy of the model with torch's AdamW, with
    `count` microbatches in each step. Assert that both have the same bits. `before` and `after` are
    called with each of the two models, before and after the call of `offload`."""
    ours, theirs = model, copy.deepcopy(model)
    before(ours)
    before(theirs)
    optimizer = optimus.offload(ours, host_share=share, **cache, **OPTIONS)
    reference = adamw(theirs, **OPTIONS)
    after(ours)
    after(theirs)
    for trained, of_model in ((ours, optimizer), (theirs, reference)):
        for step, number in itertools.product(range(3), range(count)):
            trained(models.tokens(2 * step + number, (4, 32)) / 64).square().mean().backward()
            if number == count - 1:
                of_model.step()
                of_model.zero_grad()
    assert_equal(weights(ours), weights(theirs))


class Container(nn.Module):
    """A module without a forward. The modules that contain it use its list of blocks and its
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.shift = nn.Parameter(torch.ones(32))


class Parent(nn.Module):
    """A module with parameters that it uses between the blocks of a container."""

    def __init__(self, container: nn.Module) -> None:
        super().__init__()
        self.container, self.scale = container, nn.Parameter(torch.ones(32))
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        for block in getattr(self.container, "blocks", self.container):
            x = block(x) * self.scale + getattr(self.container, "shift", 0.0)
        return self.out(x)


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "ModuleList": lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(2)),
    "Sequential": lambda: nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)),
    "without forward": Container,
}


def with_shared_container(kind: str) -> nn.Module:
    torch.manual_seed(0)
    shared = CONTAINERS[kind]()
    return nn.Sequential(Parent(shared), Parent(shared), nn.Linear(32, 32))


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize("share", SHARES)
def test_container_that_two_modules_share_equals_adamw_of_torch(kind, share):
    """The blocks of the container compute between uses of the parameters of the two modules that
    share it."""
    model = with_shared_container(kind)
    segments = find_segments(model)
    assert len({segment.module for segment in segments}) == len(segments)
    assert_trains_the_bits_of_adamw(model, share)


class Group(nn.Module):
    """A module that uses a parameter before and after its blocks and, with `scale`, uses the values
    of the parameter twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((32,), 1.1))
        self.blocks = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            scaled, again = x * self.scale, torch.tanh(x * self.scale)
            x = block(scaled) + again
        return x


class Groups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.side = Group(), Group(), nn.Linear(32, 32)
        self.tied = nn.Linear(32, 32)
        self.tied.weight = self.first.blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("kind", ["direct parameters", *CONTAINERS])
def test_later_steps_use_planned_parameters_only(kind):
    """After the first step, all uses of parameters are planned, even if two modules share a
    container. A segment must not count as a caller of the modules that it encloses."""
    model = Groups() if kind == "direct parameters" else with_shared_container(kind)
    optimizer = optimus.offload(model, host_share=1.0, **OPTIONS)
    unplanned = []
    for _ in range(3):
        model(torch.ones(4, 32)).square().mean().backward()
        unplanned.append(optimizer._offloaded.engine.params.num_unplanned)
        optimizer.step()
        optimizer.zero_grad()
    assert unplanned[0] > 0 and unplanned[1:] == [0, 0]


@pytest.mark.parametrize("kind", CONTAINERS)
def test_smallest_accepted_cache_suffices_for_a_shared_container(kind):
    with pytest.raises(ConfigError, match=r"use (\d+) or more") as refused:
        optimus.offload(with_shared_container(kind), host_share=1.0, cache_chunks=1)
    least = int(re.findall(r"use (\d+) or more", str(refused.value))[0])
    assert_trains_the_bits_of_adamw(with_shared_container(kind), cache_chunks=least)


CALLED: dict[str, Callable[[Groups], nn.Module]] = {
    "earlier block": lambda model: model.first.blocks[0],
    "later block": lambda model: model.first.blocks[2],
    "block of another module": lambda model: model.second.blocks[1],
    "other module": lambda model: model.second,
    "side": lambda model: model.side,
    "tied to the caller": lambda model: model.tied,
}
CALLERS = ("pre-hook", "hook", "forward")


def call(caller: str, called: str, model: nn.Module, checkpoints: str = "") -> None:
    """Let the second block of a model call another module, in a hook or in its forward. With
    `checkpoints`, backward recomputes the other module."""
    block, other = model.first.blocks[1], CALLED[called](model)
    if checkpoints:
        other = partial(checkpoint, other, **CHECKPOINTS[checkpoints])
    if caller == "pre-hook":
        block.register_forward_pre_hook(lambda _, inputs: inputs[0] + other(inputs[0]).tanh())
    elif caller == "hook":
        block.register_forward_hook(lambda _, inputs, output: output + other(inputs[0]).tanh())
    else:
        forward = type(block).forward
        block.forward = lambda x: forward(block, forward(block, x) + other(x).tanh())


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("called", CALLED)
@pytest.mark.parametrize("caller", CALLERS)
def test_module_called_by_a_module_that_does_not_enclose_it(
    hostile_memory, caller, called, is_after
):
    """Backward uses parameters of the caller, and of the module around the caller, after the
    backward of the called module. With `is_after`, hooks are registered after `offload`."""
    change = {"after" if is_after else "before": partial(call, caller, called)}
    assert_trains_the_bits_of_adamw(Groups(), **change, cache_chunks=5)


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("called", ["earlier block", "other module", "side"])
@pytest.mark.parametrize("caller", CALLERS)
def test_recomputed_module_called_by_a_module_that_does_not_enclose_it(
    hostile_memory, caller, called, checkpoints
):
    before = partial(call, caller, called, checkpoints=checkpoints)
    assert_trains_the_bits_of_adamw(Groups(), before=before, cache_chunks=5, count=1)


def train_scale(model: nn.Module) -> None:
    """Multiply the input of a model by a parameter, because a reentrant checkpoint needs an input
    that requires a gradient."""
    model.scale = nn.Parameter(torch.ones(32))
    model.register_forward_pre_hook(lambda module, inputs: inputs[0] * module.scale)


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("recomputed", ["callers", "called module"])
def test_recomputed_module_that_several_blocks_call_needs_a_single_caller(
    hostile_memory, recomputed, checkpoints
):
    """The cache has space for the called block and a single caller."""
    options = CHECKPOINTS[checkpoints]

    def call_last(model: nn.Module) -> None:
        train_scale(model)
        *callers, called = model.blocks
        if recomputed == "called module":
            called = partial(checkpoint, called, **options)

        def forward(block: nn.Module, x: Tensor) -> Tensor:
            y = torch.tanh(block[0](x))
            return block[1](y + called(y).tanh())

        for block in callers:
            block.forward = partial(forward, block)
            if recomputed == "callers":
                block.forward = partial(checkpoint, block.forward, **options)

    assert_trains_the_bits_of_adamw(Blocks(), before=call_last, cache_chunks=3, count=1)


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
def test_nested_checkpoints_of_forwards_equal_adamw_of_torch(hostile_memory, checkpoints):
    """As in Zamba2 of transformers, checkpoints are inside of the calls of modules. Backward
    recomputes the outer forward with the hooks of the blocks. It then recomputes the forward of the
    last block without hooks."""

    def add_checkpoints(model: nn.Module) -> None:
        train_scale(model)
        # Without an operation after the last block whose backward would recompute first.
        model.forward = lambda x: nn.Sequential.forward(model.blocks, x)
        for module in (model, *model.blocks):
            module.forward = partial(checkpoint, module.forward, **CHECKPOINTS[checkpoints])

    assert_trains_the_bits_of_adamw(Blocks(), before=add_checkpoints, cache_chunks=2, count=1)


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("kind", ["no gradients", "detached", "detached, with an inner block"])
def test_checkpoint_with_a_block_after_the_block_whose_backward_continues(
    hostile_memory, kind, checkpoints
):
    """Backward first enters the second block, and then recomputes both blocks and a further block.
    To load the further block, the cache replaces the second block."""

    def function(model: nn.Module, number: int, x: Tensor) -> Tensor:
        first, second, *others = model.blocks
        y = second(first(x))
        with torch.no_grad() if kind == "no gradients" else contextlib.nullcontext():
            z = others[number](y)
        return y + z.detach().tanh()

    def add_checkpoint(model: nn.Module) -> None:
        train_scale(model)
        if "inner" in kind:
            for block in model.blocks[2:]:
                block.forward = lambda x, block=block: block[1](model.blocks[1](block[0](x)))

        def forward(x: Tensor) -> Tensor:
            with set_checkpoint_early_stop(False):
                for number in range(2):
                    x = checkpoint(function, model, number, x, **CHECKPOINTS[checkpoints])
            return x

        model.forward = forward

    chunks = 3 if "inner" in kind else 2
    assert_trains_the_bits_of_adamw(Blocks(), before=add_checkpoint, cache_chunks=chunks, count=1)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.75, 1.0])
def test_checkpoint_with_a_last_block_on_the_device(share):
    """Unless all blocks are on the host, the first blocks stay on the device. The plan of the cache
    nevertheless contains the uses of the first blocks. The recomputation of a first block therefore
    also replaces the block whose backward continues."""

    def function(model: nn.Module, number: int, x: Tensor) -> Tensor:
        y = model.blocks[number](x)
        with torch.no_grad():
            z = model.blocks[0](y)
        return y + z.tanh()

    def add_checkpoint(model: nn.Module) -> None:
        def forward(x: Tensor) -> Tensor:
            with set_checkpoint_early_stop(False):
                for number in (2, 3):
                    x = checkpoint(function, model, number, x, use_reentrant=False)
            return x

        train_scale(model)
        model.forward = forward

    model = Blocks()
    model.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    assert_trains_the_bits_of_adamw(model, share, before=add_checkpoint, cache_chunks=2, count=1)


def test_a_failed_recomputation_frees_the_activations_of_its_graph():
    model, kept = Blocks(), []

    def failing(x: Tensor) -> Tensor:
        y = model.blocks[1](x)
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError("out of memory")
        return y

    def forward(x: Tensor) -> Tensor:
        x = model.blocks[0](x).exp()  # saves its result
        kept.append(weakref.ref(x))
        return checkpoint(failing, x, use_reentrant=False)

    model.forward = forward
    optimizer = optimus.offload(model, host_share=1.0, cache_chunks=2, **OPTIONS)
    with set_checkpoint_early_stop(False):
        loss = model(torch.ones(4, 32)).sum()
    with pytest.raises(RuntimeError, match="out of memory"):
        loss.backward()
    del loss
    optimizer.zero_grad()
    gc.collect()
    assert [reference() for reference in kept] == [None]


def test_recomputation_before_the_backward_of_its_block_copies_no_other_block():
    """The checkpoints of two blocks also contain an operation after the block. Backward therefore
    recomputes such a block before the backward of the block begins. The last use in backward is
    then still the use of the next block."""
    model, copied = Blocks(), []

    def forward(x: Tensor) -> Tensor:
        for number, block in enumerate(model.blocks):
            function = block if number % 2 else nn.Sequential(block, nn.Tanh())
            x = checkpoint(function, x, use_reentrant=False)
        return x

    model.forward = forward
    optimizer = optimus.offload(model, host_share=1.0, cache_chunks=2, **OPTIONS)
    engine = optimizer._offloaded.engine
    gather = engine.gather
    engine.gather = lambda names: copied.append(names) or gather(names)
    model(torch.ones(4, 32)).square().mean().backward()
    assert not copied


@pytest.mark.parametrize("caller", CALLERS)
def test_cache_that_is_too_small_for_a_module_and_its_caller_is_refused(caller):
    before = partial(call, caller, "side")
    message = r"side is called by .* of first and of first.blocks.1,"
    with pytest.raises(ConfigError, match=message) as refused:
        assert_trains_the_bits_of_adamw(Groups(), before=before, cache_chunks=2)
    least = int(re.findall(r"use cache_chunks = (\d+)", str(refused.value))[0])
    assert least == 3  # the direct parameters of first, which both need, and a chunk for each block
    assert_trains_the_bits_of_adamw(Groups(), before=before, cache_chunks=least)


@pytest.mark.parametrize("is_cache_given", [False, True])
def test_refusal_of_a_cache_names_the_argument_that_has_selected_its_size(is_cache_given):
    with pytest.raises(ConfigError, match="use") as refused:
        optimus.offload(Groups(), device_memory=1)
    least = int(re.findall(r"use ([\d,]+) bytes", str(refused.value))[0].replace(",", ""))
    cache = {"cache_chunks": 2} if is_cache_given else {}
    model = Groups()
    call("forward", "side", model)
    optimus.offload(model, device_memory=least, **cache)
    remedy = "cache_chunks = 3, if necessary with " if is_cache_given else ""
    remedy += "a larger device_memory"
    with pytest.raises(ConfigError, match=f"; use {remedy}, or leave out the call"):
        model(torch.ones(4, 32))


def test_failed_call_of_a_module_leaves_the_caller_usable():
    """A hook of a module calls another module. The forward of the other module raises an error,
    which the hook ignores."""

    def add_hook(model: nn.Module) -> None:
        def ignore_errors(module: nn.Module, inputs: tuple[Tensor]) -> None:
            with contextlib.suppress(RuntimeError):
                model.side(torch.ones(3))

        model.first.blocks[1].register_forward_pre_hook(ignore_errors)

    assert_trains_the_bits_of_adamw(Groups(), before=add_hook)


class Blocks(nn.Module):
    """Blocks that together need more chunks than the cache has in the tests."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
@pytest.mark.parametrize("then", ["train", "evaluate", "call a block", "clear", "ignore"])
def test_interrupted_forward_leaves_the_model_usable(hostile_memory, then):
    """torch calls no hook after KeyboardInterrupt. The cache has space for a single block. With
    "ignore", a hook of another block calls a block that is interrupted."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def use(model: nn.Module) -> None:
        handle = model.blocks[2][1].register_forward_pre_hook(interrupt)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                model(torch.ones(4, 32))
        handle.remove()
        if then == "evaluate":
            with torch.no_grad():
                model(torch.ones(4, 32))
        elif then == "call a block":
            model.blocks[0](torch.ones(4, 32))
        elif then == "clear":
            model.zero_grad()

    def ignore(model: nn.Module) -> None:
        def call_interrupted(module: nn.Module, inputs: tuple[Tensor]) -> None:
            handle = model.blocks[2][1].register_forward_pre_hook(interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                model.blocks[2](inputs[0])
            handle.remove()

        model.blocks[1].register_forward_pre_hook(call_interrupted)

    if then == "ignore":
        assert_trains_the_bits_of_adamw(Blocks(), after=ignore, cache_chunks=2)
    else:
        assert_trains_the_bits_of_adamw(Blocks(), after=use, cache_chunks=1)


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
def test_failed_backward_has_no_effect_on_later_forwards(hostile_memory):
    """The cache has space for a single block. A forward guards its parameters again."""

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    def use(model: nn.Module) -> None:
        handle = model.blocks[2].register_full_backward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(4, 32)).sum().backward()
        handle.remove()
        model(torch.ones(4, 32))
        model.blocks[2](torch.ones(4, 32))
        if is_offloaded(model.blocks[2][0].weight):
            with pytest.raises(ConfigError, match="used with gradients outside of the forward"):
                model.blocks[2][0].weight.square()
        model.zero_grad()

    assert_trains_the_bits_of_adamw(Blocks(), after=use, cache_chunks=1)


def is_offloaded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, MARK)


def test_parameter_is_guarded_after_a_failed_forward():
    """Its use with gradients would need the parameter in backward."""
    model = Blocks()
    optimus.offload(model, host_share=1.0, **OPTIONS)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model.blocks[0](torch.ones(3, 3))
    with pytest.raises(ConfigError, match="used with gradients outside of the forward"):
        model.blocks[0][0].weight.square()


class Recursive(nn.Module):
    """A block that calls itself or, with `other`, a block that calls this one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.other = self.__call__

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = torch.tanh(self.first(x))
        if depth:
            x = x + self.other(x, depth - 1)
        return torch.tanh(self.second(x))


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
@pytest.mark.parametrize("is_mutual", [False, True])
def test_modules_that_call_themselves(hostile_memory, is_mutual):
    """A block uses its parameters after the call of itself."""
    torch.manual_seed(0)
    model = nn.Sequential(Recursive(), nn.Linear(32, 32), Recursive())

    def link(model: nn.Module) -> None:
        blocks = (model[0], model[2])
        for block, other in zip(blocks, blocks[::-1] if is_mutual else blocks, strict=True):
            block.other = other.__call__

    assert_trains_the_bits_of_adamw(model, before=link)


class InnerGradient(nn.Module):
    """A block that computes a gradient of another module in its forward."""

    def __init__(self, side: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.side = [side]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.side[0](leaf).square().sum(), leaf)
        return self.second(x + gradient)


@pytest.mark.parametrize("use", ["inner module", "inner gradient"])
def test_unsupported_uses_in_a_forward_are_refused_with_the_name_of_the_segment(use):
    side = nn.Linear(32, 32)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), InnerGradient(side), side]
    model = nn.Sequential(*blocks)
    optimus.offload(model, host_share=1.0, **OPTIONS)
    if use == "inner module":
        called, parameter, segment = model[0][1], "0.1.weight", "0"
    else:
        called, parameter, segment = model[1], "1.second.weight", "1"
    message = f"{parameter} is used with gradients outside of the forward of {segment}, or after"
    with pytest.raises(ConfigError, match=message) as refused:
        called(torch.ones(4, 32))
    assert f"call {segment}, or" in str(refused.value) and "\n" not in str(refused.value)


def call_in_backward(kind: str, called: str, checkpoints: str, model: nn.Module) -> None:
    """Let a hook in the backward of the second block of a model change a gradient by the output of
    another module. With `checkpoints`, backward recomputes the block."""
    block, other = model.first.blocks[1], CALLED[called](model)

    @torch.no_grad()
    def changed(gradient: Tensor) -> Tensor:
        return gradient + other(gradient).tanh()

    if kind == "backward hook":
        block.register_full_backward_hook(lambda _, inputs, outputs: (changed(inputs[0]),))
    elif kind == "backward pre-hook":
        block.register_full_backward_pre_hook(lambda _, outputs: (changed(outputs[0]),))
    else:
        forward = type(block).forward

        def with_hook(x: Tensor) -> Tensor:
            y = torch.tanh(forward(block, x))
            if y.requires_grad:
                y.register_hook(changed)
            return forward(block, y)

        block.forward = with_hook
    if checkpoints:
        block.forward = partial(checkpoint, block.forward, **CHECKPOINTS[checkpoints])


@pytest.mark.parametrize("hostile_memory", ["random", "freed"], indirect=True)
@pytest.mark.parametrize("called", ["earlier block", "block of another module", "side"])
@pytest.mark.parametrize("checkpoints", ["", *CHECKPOINTS])
@pytest.mark.parametrize("kind", ["backward hook", "backward pre-hook", "tensor hook"])
def test_module_called_by_a_hook_in_backward(hostile_memory, kind, checkpoints, called):
    """The backward of the block then still needs its parameters."""
    change = partial(call_in_backward, kind, called, checkpoints)
    assert_trains_the_bits_of_adamw(Groups(), before=change, cache_chunks=4, count=1)


def test_cache_that_is_too_small_for_a_module_and_a_backward_hook_is_refused():
    before = partial(call_in_backward, "backward hook", "side", "")
    with pytest.raises(ConfigError, match=r"side is called by .*; use cache_chunks = 3"):
        assert_trains_the_bits_of_adamw(Groups(), before=before, cache_chunks=2)
