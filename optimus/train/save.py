"""Checkpoint saves of a run: when they are due, what they contain, and how failed saves are
handled."""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimus.checkpoint import store
from optimus.checkpoint.async_save import AsyncSave, Outcome
from optimus.checkpoint.convert import complete_hf, with_data_eos
from optimus.checkpoint.format import is_checkpoint
from optimus.checkpoint.save import BEGIN_S, FullSaver, RankStates, Saver
from optimus.checkpoint.weights import CONFIG, ModelSaver, check_weights
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config, ModelConfig, dump_toml
from optimus.distributed.collectives import broadcast_object
from optimus.distributed.world import World
from optimus.errors import LostPeerError, NonFiniteError, OptimusError, counted, one_line
from optimus.hf import config_to_hf
from optimus.io.workspace import Workspace
from optimus.resilience.finite import refuse_bad_states
from optimus.resilience.supervision.markers import write_marker
from optimus.train.loss_scale import LossScale
from optimus.train.resolve import RunPlan, flat_settings

logger = logging.getLogger(__name__)

_FEW_SAVES = 4
"""Limit for repeated warnings about checkpoint directories that cannot be removed. A warning is
repeated if the free disk space is enough for fewer saves than this number, and for fewer saves than
at the last warning."""


def check_saves(model: ModelConfig, model_interval: int, start: store.Start) -> None:
    """Check that a run's initial weights fit the model. If `model_interval` is not 0, also check
    that the model can be saved as a model-only checkpoint. Builds no model.

    Args:
        model: The run's model.
        model_interval: `checkpoint.model_interval`.
        start: The start of the run.

    Raises:
        CheckpointError: The initial weights belong to another model.
        ConfigError: `model_interval` is set, but transformers cannot represent the model.
    """
    if start.path is not None and start.full is None:
        check_weights(model, start.path)
    if model_interval:
        config_to_hf(model, "bfloat16")


class _PendingSave:
    """The saves of one kind of checkpoint, full or model-only: the save in progress, if any, and
    the number of failed saves."""

    def __init__(
        self,
        saver: Saver | None,
        path_of: Callable[[str, int], Path],
        write_sidecar_files: Callable[[Path], None],
    ) -> None:
        """Create an object without a save in progress.

        Args:
            saver: Object that starts the saves; None if this kind of checkpoint is never saved.
            path_of: Function that returns the path of the checkpoint for a run directory and a
                step.
            write_sidecar_files: Function that writes the sidecar files, such as the configuration
                and the tokenizer, to the directory of a checkpoint.
        """
        self.saver, self.path_of, self.write_sidecar_files = saver, path_of, write_sidecar_files
        self.save: AsyncSave | None = None
        self.failures = 0
        """Number of saves of this kind of checkpoint that failed since the last committed save."""

    def poll(self, wait: bool = False) -> Outcome | None:
        """Return the outcome of the save in progress if it was committed or failed since the last
        call, else None.

        All ranks must call this method.

        Args:
            wait: True to wait until the save ends.
        """
        if self.save is None:
            return None
        outcome = self.save.drain() if wait else self.save.poll()
        if self.save.is_over:
            self.save = None
        return outcome


class Saves:
    """Starts the saves of full and model-only checkpoints of a run, and records or reports the
    success or failure of each save."""

    def __init__(
        self,
        config: Config,
        world: World,
        plan: RunPlan,
        states: ChunkEngine,
        rank_states: RankStates,
        loss_scale: LossScale,
        workspace: Workspace,
        sync_logs: Callable[[], None],
    ) -> None:
        """Determine which values each rank writes to the checkpoints. All ranks must construct a
        `Saves` at the same time.

        Args:
            config: The run's configuration, with the values that ranks chose by measurement.
            world: All ranks.
            plan: The plan of the run.
            states: The parameters and optimizer states of this rank.
            rank_states: The shards of `states` and their layout over ranks.
            loss_scale: The loss scale, whose state each checkpoint contains.
            workspace: The workspace of the run, a temporary directory from which files are renamed
                into the run directory.
            sync_logs: Function that syncs the metrics files to disk. The first rank calls this
                function before each commit of a checkpoint.
        """
        self._config, self._world, self._plan, self._states = config, world, plan, states
        self._settings = flat_settings(config, plan.batch, plan.data.training)
        self._loss_scale, self._workspace = loss_scale, workspace
        # Leave out the shards: they refer to fp32 copies of frozen parameters, which would then
        # stay in memory.
        self._rank_states = replace(rank_states, shards=())
        self._removing = threading.Lock()
        self._unremovable: dict[Path, str] = {}
        """Maps each directory that could not be removed to the reason that was logged."""
        self._least_saves = _FEW_SAVES
        self._sync_logs, self._last_step, self._end_failed = sync_logs, 0, ""
        self.newest = plan.start.path
        """Path of the newest full checkpoint of this command or, before its first save, the path
        from which the run starts; None if the run starts from initial values."""
        settings = config.checkpoint
        # The first rank checks the disk for at most begin_s seconds, up to twice in a step.
        # Meanwhile the other ranks wait in a collective.
        begin_s = min(BEGIN_S, settings.timeout_s, config.parallel.timeout_s / 4)
        limits: dict[str, Any] = {"limit_s": settings.timeout_s, "begin_s": begin_s}
        limits["staged"], scatter = settings.async_save, settings.scatter
        self._saver = FullSaver(rank_states, scatter, direct=settings.direct_io, **limits)
        self._model_saver: ModelSaver | None = None
        self._fulls = _PendingSave(self._saver, store.full_path, self._write_sidecar_files)
        if settings.model_interval:
            eos = with_data_eos(config.model, plan.data.training.eos_id)
            self._warned: set[str] = set()
            self._exported = config.model.model_copy(update={"eos_token_ids": eos})
            self._model_saver = ModelSaver(rank_states, self._exported, scatter, **limits)
        write_model_files = self._write_model_sidecar_files
        self._models = _PendingSave(self._model_saver, store.model_path, write_model_files)
        states.frozen.settle()

    def save_missing(self) -> None:
        """Save the model-only checkpoint of the step at which the run starts, if the checkpoint was
        due but is missing.

        The model-only checkpoint of a step is missing if an earlier process of the run was killed
        after it committed the full checkpoint of the step and before it committed the model-only
        checkpoint. All ranks must call this method.
        """
        start, settings = self._plan.start, self._config.checkpoint
        run_dir, interval = self._config.train.run_dir, settings.model_interval
        due = interval and start.step and start.step % interval == 0
        if not due or start.path != store.full_path(run_dir, start.step):
            return
        missing = self._world.is_first and not is_checkpoint(store.model_path(run_dir, start.step))
        if broadcast_object(missing, self._world.everyone, bool):
            self._begin(self._models, start.step)
            self._handle(self._models, self._models.poll(wait=True))

    def after(self, step: int, last: bool) -> None:
        """Handle the checkpoint saves that have ended, and start the saves that are due after
        `step`.

        All ranks must call this method.

        Args:
            step: The last completed step.
            last: True if this command ends after `step`. The call then saves a full checkpoint,
                unless `checkpoint.at_end` is false, and waits for all saves to end.

        Raises:
            NonFiniteError: An optimizer state is not finite. Raised on every rank.
            OptimusError: A save of the last step failed, or `checkpoint.max_failures` saves in a
                row failed. Raised on every rank.
        """
        settings = self._config.checkpoint
        self._last_step = step if last else 0
        for pending in (self._fulls, self._models):
            self._handle(pending, pending.poll())
        model = settings.model_interval and step % settings.model_interval == 0
        full = settings.interval and step % settings.interval == 0
        full = full or (last and settings.at_end)
        if model or (full and not settings.async_save):
            self._refuse_bad_states(step)
        # The full checkpoint comes first: if the run is killed between the two saves, save_missing
        # saves the model-only checkpoint on resume.
        if full:
            self._begin(self._fulls, step)
        if model:
            is_committed = self._newest_name == store.full_path("", step).name
            reserve = self._saver.unwritten if full and not is_committed else lambda: 0
            self._begin(self._models, step, reserve)
        if last:
            for pending in (self._fulls, self._models):
                self._handle(pending, pending.poll(wait=True))
            if self._end_failed:
                self.end()
                raise OptimusError(self._end_failed)

    def end(self) -> None:
        """Wait until all saves in progress have ended, and log each failed save.

        All ranks must call this method. After an error, call this method only if every rank raises
        that error.
        """
        for pending in (self._fulls, self._models):
            if (outcome := pending.poll(wait=True)) and outcome.failure:
                self._warn(outcome.failure.message)

    def give_up(self) -> None:
        """Request that the saves in progress on this rank stop. Not a collective, because other
        ranks may have ended."""
        for pending in (self._fulls, self._models):
            if pending.save is not None:
                pending.save.give_up()

    def _begin(
        self, pending: _PendingSave, step: int, reserve: Callable[[], int] = lambda: 0
    ) -> None:
        """Wait for the previous checkpoint save of the same kind to end, and start the save of
        `step`.

        A model-only save can start before the full save of the same step has ended. `reserve` then
        returns the number of bytes that the full save must still write, and the disk must have
        space for the model-only save and for these bytes.
        """
        assert pending.saver is not None, "model-only saves need checkpoint.model_interval"
        if (before := pending.save) is not None:
            start = time.monotonic()
            self._handle(pending, pending.poll(wait=True))
            logger.info(
                "the save of step %d waited %.1f s for the save of step %d to end",
                step,
                time.monotonic() - start,
                before.step,
            )
        try:
            if before is not None and pending.save is not None:
                raise OptimusError(
                    f"the failed save of step {before.step} still waits for the disk; "
                    "check the disk"
                )
            # Get the shards again, since the chunks may have moved to other buffers.
            pending.save = pending.saver.begin(
                replace(self._rank_states, shards=self._states.shards()),
                pending.path_of(self._config.train.run_dir, step),
                pending.write_sidecar_files,
                self._remove_old,
                self._remove_leftover,
                workspace=self._workspace,
                reserve=reserve,
                **self._facts(step),
            )
        except LostPeerError:
            raise  # the loss of a rank ends the run, not only this save
        except OptimusError as error:
            self._handle_failure(pending, step, str(error))
        finally:
            self._states.frozen.settle()
        if not self._config.checkpoint.async_save:
            self._handle(pending, pending.poll(wait=True))

    def _handle(self, pending: _PendingSave, outcome: Outcome | None) -> None:
        """Record a committed save, or count and log a failed save. Do nothing if `outcome` is None.
        Raises NonFiniteError if the saved states have a non-finite value."""
        if outcome is None:
            return
        if outcome.failure is None:
            pending.failures = 0
            if pending is self._fulls:
                self.newest = store.full_path(self._config.train.run_dir, outcome.step)
        elif outcome.failure.nonfinite:  # the saved copy has a NaN or infinite value
            self._refuse_bad_states(outcome.step)
            if outcome.rank == self._world.rank:
                write_marker(
                    self._workspace,
                    self._config.train.run_dir,
                    outcome.rank,
                    outcome.step,
                    text=outcome.failure.message,
                    host=socket.gethostname(),
                )
            raise NonFiniteError(outcome.failure.message)
        else:
            self._handle_failure(pending, outcome.step, outcome.failure.message)

    def _handle_failure(self, pending: _PendingSave, step: int, reason: str) -> None:
        """Count and log a failed save. Raise OptimusError if `checkpoint.max_failures` saves in a
        row have failed.

        If the save of the last step has failed, store the error instead of raising it.
        `Saves.after` raises the stored error when all saves have ended.
        """
        pending.failures += 1
        limit = self._config.checkpoint.max_failures
        newest = self._newest_name
        message = f"step {step} is not saved: {reason}; the newest checkpoint is {newest}"
        again = "fix the problem and run the same command again to continue"
        if step == self._last_step:
            # `after` raises this error when all saves of the last step have ended.
            self._end_failed = self._end_failed or f"{message}; {again}"
        elif pending.failures == limit and not self._last_step:
            message += f"; {limit} saves in a row have failed, the limit of checkpoint.max_failures"
            self.end()
            raise OptimusError(f"{message}; {again}")
        else:
            number = f"{pending.failures} of {limit}" if limit else f"{pending.failures}"
            self._warn(f"{message}; the run continues (failure {number} in a row)")

    @property
    def _newest_name(self) -> str:
        return "none" if self.newest is None else self.newest.name

    def _warn(self, line: str) -> None:
        """Log `line` as a warning on the first rank only. Any rank may call this method."""
        if self._world.is_first:
            logger.warning(line)

    def _remove_old(self) -> None:
        """Remove the checkpoints that settings such as `checkpoint.keep_models` do not keep. Runs
        in a thread."""
        run_dir, settings = self._config.train.run_dir, self._config.checkpoint
        with self._removing:  # a full and a model-only save may end at the same time
            try:
                keep = settings.keep_models, settings.keep_models_every
                left = store.remove_old(run_dir, self._workspace, *keep)
                self._warn_of_unremovable(left)
            except OSError as error:
                where = error.filename or store.checkpoints_dir(run_dir)
                logger.warning("cannot remove old checkpoints: %s: %s", where, error.strerror)

    def _remove_leftover(self, directory: Path) -> None:
        """Remove the directory of a failed save. Runs in a thread of the first rank."""
        with self._removing, contextlib.suppress(OSError):
            self._warn_of_unremovable(
                self._unremovable | store.remove_all([directory], self._workspace)
            )

    def _warn_of_unremovable(self, left: dict[Path, str]) -> None:
        """Log a warning for each directory that could not be removed, and a warning with the free
        disk space.

        Args:
            left: Dict from the directories that could not be removed to the reasons. A directory
                that an earlier warning has named is named again only if its reason has changed.
        """
        new = [path for path in left if self._unremovable.get(path) != left[path]]
        self._unremovable = left
        run_dir = self._config.train.run_dir
        save_bytes = self._saver.bytes + (self._model_saver.bytes if self._model_saver else 0)
        saves = shutil.disk_usage(store.checkpoints_dir(run_dir)).free // max(1, save_bytes)
        # If no directory is new, log the free space only if fewer saves fit than before.
        if not left or not (new or saves < self._least_saves):
            return
        self._least_saves = min(saves, _FEW_SAVES)
        for path in new:
            logger.warning("cannot remove %s: %s", path, left[path])
        logger.warning(
            "%s cannot be removed; %s, and a save takes %.3f GB; remove the directories named "
            "above by hand",
            counted(len(left), "old checkpoint directory", "old checkpoint directories"),
            store.space_left(run_dir),
            save_bytes / 1e9,
        )

    def _refuse_bad_states(self, step: int) -> None:
        train, optim = self._config.train, self._config.optim
        everyone, workspace = self._world.everyone, self._workspace
        refuse_bad_states(train, optim, self._states, everyone, workspace, step, step)

    def _facts(self, step: int) -> dict[str, Any]:
        """Return the entries of a checkpoint's manifest that describe the state of the run after
        `step`."""
        start = self._plan.start
        return {
            "step": step,
            "tokens": self._plan.tokens_after(step),
            "updates": self._states.optimizer.num_updates,
            "origin": start.origin,
            "first_step": start.first_step,
            "settings": self._settings,
            "loss_scale": self._loss_scale.state(),
            "ranks": self._plan.mesh._asdict() | {"per_node": self._world.launch.local_world_size},
        }

    def _write_sidecar_files(self, directory: Path) -> None:
        """Write the configuration and the tokenizer to `directory`, so that the checkpoint can be
        used without other files."""
        self._sync_logs()  # a resumed run needs the metrics
        (directory / CONFIG).write_text(dump_toml(self._config), encoding="utf-8")
        name = Path(self._plan.data.training.tokenizer_file).name
        (directory / name).write_bytes(self._plan.data.tokenizer)

    def _write_model_sidecar_files(self, directory: Path) -> None:
        """Write the configuration, the tokenizer, and the other files that a model-only checkpoint
        in `directory` needs to be a complete Hugging Face directory."""
        self._write_sidecar_files(directory)
        try:
            lines = complete_hf(directory, self._exported)
        except OSError:
            raise  # the disk is full or broken: a file of the checkpoint may be incomplete
        except Exception as error:  # from any tokenizer library; these files are optional
            lines = [f"not all files for transformers are written: {one_line(error)}"]
        for line in lines:
            if line not in self._warned:
                logger.warning("model-only checkpoints: %s", line)
            self._warned.add(line)
