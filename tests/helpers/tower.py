"""A tower of equal layers, a chunk each, trained by the engine on several ranks: what the formulas
of residency are about, without a language model around it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.optimizer import AdamW
from optimus.chunks.residency import Pass, Residency, ResidencyPlan
from optimus.chunks.states import Home
from optimus.chunks.units import Unit, watch_module
from optimus.config import OptimConfig
from optimus.distributed.collectives import Group
from optimus.distributed.world import start_world
from optimus.observe.events import TrafficMeter
from tests.helpers.whole import whole_of

WIDTH = 32
CHUNK = WIDTH * WIDTH
"""Elements of a layer."""
LR = 1e-2


def fetched(plan: ResidencyPlan) -> list[int]:
    """The chunks that a step gathers, in the order in which they are asked for."""
    return [chunk for step in plan.steps for chunk in (*step.gather, *step.prefetch)]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Tower(nn.Module):
    """x [..., WIDTH] through n layers, those of a region recomputed together in backward."""

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
    """A training run of a tower."""

    n: int
    slots: int = 0
    microbatches: int = 1
    region: int = 0
    gradients: bool = True
    """Whether gradients are divided."""
    parameters: bool = True
    """Whether parameters are."""
    deterministic: bool = True
    dtype: torch.dtype = torch.float32
    steps: int = 2
    poison: bool = False


class Outcome(NamedTuple):
    """What a rank saw."""

    losses: list[float]
    weights: str
    """A digest of the masters."""
    traffic: dict[str, list[int]]
    """Calls and bytes of the last step, by operation."""
    planned: int
    """Fetches of a step."""
    trace: list[tuple[int, bool, int]]
    """Of the last step: unit, whether backward, resident bytes of parameters."""
    plan: list[tuple[int, bool, int]]
    """The same, as planned."""
    between: dict[str, int]
    """Resident bytes after the last update."""
    gradients: list[int]
    """Resident bytes of gradients before each reduction of the last step."""


def units_of(tower: Tower, silent: tuple[int, bool] = (-1, False)) -> list[Unit]:
    """A unit a layer. `silent`: one whose forward, or backward if true, goes unnoticed."""
    units = []
    for number, layer in enumerate(tower.layers):
        watch: Callable[..., None] = partial(watch_module, layer)
        if number == silent[0]:
            watch = partial(_watch_half, layer, silent[1])
        names = tuple(f"layers.{number}.{name}" for name, _ in layer.named_parameters())
        units.append(Unit(f"layer {number}", 0, names, watch))
    return units


def _watch_half(layer: nn.Module, without_backward: bool, forward: Any, backward: Any) -> None:
    def nothing() -> None:
        pass

    watch_module(layer, *((forward, nothing) if without_backward else (nothing, backward)))


def make_engine(
    tower: Tower, case: Case, world: Group, silent: tuple[int, bool] = (-1, False)
) -> ChunkEngine:
    """All ranks of the world add gradients and divide states."""
    home = Home(adders=replace(world, axes="dp"), shards=replace(world, axes="dp"))
    engine = ChunkEngine(
        dict(tower.named_parameters()),
        lambda name: home,
        AdamW(OptimConfig(lr=LR, min_lr=0.0)),
        dtype=case.dtype,
        chunk_length=CHUNK,
        deterministic=case.deterministic,
        reduce_dtype=torch.float32 if case.deterministic else case.dtype,
        everyone=world,
        residency=Residency(case.gradients, case.parameters, case.slots, case.poison),
    )
    passes = [Pass(0, False), Pass(0, True)] * case.microbatches
    engine.follow(units_of(tower, silent), passes, regions=tower.regions)
    return engine


def resident_bytes(engine: ChunkEngine) -> dict[str, int]:
    """Memory of whole chunks at the moment: of `params` and of `grads`, those of uses too."""
    uses = engine.gradients._uses
    flats = {
        "params": [one.params for one in engine.chunks],
        "grads": [one.grads for one in (*engine.chunks, *uses)],
    }
    return {
        kind: sum(flat.untyped_storage().nbytes() for flat in every)
        for kind, every in flats.items()
    }


def watch_visits(engine: ChunkEngine) -> list[tuple[int, bool, int]]:
    """Unit, whether backward, and bytes of whole parameters, of every visit from now on."""
    cache, seen = engine.cache, []
    if cache is not None:
        visit = cache.visit

        def noted(unit: int, backward: bool) -> None:
            visit(unit, backward)
            seen.append((unit, backward, resident_bytes(engine)["params"]))

        cache.visit = noted
    return seen


def batch(number: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)


def train_towers(cases: Sequence[Case]) -> list[Outcome]:
    """Some updates of this rank's copy in each case."""
    torch.set_num_threads(1)
    meter = TrafficMeter()
    world = replace(start_world(device="cpu").everyone, recorder=meter)
    return [_train(case, world, meter) for case in cases]


def _train(case: Case, world: Group, meter: TrafficMeter) -> Outcome:
    tower = Tower(case.n, case.region)
    engine = make_engine(tower, case, world)
    each = case.deterministic or case.gradients
    losses, gradients, visits = [], [], watch_visits(engine)
    engine.gradients.before_sum = lambda one: gradients.append(resident_bytes(engine)["grads"])
    for step in range(case.steps):
        gradients.clear()
        meter.clear()
        engine.gradients.start()
        for microbatch in range(case.microbatches):
            number = (step * case.microbatches + microbatch) * world.size + world.rank
            loss = (tower(batch(number, case.dtype)) - 1).square().float().mean()
            (loss / (case.microbatches * world.size)).backward()
            losses.append(loss.item())
            if each or microbatch == case.microbatches - 1:
                engine.gradients.reduce(0)
        engine.gradients.finish()
        engine.update(LR)
    counted = {name: list(entry) for (_, name), entry in meter.counts.items()}
    planned, trace, plan = 0, [], []
    if engine.cache is not None:
        size = CHUNK * case.dtype.itemsize
        planned = len(fetched(engine.cache.plan))
        trace = visits[-len(engine.cache.plan.steps) :]
        plan = [
            (step.visit.unit, step.visit.backward, len(step.resident) * size)
            for step in engine.cache.plan.steps
        ]
    between = resident_bytes(engine)
    masters = torch.cat([one.flatten() for one in whole_of(engine, "master").values()])
    digest = hashlib.sha256(masters.numpy().tobytes()).hexdigest()
    return Outcome(losses, digest, counted, planned, trace, plan, between, gradients)


def fetches_of_passes(cases: Sequence[Case], passes: int) -> list[int]:
    """How often a chunk is gathered by so many forward passes outside of a training step."""
    meter, found = TrafficMeter(), []
    world = replace(start_world(device="cpu").everyone, recorder=meter)
    for case in cases:
        tower = Tower(case.n)
        make_engine(tower, case, world)
        meter.clear()
        with torch.no_grad():
            for number in range(passes):
                tower(batch(number, case.dtype))
        found.append(meter.counts["dp", "all_gather"][0])
    return found


def use_with_silent_triggers(
    case: Case, silent: Sequence[tuple[int, bool]]
) -> list[tuple[bool, bool]]:
    """Whether the output and the input's gradient are finite, outside of a training step, with each
    of some triggers silent."""
    world, found = start_world(device="cpu").everyone, []
    for one in silent:
        tower = Tower(case.n, case.region)
        make_engine(tower, case, world, one)
        x = batch(0, case.dtype).requires_grad_()
        out = tower(x)
        (grad,) = torch.autograd.grad(out.float().sum(), x)
        found.append((bool(out.isfinite().all()), bool(grad.isfinite().all())))
    return found
