"""Runs in which one rank computes NaN, one rank gets a corrupted optimizer state, or a training
instance gives NaN on any rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from optimus.errors import NonFiniteError
from optimus.train.loop import Run
from tests.kit.runs.training import Ended, make_run, run_with


class NanBackward(torch.autograd.Function):
    """Identity whose backward pass returns NaN."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


BROKEN_OUTPUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "output": lambda x: x * float("inf"),
    "slope": NanBackward.apply,
}
"""Functions that damage the output of a layer, or only its gradient, as a broken device could."""


def poison(
    tree: dict[str, Any], bad_rank: int, target: str, layer: str = "q_proj", at: int = 3
) -> str:
    """Run the training of a configuration on this rank, with a NaN on one rank.

    Args:
        tree: The configuration.
        bad_rank: The rank that computes NaN.
        target: The first non-finite value: "parameter", "gradient", "gradient once" (only in the
            first backward pass), or a key of BROKEN_OUTPUTS.
        layer: A kind of layer, such as "q_proj". The first layer of this kind is broken.
        at: Number of the update in which the first NaN occurs.

    Returns:
        The name of the layer's weight and the error that this rank raised, with "|" between them;
        or "no error".
    """
    run = make_run(tree)
    plain_update = run.update
    named = dict(run.model.named_parameters())
    name = next(name for name in named if f"{layer}.weight" in name)

    def update(step: int) -> float:
        if step == at and run.world.rank == bad_rank:
            if target == "parameter":
                named[name].data.view(-1)[0] = torch.nan
            elif target == "gradient":
                named[name].register_hook(lambda gradient: gradient * torch.nan)
            elif target == "gradient once":  # like a transient error of a device
                factors = iter([torch.nan])
                named[name].register_hook(lambda gradient: gradient * next(factors, 1.0))
            else:
                module = run.model.get_submodule(name.removesuffix(".weight"))
                _break_output(module, BROKEN_OUTPUTS[target])
        return plain_update(step)

    return f"{name}|{error}" if (error := _error_of(run, update)) else "no error"


def _error_of(run: Run, update: Callable[[int], float]) -> str:
    """Run with `update` in place of `run.update`. Return the message of the NonFiniteError; "" if
    there is none."""
    with mock.patch.object(run, "update", update):
        try:
            run.go()
        except NonFiniteError as error:
            assert error.exit_code == 4
            return str(error)
    return ""


def _break_output(module: Any, break_tensor: Callable[[Tensor], Tensor]) -> None:
    if hasattr(module, "wiring"):  # break the product of this tp rank, before the sum over tp ranks
        multiply = module.multiply
        module.multiply = lambda x, bias: break_tensor(multiply(x, bias))
    else:
        module.register_forward_hook(lambda module, inputs, out: break_tensor(out))


def damage_state(
    tree: dict[str, Any], bad_rank: int, state: str, value: float, at: int
) -> list[str]:
    """Run the training of a configuration on this rank, with a corrupted state on one rank.

    Args:
        tree: The configuration.
        bad_rank: The rank whose state is corrupted.
        state: The optimizer state that is corrupted.
        value: The new value of one element in the rank's shard of the state.
        at: The update after which the element changes.

    Returns:
        The name of the parameter whose state is corrupted, or "" on other ranks; and the error that
        this rank raised, or "no error".
    """
    run = make_run(tree)
    plain_update, name = run.update, ""

    def update(step: int) -> float:
        nonlocal name
        seconds = plain_update(step)
        if step == at and run.world.rank == bad_rank:
            run.states.wait()
            name = break_element(run, state, value)
        return seconds

    error = _error_of(run, update)
    return [name, error or "no error"]


def break_element(run: Run, state: str, value: float) -> str:
    """Set one element of an optimizer state in this rank's shard. Return the name of the parameter
    to which the element belongs."""
    chunk = run.states.chunks[-1]
    for slot in chunk.chunk.slots:
        if (local := chunk.local_slice(chunk.states[state], slot)) is not None:
            local[0][-1] = value
            return slot.name
    raise AssertionError("the shard of the last chunk has no parameter")


@contextlib.contextmanager
def bad_instance(run: Run, number: int, target: str = "output") -> Iterator[None]:
    """Context manager in which the training instance `number` gives NaN on any rank of `run` that
    computes the embedding of this instance. `target` is a key of BROKEN_OUTPUTS."""
    bad = torch.from_numpy(run.plan.data.training.read(number, number + 1))
    if run.rank_model.layout.coordinate.pp:
        yield
        return

    def break_rows(module: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor | None:
        return BROKEN_OUTPUTS[target](out) if torch.equal(inputs[0].cpu(), bad) else None

    handle = run.model.embed.register_forward_hook(break_rows)
    try:
        yield
    finally:
        handle.remove()


def train_on_bad_instance(tree: dict[str, Any], number: int, target: str = "output") -> Ended:
    """Run the training of a configuration on this rank, with data that gives NaN on any rank.
    `number` and `target` are the arguments of `bad_instance`."""
    go = Run.go

    def go_on_bad_instance(run: Run) -> None:
        with bad_instance(run, number, target):
            go(run)

    with mock.patch.object(Run, "go", go_on_bad_instance):
        return run_with(tree, lambda step: None)
