"""Measurements and faults in the processes of a supervised run, for `optimus bench supervision`.

Each interpreter of a launch imports this module at its start. The module makes a rank report the
phases of its start-up, fail when the benchmark requests a fault, and take longer for some saves and
evaluations. With `Plan.audits`, all processes report the files that they create in the run
directory, and ranks also report the modules that they import and the files that they open.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib.abc
import importlib.machinery
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from optimus.launch import environment

PLAN = "OPTIMUS_BENCH_PLAN"
"""Name of the environment variable that contains the Plan as JSON."""
SITE = "import optimus.bench.probe\noptimus.bench.probe.start()\n"
"""Content of the module `sitecustomize`, which interpreters import from PYTHONPATH at their
start."""
_LOOP = "optimus.train.loop"
_STATUS = 9
"""Exit status of a rank with the fault "exit". This fault emulates a library that ends the
process."""
_FEWEST = 2
"""Minimum number of timed saves (or evaluations) before a save (or evaluation) is made slow. The
median of the measured times determines the time of the slow save or evaluation."""
_EVERY = 3
"""Every third save and every third evaluation is made slow."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Settings for the measurements and faults that this module adds to the processes of a
    launch."""

    folder: str
    """Folder for reports, outside of the run directory."""
    run_dir: str
    audits: bool = False
    """True to report the files that processes create and open, which makes opening a file
    slower."""
    slowdown: float = 1.0
    """Time of a slow save or evaluation, as a multiple of the median time of other saves or
    evaluations. With 1, no save or evaluation is slow."""
    save_interval: int = 0
    eval_interval: int = 0

    @property
    def fault_file(self) -> Path:
        """JSON file that requests the next fault of a rank. The JSON object has the keys `attempt`,
        `rank` and `kind`, which is "nan", "error" or "exit"."""
        return Path(self.folder, "fault.json")

    def report(self, kind: str, **values: Any) -> None:
        """Append a JSON line to the file of reports: `kind`, `values`, the Unix time, and the ID,
        attempt and rank of this process. Several processes can call this method at the same
        time."""
        values |= {"kind": kind, "time": time.time(), "pid": os.getpid()}
        values["attempt"] = int(os.environ.get("OPTIMUS_ATTEMPT", 0))
        values["rank"] = int(os.environ.get("RANK", 0))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(Path(self.folder, "reports.jsonl"), flags, 0o600)
        try:
            os.write(fd, f"{json.dumps(values)}\n".encode())
        finally:
            os.close(fd)

    def reports(self, kind: str) -> list[dict[str, Any]]:
        """Return all reports of the kind `kind`, the oldest first."""
        try:
            lines = Path(self.folder, "reports.jsonl").read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [report for line in lines if (report := json.loads(line))["kind"] == kind]


def start() -> None:
    """Start the measurements and faults in this process if the environment variable
    OPTIMUS_BENCH_PLAN is set."""
    if PLAN not in os.environ:
        return
    plan = Plan(**json.loads(os.environ[PLAN]))
    sys.meta_path.insert(0, _LoopFinder(plan))
    if plan.audits:
        audit = _Audit(plan)
        sys.addaudithook(audit.hook)
        # Only the warm process forks, so a forked process is a rank.
        os.register_at_fork(after_in_child=audit.begin)


class _LoopFinder(importlib.abc.MetaPathFinder):
    """Import finder that replaces functions of `optimus.train.loop` after the module is loaded."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _LOOP:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        load, plan = spec.loader.exec_module, self._plan

        def load_and_change(module: ModuleType) -> None:
            load(module)
            plan.report("imports", seconds=time.monotonic() - environment.STARTED)
            _change(module, plan)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]  # of this spec
        return spec


def _change(loop: Any, plan: Plan) -> None:
    """Replace functions of `optimus.train.loop` by functions that do the same and also report, fail
    or wait."""
    record, update = loop.StartUp.record, loop.Run.update

    from optimus.resilience.supervision.attempt import read_page

    def record_and_report(start_up: Any) -> Any:
        value = record(start_up)
        progress = loop.read_attempt()
        load_s = read_page(progress.progress).seconds["load"] if progress is not None else 0.0
        plan.report("first update", phases=dict(value.phases_s), load_s=load_s)
        return value

    def update_with_faults(run: Any, step: int) -> float:
        kind = _take_fault(plan)
        if kind == "nan":
            block = next(iter(run.model.blocks.values()))
            block.register_forward_hook(_nan_hook(plan))
        elif kind == "error":
            plan.report("fault")
            raise OSError(errno.EIO, os.strerror(errno.EIO), "a file of the benchmark")
        elif kind == "exit":
            plan.report("fault")
            os._exit(_STATUS)
        return update(run, step)

    loop.StartUp.record, loop.Run.update = record_and_report, update_with_faults
    if plan.slowdown > 1:
        slow = _Slowdown(plan)
        loop.Run.evaluate = slow.wrap("evaluation", loop.Run.evaluate, plan.eval_interval)
        loop.Saves.after = slow.wrap("save", loop.Saves.after, plan.save_interval)


def _take_fault(plan: Plan) -> str:
    """Return the kind of the fault that the fault file requests of this rank, and delete the file.
    Return "" if no fault is requested."""
    try:
        fault = json.loads(plan.fault_file.read_text())
    except FileNotFoundError:
        return ""
    this_rank = os.environ.get("OPTIMUS_ATTEMPT"), os.environ.get("RANK")
    if (str(fault["attempt"]), str(fault["rank"])) != this_rank:
        return ""
    plan.fault_file.unlink()
    return fault["kind"]


def _nan_hook(plan: Plan) -> Callable[..., tuple[Any, ...]]:
    """Return a forward hook that makes the output of a block NaN. The first call of the hook also
    reports the time of the fault."""
    is_reported = False

    def hook(module: Any, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal is_reported
        if not is_reported:
            plan.report("fault")
        is_reported = True
        return output[0] * float("nan"), *output[1:]

    return hook


class _Slowdown:
    """Slows down some saves and evaluations to `Plan.slowdown` times the median time.

    In each slow save or evaluation, only one rank is slow.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def wrap(self, kind: str, call: Callable[..., Any], interval: int) -> Callable[..., Any]:
        """Return a function that calls `call` and returns its result. For some steps that are
        multiples of `interval`, the function sleeps before it returns. `call` is a method whose
        first argument is the step."""

        def timed(self_: Any, step: int, *args: Any, **kwargs: Any) -> Any:
            start = time.monotonic()
            result = call(self_, step, *args, **kwargs)
            number, is_due = step // interval, step % interval == 0
            if not is_due:
                return result
            seconds = self._seconds[kind]
            is_slow = number % _EVERY == 0 and len(seconds) >= _FEWEST
            world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
            if is_slow and number // _EVERY % world == rank:
                time.sleep((self._plan.slowdown - 1) * statistics.median(seconds))
                self._plan.report(f"slow {kind}", seconds=time.monotonic() - start)
            if not is_slow:
                seconds.append(time.monotonic() - start)
            return result

        return timed


class _Audit:
    """Reports the files that a process opens and creates."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._is_rank = False

    def begin(self) -> None:
        """Record that this process is a rank. A forked process calls this method at its start."""
        self._is_rank = True

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Audit hook of the interpreter (PEP 578). Report imports and opened files of a rank, and
        files that any process creates in the run directory."""
        if event == "import" and self._is_rank:
            self._plan.report("import", module=args[0])
        elif event == "open" and not isinstance(args[0], int):
            self._opened(os.path.abspath(os.fsdecode(args[0])), args[2])
        elif event == "os.mkdir":
            path = os.path.abspath(os.fsdecode(args[0]))
            if not os.path.lexists(path):
                self._created(path)

    def _opened(self, path: str, flags: int) -> None:
        if path.startswith(self._plan.folder):  # a report
            return
        if flags & os.O_CREAT and not os.path.lexists(path):
            self._created(path)
        elif self._is_rank:
            self._plan.report("open", path=path)

    def _created(self, path: str) -> None:
        if path.startswith(f"{self._plan.run_dir}{os.sep}"):
            self._plan.report("create", path=os.path.relpath(path, self._plan.run_dir))
