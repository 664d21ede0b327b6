"""When a run saves and what; where its states come from at the start."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from optimus.checkpoint import manager
from optimus.checkpoint.manifest import seal
from optimus.checkpoint.tensors import (
    MODEL,
    OPTIMIZER,
    check_tensors,
    moments,
    open_tensors,
    write_tensors,
)
from optimus.checkpoint.weights import CONFIG, check_weights, load_weights
from optimus.chunks.engine import STATES, ChunkEngine
from optimus.config import Config, dump_toml
from optimus.dist.collectives import all_gather_objects, all_reduce_max
from optimus.dist.world import World
from optimus.errors import NonFiniteError
from optimus.model.hf import config_to_hf, write_hf
from optimus.model.transformer import Transformer
from optimus.resilience import guards
from optimus.train.loss_scale import LossScale
from optimus.train.preflight import Preflight
from optimus.train.whole import WholeModel

MOMENTS = STATES[1:]
_TOLD = ("parameter", "first moment of", "second moment of")


def _nothing(name: str) -> Tensor:
    raise AssertionError(f"only the first rank reads {name}")


def check_saves(config: Config, flight: Preflight) -> None:
    """Refuse, before anything is built, weights that do not fit and models that cannot be saved.

    Raises CheckpointError or ConfigError.
    """
    if flight.start.path is not None and flight.start.full is None:
        check_weights(config.model, flight.start.path)
    if config.checkpoint.model_interval:
        config_to_hf(config.model, "bfloat16")


class SaveAndLoad:
    """The run's checkpoints: whole tensors, written by the first rank and read by it alone."""

    def __init__(
        self,
        config: Config,
        world: World,
        flight: Preflight,
        states: ChunkEngine,
        whole: WholeModel,
        loss_scale: LossScale,
    ) -> None:
        self._config, self._world, self._flight, self._states = config, world, flight, states
        self._whole, self._loss_scale = whole, loss_scale

    def load(self) -> None:
        """Fill the states of every rank from where the run starts: one rank reads, all receive.

        Without a start the states keep what they were made with.
        """
        states, start = self._states, self._flight.start
        if start.full is not None:
            path = start.full.path
            states.num_updates = start.full.updates
            self._loss_scale.restore(start.full.loss_scale)
            self._spread_file(path / MODEL, "master")
            for kind in MOMENTS:
                self._spread_file(path / OPTIMIZER, kind, f"{kind}.")
        elif start.path is not None:
            weights = {}
            if self._world.is_first:
                model = Transformer(self._config.model)
                load_weights(model, start.path)
                weights = {name: p.detach() for name, p in model.named_parameters()}
            self._spread("master", weights.__getitem__)
        states.publish()

    def _spread(self, state: str, source: Callable[[str], Tensor]) -> None:
        names = self._whole.names if state == "master" else self._whole.trained
        self._whole.spread(partial(self._states.put, state), source, self._world.device, names)

    def _spread_file(self, path: Path, state: str, prefix: str = "") -> None:
        """Give every rank its parts of the tensors in a file, whose names begin with `prefix`."""
        if not self._world.is_first:
            self._spread(state, _nothing)
            return
        expected = self._whole.meta()
        if prefix:
            trained = self._whole.trained
            expected = {f"{kind}.{name}": expected[name] for kind in MOMENTS for name in trained}
        check_tensors(path, expected)
        with open_tensors(path) as file:
            self._spread(state, lambda name: file.get_tensor(prefix + name))

    def after(self, step: int, last: bool) -> None:
        """Save what is due after `step`; the last step of a run always leaves a full checkpoint."""
        settings = self._config.checkpoint
        model = settings.model_interval and step % settings.model_interval == 0
        full = last or (settings.interval and step % settings.interval == 0)
        if model or full:
            self._refuse_nonfinite(step)
        if not (model or full):
            return
        states = self._states
        weights = self._whole.gather(states.whole("master"))
        both = {}
        if full:
            for kind in MOMENTS:
                trained = self._whole.gather(states.whole(kind), self._whole.trained)
                both |= moments(trained, kind)
        if not self._world.is_first:
            return
        run_dir = self._config.train.run_dir
        if model:
            write = partial(self._write_model, weights)
            self._save(step, "model", manager.model_path(run_dir, step), write)
        if full:
            write = partial(self._write_full, weights, both)
            self._save(step, "full", manager.full_path(run_dir, step), write)
        manager.forget_old(self._config.train.run_dir, settings.keep_models)

    def _refuse_nonfinite(self, step: int) -> None:
        """An update can overflow though every gradient was finite. All ranks agree on whose."""
        found = ""
        for kind, state in zip(_TOLD, STATES, strict=True):
            bad = self._states.first_shard(state, lambda flat: not guards.is_finite(flat))
            if bad and not found:
                found = f"{kind} {bad}"
        flag = torch.tensor([int(bool(found))], device=self._world.device)
        all_reduce_max(flag, self._world.everyone)
        if flag.item():
            told = next(one for one in all_gather_objects(found, self._world.everyone) if one)
            raise NonFiniteError(
                f"step {step}: the update made {told} non-finite although gradients were finite; "
                "no checkpoint was written; lower the learning rate",
                on_every_rank=True,
            )

    def _save(self, step: int, kind: str, path: Path, write: Callable[[Path], None]) -> None:
        flight = self._flight
        seal(
            path,
            write,
            kind=kind,
            step=step,
            tokens=flight.tokens_after(step),
            updates=self._states.num_updates,
            origin=flight.start.origin,
            settings=flight.settings,
            loss_scale=self._loss_scale.state(),
        )

    def _write_full(
        self, weights: Mapping[str, Tensor], both: Mapping[str, Tensor], directory: Path
    ) -> None:
        write_tensors(directory / MODEL, weights)
        write_tensors(directory / OPTIMIZER, both)
        self._write_companions(directory)

    def _write_model(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        write_hf(directory, self._config.model, weights, "bf16")
        self._write_companions(directory)

    def _write_companions(self, directory: Path) -> None:
        """What makes a checkpoint usable by itself: configuration and tokenizer."""
        (directory / CONFIG).write_text(dump_toml(self._config), encoding="utf-8")
        tokenizer = self._flight.dataset.tokenizer_file
        if tokenizer is not None:
            shutil.copyfile(tokenizer, directory / Path(tokenizer).name)
