"""The metrics files of a run: metrics.jsonl, eval.jsonl, expert_load.jsonl and TensorBoard events.

The three files *.jsonl contain one JSON object per line. When a run resumes at step n, the lines of
steps after n are removed.
"""

from __future__ import annotations

import collections
import contextlib
import io
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimus.errors import DataError
from optimus.io import files
from optimus.io.workspace import Workspace
from optimus.observe.events import (
    EvalRecord,
    ExpertLoad,
    PipelineTimes,
    Record,
    Recorder,
    StepRecord,
    Traffic,
    Value,
)

logger = logging.getLogger(__name__)

_LINE_BYTES = 1 << 20
"""Maximum length, in bytes, of a line in a metrics file. A run writes lines of about 1 kB."""
_MOST_STEPS = 1 << 22
"""Maximum number of expected steps that `JsonLines.open` compares with the lines of a file. This
maximum bounds the memory if a damaged manifest contains a huge step number."""
_BATCH_BYTES = 1 << 16
"""New lines are appended to the copy of a file when they together have at least this number of
bytes."""


class MetricsFiles(Recorder):
    """Recorder that writes metrics.jsonl, eval.jsonl and expert_load.jsonl, and a hidden copy of
    each of these files.

    When a run starts, damaged or lost lines of a file are restored from the file's copy.
    """

    def __init__(
        self,
        run_dir: Path,
        workspace: Workspace,
        step: int,
        expected: Mapping[str, Iterable[int]],
        load_interval: int = 0,
    ) -> None:
        """Open the files for appending. Remove the lines of steps after `step`.

        Each file is replaced by a new file. Processes that remain from earlier starts of the run
        cannot append to the new file.

        Args:
            run_dir: Run directory. Removed lines are moved to files in its `log/`.
            workspace: The workspace of the run, a temporary directory from which files are renamed
                into the run directory.
            step: Step at which the run starts.
            expected: Maps `metrics` and `eval` to the steps, up to `step`, for which metrics.jsonl
                and eval.jsonl must contain a line.
            load_interval: Number of updates between expert loads in expert_load.jsonl; 0: no file.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        names = ["metrics", "eval", *(["expert_load"] if load_interval else [])]
        self._files: list[JsonLines] = []
        for name in names:
            path, copy = metrics_paths(run_dir, name)
            cut_log = run_dir / "log" / f"{name}-cut-{stamp}.jsonl"
            steps = expected.get(name, ())
            self._files.append(JsonLines.open(workspace, path, copy, step, cut_log, steps))
        self._metrics, self._eval, *_ = self._files
        self._load_interval = load_interval
        self._last_step: StepRecord | None = None
        self._last_evaluation: EvalRecord | None = None

    def record(self, record: Record) -> None:
        match record:
            case StepRecord():
                self._metrics.append(record.values())
                self._last_step = record
            case EvalRecord():
                self._eval.append(record.values())
                self._last_evaluation = record
            case ExpertLoad() if self._load_interval:
                if record.step == 1 or record.step % self._load_interval == 0:
                    for line in record.lines():
                        self._files[-1].append(line)

    def last_loss(self) -> float | None:
        """Return the loss in the last line of metrics.jsonl; None if the file has no line, or the
        last line has no loss."""
        if self._last_step is not None:
            return self._last_step.loss
        loss = self._metrics.read_last().get("loss")
        return loss if isinstance(loss, float) else None

    def last_evaluation(self) -> EvalRecord | None:
        """Return the last evaluation in eval.jsonl; None if the file has no line, or the last line
        has an invalid field."""
        return self._last_evaluation or EvalRecord.from_values(self._eval.read_last())

    def is_replaced(self) -> bool:
        """Return True if another process has replaced or removed metrics.jsonl after this object
        opened the file."""
        return self._metrics.is_replaced()

    def sync(self) -> None:
        """Make all recorded lines durable. Call this method before the commit of a checkpoint.
        Raises OSError if a file cannot be written."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Write the lines that are still in memory, and close the files. Raises OSError if lines
        cannot be written."""
        for file in self._files:
            file.close()


def metrics_paths(run_dir: Path, name: str) -> tuple[Path, Path]:
    """Return (path of a metrics file, path of the file's hidden copy). `name` is "metrics", "eval"
    or "expert_load"."""
    return run_dir / f"{name}.jsonl", run_dir / f".{name}-copy.jsonl"


class JsonLines:
    """Writer that appends JSON objects to a file, one object per line, without a buffer.

    If a write fails, the lines stay in memory until a later write succeeds. All lines are also
    appended to a copy of the file, several lines at a time.
    """

    def __init__(self, path: Path, fd: int, copy: Path, copy_fd: int) -> None:
        """Create a writer from a file and its copy, which are open for appending. `close` closes
        both files.

        Args:
            path: Path of the file.
            fd: Descriptor of the file.
            copy: Path of the copy.
            copy_fd: Descriptor of the copy.
        """
        self._path, self._waiting, self._warned = path, b"", False
        self._copy, self._uncopied, self._copy_failed = copy, b"", False
        self._copy_lock = threading.Lock()
        self._lock = threading.Lock()
        self._fd, self._copy_fd = fd, copy_fd

    @classmethod
    def open(
        cls,
        workspace: Workspace,
        path: Path,
        copy: Path,
        step: int,
        cut_log: Path,
        expected: Iterable[int] = (),
    ) -> JsonLines:
        """Repair a metrics file of a run that starts at `step`, and return a writer that appends to
        the file.

        Lines of later steps and damaged lines are removed. Lost lines are restored from the copy.
        If several lines have the same step and the same `source` or `layer`, only the last line is
        kept. Lines in metrics.jsonl have neither `source` nor `layer`. The file and its copy are
        replaced by new files. Processes that remain from earlier starts of the run cannot append to
        the new files.

        Args:
            workspace: The workspace of the run, a temporary directory from which files are renamed
                into the run directory.
            path: The file.
            copy: Path of the file's copy, from which lost lines are restored. After the repair, the
                copy has the same content as the file.
            step: Last step whose lines are kept.
            cut_log: File to which the removed lines are written. If it exists, it is replaced.
            expected: Steps that must have lines. A warning names the steps without a line.

        Raises:
            DataError: A file cannot be read; see `read_json_lines`.
            OSError: A file cannot be written.
        """
        data, copied = b"".join(read_lines(path)), b"".join(read_lines(copy))
        lines = data.splitlines()
        kept = _up_to(step, lines)
        present = {*lines}
        spare = [line for line in copied.splitlines() if line not in present]
        restored = {key: line for key, line in _up_to(step, spare).items() if key not in kept}
        whole = b"".join(line + b"\n" for _, line in sorted({**kept, **restored}.items()))
        moved = _others(lines, kept.values()) + _others(spare, restored.values())
        if moved:
            files.make_dirs(cut_log.parent)
            workspace.write_bytes(cut_log, b"".join(line + b"\n" for line in moved))
        fd = workspace.open_append(path, whole)
        copy_fd = workspace.open_append(copy, whole)
        if damaged := sum(_key(line) is None for line in lines[:-1]):
            # The last line is not counted: it is incomplete if the run was killed during the write.
            _warn(path, f"{damaged} of its lines cannot be read; see {cut_log}")
        if restored:
            _warn(path, f"restored the lines of {spell_steps(n for n, _ in restored)} from {copy}")
        looked_for = {*itertools.islice(expected, _MOST_STEPS)}
        if missing := looked_for - {number for number, _ in [*kept, *restored]}:
            _warn(
                path,
                f"the lines of {spell_steps(missing)} are missing, in {copy} too; the run "
                "continues with this gap; to close it, stop the run, put the lines back from a "
                "backup and run the same command again",
            )
        return cls(path, fd, copy, copy_fd)

    def append(self, values: Mapping[str, object]) -> None:
        line = json.dumps(values).encode() + b"\n"
        try:
            with self._lock:
                self._waiting += line
                self._uncopied += line
                self._write()
            self._warned = False
        except OSError as error:
            if not self._warned:
                _warn(self._path, f"{error.strerror}; new lines wait in memory for the next write")
            self._warned = True
        if len(self._uncopied) >= _BATCH_BYTES:
            self._write_copy()

    def sync(self) -> None:
        """Make all lines durable. Any thread can call this method. Raises OSError if the file
        cannot be written."""
        try:
            with self._lock:
                self._write()
            os.fsync(self._fd)
        except OSError as error:
            error.filename = os.fspath(self._path)
            raise
        self._write_copy()

    def close(self) -> None:
        """Write the lines that are still in memory, and close the file and its copy. Raises OSError
        if lines cannot be written."""
        try:
            self.sync()
        finally:
            os.close(self._fd)
            os.close(self._copy_fd)

    def is_replaced(self) -> bool:
        """Return True if another process has replaced or removed the file after this object opened
        the file."""
        return os.fstat(self._fd).st_nlink == 0

    def read_last(self) -> dict[str, Any]:
        """Return the last JSON object in the file, or {} if the file has none."""
        return next(iter(read_json_lines(self._path)[-1:]), {})

    def _write_copy(self) -> None:
        """Append to the copy the lines that the copy does not contain yet. If the write fails, keep
        these lines in memory."""
        with self._copy_lock:
            with self._lock:
                lines, self._uncopied = self._uncopied, b""
            try:  # without fsync, because checkpoints rely on the original file
                while lines:
                    lines = lines[os.write(self._copy_fd, lines) :]
                self._copy_failed = False
            except OSError as error:
                with self._lock:
                    self._uncopied = lines + self._uncopied
                if not self._copy_failed:
                    _warn(
                        self._copy,
                        f"{error.strerror}; its new lines wait in memory for the next write",
                    )
                self._copy_failed = True

    def _write(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[os.write(self._fd, self._waiting) :]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects in a file, one object for each line; [] if the file does not exist.

    Damaged lines are skipped.

    Raises:
        DataError: The file cannot be read, is not a regular file, or has a line longer than 1 MiB.
    """
    records = []
    for line in read_lines(path):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(line), dict):
                records.append(record)
    return records


def read_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, including newlines; [] if the file does not exist.

    Raises:
        DataError: The file cannot be read, is not a regular file, or has a line longer than 1 MiB.
    """
    lines = []
    try:
        with io.BufferedReader(files.open_regular(path)) as file:
            while line := file.readline(_LINE_BYTES + 1):
                lines.append(line)
                if len(line) > _LINE_BYTES:  # the whole line might not fit into memory
                    raise DataError(
                        f"{path}: line {len(lines):,} is longer than {_LINE_BYTES:,} bytes, so the "
                        "file is damaged; remove that line or move the file away"
                    )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from None
    return lines


def _up_to(step: int, lines: Iterable[bytes]) -> dict[tuple[int, str], bytes]:
    """Return a dict that maps (step, source) to the line with these values, for steps up to `step`.
    If several lines have the same key, the dict contains the last of these lines."""
    return {key: line for line in lines if (key := _key(line)) is not None and key[0] <= step}


def _others(lines: Iterable[bytes], kept: Iterable[bytes]) -> list[bytes]:
    """Return `lines` without the lines in `kept`. For each line in `kept`, one equal line is
    removed."""
    remaining = collections.Counter(kept)
    others = []
    for line in lines:
        if remaining[line]:
            remaining[line] -= 1
        else:
            others.append(line)
    return others


def spell_steps(steps: Iterable[int]) -> str:
    """Return a text with steps as ranges, such as "steps 3-7, 9". If there are more than eight
    ranges, the text contains the first eight and the number of the remaining ranges."""
    ranges: list[list[int]] = []
    for step in sorted(set(steps)):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return spell_ranges(ranges)


def spell_ranges(ranges: Sequence[Sequence[int]]) -> str:
    """Return a text for ascending ranges (first step, last step), such as "steps 3-7, 9". If there
    are more than eight ranges, the text contains the first eight and the number of the remaining
    ranges."""
    texts = [f"{low}" if low == high else f"{low}-{high}" for low, high in ranges]
    more = f" and {len(texts) - 8} more" if len(texts) > 8 else ""
    word = "steps" if ranges[-1][1] > ranges[0][0] else "step"
    return f"{word} {', '.join(texts[:8])}{more}"


def _key(line: bytes) -> tuple[int, str] | None:
    """Return (step, source) of a line of a metrics file; None if the line is damaged. The source of
    a line of metrics.jsonl is "", and the source of a line of expert_load.jsonl is its layer."""
    try:
        record = json.loads(line)
        step, source = record["step"], record.get("source", record.get("layer", ""))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return (step, str(source)) if type(step) is int else None


def _warn(path: Path, problem: str) -> None:
    logger.warning("%s: %s", path, problem)


class TensorBoard(Recorder):
    """Recorder that writes the metrics as TensorBoard scalars to `tb/`. After a failed write, the
    recorder ignores all further records."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open an event file.

        Args:
            directory: The directory `tb/` of the run.
            first_step: Step at which the run starts or resumes. TensorBoard hides the events of
                later steps that the run wrote before it resumed.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._summary = Summary
        self._writer: SummaryWriter | None = SummaryWriter(
            str(directory), purge_step=first_step + 1
        )

    def record(self, record: Record) -> None:
        match record:
            case StepRecord():
                self._write(record.step, _prefixed("train", record.values()))
            case EvalRecord():
                self._write(record.step, _prefixed("eval", record.values()))
            case ExpertLoad():
                scalars: dict[str, float] = {}
                for layer, low, high, idle in record.layers:
                    values = {"max": high, "min": low, "experts_without_rows": idle}
                    scalars |= _prefixed(f"expert_load/layer_{layer}", values)
                self._write(record.step, scalars)
            case Traffic():
                self._write(record.step, _prefixed("traffic_bytes", record.bytes_by_axes))
            case PipelineTimes():
                self._write(record.step, _prefixed("pipeline_s", record.seconds_by_kind))

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._end(error)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None or not scalars:
            return
        # Write one event for all scalars: add_scalar takes 80 us per scalar, and the expert loads
        # of a model with 48 layers are 144 scalars.
        values = [self._summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        events = self._writer.file_writer
        assert events is not None, "SummaryWriter opens the file"
        try:
            events.add_summary(self._summary(value=values), step)
        except OSError as error:  # raised in the writer's thread, which has ended
            self._end(error)

    def _end(self, error: OSError) -> None:
        self._writer = None
        logger.warning(
            "tb/: %s; the run no longer writes TensorBoard events, but continues metrics.jsonl",
            error.strerror,
        )


def _prefixed(prefix: str, values: Mapping[str, Value]) -> dict[str, float]:
    """Return a dict that maps TensorBoard tags, such as `train/loss`, to numbers.

    A tag is `prefix`/KEY for a number in `values`, and `prefix`/KEY/INNER for a number in a dict in
    `values`. Other values and the key `step` are omitted.
    """
    scalars: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            scalars |= _prefixed(f"{prefix}/{name}", value)
        elif isinstance(value, int | float) and name != "step":
            scalars[f"{prefix}/{name}"] = value
    return scalars
