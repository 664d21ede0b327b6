"""When a run saves and what; where its states come from at the start."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus.checkpoint import manager
from optimus.checkpoint.load import load_full
from optimus.checkpoint.manifest import seal
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.save import save_full
from optimus.checkpoint.weights import CONFIG, check_weights, load_weights
from optimus.chunks.engine import STATES, ChunkEngine
from optimus.config import Config, dump_toml
from optimus.dist.collectives import all_gather_objects, all_reduce_max, broadcast_object
from optimus.dist.groups import Groups
from optimus.dist.world import World
from optimus.errors import CheckpointError, NonFiniteError
from optimus.model.hf import config_to_hf, write_hf
from optimus.model.transformer import Transformer
from optimus.parallel.layout import Layout
from optimus.parallel.placement import whole_model
from optimus.resilience import guards
from optimus.train.loss_scale import LossScale
from optimus.train.preflight import Preflight, start_again
from optimus.train.whole import WholeModel

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


def states_of_rank(
    config: Config, layout: Layout, groups: Groups, states: ChunkEngine
) -> RankStates:
    """What this rank holds, as checkpoints see it."""
    tied = config.model.tie_embeddings and groups.mesh.pp > 1
    return RankStates(
        groups,
        states.shards(),
        {name: one.intervals for name, one in layout.placements.items()},
        {name: tuple(p.shape) for name, p in whole_model(config.model).named_parameters()},
        on_both_ends=("embed.weight",) if tied else (),
    )


class SaveAndLoad:
    """The run's checkpoints: full ones of all ranks' shards, models from gathered weights."""

    def __init__(
        self,
        config: Config,
        world: World,
        groups: Groups,
        layout: Layout,
        flight: Preflight,
        states: ChunkEngine,
        loss_scale: LossScale,
    ) -> None:
        self._config, self._world, self._flight, self._states = config, world, flight, states
        self._whole, self._loss_scale = WholeModel(config, layout, groups, world.device), loss_scale
        # Asked anew each time: where states lie may change.
        self._rank_states = partial(states_of_rank, config, layout, groups, states)

    def load(self) -> Preflight:
        """Fill the states of every rank from where the run starts, and say where that was.

        A checkpoint that proves damaged is passed over for the one before, on all ranks alike.
        Without a start the states keep what they were made with. Raises CheckpointError.
        """
        damaged: dict[Path, str] = {}
        while (full := self._flight.start.full) is not None:
            problem = load_full(self._rank_states(), full, self._config.checkpoint.distribute)
            if not problem:
                self._states.num_updates = full.updates
                self._loss_scale.restore(full.loss_scale)
                break
            damaged[full.path] = problem
            self._flight = self._fall_back(damaged)
        start = self._flight.start
        if full is None and start.path is not None:
            weights = {}
            if self._world.is_first:
                model = Transformer(self._config.model)
                load_weights(model, start.path)
                weights = {name: p.detach() for name, p in model.named_parameters()}
            source = weights.__getitem__ if self._world.is_first else _nothing
            put, how = partial(self._states.put, "master"), self._config.checkpoint.distribute
            self._whole.spread(put, source, self._world.device, how)
        self._states.publish()
        return self._flight

    def _fall_back(self, damaged: Mapping[Path, str]) -> Preflight:
        """The start that is left; the first rank decides and says so."""
        flight, refused = self._flight, ""
        if self._world.is_first:
            problem = list(damaged.values())[-1]
            print(f"optimus: passing over a damaged checkpoint: {problem}", file=sys.stderr)
            try:
                flight = start_again(self._config, flight, damaged)
                start = flight.start
                print(f"optimus: starting at step {start.step} from {start.path}", file=sys.stderr)
            except CheckpointError as error:
                refused = str(error)
        start, refused = broadcast_object((flight.start, refused), self._world.everyone)
        if refused:
            raise CheckpointError(refused, on_every_rank=True)
        assert start.path is not None, "nothing has initialised the parameters"
        return replace(flight, start=start)

    def after(self, step: int, last: bool) -> None:
        """Save what is due after `step`; the last step of a run always leaves a full checkpoint."""
        settings = self._config.checkpoint
        model = settings.model_interval and step % settings.model_interval == 0
        full = last or (settings.interval and step % settings.interval == 0)
        if model or full:
            self._refuse_nonfinite(step)
        if not (model or full):
            return
        run_dir = self._config.train.run_dir
        if model:
            weights = self._whole.gather(self._states.whole("master"))
            if self._world.is_first:
                write = partial(self._write_model, weights)
                size = 2 * sum(weight.numel() for weight in weights.values())
                path = manager.model_path(run_dir, step)
                seal(path, write, needed_bytes=size, kind="model", **self._facts(step))
        if full:
            path = manager.full_path(run_dir, step)
            write = self._write_companions
            save_full(self._rank_states(), path, settings.scatter, write, **self._facts(step))
            self._states.frozen.settle()
        if self._world.is_first:
            manager.forget_old(run_dir, settings.keep_models)

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

    def _facts(self, step: int) -> dict[str, Any]:
        """What a manifest says of the run after `step`."""
        flight = self._flight
        return {
            "step": step,
            "tokens": flight.tokens_after(step),
            "updates": self._states.num_updates,
            "origin": flight.start.origin,
            "settings": flight.settings,
            "loss_scale": self._loss_scale.state(),
            "ranks": self._ranks(),
        }

    def _ranks(self) -> dict[str, int]:
        sizes = self._flight.mesh.sizes._asdict()
        return sizes | {"per_node": self._world.launch.local_world_size}

    def _write_model(self, weights: Mapping[str, Tensor], directory: Path) -> None:
        write_hf(directory, self._config.model, weights, "bf16")
        self._write_companions(directory)

    def _write_companions(self, directory: Path) -> None:
        """What makes a checkpoint usable by itself: configuration and tokenizer."""
        (directory / CONFIG).write_text(dump_toml(self._config), encoding="utf-8")
        tokenizer = self._flight.dataset.tokenizer_file
        if tokenizer is not None:
            shutil.copyfile(tokenizer, directory / Path(tokenizer).name)
