"""The run directory on the first rank: its lock, its config.toml and its metrics files."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import BinaryIO

from optimus.checkpoint.store import prepare_directory
from optimus.config import Config, dump_toml
from optimus.errors import ConfigError, reason_of
from optimus.io import files
from optimus.observe.events import Recorder
from optimus.observe.log import LogRecorder, Progress
from optimus.observe.metrics import MetricsFiles, TensorBoard, metrics_paths
from optimus.train.resolve import RunPlan

logger = logging.getLogger(__name__)

LOCK = ".lock"


def check_not_in_use(path: Path) -> None:
    """Raise ConfigError if another run has locked the run directory `path`. Creates no file."""
    try:
        with files.open_regular(path / LOCK) as file:
            _lock(file, path, fcntl.LOCK_SH)
    except FileNotFoundError:
        return
    except ConfigError as error:
        raise ConfigError(
            f"{error}; if you check a job that will start after the other run has ended, add "
            "--skip-run-dir-check"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"train.run_dir = {str(path)!r}: cannot open {LOCK}: {reason_of(error)}; choose "
            "another directory"
        ) from None


def _lock(file: BinaryIO, run_dir: Path, kind: int) -> None:
    """Lock `file`, the lock file of `run_dir`, until it is closed. `kind` is LOCK_SH or LOCK_EX of
    fcntl. If another process has the lock, close `file` and raise ConfigError."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"train.run_dir = {str(run_dir)!r} is in use by another run; choose another directory "
            "or wait until that run ends"
        ) from None


class RunDirectory:
    """The locked run directory and the open files in it, on the first rank only."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Create the directory if it does not exist, and lock it.

        Args:
            path: `train.run_dir`.

        Raises:
            ConfigError: The directory cannot be created, or another run uses it.
        """
        self.path = Path(path)
        self._lock = self._acquire_lock()
        self._board: TensorBoard | None = None

    def open(self, config: Config, plan: RunPlan, last_step: int) -> list[Recorder]:
        """Write config.toml and open the files of metrics and evaluations.

        If the run starts at step n, checkpoints and metrics of later steps are moved to
        subdirectories. Call this after the initial states are loaded, so that a failed load changes
        nothing.

        Args:
            config: The run's configuration, with the settings that ranks chose by measurement.
            plan: The run's plan.
            last_step: The step at which this command ends.

        Returns:
            The recorders of the run: metrics files, log, progress bar and TensorBoard.
        """
        step = plan.start.step
        prepare_directory(self.path, plan.start)
        expected = {name: _expected_steps(plan, name, self.path) for name in ("metrics", "eval")}
        self.metrics = MetricsFiles(self.path, step, expected)
        # This write syncs the directory, so the names of the new metrics files are durable, too.
        files.write_bytes(self.path / "config.toml", dump_toml(config).encode())
        self._progress = Progress(step, last_step, config.observe.log_interval)
        sinks = [self.metrics, LogRecorder(), self._progress]
        if config.observe.tensorboard:
            self._board = TensorBoard(self.path / "tb", step)
            sinks.append(self._board)
        return sinks

    def _acquire_lock(self) -> BinaryIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"train.run_dir = {str(self.path)!r}: cannot create the directory: "
                f"{error.strerror}; choose another directory"
            ) from None
        # Mode 0600, since any user who can open the file can lock it. O_NOFOLLOW, since opening a
        # symbolic link could create a file in another directory.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.fdopen(os.open(self.path / LOCK, flags, 0o600), "r+b", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"train.run_dir = {str(self.path)!r}: cannot open {LOCK}: {reason_of(error)}; "
                "choose another directory"
            ) from None
        with contextlib.suppress(OSError):  # earlier versions made it readable by others
            os.fchmod(file.fileno(), 0o600)
        _lock(file, self.path, fcntl.LOCK_EX)
        if self.path.stat().st_mode & stat.S_IWOTH:
            logger.warning(
                "%s: every user of this machine may write to it and replace its checkpoints; run "
                "chmod o-w on it",
                self.path,
            )
        return file

    def sync(self) -> None:
        """Sync metrics.jsonl and eval.jsonl to disk. Call this before a checkpoint is committed.
        Raises OSError if the disk fails."""
        self.metrics.sync()

    def end_progress(self) -> None:
        """End the progress bar and leave it on the terminal. Later lines are printed below it."""
        self._progress.close()

    def close(self) -> None:
        """Close the files and unlock the directory. Raises OSError if lines of metrics could not
        be written."""
        self.end_progress()
        self.metrics.close()
        if self._board is not None:
            self._board.close()
        self._lock.close()


def _expected_steps(plan: RunPlan, name: str, run_dir: Path) -> range:
    """Return the steps whose lines a metrics file must contain before the run starts at
    `plan.start`.

    The range is empty if these steps are unknown.

    Args:
        plan: The run's plan.
        name: "metrics" for metrics.jsonl, "eval" for eval.jsonl.
        run_dir: The run directory.
    """
    start, interval = plan.start, 1
    first = 0 if start.first_step is None and start.origin == "none" else start.first_step
    if name == "eval":  # eval_interval may have changed between commands; the copy has all lines
        _, copy = metrics_paths(run_dir, name)
        has_lines = copy.exists() and copy.stat().st_size > 0
        is_known = plan.data.held_out is not None and not has_lines
        interval = start.settings.get("train.eval_interval", 0) if is_known else 0
    if first is None or not interval:
        return range(0)
    return range((first // interval + 1) * interval, start.step + 1, interval)
