#!/usr/bin/env python3
"""Plant each fault of tests/planted/faults.toml by itself and check that its tests fail.

    python scripts/drills/planted.py [--only TEXT] [--jobs N] [--keep]

The tracked files are copied as they are in the working tree, one copy for each job. All named
tests run first without a fault and must pass. Then each fault is applied alone, its tests run, and
the file is restored. A fault is caught if a test fails; an error of collection or import does not
count. A fault whose tests are skipped on this machine is "not decidable here".
Exit status 0: every fault was caught.
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "planted" / "faults.toml"
_LIMIT_S = 600
"""For one run of pytest."""
_NO_FINDING = re.compile(r"(\w+\.)*(ImportError|ModuleNotFoundError|NameError|SyntaxError)\b")
"""Failures of a fault that does not even run."""
_OUTCOMES = {"failure": "failed", "error": "error", "skipped": "skipped"}
"""By the element of a JUnit file."""


@dataclass(frozen=True)
class Fault:
    """`old`, which occurs once in `file`, becomes `new`; then one of `tests` must fail."""

    name: str
    package: str
    file: str
    old: str
    new: str
    tests: list[str]
    why: str


class Case(NamedTuple):
    """The result of one test case, from pytest's JUnit file."""

    node: str
    outcome: str
    """"passed", "failed", "error" or "skipped"."""
    message: str


class Run(NamedTuple):
    """One run of pytest."""

    status: int | None
    """None: it was killed after _LIMIT_S."""
    cases: list[Case]
    output: str


def main() -> int:
    args = _arguments()
    faults = [fault for fault in read_faults() if args.only in f"{fault.name} {fault.file}"]
    if not faults:
        print(f"--only {args.only!r} selects no fault", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="optimus-planted-"))
    try:
        copies = [copy_checkout(folder / f"copy{number}") for number in range(args.jobs)]
        for fault in faults:
            count = (copies[0] / fault.file).read_text(encoding="utf-8").count(fault.old)
            if count != 1:
                print(f"{fault.name}: {fault.file} holds `old` {count} times", file=sys.stderr)
                return 2
        return _drill(faults, copies)
    finally:
        if args.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of a fault's name or file")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--keep", action="store_true", help="keep the copies")
    return parser.parse_args()


def read_faults() -> list[Fault]:
    """Return the table's faults, in its order."""
    with open(TABLE, "rb") as file:
        return [Fault(**entry) for entry in tomllib.load(file)["fault"]]


def copy_checkout(to: Path) -> Path:
    """Copy the tracked files, links as links, with their content in the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, stdout=subprocess.PIPE, check=True
    ).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):  # else it was removed, which is not committed yet
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
        print("a test fails without a fault; fix it first")
        return 1
    skipped = _skipped(nodes, [case for run in runs for case in run.cases])
    print(f"{len(nodes)} tests pass without a fault, {time.monotonic() - start:.0f} s", flush=True)

    def judge(fault: Fault, copy: Path) -> str:
        before = time.monotonic()
        verdict, detail = _judge(fault, copy, skipped)
        took = time.monotonic() - before
        print(f"{verdict:<21}{fault.name} ({took:.0f} s){detail and ': '}{detail}", flush=True)
        return verdict

    verdicts = _in_copies(copies, faults, judge)
    counts = {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))}
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    print(f"{len(faults)} faults in {time.monotonic() - start:.0f} s: {summary}")
    return 0 if set(verdicts) == {"caught"} else 1


def _in_copies(copies: Sequence[Path], items: Sequence, do: Callable) -> list:
    """Return `do(item, copy)` of all items, each copy used by one at a time."""
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def with_copy(item: Any) -> Any:
        copy = free.get()
        try:
            return do(item, copy)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as pool:
        return list(pool.map(with_copy, items))


def _skipped(nodes: Sequence[str], cases: Sequence[Case]) -> dict[str, str]:
    """Return the reason for each test of which no case ran."""
    reasons = {}
    for node in nodes:
        found = [case for case in cases if case.node == node or case.node.startswith(f"{node}[")]
        if found and all(case.outcome == "skipped" for case in found):
            reasons[node] = found[0].message
    return reasons


def _judge(fault: Fault, copy: Path, skipped: dict[str, str]) -> tuple[str, str]:
    """Return the verdict and a detail."""
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
    """Run some tests of a copy, without bytecode: an edit within a second would keep the old.

    `cache`: for compiled kernels with a fault, so that they do not stay in the user's.
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
            process.kill()  # its ranks end with it
            output, status = process.communicate()[0], None
    return Run(status, _read_report(report), output.decode(errors="replace"))


def _read_report(path: Path) -> list[Case]:
    if not path.exists():
        return []
    cases = []
    for case in ElementTree.parse(path).iter("testcase"):
        node = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        found = next((child for child in case if child.tag in _OUTCOMES), None)
        if found is None:
            cases.append(Case(node, "passed", ""))
        else:
            cases.append(Case(node, _OUTCOMES[found.tag], found.get("message", "")))
    return cases


if __name__ == "__main__":
    sys.exit(main())
