#!/usr/bin/env python3
"""Find words and names that are not plain technical English. Called by `make lint`.

    python scripts/language.py [PATH ...]

The script checks names, docstrings, comments, message strings and Markdown text. The rules are in
CONTRIBUTING.md, section "Words". Without arguments, all paths except those in EXEMPT are checked. A
finding is ignored if scripts/language_allowed.txt contains the source line of the finding. Exit
status 1: there is a finding that is not ignored.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / "scripts" / "language_allowed.txt"
MAX_ALLOWED = 30
FOLDERS = ("optimus", "data_prep", "kernels", "configs", "docs", "scripts", "tests")
_THIS = "scripts/language.py"

WORDS = {
    r"behind": '"after", "below" or "following"',
    r"besides?": '"next to", "as well as" or "in addition"',
    r"but for": '"except for"',
    r"begun": '"started"',
    r"told|tells?": '"reported", "says" or "prints"',
    r"stands?|stood": '"is" or "contains"',
    r"lies?|lay|lain": '"is" or "is stored"',
    r"mend(?:s|ed|ing)?": '"fix" or "repair"',
    r"alike": '"in the same way" or "both"',
    r"let (?:be|go)": '"keep", "release"',
    r"(?:go|goes|going|went|gone) on": '"continue"',
    r"so many": "the number, or a name for it",
    r"under ?way": '"in progress"',
    r"anew": '"again"',
    r"whoever|whosoever": "the subject that acts",
    r"gives? out": '"distribute" or "print"',
}
"""Maps the regular expression of each disallowed idiom to a suggested replacement."""

NAMES = {
    **dict.fromkeys(
        ("one", "ones", "own", "part", "parts", "held", "told", "what", "place", "places"),
        "name the element (chunk, shard, rank, path)",
    ),
    **dict.fromkeys(
        ("found", "here", "there", "every", "taken", "begun", "given"), "say what it holds"
    ),
    **dict.fromkeys(("item", "thing", "elem", "obj", "info"), "say what it is"),
}
"""Maps each disallowed name, which does not describe its value, to advice for a better name."""

_QUESTION = re.compile(r"^(?:What|Where|Which|Whether|Who|Whose|Whoever|How|When|Why)\b")
"""Disallowed first words of a docstring."""

EXEMPT = (
    # Input of tests, which must not change.
    "tests/golden/v1",
    "tests/test_language.py",
)

_PATTERN = re.compile(r"\b(?:" + "|".join(f"({word})" for word in WORDS) + r")\b", re.IGNORECASE)
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
_SUGGESTIONS = tuple(WORDS.values())
_COMMENTS = {
    ".toml": re.compile(r"(?:^|\s)#(.*)$", re.MULTILINE),
    ".sh": re.compile(r"(?:^|\s)#(.*)$", re.MULTILINE),
    **dict.fromkeys(
        (".h", ".hpp", ".c", ".cpp", ".cu", ".cuh"),
        re.compile(r"//(.*)$|/\*(.*?)\*/", re.MULTILINE | re.DOTALL),
    ),
}


class Finding(NamedTuple):
    """Word or name that is not allowed, with its file, its line and a suggested replacement."""

    path: str
    line: int
    word: str
    suggestion: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: {self.suggestion}"


def main() -> int:
    allowed = read_allowed()
    findings = []
    for path in _files(sys.argv[1:]):
        text = (ROOT / path).read_text(encoding="utf-8")
        lines = text.splitlines()
        findings += [
            finding
            for finding in check_text(path, text)
            if lines[finding.line - 1].strip() not in allowed
        ]
    for finding in findings:
        print(finding)
    if findings:
        print(f"{len(findings)} findings; fix them as CONTRIBUTING.md, section Words, describes")
    return 1 if findings else 0


def read_allowed() -> set[str]:
    """Return the source lines in scripts/language_allowed.txt, in which findings are ignored."""
    if not ALLOWED.exists():
        return set()
    lines = [line.strip() for line in ALLOWED.read_text(encoding="utf-8").splitlines()]
    allowed = [line for line in lines if line and not line.startswith("# ")]
    assert len(allowed) <= MAX_ALLOWED, f"{ALLOWED.name} has more than {MAX_ALLOWED} lines"
    return set(allowed)


def check_text(path: str, text: str) -> list[Finding]:
    """Return the words and names in `text` that are not allowed, sorted by line. `text` is the
    content of the file `path`."""
    suffix = Path(path).suffix
    findings: Iterable[Finding]
    if suffix == ".py":
        findings = _check_python(path, text)
    elif suffix == ".md":
        findings = _check_prose(path, 1, _CODE.sub(lambda code: "\n" * code[0].count("\n"), text))
    else:
        findings = (
            finding
            for match in _COMMENTS[suffix].finditer(text)
            for finding in _check_prose(path, 1 + text.count("\n", 0, match.start()), match[0])
        )
    return sorted(findings, key=lambda finding: finding.line)


def _files(chosen: list[str]) -> list[str]:
    suffixes = {".py", ".md", *_COMMENTS}
    roots = [ROOT / name for name in chosen or FOLDERS]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob("*"))]
    paths += [] if chosen else [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    names = sorted(
        path.relative_to(ROOT).as_posix()
        for path in paths
        if path.suffix in suffixes and path.is_file() and not path.is_symlink()
    )
    exempt = () if chosen else EXEMPT
    return [
        name
        for name in names
        if not any(f"{name}/".startswith(f"{path}/") for path in exempt) and name != _THIS
    ]


def _check_prose(
    path: str, first_line: int, text: str, last_line: int | None = None
) -> Iterator[Finding]:
    for match in _PATTERN.finditer(text):
        line = first_line + text.count("\n", 0, match.start())
        if last_line is not None:  # a string can have more line ends than its source
            line = min(line, last_line)
        number = match.lastindex
        assert number is not None, "every alternative of the pattern is a group"
        yield Finding(path, line, match[0], _SUGGESTIONS[number - 1])


def _check_python(path: str, text: str) -> Iterator[Finding]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield from _check_prose(path, token.start[0], token.string)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if " " in node.value:  # a single word, such as a key, is not prose
                yield from _check_prose(path, node.lineno, node.value, node.end_lineno)
        elif isinstance(node, ast.Expr):
            continue
        yield from _check_names(path, node)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and (match := _QUESTION.match(docstring)):
                line = node.body[0].lineno
                yield Finding(path, line, match[0], "begin with a verb or a noun phrase")


def _check_names(path: str, node: ast.AST) -> Iterator[Finding]:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names = [node.id]
    elif isinstance(node, ast.arg):
        names = [node.arg]
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        names = [node.attr]
    elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        words = node.name.replace("held_out", "heldout")  # a term, as in "held-out data"
        names = [node.name, *words.split("_")]
    else:
        return
    for name in dict.fromkeys(names):
        if suggestion := NAMES.get(name.lstrip("_")):
            yield Finding(path, node.lineno, name, suggestion)


if __name__ == "__main__":
    sys.exit(main())
