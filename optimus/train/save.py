"""When a run saves and what; where its states come from at the start."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from optimus.checkpoint import manager
from optimus.checkpoint.manifest import seal
from optimus.checkpoint.tensors import MODEL, OPTIMIZER, moments, read_tensors, share, write_tensors
from optimus.checkpoint.weights import CONFIG, check_weights, load_weights
from optimus.config import Config, dump_toml
from optimus.dist.world import World
from optimus.errors import NonFiniteError
from optimus.model.hf import config_to_hf, write_hf
from optimus.model.init import initialise_
from optimus.resilience import guards
from optimus.train.preflight import Preflight
from optimus.train.states import ModelStates


def check_saves(config: Config, flight: Preflight) -> None:
    """Refuse, before anything is built, weights that do not fit and models that cannot be saved.

    Raises CheckpointError or ConfigError.
    """
    if flight.start.path is not None and flight.start.full is None:
        check_weights(config.model, flight.start.path)
    if config.checkpoint.model_interval:
        config_to_hf(config.model, "bfloat16")


def first_weights(config: Config, flight: Preflight, model: nn.Module) -> None:
    """On the first rank, before states exist: initial weights, or those that the start names."""
    if flight.start.path is None:
        initialise_(model, config.train.seed)
    elif flight.start.full is None:
        load_weights(model, flight.start.path)


class SaveAndLoad:
    """The run's checkpoints, written by the first rank and read by it alone."""

    def __init__(
        self, config: Config, world: World, flight: Preflight, states: ModelStates
    ) -> None:
        self._config, self._world, self._flight, self._states = config, world, flight, states

    def load(self) -> None:
        """Fill the states of every rank: one rank reads, the others receive."""
        states, start = self._states, self._flight.start
        shared = [states.masters]
        if start.full is not None:
            shared += [states.exp_avg, states.exp_avg_sq]
            states.num_updates = start.full.updates
            if self._world.is_first:
                self._read(start.full.path)
        share(shared, self._world.everyone)
        states.publish()

    def _read(self, path: Path) -> None:
        states = self._states
        read_tensors(path / MODEL, states.named(states.masters))
        both = moments(states.named(states.exp_avg), "exp_avg")
        both |= moments(states.named(states.exp_avg_sq), "exp_avg_sq")
        read_tensors(path / OPTIMIZER, both)

    def after(self, step: int, last: bool) -> None:
        """Save what is due after `step`; the last step of a run always leaves a full checkpoint."""
        settings = self._config.checkpoint
        model = settings.model_interval and step % settings.model_interval == 0
        full = last or (settings.interval and step % settings.interval == 0)
        if model or full:
            self._refuse_nonfinite(step)
        if not self._world.is_first:
            return
        if model:
            self._save(step, "model", manager.model_path(self._config.train.run_dir, step))
        if full:
            self._save(step, "full", manager.full_path(self._config.train.run_dir, step))
        manager.forget_old(self._config.train.run_dir, settings.keep_models)

    def _refuse_nonfinite(self, step: int) -> None:
        """An update can overflow though every gradient was finite; all ranks see the same."""
        states = self._states
        kinds = {
            "parameter": states.masters,
            "first moment of": states.exp_avg,
            "second moment of": states.exp_avg_sq,
        }
        for kind, flat in kinds.items():
            if not guards.is_finite(flat):
                name = guards.first_nonfinite(states.named(flat).items())
                raise NonFiniteError(
                    f"step {step}: the update made {kind} {name} non-finite although gradients "
                    "were finite; no checkpoint was written; lower the learning rate",
                    on_every_rank=True,
                )

    def _save(self, step: int, kind: str, path: Path) -> None:
        flight = self._flight
        seal(
            path,
            self._write_full if kind == "full" else self._write_model,
            kind=kind,
            step=step,
            tokens=flight.tokens_after(step),
            updates=self._states.num_updates,
            origin=flight.start.origin,
            settings=flight.settings,
        )

    def _write_full(self, directory: Path) -> None:
        states = self._states
        write_tensors(directory / MODEL, states.named(states.masters))
        both = moments(states.named(states.exp_avg), "exp_avg")
        both |= moments(states.named(states.exp_avg_sq), "exp_avg_sq")
        write_tensors(directory / OPTIMIZER, both)
        self._write_companions(directory)

    def _write_model(self, directory: Path) -> None:
        states = self._states
        weights = states.named(states.masters)
        write_hf(directory, self._config.model, weights, "bf16")
        self._write_companions(directory)

    def _write_companions(self, directory: Path) -> None:
        """What makes a checkpoint usable by itself: configuration and tokenizer."""
        (directory / CONFIG).write_text(dump_toml(self._config), encoding="utf-8")
        tokenizer = self._flight.dataset.tokenizer_file
        if tokenizer is not None:
            shutil.copyfile(tokenizer, directory / Path(tokenizer).name)
