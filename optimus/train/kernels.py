"""What a run computes its experts with: chosen, compiled once a machine, the same on all ranks.

Reduction orders differ between backends and between forms of grouped products. Ranks that differed
would drift apart unseen, so they compare before the first step and end where they disagree.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from optimus import platform
from optimus.config import Config
from optimus.distributed.collectives import all_gather_objects, broadcast_object
from optimus.distributed.world import World
from optimus.errors import ConfigError
from optimus.train.grouped_gemm import inner_sizes, measure_grouped_gemm
from optimus.train.preflight import Preflight
from optimus_kernels import backend
from optimus_kernels.backend import Backend
from optimus_kernels.cache import KernelError
from optimus_kernels.grouped_mm import form as form_in_force
from optimus_kernels.grouped_mm import set_form

logger = logging.getLogger(__name__)


def settle_kernels(config: Config, world: World, flight: Preflight) -> tuple[Config, Preflight]:
    """As `take_kernels`, both in the configuration and as settings that say what was taken."""
    stored = flight.start.full.settings if flight.start.full is not None else {}
    config, settled = take_kernels(config, world, stored)
    flight = replace(
        flight,
        settings=flight.settings | {f"kernels.{key}": value for key, value in settled.items()},
        differences=(*flight.differences, *_differences(settled, flight)),
    )
    return config, flight


def take_kernels(
    config: Config, world: World, stored: Mapping[str, Any]
) -> tuple[Config, dict[str, str]]:
    """Choose backend and grouped GEMM on all ranks, `stored` settings where they say one.

    Does nothing for a model without experts, unless a backend is asked for by name. Raises
    ConfigError on every rank if an explicit choice cannot be had somewhere or ranks differ.
    """
    sparse = any(config.model.experts_by_layer)
    backend.choose(config.kernels.backend)
    choices = all_gather_objects(_choice(), world.everyone, Answer)  # environments may differ
    if trouble := _failure(choices):
        raise ConfigError(trouble, on_every_rank=True)
    if not sparse and all(choice.name == "auto" for choice in choices):
        return config, {}
    taken = _agree_on_backend(world)
    form = _agree_on_form(config, world, stored) if sparse else config.kernels.grouped_gemm
    settled = {"backend": taken.name, "grouped_gemm": form}
    if world.is_first:
        logger.info("kernels: %s%s", taken.name, f", grouped products: {form}" if sparse else "")
    kernels = config.kernels.model_copy(update=settled)
    return config.model_copy(update={"kernels": kernels}), settled


def _agree_on_backend(world: World) -> Backend:
    """Where the world is small, one rank of a machine compiles what is missing; the others wait in
    the collective, bounded by parallel.timeout_s. Then all take the same."""
    kind, builds = world.device.type, world.launch.local_rank == 0
    found, answer = Backend("torch"), Answer()
    if builds:
        found, answer = _find(kind, world.size <= backend.MAX_BUILDING_WORLD)
    key = all_gather_objects(answer.key, world.everyone, str)[0]
    if not builds:
        found, answer = _find(kind, False, key)
    answers = all_gather_objects(answer, world.everyone, Answer)
    if trouble := disagreement(answers):
        raise ConfigError(trouble, on_every_rank=True)
    if world.is_first and found.why_not:
        logger.info("plain torch on %s, since %s", kind, found.why_not)
    backend.use(kind, found)
    return found


class Answer(NamedTuple):
    """What one rank has found for itself."""

    name: str = ""
    key: str = ""
    why_not: str = ""
    """Under auto: why its device's own backend is not it."""
    failure: str = ""
    """Why an explicit choice cannot be had."""


def _choice() -> Answer:
    """What is asked for on this rank, by name."""
    try:
        return Answer(backend.chosen()[0])
    except KernelError as error:
        return Answer(failure=str(error))


def _find(kind: str, may_build: bool, key: str = "") -> tuple[Backend, Answer]:
    try:
        found = backend.find(kind, may_build, key)
    except KernelError as error:
        return Backend("torch"), Answer(failure=str(error))
    return found, Answer(found.name, found.key, found.why_not)


def disagreement(answers: Sequence[Answer]) -> str:
    """One line naming ranks, where one cannot have what is asked for or they differ; else ""."""
    if failure := _failure(answers):
        return failure
    by_choice = defaultdict(list)
    for rank, answer in enumerate(answers):
        by_choice[(answer.name, answer.key)].append(rank)
    if len(by_choice) == 1:
        return ""
    parts = [f"{key or name} on {_ranks(ranks)}" for (name, key), ranks in by_choice.items()]
    reason = next((f" ({answer.why_not})" for answer in answers if answer.why_not), "")
    return (
        f"ranks differ in their kernels: {', '.join(parts)}{reason}; give all machines one "
        "OPTIMUS_KERNELS_CACHE with what `optimus kernels build` made, or set kernels.backend=torch"
    )


def _failure(answers: Sequence[Answer]) -> str:
    """The first rank's, in one line that names all that have one; else ""."""
    failed = [rank for rank, answer in enumerate(answers) if answer.failure]
    where = f"{_ranks(failed)}: " if failed and len(answers) > 1 else ""
    return where + answers[failed[0]].failure if failed else ""


def _ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7, 9`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _agree_on_form(config: Config, world: World, stored: Mapping[str, Any]) -> str:
    """Given, kept from the checkpoint, or measured by the first rank: one form on all ranks."""
    wanted = all_gather_objects(config.kernels.grouped_gemm, world.everyone, str)
    others = [rank for rank, form in enumerate(wanted) if form != wanted[0]]
    if others:
        raise ConfigError(
            f"kernels.grouped_gemm = {wanted[0]!r} on rank 0 and {wanted[others[0]]!r} on "
            f"{_ranks(others)}; give all ranks one configuration",
            on_every_rank=True,
        )
    form = "loop" if config.train.deterministic else wanted[0]
    if form == "auto":
        form = stored.get("kernels.grouped_gemm", "auto")
        form = "auto" if _cannot_have(form, config, world) else form  # from another machine
    if form == "auto":
        measured = measure_grouped_gemm(config, world.device) if world.is_first else ""
        form = broadcast_object(measured, world.everyone, str)
    if trouble := _cannot_have(form, config, world):
        raise ConfigError(f"kernels.{trouble}", on_every_rank=True)
    set_form(form)
    return form


def _cannot_have(form: str, config: Config, world: World) -> str:
    """Why this form does not exist for the run's device, dtype and sizes; "" if it does."""
    like = torch.empty(0, dtype=platform.dtype_of(config.train.dtype), device=world.device)
    try:
        set_form(form)
        form_in_force(like, config.model.hidden_size, *inner_sizes(config))
    except ValueError as error:
        return str(error)
    finally:
        set_form("auto")
    return ""


def _differences(settled: Mapping[str, str], flight: Preflight) -> list[str]:
    """Where this run computes with something else than its checkpoint did, for the log."""
    if flight.start.full is None:
        return []
    stored, step = flight.start.full.settings, flight.start.step
    return [
        f"kernels.{key} = {value!r} (checkpoint of step {step}: {stored[f'kernels.{key}']!r})"
        for key, value in settled.items()
        if stored.get(f"kernels.{key}", value) != value
    ]
