#!/usr/bin/env python3
"""Plant faults in the code, one at a time, and check that tests detect each fault.

    python scripts/drills/planted.py [--only TEXT] [--jobs N] [--keep]

Each entry of tests/planted/faults.toml is a fault: a change of one file, and the tests that must
detect the change. The drill copies the tracked files of the working tree, once for each job. First,
the tests of all faults run without a fault and must pass. Then each fault is planted, the tests of
the fault run, and the file is restored. A fault is caught if a test fails. An error in the
collection or import of tests is not a failure. If the tests of a fault are skipped on this machine,
the fault is "not decidable here". Exit status 0: all faults were caught.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")
ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "planted" / "faults.toml"
_LIMIT_S = 600
"""Time limit of a run of pytest, in seconds."""
_NO_FINDING = re.compile(r"(\w+\.)*(ImportError|ModuleNotFoundError|NameError|SyntaxError)\b")
"""Pattern for the messages of failed tests. A match shows that the changed code is invalid, for
example that it cannot be imported. A test with such a message has not caught the fault."""
_OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
"""Maps the name of an XML element in the JUnit entry of a test case to the outcome of the case."""


@dataclass(frozen=True)
class Fault:
    """Deliberate error in the code. The text `old`, which occurs once in `file`, is replaced by
    `new`. At least one of `tests` must then fail."""

    name: str
    package: str
    file: str
    old: str
    new: str
    tests: list[str]
    why: str


class Case(NamedTuple):
    """Result of a test case, from pytest's JUnit file."""

    node: str
    outcome: str
    """"passed", "failed", "error" or "skipped"."""
    message: str


class Run(NamedTuple):
    """Result of a run of pytest."""

    status: int | None
    """Exit status; None if pytest was killed after _LIMIT_S."""
    cases: list[Case]
    output: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="text in the name or file of a fault")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel jobs")
    parser.add_argument("--keep", action="store_true", help="keep the copies")
    args = parser.parse_args()
    faults = [fault for fault in read_faults() if args.only in f"{fault.name} {fault.file}"]
    if not faults:
        print(f"--only {args.only!r} selects no fault; see {TABLE}", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="optimus-planted-"))
    try:
        copies = [copy_checkout(folder / f"copy{number}") for number in range(args.jobs)]
        for fault in faults:
            count = (copies[0] / fault.file).read_text(encoding="utf-8").count(fault.old)
            if count != 1:
                print(
                    f"{fault.name}: `old` occurs {count} times in {fault.file}; it must occur once",
                    file=sys.stderr,
                )
                return 2
        return _drill(faults, copies)
    finally:
        if args.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def read_faults() -> list[Fault]:
    """Return the faults in tests/planted/faults.toml, in the order of the file."""
    with open(TABLE, "rb") as file:
        return [Fault(**entry) for entry in tomllib.load(file)["fault"]]


def copy_checkout(to: Path) -> Path:
    """Copy the tracked files of the working tree to `to`, and return `to`. Symbolic links are
    copied as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):  # git also lists a file that was removed without git
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name, follow_symlinks=False)
    return to


def _drill(faults: Sequence[Fault], copies: Sequence[Path]) -> int:
    start = time.monotonic()
    nodes = list(dict.fromkeys(node for fault in faults for node in fault.tests))
    shares = [nodes[number :: len(copies)] for number in range(len(copies))]
    runs = _in_copies(copies, [share for share in shares if share], run_tests)
    wrong = [run for run in runs if run.status != 0]
    for run in wrong:
        print(run.output)
    if wrong:
        print("a test fails without a planted fault; fix the test or the code first")
        return 1
    cases = [case for run in runs for case in run.cases]
    skipped = {}  # the reason for each test whose cases were all skipped
    for node in nodes:
        of_node = [case for case in cases if case.node == node or case.node.startswith(f"{node}[")]
        if of_node and all(case.outcome == "skipped" for case in of_node):
            skipped[node] = of_node[0].message
    print(f"{len(nodes)} tests pass without a fault, {time.monotonic() - start:.0f} s", flush=True)

    def judge(fault: Fault, copy: Path) -> str:
        before = time.monotonic()
        verdict, detail = _judge(fault, copy, skipped)
        seconds = time.monotonic() - before
        print(f"{verdict:<21}{fault.name} ({seconds:.0f} s){detail and ': '}{detail}", flush=True)
        return verdict

    verdicts = _in_copies(copies, faults, judge)
    counts = {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{len(faults)} faults in {time.monotonic() - start:.0f} s: {summary}")
    return 0 if set(verdicts) == {"caught"} else 1


def _in_copies(
    copies: Sequence[Path], tasks: Sequence[T], function: Callable[[T, Path], R]
) -> list[R]:
    """Call `function(task, copy)` for each task, in parallel threads. Return the results in the
    order of `tasks`. At most one call at a time uses the same copy."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def with_copy(task: T) -> R:
        copy = free.get()
        try:
            return function(task, copy)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(with_copy, tasks))


def _judge(fault: Fault, copy: Path, skipped: dict[str, str]) -> tuple[str, str]:
    """Insert `fault` into a source file of `copy`, run the tests that must detect the fault, and
    restore the file.

    Args:
        fault: The fault.
        copy: A copy of the checkout.
        skipped: Maps the name of each test that is skipped on this machine to the reason.

    Returns:
        (verdict, reason). The verdict is "caught", "MISSED", "NO VERDICT" or "not decidable here".
        The reason for the verdict "caught" is "".
    """
    tests = [node for node in fault.tests if node not in skipped]
    if not tests:
        return "not decidable here", skipped[fault.tests[0]]
    path = copy / fault.file
    before = path.read_bytes()
    path.write_bytes(before.decode().replace(fault.old, fault.new).encode())
    try:
        run = run_tests(
            tests, copy, "-x", cache=copy / "kernels-cache" if "csrc" in fault.file else None
        )
    finally:
        path.write_bytes(before)
    failed = [case for case in run.cases if case.outcome == "failed"]
    if run.status == 1 and any(not _NO_FINDING.match(case.message) for case in failed):
        return "caught", ""
    if run.status == 0:
        return "MISSED", fault.why
    if run.status is None:
        return "NO VERDICT", f"pytest was killed after {_LIMIT_S} s"
    return "NO VERDICT", f"no test failed, pytest's exit status is {run.status}\n{run.output}"


def run_tests(nodes: Sequence[str], copy: Path, *options: str, cache: Path | None = None) -> Run:
    """Run tests in a copy of the checkout.

    Python does not write bytecode files. With bytecode files, Python would not detect that a source
    file was changed twice within a second.

    Args:
        nodes: Names of the tests, as pytest's node IDs.
        copy: The copy of the checkout.
        options: Options of pytest.
        cache: Directory for compiled kernels; None for the user's cache.
    """
    report = copy / "planted-report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += [f"--junit-xml={report}", *nodes]
    path = os.pathsep.join([str(copy), str(copy / "kernels")])
    environ = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    environ.setdefault("OMP_NUM_THREADS", "1")
    if cache is not None:
        environ["OPTIMUS_KERNELS_CACHE"] = str(cache)
    with subprocess.Popen(
        command,
        cwd=copy,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, status = process.communicate(timeout=_LIMIT_S)[0], process.returncode
        except subprocess.TimeoutExpired:
            process.kill()  # also ends ranks that pytest started
            output, status = process.communicate()[0], None
    return Run(status, _read_report(report), output.decode(errors="replace"))


def _read_report(path: Path) -> list[Case]:
    if not path.exists():
        return []
    cases = []
    for case in ElementTree.parse(path).iter("testcase"):
        node = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        outcome = next((child for child in case if child.tag in _OUTCOMES), None)
        if outcome is None:
            cases.append(Case(node, "passed", ""))
        else:
            cases.append(Case(node, _OUTCOMES[outcome.tag], outcome.get("message", "")))
    return cases


if __name__ == "__main__":
    sys.exit(main())
