"""When a run saves and what, and what it does when that fails."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from optimus.checkpoint import manager
from optimus.checkpoint import manifest as manifests
from optimus.checkpoint.convert import complete_hf, with_data_eos
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.save import BEGIN_S, FullSaver, Saver
from optimus.checkpoint.save_model import ModelSaver
from optimus.checkpoint.underway import Outcome, Underway
from optimus.checkpoint.weights import CONFIG, check_weights
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config, ModelConfig, dump_toml
from optimus.distributed.collectives import broadcast_object
from optimus.distributed.world import World
from optimus.errors import LostPeerError, NonFiniteError, OptimusError, counted, one_line
from optimus.hf import config_to_hf
from optimus.resilience import guards
from optimus.resilience.nonfinite import refuse_bad_states
from optimus.train.loss_scale import LossScale
from optimus.train.resolve import RunPlan, flat_settings

logger = logging.getLogger(__name__)

_TIGHT = 4
"""How few more saves must fit on the disk for a warning at each that makes them fewer."""


def check_saves(model: ModelConfig, model_interval: int, start: manager.Start) -> None:
    """Refuse, before anything is built, weights that do not fit and models that cannot be saved.

    Raises CheckpointError or ConfigError.
    """
    if start.path is not None and start.full is None:
        check_weights(model, start.path)
    if model_interval:
        config_to_hf(model, "bfloat16")


class _Lane:
    """Checkpoints of one kind: at most one of them is under way."""

    def __init__(self) -> None:
        self.under_way: Underway | None = None
        self.failures = 0
        """Saves that have failed since one was sealed."""

    def poll(self, wait: bool = False) -> Outcome | None:
        """What has become of the save under way, or, if waited for, becomes of it. A collective."""
        if self.under_way is None:
            return None
        outcome = self.under_way.drain() if wait else self.under_way.poll()
        if self.under_way.is_over:
            self.under_way = None
        return outcome


class Saves:
    """The run's checkpoints: full ones and models alone, of all ranks' shards."""

    def __init__(
        self,
        config: Config,
        world: World,
        plan: RunPlan,
        states: ChunkEngine,
        rank_states: RankStates,
        loss_scale: LossScale,
        sync_logs: Callable[[], None],
    ) -> None:
        """`sync_logs` makes what the first rank logged durable. A collective of all ranks."""
        self._config, self._world, self._plan, self._states = config, world, plan, states
        self._settings = flat_settings(config, plan.batch, plan.data.training)
        self._loss_scale = loss_scale
        self._rank_states = replace(rank_states, shards=())  # else copies of frozen ones would stay
        self._fulls, self._models, self._removing = _Lane(), _Lane(), threading.Lock()
        self._left: dict[Path, str] = {}
        """What could not be removed, and why: each is named once."""
        self._least_room = _TIGHT
        self._sync_logs, self._last_step, self._end_failed = sync_logs, 0, ""
        self._newest = plan.start.path.name if plan.start.path is not None else "none"
        settings = config.checkpoint
        # How long ranks may wait for the first one's look at the disk; a step may have two.
        begin_s = min(BEGIN_S, settings.timeout_s, config.parallel.timeout_s / 4)
        limits: dict[str, Any] = {"limit_s": settings.timeout_s, "begin_s": begin_s}
        limits["staged"], scatter = settings.async_save, settings.scatter
        self._saver = FullSaver(rank_states, scatter, direct=settings.direct_io, **limits)
        self._model_saver: ModelSaver | None = None
        if settings.model_interval:
            eos = with_data_eos(config.model, plan.data.training.eos_id)
            self._warned: set[str] = set()
            self._exported = config.model.model_copy(update={"eos_token_ids": eos})
            self._model_saver = ModelSaver(rank_states, self._exported, scatter, **limits)
        states.frozen.settle()

    def make_up(self) -> None:
        """Write the model-only checkpoint that was due where this run goes on, if its kill came
        between the seal of the full one and the model's. A collective of all ranks."""
        start, settings = self._plan.start, self._config.checkpoint
        run_dir, interval = self._config.train.run_dir, settings.model_interval
        due = interval and start.step and start.step % interval == 0
        if not due or start.path != manager.full_path(run_dir, start.step):
            return
        missing = self._world.is_first and not manifests.is_checkpoint(
            manager.model_path(run_dir, start.step)
        )
        if broadcast_object(missing, self._world.everyone, bool):
            self._begin(self._models, start.step, self._begin_model)
            self._take(self._models, self._models.poll(wait=True))

    def after(self, step: int, last: bool) -> None:
        """Tell of saves that have come to an end, and save what is due after `step`; the last step
        of a run always leaves a full checkpoint. A collective of all ranks.

        Raises, on every rank, NonFiniteError, and OptimusError where the last or too many in a row
        could not be written.
        """
        settings = self._config.checkpoint
        self._last_step = step if last else 0
        for lane in (self._fulls, self._models):
            self._take(lane, lane.poll())
        model = settings.model_interval and step % settings.model_interval == 0
        full = last or (settings.interval and step % settings.interval == 0)
        if model or (full and not settings.async_save):
            self._refuse_bad_states(step)
        if full:  # first: what a kill leaves unmade of models is made up
            self._begin(self._fulls, step, self._begin_full)
        if model:
            is_sealed = self._newest == manager.full_path("", step).name
            beside = self._saver.unwritten if full and not is_sealed else lambda: 0
            self._begin(self._models, step, partial(self._begin_model, beside=beside))
        if last:
            for lane in (self._fulls, self._models):
                self._take(lane, lane.poll(wait=True))
            if self._end_failed:
                self.end()
                raise OptimusError(self._end_failed)

    def end(self) -> None:
        """Wait for the saves in progress where all ranks end with an error. A collective of all
        ranks."""
        for lane in (self._fulls, self._models):
            if (outcome := lane.poll(wait=True)) and outcome.failure:
                self._warn(outcome.failure.what)

    def give_up(self) -> None:
        """Stop what this rank is writing, where others cannot be asked any more."""
        for lane in (self._fulls, self._models):
            if lane.under_way is not None:
                lane.under_way.give_up()

    def _begin(self, lane: _Lane, step: int, begin: Callable[[int], Underway]) -> None:
        if (before := lane.under_way) is not None:
            start = time.monotonic()
            self._take(lane, lane.poll(wait=True))
            logger.info(
                "the save of step %d waited %.1f s for that of step %d",
                step,
                time.monotonic() - start,
                before.step,
            )
        try:
            if before is not None and lane.under_way is not None:
                raise OptimusError(f"the disk has not taken what step {before.step} gave it")
            lane.under_way = begin(step)
        except LostPeerError:
            raise  # the run is over, not this save alone
        except OptimusError as error:
            self._failed(lane, step, str(error))
        if not self._config.checkpoint.async_save:
            self._take(lane, lane.poll(wait=True))

    def _take(self, lane: _Lane, outcome: Outcome | None) -> None:
        """Act upon what became of a save."""
        if outcome is None:
            return
        if outcome.failure is None:
            lane.failures = 0
            if lane is self._fulls:
                self._newest = manager.full_path("", outcome.step).name
        elif outcome.failure.nonfinite:  # of the copy; as a rule the states have it too
            self._refuse_bad_states(outcome.step)
            if outcome.rank == self._world.rank:
                log_dir, what = Path(self._config.train.run_dir) / "log", outcome.failure.what
                host = socket.gethostname()
                guards.write_marker(log_dir, outcome.rank, outcome.step, what, host)
            raise NonFiniteError(outcome.failure.what)
        else:
            self._failed(lane, outcome.step, outcome.failure.what)

    def _failed(self, lane: _Lane, step: int, what: str) -> None:
        """Warn and go on; or raise OptimusError after too many in a row. Of the last step it is
        kept: there may be more to save."""
        lane.failures += 1
        limit = self._config.checkpoint.max_failures
        told = f"step {step} is not saved: {what}; the newest checkpoint is {self._newest}"
        again = "fix it and give the same command again to continue"
        if step == self._last_step:
            self._end_failed = self._end_failed or f"{told}; {again}"
        elif lane.failures == limit and not self._last_step:
            told += f"; so many saves in a row have failed: checkpoint.max_failures = {limit}"
            self.end()
            raise OptimusError(f"{told}; {again}")
        else:
            number = f"{lane.failures} of {limit}" if limit else f"{lane.failures}"
            self._warn(f"{told}; the run continues (failure {number} in a row)")

    def _warn(self, line: str) -> None:
        """Log a warning that all ranks have, once."""
        if self._world.is_first:
            logger.warning(line)

    def _begin_full(self, step: int) -> Underway:
        path = manager.full_path(self._config.train.run_dir, step)
        return self._begin_with(self._saver, path, step)

    def _begin_model(self, step: int, beside: Callable[[], int] = lambda: 0) -> Underway:
        """It yields where there is no room for `beside` more: for the full one due with it."""
        assert self._model_saver is not None, "due only where there is an interval"
        path = manager.model_path(self._config.train.run_dir, step)
        return self._begin_with(self._model_saver, path, step, beside)

    def _begin_with(
        self, saver: Saver, path: Path, step: int, beside: Callable[[], int] = lambda: 0
    ) -> Underway:
        is_model = saver is self._model_saver
        # Where states lie may have changed.
        states = replace(self._rank_states, shards=self._states.shards())
        try:
            return saver.begin(
                states,
                path,
                self._write_model_companions if is_model else self._write_companions,
                self._remove_old,
                self._remove_leftover,
                beside=beside,
                **self._facts(step),
            )
        finally:
            self._states.frozen.settle()

    def _remove_old(self) -> None:
        """Apply retention, in a thread of the first rank after a seal; failures only warn."""
        run_dir, settings = self._config.train.run_dir, self._config.checkpoint
        with self._removing:  # full ones and models may end at once
            try:
                left = manager.remove_old(run_dir, settings.keep_models, settings.keep_models_every)
                self._warn_of_left(left)
            except OSError as error:
                where = error.filename or manager.checkpoints_dir(run_dir)
                logger.warning("old checkpoints are not removed: %s: %s", where, error.strerror)

    def _remove_leftover(self, directory: Path) -> None:
        """Remove what a failed save wrote, in a thread of the first rank."""
        with self._removing, contextlib.suppress(OSError):
            self._warn_of_left(self._left | manager.remove_all([directory]))

    def _warn_of_left(self, left: dict[Path, str]) -> None:
        """Name what newly could not be removed; say how much space is left, then and as the disk
        gets full. Raises OSError."""
        new = [path for path in left if self._left.get(path) != left[path]]
        self._left = left
        run_dir = self._config.train.run_dir
        takes = self._saver.bytes + (self._model_saver.bytes if self._model_saver else 0)
        room = shutil.disk_usage(manager.checkpoints_dir(run_dir)).free // max(1, takes)
        if not left or not (new or room < self._least_room):
            return
        self._least_room = min(room, _TIGHT)
        for path in new:
            logger.warning("cannot remove %s: %s", path, left[path])
        logger.warning(
            "%s of checkpoints cannot be removed; %s, and a save takes %.3f GB; remove by hand "
            "what is named above",
            counted(len(left), "old directory", "old directories"),
            manager.space_left(run_dir),
            takes / 1e9,
        )

    def _refuse_bad_states(self, step: int) -> None:
        refuse_bad_states(self._config, self._states, self._world.everyone, step, step)

    def _facts(self, step: int) -> dict[str, Any]:
        """What a manifest says of the run after `step`."""
        start = self._plan.start
        return {
            "step": step,
            "tokens": self._plan.tokens_after(step),
            "updates": self._states.num_updates,
            "origin": start.origin,
            "begun": start.begun,
            "settings": self._settings,
            "loss_scale": self._loss_scale.state(),
            "ranks": self._ranks(),
        }

    def _ranks(self) -> dict[str, int]:
        sizes = self._plan.mesh._asdict()
        return sizes | {"per_node": self._world.launch.local_world_size}

    def _write_companions(self, directory: Path) -> None:
        """What makes a checkpoint usable by itself, configuration and tokenizer; and before it is
        sealed, the curve up to its step, which a resume will go on from."""
        self._sync_logs()
        (directory / CONFIG).write_text(dump_toml(self._config), encoding="utf-8")
        name = Path(self._plan.data.training.tokenizer_file).name
        (directory / name).write_bytes(self._plan.data.tokenizer)

    def _write_model_companions(self, directory: Path) -> None:
        """The same for a model alone, which is a Hugging Face directory with all of its files."""
        self._write_companions(directory)
        try:
            lines = complete_hf(directory, self._exported)
        except OSError:
            raise  # the disk is full or broken: a file of the checkpoint may be incomplete
        except Exception as error:  # of a tokenizer library too: these files are no reason to fail
            lines = [f"not all files for transformers are written: {one_line(error)}"]
        for line in lines:
            if line not in self._warned:
                logger.warning("models of this run: %s", line)
            self._warned.add(line)
