"""The run directory as its first rank keeps it: one writer, configuration, metrics, events."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from optimus import files
from optimus.checkpoint.manager import prepare_directory
from optimus.config import Config, dump_toml
from optimus.errors import ConfigError
from optimus.observe.metrics import JsonLines, cut_after
from optimus.observe.progress import Progress
from optimus.train.preflight import Preflight


class RunDirectory:
    """Owns the files of a run. Made by the first rank alone; ended by `close`.

    Making it takes the directory for this process; nothing in it changes before `open`.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        self._lock = self._take()

    def open(self, config: Config, flight: Preflight, last_step: int) -> None:
        """Cut back to where the run starts and open its logs; call it once the start is loaded."""
        step = flight.start.step
        prepare_directory(self.path, flight.start)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        logs = []
        for name in ("metrics", "eval"):
            path, copy = self.path / f"{name}.jsonl", self.path / f".{name}-copy.jsonl"
            expected = _expected_steps(flight, name, copy)
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
        file = open(self.path / ".lock", "ab")  # noqa: SIM115, held until `close`
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise ConfigError(
                f"train.run_dir = {str(self.path)!r} is in use by another run; choose another"
            ) from None
        return file

    def metrics(self, record: Mapping[str, Any]) -> None:
        self._metrics.append(record)
        self._progress.show(record)
        if self._board is not None:
            self._board.show(record, "train")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        self._eval.append(record)
        self.say(f"held-out loss {record['loss']:.4f} at step {record['step']}")
        if self._board is not None:
            self._board.show(record, "eval")

    def sync(self) -> None:
        """Make metrics and evaluations durable: what a checkpoint that is sealed now relies on."""
        self._metrics.sync()
        self._eval.sync()

    def say(self, line: str) -> None:
        self._progress.say(line)

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        self._eval.close()
        if self._board is not None:
            self._board.close()
        self._lock.close()


def _expected_steps(flight: Preflight, name: str, copy: Path) -> range:
    """The steps before the start of which metrics.jsonl, or eval.jsonl, has lines for sure."""
    start, interval = flight.start, 1
    begun = 0 if start.begun is None and start.origin == "none" else start.begun
    if name == "eval":  # the copy knows better: the interval may have been another before
        is_known = flight.eval_dataset is not None and not copy.exists()
        interval = start.settings.get("train.eval_interval", 0) if is_known else 0
    if begun is None or not interval:
        return range(0)
    return range((begun // interval + 1) * interval, start.step + 1, interval)


def say_start(flight: Preflight, doubts: Sequence[str]) -> None:
    """Where this run begins, in a line or two, and what about it is doubtful."""
    for doubt in doubts:
        print(f"optimus: warning: {doubt}", file=sys.stderr)
    start = flight.start
    if start.path is not None:
        print(f"optimus: starting at step {start.step} from {start.path}", file=sys.stderr)
    for difference in flight.differences:
        print(f"optimus: changed on resume: {difference}", file=sys.stderr)
