"""Cases of the drill of mutated files, and the judgement of their reports.

The promise that is checked: exit status 0 with the content of the sound file, or a refusal in one
line with its exit status; no traceback, no hang, bounded memory, and no file outside the directory
is read, made or changed.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.helpers.hostile_changes import Change, mutate
from tests.helpers.hostile_formats import Command, Format

LINE_CHARS = 5000
"""Longest line on standard error that is accepted."""
_ERROR = re.compile(r"optimus(-data)?: error: ")
_NOTICES = re.compile(r"optimus(-data| kernels)?: |  +\w|[a-z /-]+: \S+/\S+( \w+)? in [\d.]+ s")
"""Lines that any outcome may have: what a run will do, warnings, progress."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


@dataclass(frozen=True)
class Case:
    """A mutated file and the command that reads it."""

    seed: int
    number: int
    """Negative for a sound sample, which is read without limits."""
    format: Format
    command: Command
    change: Change
    is_sealed: bool
    """The hashes of the file are made to fit the change."""


@dataclass(frozen=True)
class Verdict:
    """The judgement of a case."""

    outcome: str
    """"same", "other", "refused" or "finding"."""
    kind: str = ""
    """Of a finding: one line."""
    output: str = ""
    """Of a finding: the last output of the command."""


def draw(seed: int, number: int, formats: list[Format], samples: Path) -> Case:
    """Return the case of a number: formats take turns, by their weights."""
    turns = [entry for entry in formats for _ in range(entry.weight)]
    random.Random(0).shuffle(turns)
    offset = number * len(formats) // len(turns)
    chance = random.Random(f"{seed} {number}")
    # The first round has each format once, so that a few cases reach all formats.
    format_ = formats[number] if number < len(formats) else turns[(number + offset) % len(turns)]
    content = (samples / format_.sample / format_.file).read_bytes()
    change = mutate(chance, content, format_.syntax)
    likely = 0.7 if change.is_structural else 0.4
    is_sealed = format_.sealed and not change.place and chance.random() < likely
    return Case(seed, number, format_, chance.choice(format_.commands), change, is_sealed)


def judge(case: Case, report: dict[str, Any], sound: Any) -> tuple[str, str]:
    """Return the outcome and, of a finding, its kind. `sound`: the content of the sound sample."""
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
        return ("refused", "") if has_text else ("finding", "refused without a word")
    if len(errors) != 1:
        return "finding", f"refused in {len(errors)} lines"
    return "refused", ""


def _fault_of_output(
    case: Case, report: dict[str, Any], lines: list[str], errors: list[str]
) -> str:
    """Return what is wrong with the output, whatever the exit status; "" if nothing."""
    controls = _CONTROLS.search(report["stderr"])
    # These print text of the file.
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
    if same == "always" or (same == "intact" and case.format.sealed and not case.is_sealed):
        how = "with fitting hashes" if case.is_sealed else "without fitting hashes"
        return "finding", f"accepted with other content, {how}"
    return "other", ""


def describe(case: Case, verdict: Verdict) -> dict[str, Any]:
    """Return a finding as a line of a report."""
    return {
        "seed": case.seed,
        "case": case.number,
        "format": case.format.name,
        "command": case.command.name,
        "change": case.change.how[:300],
        "sealed": case.is_sealed,
        **asdict(verdict),
    }
