"""Run commands on mutated files, in forked workers with limits of time and memory.

A case is a mutated file and a command that reads the file. `Arena` makes the samples and sends
cases to workers that have imported all modules. If a case breaks a rule of judge.py (a finding),
`Arena` repeats the case in a new worker. judge.py defines the rules, draws the cases, computes the
verdicts and checks file accesses.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.kit.faults.formats import (
    READERS,
    Format,
    Reader,
    available,
    seal,
    with_self_hash,
)
from tests.kit.faults.judge import (
    FILE_BYTES,
    Audit,
    Case,
    Verdict,
    file_with_canary,
    judge,
    listing,
    make_folder,
)
from tests.kit.faults.mutations import CANARY, LARGE_BYTES, Change
from tests.kit.faults.samples import make_samples
from tests.kit.ranks.processes import status_bytes

_ADDRESS_BYTES = 2 << 30
"""Limit for the growth of a case's address space. A larger allocation raises MemoryError, so that a
fault does not exhaust the memory of the machine."""
_INPUT_BYTES = 320 << 20
_CASES_PER_WORKER = 200
_MODULES = (
    *("matplotlib.pyplot", "pyarrow.parquet", "sentencepiece", "tokenizers", "zstandard"),
    *("optimus.checkpoint.convert", "optimus.checkpoint.inspect", "optimus.doctor"),
    *("optimus.evaluate.checkpoint", "optimus.observe.report", "optimus.train.summary"),
    *("data_prep.pipeline.import_run", "data_prep.pipeline.run", "data_prep.pipeline.verify"),
    "data_prep.dataset.describe",
)


@dataclass(frozen=True)
class Limits:
    """Limits of one case."""

    cpu_s: float = 5.0
    """Maximum processor time, in seconds."""
    idle_s: float = 5.0
    """Seconds without processor time, after which the process counts as hanging."""
    clock_s: float = 60.0
    """Maximum wall-clock time, in seconds, with a margin for a busy machine."""
    memory_bytes: int = 256 << 20
    """Maximum growth of resident memory, in bytes."""


class Arena:
    """Runs commands on changed copies of sample files and judges how the commands end.

    Args:
        folder: Directory for the samples and for one folder per case.
        limits: Limits of a case; None: the defaults.
    """

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.folder, self.samples = folder, folder / "samples"
        self.readers = dict(READERS)
        """Functions that command lines can call by name, in place of programs. A change of this
        dict affects only workers that start later."""
        self._settings = _Settings(self.samples, limits or Limits(), self.readers)
        self.formats: list[Format] = []
        self.sound: dict[tuple[str, str], Any] = {}
        """The content that each command read from an unchanged sample, by (sample, command)."""

    def prepare(self, formats: Iterable[Format] | None = None, jobs: int = 2) -> None:
        """Run the commands of each format on the format's unchanged sample. Store the contents that
        the commands read in `sound`.

        Args:
            formats: Formats whose samples exist; None: make the samples of all formats first.
            jobs: Number of workers.

        Raises:
            RuntimeError: A command does not accept a sample.
        """
        if formats is None:
            os.environ["MPLCONFIGDIR"] = str(self.folder / "matplotlib")
            for name in _MODULES:  # import once, not in each worker
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
            make_samples(self.samples)
        self.formats = available(self.samples) if formats is None else list(formats)
        cases = {
            (format_.sample, command.name): Case(0, -1, format_, command, Change("none"), False)
            for format_ in self.formats
            for command in format_.commands
        }
        modules: set[str] = set()
        for case, report in self._execute(cases.values(), jobs):
            if report["problem"] or report["code"] != 0:
                raise RuntimeError(f"{case.command.name} in {case.format.sample}: {report}")
            self.sound[case.format.sample, case.command.name] = report["content"]
            modules |= {*report["modules"]}
        for name in sorted(modules):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.collect()
        gc.freeze()

    def run(self, cases: Iterable[Case], jobs: int) -> Iterator[tuple[Case, Verdict]]:
        """Yield pairs (case, verdict) in the order in which the cases end.

        A case with a finding runs again in a new worker. If the second run has no finding, the
        `kind` of the verdict begins with "only after other cases".

        Args:
            cases: The cases.
            jobs: Number of workers.
        """
        for case, report in self._execute(cases, jobs):
            verdict = self._judge(case, report)
            if verdict.outcome == "finding":
                (_, report), *_ = self._execute([case], 1)
                repeated = self._judge(case, report)
                if repeated.outcome == "finding":
                    verdict = repeated
                else:
                    verdict = replace(verdict, kind=f"only after other cases: {verdict.kind}")
            yield case, verdict

    def _judge(self, case: Case, report: dict[str, Any]) -> Verdict:
        outcome, kind = judge(case, report, self.sound[case.format.sample, case.command.name])
        output = report.get("stdout", "") + report.get("stderr", "")
        return Verdict(outcome, kind, output[-4000:] if outcome == "finding" else "")

    def _execute(self, cases: Iterable[Case], jobs: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """Yield (case, report) for each case. A worker that has ended is replaced by a new one."""
        waiting = iter(cases)
        workers: list[_Worker] = []
        number = 0
        try:
            while True:
                for slot in range(jobs):
                    if slot == len(workers):
                        workers.append(_Worker(self._settings))
                    elif workers[slot].is_spent:
                        workers[slot].close()
                        workers[slot] = _Worker(self._settings)
                    if workers[slot].case is None and (case := next(waiting, None)) is not None:
                        workers[slot].start(case, self.folder / f"case-{os.getpid()}-{number}")
                        number += 1
                busy = [worker for worker in workers if worker.case is not None]
                if not busy:
                    return
                ready, _, _ = select.select([worker.results for worker in busy], [], [], 0.5)
                for worker in busy:
                    if worker.results in ready:
                        assert worker.case is not None
                        yield worker.case, worker.finish()
                    else:
                        worker.watch.check()
        finally:
            for worker in workers:
                worker.close()


@dataclass(frozen=True)
class _Settings:
    """Settings of all workers of an arena."""

    samples: Path
    limits: Limits
    readers: Mapping[str, Reader]


class _Worker:
    """A forked process that executes cases one after the other."""

    def __init__(self, settings: _Settings) -> None:
        self.case: Case | None = None
        self._limits = settings.limits
        self.is_spent, self._num_cases = False, 0
        orders, self._orders = os.pipe()
        self.results, results = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._orders)
            os.close(self.results)
            _serve(settings, orders, results)
        os.close(orders)
        os.close(results)

    def start(self, case: Case, folder: Path) -> None:
        self.case, self._folder, self.watch = case, folder, _Watch(self._pid, self._limits)
        self._listing = make_folder(folder)
        self._num_cases += 1
        data = pickle.dumps((case, folder))
        data = len(data).to_bytes(8, "little") + data
        while data:
            data = data[os.write(self._orders, data) :]

    def finish(self) -> dict[str, Any]:
        """Return the report on the case. If the worker died, the report contains the cause."""
        answer = os.read(self.results, 1)
        status = None
        if not answer:
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
        self.is_spent = not answer or self._num_cases >= _CASES_PER_WORKER
        self.case = None
        return _collect(self._folder, self._listing, status, self.watch)

    def close(self) -> None:
        for file in (self._orders, self.results):
            with contextlib.suppress(OSError):
                os.close(file)
        self._orders = self.results = -1
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._pid = 0


class _Watch:
    """Kills a process that exceeds its limits of time."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._pid, self._limits, self.reason = pid, limits, ""
        self._start = self._last_work = time.monotonic()
        self._next, self._ticks = self._start + 0.5, -1

    def check(self) -> None:
        now = time.monotonic()
        if now < self._next or self.reason:
            return
        self._next = now + 0.5
        ticks, is_waiting = _work_of_group(self._pid)
        if ticks != self._ticks or not is_waiting:
            self._ticks, self._last_work = ticks, now
        if now - self._last_work > self._limits.idle_s:
            self.reason = f"no processor time for {self._limits.idle_s:g} s"
        elif now - self._start > self._limits.clock_s:
            self.reason = f"no end after {self._limits.clock_s:g} s"
        if self.reason:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)


def _work_of_group(group: int) -> tuple[int, bool]:
    """Return two values: the processor time of a process group in clock ticks, and True if all
    processes of the group sleep."""
    ticks, sleeps = 0, True
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
                sleeps = sleeps and fields[0] in "SZ"
    return ticks, sleeps


def _collect(
    folder: Path, before: list[tuple[str, int, int, int]], status: int | None, watch: _Watch
) -> dict[str, Any]:
    """Return the report on a case that has ended, and remove the folder of the case.

    Args:
        folder: The folder of the case.
        before: Listing of the folder before the case.
        status: Wait status of the worker if it died; None if the worker still runs.
        watch: The watch of the worker. If the watch has killed the worker, the watch knows the
            reason.
    """
    try:
        report = json.loads((folder / "report").read_text())
    except (OSError, ValueError):
        report = {"problem": "no report"}
    for name in ("stdout", "stderr"):
        with contextlib.suppress(OSError):
            output = (folder / name).read_bytes()[: 1 << 20]
            report[name] = output.decode("utf-8", "surrogateescape")
    if watch.reason:
        report["problem"] = f"hang: {watch.reason}"
    elif status is not None:
        report["problem"] = _cause_of_death(status)
    if not report["problem"] and listing(folder) != before:
        report["problem"] = "a file outside the directory was made or changed"
    shutil.rmtree(folder, ignore_errors=True)
    return report


def _cause_of_death(status: int) -> str:
    if not os.WIFSIGNALED(status):
        return f"the process exited with wait status {status}"
    number = os.WTERMSIG(status)
    if number == signal.SIGPROF:
        return "hang: too many processor seconds"
    return f"killed by {signal.Signals(number).name}"


def _serve(settings: _Settings, orders: int, results: int) -> None:
    """Execute cases in the forked process and write their reports, until the pipe of orders is
    closed."""
    code = 1
    try:
        os.setsid()
        faulthandler.disable()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        # Bytecode next to our sources would be a write outside the directory of the case.
        sys.dont_write_bytecode = True
        # Durability is not tested here, and fsync would take most of the time.
        mock.patch.object(os, "fsync", lambda fd: None).start()
        audit = Audit()
        sys.addaudithook(audit)
        source, num_cases = os.fdopen(orders, "rb"), 0
        while head := source.read(8):
            case, folder = pickle.loads(source.read(int.from_bytes(head, "little")))
            try:
                report = _execute_in_copy(settings, case, folder, audit)
            except BaseException:
                report = {"problem": f"harness: {traceback.format_exc()}"}
            (folder / "report").write_text(json.dumps(report))
            os.chdir("/")
            _clear_caches()
            if num_cases % 20 == 0:
                gc.collect()
            num_cases += 1
            os.write(results, b"1")
        code = 0
    finally:
        os._exit(code)


def _clear_caches() -> None:
    """Clear the caches that commands keep until their process ends."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("optimus", "data_prep"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def _execute_in_copy(settings: _Settings, case: Case, folder: Path, audit: Audit) -> dict[str, Any]:
    inside, is_sound = folder / "inside", case.number < 0
    shutil.copytree(settings.samples / case.format.sample, inside, dirs_exist_ok=True)
    known = set(sys.modules)
    if not is_sound:
        apply_change(case, inside)
    report = execute(case, folder, audit, settings)
    if not report["problem"] and (name := file_with_canary(inside)):
        report["problem"] = f"content of a file outside the directory was copied to {name}"
    return report | {"modules": sorted({*sys.modules} - known) if is_sound else []}


def apply_change(case: Case, inside: Path) -> None:
    """Apply the change of a case to the copy of its sample."""
    path, change = inside / case.format.file, case.change
    before = path.read_bytes()
    if not change.replacement:
        content = change.content
        if case.is_sealed and b'"self_xxh3"' in before:
            content = with_self_hash(_without_hash(content))
        path.write_bytes(content)
        if case.is_sealed:
            seal(inside, path, before)
        return
    path.unlink()
    outside = inside.parent / "outside"
    if change.replacement == "fifo":
        os.mkfifo(path)
    elif change.replacement == "directory":
        path.mkdir()
    elif change.replacement == "dangling":
        path.symlink_to("nothing-here")
    elif change.replacement == "endless":
        path.symlink_to("/dev/zero")
    elif change.replacement == "foreign":
        # Half of the links refer to a file with a JSON object: readers of JSON would refuse a file
        # with other text.
        path.symlink_to(outside / ("secret.json", "secret")[case.number % 2])
    elif change.replacement == "copy":
        with contextlib.suppress(FileExistsError):
            (inside / "copy").write_bytes(before)
        path.symlink_to(inside / "copy")
    elif change.replacement == "socket":
        # The name of a socket has at most 107 characters, so use a relative name.
        with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif change.replacement == "large":
        is_input = case.format.sample == "texts"  # such a command reads the whole file
        with open(path, "wb") as file:
            file.write(before)
            file.truncate(_INPUT_BYTES if is_input else LARGE_BYTES)


def _without_hash(content: bytes) -> bytes:
    """Return a JSON text. If its last key is "self_xxh3" (the hash of the text), leave out this
    key."""
    match = re.search(rb',\s*"self_xxh3": "[0-9a-f]{16}"\s*}\s*$', content)
    return content[: match.start()] + b"\n}" if match else content


def execute(case: Case, folder: Path, audit: Audit, settings: _Settings) -> dict[str, Any]:
    """Run the command of a case in `folder`/inside. Return a report with the problem, the exit
    status and the content that the command read."""
    inside, limits = folder / "inside", settings.limits
    os.chdir(inside)
    _redirect(folder)
    os.environ |= {
        **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), str(inside)),
        "OPTIMUS_PEAK_CACHE": "peaks",
        "OPTIMUS_KERNELS_CACHE": "kernels",
        "OPTIMUS_KERNELS": "torch",
        "OPTIMUS_IPEX": "0",
        "COLUMNS": "100",
    }
    problem, code, content = "", 0, None
    start = status_bytes("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    limits = replace(limits, cpu_s=max(limits.cpu_s, case.format.cpu_s))
    with _limited(limits, case.number >= 0), audit.watching(inside, case.format.names_files):
        try:
            code = _run_lines(case.command.lines, settings.readers)
        except BaseException as error:
            problem = _explain(error)
            traceback.print_exc()
    grown = status_bytes("VmHWM") - start
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = (
        (folder / name).read_text(errors="surrogateescape") for name in ("stdout", "stderr")
    )
    if not problem and audit.problem:
        problem = audit.problem
    if not problem and grown > limits.memory_bytes and case.number >= 0:
        problem = f"used more than {limits.memory_bytes >> 20} MiB of memory"
    if not problem and CANARY in stdout + stderr:
        problem = "content of a file outside the directory was printed"
    if not problem and code == 0:
        try:
            content = case.command.content(stdout)
        except BaseException as error:
            problem = f"accepted, but the content cannot be read: {_explain(error)}"
            traceback.print_exc()
            sys.stderr.flush()
    return {"problem": problem, "code": code, "content": json.loads(json.dumps(content))}


def _redirect(folder: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)


@contextlib.contextmanager
def _limited(limits: Limits, are_set: bool) -> Iterator[None]:
    """Context manager that limits the processor time, the address space and the file sizes of this
    process."""
    if not are_set:
        yield
        return
    space = status_bytes("VmSize") + _ADDRESS_BYTES
    values = {
        resource.RLIMIT_AS: space,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    before = {limit: resource.getrlimit(limit) for limit in values}
    for limit, value in values.items():
        resource.setrlimit(limit, (value, before[limit][1]))
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        for limit, limits_before in before.items():
            resource.setrlimit(limit, limits_before)


def _run_lines(lines: Iterable[str], readers: Mapping[str, Reader]) -> Any:
    """Run command lines until one of them fails. Return the exit status of the failed line; 0 if no
    line fails."""
    from data_prep.cli import main as optimus_data
    from optimus.cli import main as optimus
    from optimus.observe.log import set_up_logging

    programs: dict[str, Reader] = {"optimus": optimus, "optimus-data": optimus_data, **readers}
    for line in lines:
        program, *words = shlex.split(line)
        set_up_logging(program=program)  # as the process of the command does
        try:
            code: Any = programs[program](words)
        except SystemExit as end:
            code = end.code
        if code:
            return code
    return 0


def _explain(error: BaseException) -> str:
    """Return one line of text about an error: the type of the exception, and the innermost line of
    code of Optimus in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    packages = "optimus|data_prep|optimus_kernels"
    ours = [frame for frame in frames if re.search(rf"/({packages})/", frame.filename)]
    frame = ours[-1] if ours else frames[-1]
    path = re.sub(rf".*/(?=({packages}|tests)/)", "", frame.filename)
    return f"traceback: {type(error).__name__} at {path}:{frame.lineno} {frame.name}"
