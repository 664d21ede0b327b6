"""The run directory as its first rank keeps it: one writer, configuration, metrics, events."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from optimus.checkpoint.manager import prepare_directory
from optimus.config import Config, dump_toml
from optimus.errors import ConfigError
from optimus.io import files
from optimus.observe.metrics import JsonLines, cut_after, read_json_lines
from optimus.observe.progress import Progress
from optimus.train.resolve import RunPlan

logger = logging.getLogger(__name__)

LOCK = ".lock"


def check_not_in_use(path: Path) -> None:
    """Raise ConfigError if another run has the directory. Creates nothing."""
    try:
        with files.open_regular(path / LOCK) as file:
            _lock(file, path, fcntl.LOCK_SH)
    except FileNotFoundError:
        return
    except ConfigError as error:
        raise ConfigError(
            f"{error}; to submit a job that follows that run, give --skip-run-dir-check"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"train.run_dir = {str(path)!r}: {LOCK}: {error.strerror}; choose another"
        ) from None


def _lock(file: BinaryIO, run_dir: Path, kind: int) -> None:
    """Lock `file` until it is closed; close it and raise ConfigError if another process has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ConfigError(
            f"train.run_dir = {str(run_dir)!r} is in use by another run; choose another or wait "
            "for its end"
        ) from None


class RunDirectory:
    """Owns the files of a run. Made by the first rank alone; ended by `close`.

    Making it creates the directory and takes it for this process; raises ConfigError where it
    cannot. What is in it does not change before `open`.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._lock = self._take()
        self._last: dict[str, Mapping[str, Any]] = {}

    def open(self, config: Config, plan: RunPlan, last_step: int) -> None:
        """Cut back to where the run starts and open its logs; call it once the start is loaded."""
        step = plan.start.step
        prepare_directory(self.path, plan.start)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        logs = []
        for name in ("metrics", "eval"):
            path, copy = self.path / f"{name}.jsonl", self.path / f".{name}-copy.jsonl"
            expected = _expected_steps(plan, name, copy)
            cut_after(path, step, self.path / "log" / f"{name}-cut-{stamp}.jsonl", copy, expected)
            logs.append(JsonLines(path, copy))
        self._metrics, self._eval = logs
        # This makes the names of the logs durable, too.
        files.write_bytes(self.path / "config.toml", dump_toml(config).encode())
        self._progress = Progress(step, last_step, config.observe.log_interval)
        self._board = None
        if config.observe.tensorboard:
            from optimus.observe.tensorboard import TensorBoard

            self._board = TensorBoard(self.path / "tb", step)

    def _take(self) -> BinaryIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"train.run_dir = {str(self.path)!r}: {error.strerror}; choose another"
            ) from None
        # Whoever may open the file may hold its lock, and a link could create a file elsewhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            file = os.fdopen(os.open(self.path / LOCK, flags, 0o600), "r+b", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"train.run_dir = {str(self.path)!r}: {LOCK}: {error.strerror}; choose another"
            ) from None
        with contextlib.suppress(OSError):  # an earlier version let others open it
            os.fchmod(file.fileno(), 0o600)
        _lock(file, self.path, fcntl.LOCK_EX)
        if self.path.stat().st_mode & stat.S_IWOTH:
            logger.warning(
                "%s: every user of this machine may write to it and replace its checkpoints; run "
                "chmod o-w on it",
                self.path,
            )
        return file

    def metrics(self, record: Mapping[str, Any]) -> None:
        self._metrics.append(record)
        self._last["metrics"] = record
        self._progress.show(record)
        if self._board is not None:
            self._board.show(record, "train")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._eval.append(record)
        self._last["eval"] = record
        logger.info("held-out loss %.4f at step %d", record["loss"], record["step"])
        if self._board is not None:
            self._board.show(record, "eval")

    def sync(self) -> None:
        """Make metrics and evaluations durable: what a checkpoint that is sealed now relies on."""
        self._metrics.sync()
        self._eval.sync()

    def last(self, name: str) -> Mapping[str, Any]:
        """The last line of `metrics` or of `eval`, whichever start wrote it; empty without one."""
        if name not in self._last:
            self._last[name] = next(iter(read_json_lines(self.path / f"{name}.jsonl")[-1:]), {})
        return self._last[name]

    def end_progress(self) -> None:
        """Leave the bar as it is now; what is printed later comes below it."""
        self._progress.close()

    def close(self) -> None:
        self.end_progress()
        self._metrics.close()
        self._eval.close()
        if self._board is not None:
            self._board.close()
        self._lock.close()


def _expected_steps(plan: RunPlan, name: str, copy: Path) -> range:
    """The steps before the start of which metrics.jsonl, or eval.jsonl, has lines for sure."""
    start, interval = plan.start, 1
    begun = 0 if start.begun is None and start.origin == "none" else start.begun
    if name == "eval":  # lines of the copy are better: the interval may have been another before
        has_lines = copy.exists() and copy.stat().st_size > 0
        is_known = plan.data.held_out is not None and not has_lines
        interval = start.settings.get("train.eval_interval", 0) if is_known else 0
    if begun is None or not interval:
        return range(0)
    return range((begun // interval + 1) * interval, start.step + 1, interval)
