"""Run directory of a training run, as the first rank uses it: its lock, config.toml and the metrics
files."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import BinaryIO

from optimus.checkpoint.store import (
    adopt_workspace,
    checkpoints_dir,
    open_workspace,
    prepare_directory,
)
from optimus.config import Config, dump_toml
from optimus.errors import OptimusError
from optimus.io.workspace import CreatedPaths, Workspace, lock_run_dir
from optimus.observe.events import Recorder
from optimus.observe.log import LogRecorder, Progress
from optimus.observe.metrics import MetricsFiles, TensorBoard, metrics_paths
from optimus.resilience.supervision.attempt import read_attempt
from optimus.train.resolve import RunPlan

logger = logging.getLogger(__name__)


class RunDirectory:
    """Run directory of a training run: its lock and the open files in it. Only the first rank has a
    RunDirectory."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Create the run directory if it does not exist, lock it and open a workspace.

        A workspace is a temporary directory from which files are renamed into the run directory. In
        a supervised run, the supervisor has already locked the run directory and opened the
        workspace, and this object uses that workspace.

        Args:
            path: `train.run_dir`.

        Raises:
            ConfigError: The directory cannot be created, or another run uses it.
            OSError: The workspace cannot be opened.
        """
        self.path = Path(path)
        attempt = read_attempt()
        self._lock: BinaryIO | None = None
        self._created = CreatedPaths(self.path, [checkpoints_dir(self.path).name])
        if attempt is None:
            try:
                self._lock = lock_run_dir(self.path)
                self.workspace = open_workspace(self.path)
            except BaseException:
                self._created.remove(self._lock)
                raise
        else:
            self.workspace = adopt_workspace(self.path, Workspace(attempt.workspace))
        self._board: TensorBoard | None = None
        self._progress: Progress | None = None

    def open(self, config: Config, plan: RunPlan, last_step: int) -> list[Recorder]:
        """Write config.toml and open the files of metrics and evaluations.

        If the run starts at step n, checkpoints and metrics of later steps are moved to
        subdirectories. Call this method after the initial states are loaded, so that a failed load
        changes no file.

        Args:
            config: The run's configuration, with the settings that ranks chose by measurement.
            plan: The run's plan.
            last_step: The step at which this command ends.

        Returns:
            The recorders of the run: metrics files, log, progress bar and TensorBoard.
        """
        step = plan.start.step
        prepare_directory(self.path, plan.start, self.workspace)
        expected = {name: _expected_steps(plan, name, self.path) for name in ("metrics", "eval")}
        loads = config.observe.expert_load_interval if config.model.sparse_layers else 0
        self.metrics = MetricsFiles(self.path, self.workspace, step, expected, loads)
        self.workspace.write_bytes(self.path / "config.toml", dump_toml(config).encode())
        self._progress = Progress(step, last_step, config.observe.log_interval)
        sinks = [self.metrics, LogRecorder(), self._progress]
        if config.observe.tensorboard:
            self._board = TensorBoard(self.path / "tb", step)
            sinks.append(self._board)
        return sinks

    def check_newest(self) -> None:
        """Raise OptimusError if a later start of the same run has taken over the run directory.
        This process must then no longer change the directory."""
        if self.metrics.is_replaced() and not self.workspace.is_open():
            raise OptimusError(
                f"train.run_dir = {str(self.path)!r}: another start of this run uses the directory "
                "now; this process ends without saving"
            )

    def sync(self) -> None:
        """Sync the metrics files to disk. Call this method before a checkpoint is
        committed. Raises OSError if the disk fails."""
        self.metrics.sync()

    def end_progress(self) -> None:
        """Stop the progress bar without removing it from the terminal. Later lines are printed
        below it."""
        if self._progress is not None:
            self._progress.close()

    def close(self, others_have_ended: bool) -> None:
        """Close the files of the run directory and unlock the directory. If `open` was not called,
        because the run cannot start, remove all files and directories that this object has created.

        Args:
            others_have_ended: True if no other rank uses the workspace any more. An empty workspace
                is then removed.

        Raises:
            OSError: Lines of the metrics files could not be written.
        """
        self.end_progress()
        if self._board is not None:
            self._board.close()
        is_open = self._progress is not None
        try:
            if is_open:
                self.metrics.close()
        finally:
            if self._lock is not None:
                if others_have_ended:
                    self.workspace.close()
                if is_open:
                    self._lock.close()
                else:
                    self._created.remove(self._lock)


def _expected_steps(plan: RunPlan, name: str, run_dir: Path) -> range:
    """Return the steps for which a metrics file must already have a line when the run starts at
    `plan.start`.

    The range is empty if these steps are unknown.

    Args:
        plan: The run's plan.
        name: "metrics" for metrics.jsonl, "eval" for eval.jsonl.
        run_dir: The run directory.
    """
    start, interval = plan.start, 1
    first = 0 if start.first_step is None and start.origin == "none" else start.first_step
    # eval_interval may have changed between commands. Use it only if the hidden copy of eval.jsonl,
    # from which lost lines are restored, is missing or empty.
    if name == "eval":
        _, copy = metrics_paths(run_dir, name)
        has_lines = copy.exists() and copy.stat().st_size > 0
        is_known = plan.data.held_out is not None and not has_lines
        interval = start.settings.get("train.eval_interval", 0) if is_known else 0
    if first is None or not interval:
        return range(0)
    return range((first // interval + 1) * interval, start.step + 1, interval)
