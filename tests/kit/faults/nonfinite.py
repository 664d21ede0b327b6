"""A rank's run to be changed before it goes, and runs in which one rank computes NaN."""

from __future__ import annotations

import torch

from optimus.errors import NonFiniteError
from optimus.train.loop import Run
from tests.kit.runs.training import make_run


class NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * float("nan")


SPOILT = {"output": lambda x: x * float("inf"), "slope": NanBackward.apply}
"""What a layer of a broken device gives; all that follows is spoilt with it."""


def poison(tree: dict, bad_rank: int, what: str, layer: str = "q_proj", at: int = 3) -> str:
    """One rank computes NaN at step `at`, in a `parameter`, a `gradient` or what SPOILT has of the
    first layer of this name; the parameter's name and the error that this rank raised."""
    run = make_run(tree)
    plain_update = run.update
    named = dict(run.model.named_parameters())
    name = next(name for name in named if f"{layer}.weight" in name)

    def update(step: int) -> None:
        if step == at and run.world.rank == bad_rank:
            if what == "parameter":
                named[name].data.view(-1)[0] = torch.nan
            elif what == "gradient":
                named[name].register_hook(lambda gradient: gradient * torch.nan)
            elif what == "gradient once":  # as a device does that computes wrongly once
                factors = iter([torch.nan])
                named[name].register_hook(lambda gradient: gradient * next(factors, 1.0))
            else:
                _spoil(run.model.get_submodule(name.removesuffix(".weight")), what)
        plain_update(step)

    run.update = update
    try:
        run.go()
    except NonFiniteError as error:
        assert error.exit_code == 4
        return f"{name}|{error}"
    return "no error"


def _spoil(module: torch.nn.Module, what: str) -> None:
    if hasattr(module, "wiring"):  # of which a tp rank has a part of the sum
        module.multiply = lambda x, bias: SPOILT[what](type(module).multiply(module, x, bias))
    else:
        module.register_forward_hook(lambda module, inputs, out: SPOILT[what](out))


def damage_state(tree: dict, bad_rank: int, state: str, value: float, at: int) -> list[str]:
    """One rank's memory breaks behind update `at`: an element of an optimizer state of its shard
    becomes `value`. The parameter and what this rank raised, if anything."""
    run = make_run(tree)
    plain_update, name = run.update, ""

    def update(step: int) -> None:
        nonlocal name
        plain_update(step)
        if step == at and run.world.rank == bad_rank:
            run.states.wait()
            name = break_element(run, state, value)

    run.update = update
    try:
        run.go()
    except NonFiniteError as error:
        assert error.exit_code == 4
        return [name, str(error)]
    return [name, "no error"]


def break_element(run: Run, state: str, value: float) -> str:
    """Set the last element of some parameter in this rank's shard; the parameter's name."""
    chunk = run.states.chunks[-1]
    slot, part = next(
        (slot, part[0])
        for slot in chunk.chunk.slots
        if (part := chunk.local_slice(chunk.states[state], slot)) is not None
    )
    part[-1] = value
    return slot.name
