"""Give mutated files to the commands that read them, and judge the outcome.

The promise: exit status 0 with the content of the sound file, or a refusal in one line with its
exit status; no traceback, no hang, bounded memory, and nothing outside the directory is read, made
or changed. `Arena` runs cases in forked workers that have all modules imported, and repeats each
finding in a fresh worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import pickle
import random
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import stat
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.helpers import hostile_formats
from tests.helpers.hostile_changes import CANARY, LARGE_BYTES, Change, mutate
from tests.helpers.hostile_formats import Command, Format, available, make_samples, seal

LINE_CHARS = 5000
"""Of one line on standard error."""
_ADDRESS_BYTES = 2 << 30
"""By which a case may increase its address space: what asks for more gets MemoryError, so that a
fault does not harm the machine."""
_FILE_BYTES = 64 << 20
_INPUT_BYTES = 320 << 20
_CASES_A_WORKER = 200
_MODULES = (
    *("matplotlib.pyplot", "pyarrow.parquet", "sentencepiece", "tokenizers", "zstandard"),
    *("optimus.checkpoint.convert", "optimus.checkpoint.inspect", "optimus.doctor"),
    *("optimus.evaluate.checkpoint", "optimus.observe.report", "optimus.train.summary"),
    *("data_prep.importers.run", "data_prep.inspect", "data_prep.run", "data_prep.stats"),
    "data_prep.verify",
)
_ERROR = re.compile(r"optimus(-data)?: error: ")
_NOTICES = re.compile(r"optimus(-data| kernels)?: |  +\w|[a-z /-]+: \S+/\S+( \w+)? in [\d.]+ s")
"""Lines that go with any outcome: what a run will do, warnings, progress."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Limits:
    """What one case may take."""

    cpu_s: float = 5.0
    """Processor seconds."""
    idle_s: float = 5.0
    """Seconds without any work: it waits for something that never comes."""
    clock_s: float = 60.0
    """Seconds on a machine that does much else."""
    memory_bytes: int = 256 << 20
    """Growth of resident memory."""


@dataclass(frozen=True)
class Case:
    """One file, mutated, and the command that reads it."""

    seed: int
    number: int
    format: Format
    command: Command
    change: Change
    is_sealed: bool


@dataclass(frozen=True)
class Verdict:
    """What became of a case. `outcome`: same, other, refused, or finding."""

    outcome: str
    what: str = ""
    """Of a finding: one line for its kind."""
    output: str = ""
    """Of a finding: what the command wrote."""


def draw(seed: int, number: int, formats: list[Format], samples: Path) -> Case:
    """The case of a number: formats take turns, by their weights."""
    turns = [one for one in formats for _ in range(one.weight)]
    random.Random(0).shuffle(turns)
    at = number * len(formats) // len(turns)
    chance = random.Random(f"{seed} {number}")
    # One round of all formats first, so that few cases meet all of them.
    one = formats[number] if number < len(formats) else turns[(number + at) % len(turns)]
    change = mutate(chance, (samples / one.sample / one.file).read_bytes(), one.syntax)
    likely = 0.7 if change.is_structural else 0.4
    is_sealed = one.sealed and not change.place and chance.random() < likely
    return Case(seed, number, one, chance.choice(one.commands), change, is_sealed)


class Arena:
    """Samples, what commands make of them when they are sound, and a directory for the cases."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.folder, self.samples = folder, folder / "samples"
        self._limits = limits or Limits()
        self.formats: list[Format] = []
        self.sound: dict[tuple[str, str], Any] = {}
        """What each command gives of its sound sample."""

    def prepare(self, formats: Iterable[Format] | None = None, jobs: int = 2) -> None:
        """Read each sample, unmutated, by its commands. Without `formats` all samples are made
        first. Raises RuntimeError where a command does not accept one."""
        if formats is None:
            os.environ["MPLCONFIGDIR"] = str(self.folder / "matplotlib")
            for name in _MODULES:  # here, once, instead of in each worker
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
            make_samples(self.samples)
        self.formats = available(self.samples) if formats is None else list(formats)
        cases = {
            (one.sample, command.name): Case(0, -1, one, command, Change("none"), False)
            for one in self.formats
            for command in one.commands
        }
        modules: set[str] = set()
        for case, report in self._work(cases.values(), jobs):
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
        """Judge cases, `jobs` at a time, as they end. A finding is one that a process of its own
        makes again."""
        for case, report in self._work(cases, jobs):
            verdict = self._judge(case, report)
            if verdict.outcome == "finding":
                (_, report), *_ = self._work([case], 1)
                again = self._judge(case, report)
                verdict = (
                    again
                    if again.outcome == "finding"
                    else replace(verdict, what=f"only after other cases: {verdict.what}")
                )
            yield case, verdict

    def _judge(self, case: Case, report: dict[str, Any]) -> Verdict:
        outcome, what = judge(case, report, self.sound[case.format.sample, case.command.name])
        output = report.get("stdout", "") + report.get("stderr", "")
        return Verdict(outcome, what, output[-4000:] if outcome == "finding" else "")

    def _work(self, cases: Iterable[Case], jobs: int) -> Iterator[tuple[Case, dict[str, Any]]]:
        """The report of each case, from workers that are forked anew when they are killed."""
        waiting, workers = iter(cases), []
        number = 0
        try:
            while True:
                for slot in range(jobs):
                    if slot == len(workers):
                        workers.append(_Worker(self.samples, self._limits))
                    elif workers[slot].is_spent:
                        workers[slot].close()
                        workers[slot] = _Worker(self.samples, self._limits)
                    if workers[slot].case is None and (case := next(waiting, None)) is not None:
                        workers[slot].give(case, self.folder / f"case-{os.getpid()}-{number}")
                        number += 1
                busy = [one for one in workers if one.case is not None]
                if not busy:
                    return
                ready, _, _ = select.select([one.results for one in busy], [], [], 0.5)
                for worker in busy:
                    if worker.results in ready:
                        yield worker.case, worker.take()
                    else:
                        worker.watch.look()
        finally:
            for worker in workers:
                worker.close()


class _Worker:
    """A forked process that reads one case after the other."""

    def __init__(self, samples: Path, limits: Limits) -> None:
        self.case: Case | None = None
        self._limits = limits
        self.is_spent, self._given = False, 0
        orders, self._orders = os.pipe()
        self.results, results = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self._orders)
            os.close(self.results)
            _serve(samples, limits, orders, results)
        os.close(orders)
        os.close(results)

    def give(self, case: Case, where: Path) -> None:
        self.case, self._where, self.watch = case, where, _Watch(self._pid, self._limits)
        self._before = _lay_out(where)
        self._given += 1
        data = pickle.dumps((case, where))
        data = len(data).to_bytes(8, "little") + data
        while data:
            data = data[os.write(self._orders, data) :]

    def take(self) -> dict[str, Any]:
        """The report on the case; if the worker died of it, how."""
        answer = os.read(self.results, 1)
        status = None
        if not answer:
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
        self.is_spent = not answer or self._given >= _CASES_A_WORKER
        self.case = None
        return _collect(self._where, self._before, status, self.watch)

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


def judge(case: Case, report: dict[str, Any], sound: Any) -> tuple[str, str]:
    """Outcome and, of a finding, its kind."""
    if report.get("problem"):
        return "finding", report["problem"]
    code, stderr, stdout = report["code"], report["stderr"], report["stdout"]
    lines = stderr.splitlines()
    controls = _CONTROLS.search(stderr) or (
        None
        if "generate" in case.command.name or "inspect" in case.command.name
        else _CONTROLS.search(stdout)
    )
    if controls:
        return "finding", f"control character {controls[0]!r} in the output"
    if any(len(line) > LINE_CHARS for line in lines):
        return "finding", f"a line of {max(map(len, lines))} characters"
    errors = [line for line in lines if _ERROR.match(line)]
    other = [line for line in lines if line not in errors and not _NOTICES.match(line)]
    if other:
        return "finding", f"other lines on stderr: {other[0][:120]}"
    if code == 0:
        if errors:
            return "finding", "exit status 0 with an error line"
        content = report["content"]
        if content is None:
            return "refused", ""
        if content == sound:
            return "same", ""
        same = case.command.same
        if same == "always" or (same == "intact" and case.format.sealed and not case.is_sealed):
            how = "with fitting hashes" if case.is_sealed else "without fitting hashes"
            return "finding", f"accepted with other content, {how}"
        return "other", ""
    if code not in case.command.codes:
        return "finding", f"exit status {code}: {lines[-1][:160] if lines else ''}"
    if case.command.lists:
        return ("refused", "") if lines or stdout.strip() else ("finding", "refused without a word")
    if len(errors) != 1:
        return "finding", f"refused in {len(errors)} lines"
    return "refused", ""


# The parent's side.


class _Watch:
    """Kills a process that works or waits too long."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._pid, self._limits, self.reason = pid, limits, ""
        self._begun = self._moved = time.monotonic()
        self._next, self._ticks = self._begun + 0.5, -1

    def look(self) -> None:
        now = time.monotonic()
        if now < self._next or self.reason:
            return
        self._next = now + 0.5
        ticks, is_waiting = _work_of_group(self._pid)
        if ticks != self._ticks or not is_waiting:
            self._ticks, self._moved = ticks, now
        if now - self._moved > self._limits.idle_s:
            self.reason = f"waits without end, {self._limits.idle_s:g} s without any work"
        elif now - self._begun > self._limits.clock_s:
            self.reason = f"{self._limits.clock_s:g} s have passed"
        if self.reason:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)


def _work_of_group(group: int) -> tuple[int, bool]:
    """Clock ticks of all processes of a group, and whether all of them sleep."""
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


def _lay_out(where: Path) -> list[tuple]:
    """A directory for a case, `inside` for its files, `outside` for those that nobody may touch;
    what is there outside."""
    (where / "outside").mkdir(parents=True)
    (where / "inside").mkdir(mode=0o700)
    for name in ("secret", "secret.json", "secret.npy"):
        is_json = name.endswith(".json")
        content = f'{{"{CANARY}": 1}}\n' if is_json else f"{CANARY} 1\n"
        (where / "outside" / name).write_text(content)
    return _listing(where)


def _listing(where: Path) -> list[tuple]:
    """Everything in the case's directory but `inside` and the reports."""
    found = []
    for folder, folders, names in os.walk(where):
        if Path(folder) == where:
            folders[:] = [name for name in folders if name != "inside"]
            names = [name for name in names if name not in ("stdout", "stderr", "report")]
        for name in (*folders, *names):
            path = Path(folder, name)
            about = path.lstat()
            size = about.st_size if stat.S_ISREG(about.st_mode) else 0
            found.append((str(path), about.st_mode, size, about.st_mtime_ns * bool(size)))
    return sorted(found)


def _collect(where: Path, before: list[tuple], status: int | None, watch: _Watch) -> dict[str, Any]:
    """The report on a case that has ended, of which its process died with `status`; its directory
    goes."""
    try:
        report = json.loads((where / "report").read_text())
    except (OSError, ValueError):
        report = {"problem": "no report"}
    for name in ("stdout", "stderr"):
        with contextlib.suppress(OSError):
            report[name] = (where / name).read_bytes()[: 1 << 20].decode("utf-8", "surrogateescape")
    if watch.reason:
        report["problem"] = f"hang: {watch.reason}"
    elif status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        is_timer = number == signal.SIGPROF
        report["problem"] = (
            "hang: too many seconds of processor"
            if is_timer
            else f"killed by {signal.Signals(number).name}"
        )
    elif status is not None:
        report["problem"] = f"its process ended by itself, wait status {status}"
    if not report["problem"] and _listing(where) != before:
        report["problem"] = "a file outside the directory was made or changed"
    shutil.rmtree(where, ignore_errors=True)
    return report


# The child's side.


def _serve(samples: Path, limits: Limits, orders: int, results: int) -> None:
    """Read cases and report on each, until there are no more."""
    code = 1
    try:
        os.setsid()
        faulthandler.disable()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        os.fsync = lambda fd: None  # durability is not tested here, and takes most of the time
        audit = _Audit()
        sys.addaudithook(audit)
        source, done = os.fdopen(orders, "rb"), 0
        while head := source.read(8):
            case, where = pickle.loads(source.read(int.from_bytes(head, "little")))
            try:
                report = _read_case(samples, case, where, audit, limits)
            except BaseException:
                report = {"problem": f"harness: {traceback.format_exc()}"}
            (where / "report").write_text(json.dumps(report))
            _forget(done)
            done += 1
            os.write(results, b"1")
        code = 0
    finally:
        os._exit(code)


def _forget(done: int) -> None:
    """Let go of what commands keep for the rest of their process."""
    os.chdir("/")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("optimus", "data_prep"):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    if done % 20 == 0:
        gc.collect()


def _read_case(
    samples: Path, case: Case, where: Path, audit: _Audit, limits: Limits
) -> dict[str, Any]:
    inside, is_sound = where / "inside", case.number < 0
    shutil.copytree(samples / case.format.sample, inside, dirs_exist_ok=True)
    known = set(sys.modules)
    if not is_sound:
        place(case, inside)
    report = execute(case, where, audit, limits)
    if not report["problem"] and (name := _holder_of_canary(inside)):
        report["problem"] = f"content of a file outside was copied to {name}"
    return report | {"modules": sorted({*sys.modules} - known) if is_sound else []}


def _holder_of_canary(inside: Path) -> str:
    """The file of the directory that has the content of one outside; "" if none has."""
    for folder, _, names in os.walk(inside):
        for name in names:
            path = Path(folder, name)
            about = path.lstat()
            is_small = stat.S_ISREG(about.st_mode) and about.st_size < _FILE_BYTES
            if is_small and CANARY.encode() in path.read_bytes():
                return name
    return ""


def place(case: Case, inside: Path) -> None:
    """Put a case's change into the copy of its sample."""
    path, change = inside / case.format.file, case.change
    before = path.read_bytes()
    if not change.place:
        content = change.content
        own = case.is_sealed and b'"self_xxh3"' in before
        path.write_bytes(hostile_formats.with_own_hash(_without_hash(content)) if own else content)
        if case.is_sealed:
            seal(inside, path, before)
        return
    path.unlink()
    outside = inside.parent / "outside"
    if change.place == "fifo":
        os.mkfifo(path)
    elif change.place == "directory":
        path.mkdir()
    elif change.place == "dangling":
        path.symlink_to("nothing-here")
    elif change.place == "endless":
        path.symlink_to("/dev/zero")
    elif change.place == "foreign":
        # Both kinds: readers of JSON refuse the text, but may copy the object.
        path.symlink_to(outside / ("secret.json", "secret")[case.number % 2])
    elif change.place == "copy":
        with contextlib.suppress(FileExistsError):
            (inside / "copy").write_bytes(before)
        path.symlink_to(inside / "copy")
    elif change.place == "socket":
        # A socket's name has at most 107 characters: bind by a short relative one.
        here = os.getcwd()
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif change.place == "large":
        is_input = case.format.sample == "texts"  # reading all of it is what was asked for
        with open(path, "wb") as file:
            file.write(before)
            file.truncate(_INPUT_BYTES if is_input else LARGE_BYTES)


def _without_hash(content: bytes) -> bytes:
    """A JSON text without its hash of itself, where that is its last key."""
    found = re.search(rb',\s*"self_xxh3": "[0-9a-f]{16}"\s*}\s*$', content)
    return content[: found.start()] + b"\n}" if found else content


def execute(case: Case, where: Path, audit: _Audit, limits: Limits) -> dict[str, Any]:
    """Run a case's command in `where`/inside, watched; exit status and content, or the problem."""
    inside = where / "inside"
    os.chdir(inside)
    _redirect(where)
    os.environ |= {
        **dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), str(inside)),
        "OPTIMUS_PEAK_CACHE": "peaks",
        "OPTIMUS_KERNELS_CACHE": "kernels",
        "OPTIMUS_KERNELS": "torch",
        "OPTIMUS_IPEX": "0",
        "COLUMNS": "100",
    }
    problem, code, content = "", 0, None
    start = _kilobytes("VmRSS")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the highest, from here on
    with _limited(limits, case.number >= 0), audit.watching(inside, case.format.names_files):
        try:
            code = _run_lines(case.command.lines)
        except BaseException as error:
            problem = _explain(error)
            traceback.print_exc()
    grown = 1024 * (_kilobytes("VmHWM") - start)
    sys.stdout.flush()
    sys.stderr.flush()
    stdout, stderr = (
        (where / name).read_text(errors="surrogateescape") for name in ("stdout", "stderr")
    )
    if not problem and audit.problem:
        problem = audit.problem
    if not problem and grown > limits.memory_bytes and case.number >= 0:
        problem = f"took more than {limits.memory_bytes >> 20} MiB of memory"
    if not problem and CANARY in stdout + stderr:
        problem = "content of a file outside was printed"
    if not problem and code == 0:
        try:
            content = case.command.content(stdout)
        except BaseException as error:
            problem = f"accepted, but its content cannot be read: {_explain(error)}"
            traceback.print_exc()
            sys.stderr.flush()
    return {"problem": problem, "code": code, "content": json.loads(json.dumps(content))}


def _redirect(where: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(where / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    sys.stderr = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace", buffering=1)


@contextlib.contextmanager
def _limited(limits: Limits, are_set: bool) -> Iterator[None]:
    """Processor seconds, address space and size of files, of this process until the block ends."""
    if not are_set:
        yield
        return
    space = 1024 * _kilobytes("VmSize") + _ADDRESS_BYTES
    values = {
        resource.RLIMIT_AS: space,
        resource.RLIMIT_FSIZE: _FILE_BYTES,
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
        for limit, value in before.items():
            resource.setrlimit(limit, value)


def _run_lines(lines: Iterable[str]) -> int:
    """The exit status of the first command line that fails, or 0."""
    from data_prep.cli import main as optimus_data
    from optimus.cli import main as optimus

    programs = {"optimus": optimus, "optimus-data": optimus_data, **hostile_formats.READERS}
    for line in lines:
        program, *words = shlex.split(line)
        try:
            code = programs[program](words)
        except SystemExit as end:
            code = end.code
        if code:
            return code
    return 0


def _explain(error: BaseException) -> str:
    """The kind of a traceback: the exception and the innermost line of ours."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        one for one in frames if re.search(r"/(optimus|data_prep|optimus_kernels)/", one.filename)
    ]
    frame = ours[-1] if ours else frames[-1]
    place = re.sub(r".*/(?=(optimus|data_prep|optimus_kernels|tests)/)", "", frame.filename)
    return f"traceback: {type(error).__name__} at {place}:{frame.lineno} {frame.name}"


def _kilobytes(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE)[1])


_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"}
_PROGRAMS = ("g++", "c++", "clang++", "nvcc", "icpx", "gcc", "ldconfig", "ld")


class _Audit:
    """Notes files outside the directory that are opened by name, other programs, and pickles.

    The target of a link in the directory may be opened, since users keep files elsewhere; the
    canary shows whether its content goes anywhere.
    """

    def __init__(self) -> None:
        self.problem, self._is_on = "", False
        self._inside, self._names_files = "", False
        system = (sys.prefix, sys.base_prefix, sys.exec_prefix, "/proc", "/sys", "/usr", "/lib")
        roots = [os.path.realpath(path) for path in sys.path if path]
        self._system = tuple({*map(os.path.realpath, system), *system, *roots})

    @contextlib.contextmanager
    def watching(self, inside: Path, names_files: bool) -> Iterator[None]:
        """Look at everything that the block does."""
        self.problem, self._is_on = "", True
        self._inside, self._names_files = os.path.normpath(inside), names_files
        try:
            yield
        finally:
            self._is_on = False

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self._is_on or self.problem:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes)):
                writes = bool(flags and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
                self._look_at(
                    os.fsdecode(path), "opened for writing" if writes else "opened", writes
                )
        elif event in _WRITES:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                if isinstance(path, (str, bytes)):
                    self._look_at(os.fsdecode(path), event, True)
        elif event in ("pickle.find_class", "os.system"):
            self.problem = f"{event} {arguments}"[:200]
        elif event == "subprocess.Popen":
            name = os.path.basename(os.fsdecode(arguments[0] or b""))
            if name not in _PROGRAMS:
                self.problem = f"started {name}"

    def _look_at(self, path: str, what: str, writes: bool) -> None:
        full = os.path.normpath(os.path.join(os.getcwd(), path))
        if self._is_below(full, self._inside):
            return
        if not writes and (self._names_files or any(self._is_below(full, p) for p in self._system)):
            return
        if full in ("/dev/null", "/dev/urandom", "/etc/localtime", "/etc/mime.types"):
            return
        self.problem = f"{what} outside the directory: {os.path.relpath(full, self._inside)}"

    def _is_below(self, path: str, root: str) -> bool:
        return path == root or path.startswith(root.rstrip("/") + "/")


def describe(case: Case, verdict: Verdict) -> dict[str, Any]:
    """A finding as a line of a report."""
    told = asdict(verdict)
    return {
        "seed": case.seed,
        "case": case.number,
        "format": case.format.name,
        "command": case.command.name,
        "change": case.change.how[:300],
        "sealed": case.is_sealed,
        **told,
    }
