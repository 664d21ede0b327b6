"""Cases of scripts/drills/hostile_files.py, and the verdicts on the reports and file accesses of
cases.

A command must either accept the mutated file, with exit status 0, or refuse the file, with one line
and the exit status of a refusal. An accepted file must have the content of the unchanged file,
unless `Command.same` permits other content. A traceback, a hang and memory above the limit are
findings. The command must not read, create or change a file outside its directory.

The folder of a case contains `inside`, in which the command runs, and `outside`, whose files
contain CANARY. An audit hook records accesses to paths outside `inside`. Listings before and after
the case show changes outside `inside`. CANARY in an output or in a file of `inside` shows that a
command printed or copied content of `outside`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.kit.faults.formats import Command, Format
from tests.kit.faults.mutations import CANARY, Change, all_changes, mutate

FILE_BYTES = 64 << 20
"""Maximum size in bytes of a file that a case writes."""
_WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate"}
_PROGRAMS = ("g++", "c++", "clang++", "nvcc", "icpx", "gcc", "ldconfig", "ld")


class Audit:
    """Audit hook that records forbidden accesses: opening a file by a name outside the folder,
    starting a program, and loading a pickle.

    A command is permitted to follow links from the folder to other directories, since users store
    files there. CANARY shows if a command prints or copies the content of such a file.
    """

    def __init__(self) -> None:
        self.problem, self._is_on = "", False
        self._inside, self._names_files = "", False
        system = (sys.prefix, sys.base_prefix, sys.exec_prefix, "/proc", "/sys", "/usr", "/lib")
        roots = [os.path.realpath(path) for path in sys.path if path]
        self._system = tuple({*map(os.path.realpath, system), *system, *roots})

    @contextlib.contextmanager
    def watching(self, inside: Path, names_files: bool) -> Iterator[None]:
        """Context manager that records the forbidden accesses. With `names_files`, a command is
        permitted to read files in any directory, because the mutated file can contain paths of such
        files."""
        self.problem, self._is_on = "", True
        self._inside, self._names_files = os.path.normpath(inside), names_files
        try:
            yield
        finally:
            self._is_on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on or self.problem:
            return
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, (str, bytes)):
                writes = bool(flags and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
                access = "opened for writing" if writes else "opened"
                self._check(os.fsdecode(path), access, writes)
        elif event in _WRITES:
            for path in arguments[: 2 if event in ("os.rename", "os.link") else 1]:
                if isinstance(path, (str, bytes)):
                    self._check(os.fsdecode(path), event, True)
        elif event in ("pickle.find_class", "os.system"):
            self.problem = f"{event} {arguments}"[:200]
        elif event == "subprocess.Popen":
            name = os.path.basename(os.fsdecode(arguments[0] or b""))
            if name not in _PROGRAMS:
                self.problem = f"started {name}"

    def _check(self, path: str, access: str, writes: bool) -> None:
        full = os.path.normpath(os.path.join(os.getcwd(), path))
        if _is_below(full, self._inside):
            return
        if not writes and (self._names_files or any(_is_below(full, p) for p in self._system)):
            return
        if full in ("/dev/null", "/dev/urandom", "/etc/localtime", "/etc/mime.types"):
            return
        self.problem = f"{access} outside the directory: {os.path.relpath(full, self._inside)}"


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def make_folder(folder: Path) -> list[tuple[str, int, int, int]]:
    """Make the folder of a case, with the subfolders `inside` for the files of the case and
    `outside` for files that no command is permitted to access. Return the listing of the folder."""
    (folder / "outside").mkdir(parents=True)
    (folder / "inside").mkdir(mode=0o700)
    for name in ("secret", "secret.json", "secret.npy"):
        is_json = name.endswith(".json")
        content = f'{{"{CANARY}": 1}}\n' if is_json else f"{CANARY} 1\n"
        (folder / "outside" / name).write_text(content)
    return listing(folder)


def listing(folder: Path) -> list[tuple[str, int, int, int]]:
    """Return path, mode, size and time of all files in the folder of a case, except `inside` and
    the reports."""
    entries = []
    for parent, folders, names in os.walk(folder):
        if Path(parent) == folder:
            folders[:] = [name for name in folders if name != "inside"]
            names = [name for name in names if name not in ("stdout", "stderr", "report")]
        for name in (*folders, *names):
            path = Path(parent, name)
            status = path.lstat()
            size = status.st_size if stat.S_ISREG(status.st_mode) else 0
            entries.append((str(path), status.st_mode, size, status.st_mtime_ns * bool(size)))
    return sorted(entries)


def file_with_canary(inside: Path) -> str:
    """Return the name of a file below `inside` with content of `outside`; "" if there is none."""
    for parent, _, names in os.walk(inside):
        for name in names:
            path = Path(parent, name)
            status = path.lstat()
            is_small = stat.S_ISREG(status.st_mode) and status.st_size < FILE_BYTES
            if is_small and CANARY.encode() in path.read_bytes():
                return name
    return ""


LINE_CHARS = 5000
"""Length limit of a line on standard error."""
_ERROR = re.compile(r"optimus(-data)?: error: ")
_NOTICES = re.compile(r"optimus(-data| kernels)?: |  +\w|[a-z /-]+: \S+/\S+( \w+)? in [\d.]+ s")
"""Lines that are allowed with any outcome: the plan of a run, warnings, progress."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Case:
    """A mutated file and the command that reads it."""

    seed: int
    number: int
    """Number of the case. The number is negative for an unchanged sample, which is read without
    limits of time and memory."""
    format: Format
    command: Command
    change: Change
    is_sealed: bool
    """True if the stored hashes of the file were replaced by the hashes of the changed file."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a case."""

    outcome: str
    """"same": the command accepted the file and read the content of the unchanged file. "other":
    the command accepted the file and read other content, which is permitted. "refused": the command
    refused the file. "finding": the command has a fault."""
    kind: str = ""
    """One line that describes a finding."""
    output: str = ""
    """For a finding, the last output of the command."""


def draw(seed: int, number: int, formats: list[Format], samples: Path) -> Case:
    """Return the case with the number `number`. The number of cases of a format is proportional to
    the format's weight."""
    turns = [entry for entry in formats for _ in range(entry.weight)]
    random.Random(0).shuffle(turns)
    offset = number * len(formats) // len(turns)
    generator = random.Random(f"{seed} {number}")
    # The first cases contain each format once, so that a short drill tests all formats.
    format_ = formats[number] if number < len(formats) else turns[(number + offset) % len(turns)]
    content = (samples / format_.sample / format_.file).read_bytes()
    change = mutate(generator, content, format_.syntax)
    probability = 0.7 if change.is_structural else 0.4
    is_sealed = format_.has_hash and not change.replacement and generator.random() < probability
    return Case(seed, number, format_, generator.choice(format_.commands), change, is_sealed)


def all_cases(formats: list[Format], samples: Path) -> Iterator[Case]:
    """Yield a case for each change of `all_changes` of each format. The hashes of the changed file
    are always replaced. The commands of a format take turns."""
    number = 0
    for format_ in formats:
        content = (samples / format_.sample / format_.file).read_bytes()
        for change in all_changes(content, format_.syntax):
            command = format_.commands[number % len(format_.commands)]
            yield Case(0, number, format_, command, change, format_.has_hash)
            number += 1


def judge(case: Case, report: dict[str, Any], sound: Any) -> tuple[str, str]:
    """Return the verdict on a case.

    Args:
        case: The case.
        report: The report of the worker.
        sound: The content of the sound sample.

    Returns:
        The outcome and, for a finding, its kind.
    """
    if report.get("problem"):
        return "finding", report["problem"]
    lines = report["stderr"].splitlines()
    errors = [line for line in lines if _ERROR.match(line)]
    if fault := _fault_of_output(case, report, lines, errors):
        return "finding", fault
    if report["code"] == 0:
        return _judge_content(case, report["content"], sound, bool(errors))
    if report["code"] not in case.command.codes:
        last = lines[-1][:160] if lines else ""
        return "finding", f"exit status {report['code']}: {last}"
    if case.command.lists:
        has_text = lines or report["stdout"].strip()
        return ("refused", "") if has_text else ("finding", "refused without a message")
    if len(errors) != 1:
        return "finding", f"refused in {len(errors)} lines"
    return "refused", ""


def _fault_of_output(
    case: Case, report: dict[str, Any], lines: list[str], errors: list[str]
) -> str:
    """Return the first fault in the output that is a finding for any exit status; "" if there is
    none."""
    controls = _CONTROLS.search(report["stderr"])
    # Standard output of these commands contains text of the file.
    if not controls and not any(word in case.command.name for word in ("generate", "inspect")):
        controls = _CONTROLS.search(report["stdout"])
    if controls:
        return f"control character {controls[0]!r} in the output"
    if any(len(line) > LINE_CHARS for line in lines):
        return f"a line of {max(map(len, lines))} characters"
    others = [line for line in lines if line not in errors and not _NOTICES.match(line)]
    return f"other lines on stderr: {others[0][:120]}" if others else ""


def _judge_content(case: Case, content: Any, sound: Any, has_error: bool) -> tuple[str, str]:
    if has_error:
        return "finding", "exit status 0 with an error line"
    if content is None:
        return "refused", ""
    if content == sound:
        return "same", ""
    same = case.command.same
    if same == "always" or (same == "intact" and case.format.has_hash and not case.is_sealed):
        hashes = "with new hashes" if case.is_sealed else "with the hashes of the sound file"
        return "finding", f"accepted with other content, {hashes}"
    return "other", ""


def describe(case: Case, verdict: Verdict) -> dict[str, Any]:
    """Return a finding as an object for a line of a report."""
    return {
        "seed": case.seed,
        "case": case.number,
        "format": case.format.name,
        "command": case.command.name,
        "change": case.change.how[:300],
        "sealed": case.is_sealed,
        **asdict(verdict),
    }
