"""A tower is a stack of equal layers, each in a separate chunk. A `ChunkEngine` trains the tower.

The number of gathers of the chunks must equal the number that the formulas in
`optimus/chunks/residency.py` give.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optimus.chunks.buffers import ChunkState, ShardBuffers
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.optimizer import AdamW
from optimus.chunks.residency import Pass, Residency, ResidencyPlan
from optimus.chunks.segments import ModelSegment, register_module
from optimus.config import OptimConfig
from optimus.config.machine import Links
from optimus.distributed.collectives import ALONE, Group
from optimus.distributed.world import start_world
from optimus.observe.events import TrafficMeter
from tests.kit.layouts.whole import whole_of

WIDTH = 32
CHUNK = WIDTH * WIDTH
"""Number of elements of a layer, and of its chunk."""
LR = 1e-2
ALL_HOOKS = (-1, False)
"""Value of `missing_hook` for an engine with all hooks."""


def planned_gathers(plan: ResidencyPlan) -> list[int]:
    """Return the numbers of the chunks that a step gathers, in the order in which the gathers
    begin."""
    return [chunk for step in plan.steps for chunk in (*step.gather, *step.prefetch)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Tower(nn.Module):
    """A sequence of n layers with an input x [..., WIDTH].

    If `region` is not 0, backward recomputes groups of `region` consecutive layers.
    """

    def __init__(self, n: int, region: int = 0) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(Layer() for _ in range(n))
        self.regions = [range(at, at + region) for at in range(0, n, region)] if region else []

    def forward(self, x: Tensor) -> Tensor:
        for region in self.regions:
            x = checkpoint(self._through, x, region, use_reentrant=False)
        return x if self.regions else self._through(x, range(len(self.layers)))

    def _through(self, x: Tensor, layers: Sequence[int]) -> Tensor:
        for number in layers:
            x = self.layers[number](x)
        return x


class Case(NamedTuple):
    """Settings of a training run of a tower."""

    n: int
    """Number of layers."""
    slots: int = 0
    """Size of the cache, in chunks; 0: all chunks."""
    microbatches: int = 1
    region: int = 0
    """Number of layers that are recomputed together; 0: no recomputation."""
    gradients: bool = True
    """True if gradients are sharded."""
    parameters: bool = True
    """True if parameters are sharded."""
    deterministic: bool = True
    dtype: torch.dtype = torch.float32
    steps: int = 2
    poison: bool = False
    host_share: float = 0.0
    """Share of the layers whose chunks are stored on the host."""
    disk_share: float = 0.0
    """Share of the layers on the host that have their masters and moments on disk."""
    disk: str = ""
    """Directory of the states on disk."""
    copies: str = "early"
    """Argument `copies` of optimus.chunks.memory.Memory, which determines when copies are made on a
    CPU without `links`."""
    delay_s: float = 0.0
    """Seconds by which each update of a chunk is delayed."""
    links: Links | None = None
    """Rates of the links of an emulated device; None: no emulated device."""
    rounds: bool = False
    """True if gradients are rounded to bf16 when they leave the device."""
    early: bool = False
    """True if all chunks on the host can be updated early (during backward)."""
    surprises: str = ""
    """One character for each step of `use_in_order`. "c": the update multiplies gradients by
    another factor than expected at the start of the step, as if the norm was clipped. "s": there is
    no update, as if a gradient was not finite. Any other character: neither of them."""


class Outcome(NamedTuple):
    """Results of a run on one rank."""

    losses: list[float]
    weights: str
    """SHA-256 of the master parameters."""
    traffic: dict[str, list[int]]
    """Calls and bytes of the last step, by operation."""
    planned: int
    """Number of gathers in the plan of a step."""
    trace: list[tuple[int, bool, int]]
    """For each use of a segment in the last step: the number of the segment, True for backward, and
    the resident bytes of parameters."""
    plan: list[tuple[int, bool, int]]
    """The values of `trace` that the residency plan predicts."""
    between: dict[str, int]
    """Resident bytes after the last update, by kind of memory (see `resident_bytes`)."""
    gradients: list[int]
    """Resident bytes of gradients before each reduction of the last step."""


def segments_of(tower: Tower, missing_hook: tuple[int, bool] = ALL_HOOKS) -> list[ModelSegment]:
    """Return a segment for each layer.

    Args:
        tower: The model.
        missing_hook: The number of a layer, and True if its backward hook has no effect, False if
            its forward hook has no effect.
    """
    segments = []
    for number, layer in enumerate(tower.layers):
        register: Callable[..., None] = partial(register_module, layer)
        if number == missing_hook[0]:
            register = partial(_register_single_hook, layer, missing_hook[1])
        names = tuple(f"layers.{number}.{name}" for name, _ in layer.named_parameters())
        segments.append(ModelSegment(f"layer {number}", 0, names, register))
    return segments


def _register_single_hook(
    layer: nn.Module, without_backward: bool, before_forward: Any, before_backward: Any
) -> None:
    def nothing() -> None:
        pass

    hooks = (before_forward, nothing) if without_backward else (nothing, before_backward)
    register_module(layer, *hooks)


class _SlowAdamW(AdamW):
    """AdamW that first sleeps for `delay_s` seconds in each update of a chunk."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(OptimConfig(lr=LR, min_lr=0.0))
        self._delay_s = delay_s

    def update(self, state: ChunkState, lr: float, grad_scale: float) -> None:
        time.sleep(self._delay_s)
        super().update(state, lr, grad_scale)

    def update_into(self, into: ShardBuffers, state: ChunkState, *arguments: Any) -> None:
        time.sleep(self._delay_s)
        super().update_into(into, state, *arguments)


def make_engine(
    tower: Tower, case: Case, world: Group, missing_hook: tuple[int, bool] = ALL_HOOKS
) -> ChunkEngine:
    """Return an engine for a tower. The engine reduces gradients and shards states over all
    ranks."""
    groups = ParamProcessGroups(
        reduce_group=replace(world, axes="dp"), shard_group=replace(world, axes="dp")
    )
    engine = ChunkEngine(
        dict(tower.named_parameters()),
        lambda name: groups,
        _SlowAdamW(case.delay_s),
        dtype=case.dtype,
        chunk_length=CHUNK,
        deterministic=case.deterministic,
        reduce_dtype=torch.float32 if case.deterministic else case.dtype,
        everyone=world,
        residency=Residency(
            divides_gradients=case.gradients,
            divides_parameters=case.parameters,
            host_share=case.host_share,
            disk_share=case.disk_share,
            disk=case.disk,
            slots=case.slots,
            poison=case.poison,
            copies=case.copies,
            links=case.links,
            rounds_gradients=case.rounds,
        ),
    )
    passes = [Pass(0, False), Pass(0, True)] * case.microbatches
    engine.attach(segments_of(tower, missing_hook), passes, regions=tower.regions)
    engine.add_spare(math.inf if case.early else 0)
    return engine


def resident_bytes(engine: ChunkEngine) -> dict[str, int]:
    """Return the resident bytes of whole chunks: of parameters (key "params") and of gradients (key
    "grads")."""
    params = [chunk.params for chunk in engine.chunks]
    grads = [chunk.grads for chunk in engine.chunks]
    grads += [buffer.grads for buffer in engine.gradients._uses]
    return {
        kind: sum(flat.untyped_storage().nbytes() for flat in flats)
        for kind, flats in (("params", params), ("grads", grads))
    }


def watch_uses(engine: ChunkEngine) -> list[tuple[int, bool, int]]:
    """Return a list to which each later use of a segment adds a tuple: the number of the segment,
    True for backward, and the resident bytes of parameters. The list remains empty if no parameter
    is sharded."""
    store: Any = engine.params
    uses: list[tuple[int, bool, int]] = []
    if store.plan is not None:
        use = store.use

        def use_and_record(segment: int, backward: bool) -> None:
            use(segment, backward)
            uses.append((segment, backward, resident_bytes(engine)["params"]))

        store.use = use_and_record
    return uses


def batch(number: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)


def train_towers(cases: Sequence[Case]) -> list[Outcome]:
    """Train a tower for each case, and return the results of this rank."""
    torch.set_num_threads(1)
    meter = TrafficMeter()
    world = replace(start_world(device="cpu").everyone, recorder=meter)
    return [_train(case, world, meter) for case in cases]


def _train(case: Case, world: Group, meter: TrafficMeter) -> Outcome:
    tower = Tower(case.n, case.region)
    engine = make_engine(tower, case, world)
    reduces_each = case.deterministic or case.gradients
    losses, gradients, uses = [], [], watch_uses(engine)
    engine.gradients.before_reduce = lambda _: gradients.append(resident_bytes(engine)["grads"])
    for step in range(case.steps):
        gradients.clear()
        meter.clear()
        engine.start_step((LR, 1.0))
        for microbatch in range(case.microbatches):
            number = (step * case.microbatches + microbatch) * world.size + world.rank
            loss = (tower(batch(number, case.dtype)) - 1).square().float().mean()
            (loss / (case.microbatches * world.size)).backward()
            losses.append(loss.item())
            if reduces_each or microbatch == case.microbatches - 1:
                engine.gradients.reduce(0)
        engine.gradients.finish()
        engine.update(LR)
    traffic = {name: list(count) for (_, name), count in meter.counts.items()}
    planned, trace, plan = 0, [], []
    if engine.params.plan is not None:
        size = CHUNK * case.dtype.itemsize
        planned = len(planned_gathers(engine.params.plan))
        trace = uses[-len(engine.params.plan.steps) :]
        plan = [
            (step.use.segment, step.use.backward, len(step.resident) * size)
            for step in engine.params.plan.steps
        ]
    between = resident_bytes(engine)
    masters = torch.cat([master.flatten() for master in whole_of(engine, "master").values()])
    engine.close()
    digest = hashlib.sha256(masters.numpy().tobytes()).hexdigest()
    return Outcome(losses, digest, traffic, planned, trace, plan, between, gradients)


def train_in_order(case: Case, order: str) -> tuple[list[float], str, int]:
    """Train a tower on this rank. The layers compute in the order `order` (see `use_in_order`).

    Returns:
        The losses, the SHA-256 of the master parameters, and the number of unplanned uses in the
        last step.
    """
    tower = Tower(case.n)
    engine = make_engine(tower, case, ALONE)
    losses = use_in_order(tower, engine, case, order)
    masters = torch.cat([master.flatten() for master in whole_of(engine, "master").values()])
    engine.close()
    digest = hashlib.sha256(masters.numpy().tobytes()).hexdigest()
    return losses, digest, engine.params.num_unplanned


def use_in_order(tower: Tower, engine: ChunkEngine, case: Case, order: str) -> list[float]:
    """Train a tower on this rank, and return the losses.

    Args:
        tower, engine: The tower and its engine.
        case: Settings.
        order: Order of the layers. "forward": the order of the plan. "reverse": the opposite order.
            "twice": each layer computes twice. "skip": only every second layer computes.
            "alternate": all layers compute in every second step, and only the first two layers
            compute in the other steps.
    """
    layers = {
        "forward": range(case.n),
        "reverse": range(case.n)[::-1],
        "twice": [layer for layer in range(case.n) for _ in range(2)],
        "skip": range(0, case.n, 2),
    }
    losses = []
    for step in range(case.steps):
        layers["alternate"] = range(2 if step % 2 else case.n)
        surprise = case.surprises[step % len(case.surprises)] if case.surprises else ""
        engine.start_step((LR, 1.0 if surprise == "c" else 0.5))
        for microbatch in range(case.microbatches):
            out = batch(step * case.microbatches + microbatch, case.dtype)
            for layer in layers[order]:
                out = tower.layers[layer](out)
            loss = (out - 1).square().float().mean()
            loss.backward()
            losses.append(loss.item())
            engine.gradients.reduce(0)
        engine.gradients.finish()
        if surprise != "s":
            engine.update(LR, 0.5)
    return losses


def count_gathers(cases: Sequence[Case], passes: int) -> list[int]:
    """Return the number of gathers in `passes` forward passes outside of a step, for each case."""
    meter, counts = TrafficMeter(), []
    world = replace(start_world(device="cpu").everyone, recorder=meter)
    for case in cases:
        tower = Tower(case.n)
        make_engine(tower, case, world)
        meter.clear()
        with torch.no_grad():
            for number in range(passes):
                tower(batch(number, case.dtype))
        counts.append(meter.counts["dp", "all_gather"][0])
    return counts


def run_with_missing_hooks(
    case: Case, missing_hooks: Sequence[tuple[int, bool]]
) -> list[tuple[bool, bool]]:
    """For each element of `missing_hooks`, run forward and backward of a new tower without this
    hook, outside of a training step. Return a pair for each run: True if the output is finite, and
    True if the gradient of the input is finite."""
    world, is_finite = start_world(device="cpu").everyone, []
    for missing_hook in missing_hooks:
        tower = Tower(case.n, case.region)
        make_engine(tower, case, world, missing_hook)
        x = batch(0, case.dtype).requires_grad_()
        out = tower(x)
        (grad,) = torch.autograd.grad(out.float().sum(), x)
        is_finite.append((bool(out.isfinite().all()), bool(grad.isfinite().all())))
    return is_finite
