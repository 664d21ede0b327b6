"""Tests of scripts/drills/hostile_files.py, which gives mutated files to all readers.

One test runs 100 cases. Other tests plant faults in the code that reads files. The drill must
detect these faults.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from optimus.errors import ConfigError
from optimus.io import files
from optimus.resilience.supervision.ledger import read_history
from tests.kit.faults import formats
from tests.kit.faults.arena import Arena, Limits
from tests.kit.faults.formats import FORMATS, Command, Format
from tests.kit.faults.judge import Case
from tests.kit.faults.mutations import STRUCTURES, Change, all_changes, mutate, to_json
from tests.kit.faults.samples import make_ledger

DRILL = Path(__file__).resolve().parents[1] / "scripts" / "drills" / "hostile_files.py"
LIMITS = Limits(cpu_s=0.5, idle_s=1.0, clock_s=20.0, memory_bytes=64 << 20)


def test_mutated_files_are_refused_or_read_with_the_same_result():
    """Run 100 cases of the drill, over all formats of files. The drill must have no finding.
    `scripts/drills/hostile_files.py --cases N` runs more cases."""
    drill = [sys.executable, str(DRILL), "--cases", "100", "--seed", "5"]
    done = subprocess.run(drill, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "findings: 0" in done.stdout
    rows = re.findall(r"^(\S.*?)  +(\d+)  +\d+  +\d+  +\d+  +0$", done.stdout, re.MULTILINE)
    assert sum(int(cases) for _, cases in rows) == 100
    assert all(int(cases) for _, cases in rows) and len(rows) > len(FORMATS) - 10


def test_same_seed_makes_the_same_mutations():
    content = b'{"a": [1, 2, {"b": "text"}], "c": 0.5}'
    for syntax in ("json", "json lines", "bytes"):
        first, second = (
            [mutate(random.Random(f"{n}"), content, syntax) for n in range(50)] for _ in "ab"
        )
        assert first == second
        assert len({change.how for change in first}) > 30


def test_structural_change_is_valid_in_its_syntax():
    content = {
        "json": b'{"a": [1, {"b": "text"}]}',
        "json lines": b'{"step": 1}\n{"step": 2}\n',
        "toml": b"[a]\nb = 1\nc = ['d']\n",
    }
    parsers: dict[str, Callable] = {
        "json": json.loads,
        "json lines": lambda data: [json.loads(line) for line in data.splitlines()],
    }
    for syntax, data in content.items():
        for n in range(100):
            _, changed = STRUCTURES[syntax](random.Random(n), data)
            if syntax in parsers and len(changed) < 4000:
                parsers[syntax](changed)


def test_each_field_is_set_to_each_value():
    tree = {f"key {n}": n for n in range(30)} | {"list": [{"a": 0.5}, 1, 2, 3, 4], "last": "text"}
    changed = [change.content for change in all_changes(json.dumps(tree).encode(), "json")]
    hows = [change.how for change in all_changes(json.dumps(tree).encode(), "json")]
    assert len(set(hows)) > 0.95 * len(hows)
    for name in ("all", "key 0", "key 7", "last"):
        assert f"{name}: set to None" in hows and f"{name}: set to '@E@'" in hows
    for name in ("key 0", "last"):
        assert f"{name}: renamed ()" in hows  # removed
    assert any(b'"key 3": 1e999' in content for content in changed)
    assert changed.count(to_json(tree, indent=1)) < 30  # a changed value can equal the sample's
    lines = b'{"a": 1}\n{"a": 2}\n'
    assert {change.content.count(b"\n") for change in all_changes(lines, "json lines")} == {2}
    assert not [*all_changes(b"text", "bytes")]


def test_seal_of_a_ledger_makes_its_chain_of_hashes_valid(tmp_path):
    make_ledger(tmp_path / "run")
    path = tmp_path / "run" / "events.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b"the last step", b"another reason"))
    with pytest.raises(ConfigError, match="damaged"):
        read_history(path.parent)
    formats.seal(path.parent, path, before)
    verdict = read_history(path.parent).verdict
    assert verdict is not None and verdict.reason == "another reason"


def test_seal_updates_the_hashes_of_a_changed_file(tmp_path):
    inner, outer = tmp_path / "inner.json", tmp_path / "outer.json"
    inner.write_bytes(files.checked_json({"data": files.xxh3_bytes(b"before"), "size": 6}))
    entry = {"xxh3": files.xxh3_file(inner), "size": inner.stat().st_size}
    outer.write_bytes(files.checked_json({"files": [entry]}))
    data = tmp_path / "data"
    data.write_bytes(b"after it")
    formats.seal(tmp_path, data, b"before")
    assert files.parse_checked_json(inner.read_bytes())["size"] == 8
    (sealed,) = files.parse_checked_json(outer.read_bytes())["files"]
    assert sealed == {"xxh3": files.xxh3_file(inner), "size": inner.stat().st_size}


# Functions that read a JSON object, as a command would. Each function except the first has a fault
# that a command could have.


def _read(words: Sequence[str]) -> int:
    """Read sample.json, and print its value. Return status 0, or status 2 with a line on stderr if
    the file is damaged."""
    try:
        value = json.loads(files.read_regular("sample.json", 1 << 20))["value"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        print(f"optimus: error: sample.json: {type(error).__name__}", file=sys.stderr)
        return 2
    print(ascii(value)[:1000])
    return 0


def _raises(words: Sequence[str]) -> int:
    raise KeyError("value")


def _loops(words: Sequence[str]) -> int:
    while True:
        pass


def _blocks(words: Sequence[str]) -> int:
    time.sleep(1000)
    return 0


def _allocates(words: Sequence[str]) -> int:
    bytearray(200 << 20)
    return _read(words)


def _writes_outside(words: Sequence[str]) -> int:
    with open("../outside/new", "w"):
        return _read(words)


def _writes_unaudited(words: Sequence[str]) -> int:
    """Create a file outside of the directory of the case by a call of the C library. Such a call
    causes no audit event of Python."""
    libc = ctypes.CDLL(None)
    os.close(libc.open(b"../outside/new", os.O_WRONLY | os.O_CREAT, 0o600))
    return _read(words)


def _reads_outside(words: Sequence[str]) -> int:
    Path("../outside/secret").read_text()
    return _read(words)


def _copies(words: Sequence[str]) -> int:
    Path("copy.json").write_bytes(Path("sample.json").read_bytes())
    return 0


def _prints(words: Sequence[str]) -> int:
    print(Path("sample.json").read_text())
    return 0


def _prints_other_content(words: Sequence[str]) -> int:
    print("something else")
    return 0


def _prints_escapes(words: Sequence[str]) -> int:
    print("optimus: error: \x1b]0;title\x07", file=sys.stderr)
    return 2


def _prints_two_lines(words: Sequence[str]) -> int:
    print("optimus: error: a\noptimus: error: b", file=sys.stderr)
    return 2


def _prints_long_line(words: Sequence[str]) -> int:
    print("optimus: error: " + "x" * 10_000, file=sys.stderr)
    return 2


def _warns(words: Sequence[str]) -> int:
    print("library.py:1: UserWarning: something", file=sys.stderr)
    return 0


def _prints_no_line(words: Sequence[str]) -> int:
    return 2


def _exits_with_7(words: Sequence[str]) -> int:
    print("optimus: error: no", file=sys.stderr)
    return 7


def _crashes(words: Sequence[str]) -> int:
    ctypes.string_at(0)
    return 0


def _exits(words: Sequence[str]) -> int:
    os._exit(0)


CHANGED = Change("another value", b'{"value": 6}', is_structural=True)
FOREIGN = Change("foreign", replacement="foreign")
FAULTS = {
    "raises": (_raises, CHANGED, "traceback: KeyError"),
    "loops": (_loops, CHANGED, "processor seconds"),
    "blocks": (_blocks, CHANGED, "no processor time"),
    "allocates": (_allocates, CHANGED, "MiB of memory"),
    "writes outside": (_writes_outside, CHANGED, "opened for writing outside"),
    "writes unaudited": (_writes_unaudited, CHANGED, "a file outside the directory was made"),
    "reads outside": (_reads_outside, CHANGED, "opened outside the directory"),
    "copies": (_copies, FOREIGN, "was copied to copy.json"),
    "prints": (_prints, FOREIGN, "was printed"),
    "other content": (_prints_other_content, CHANGED, "accepted with other content"),
    "prints escapes": (_prints_escapes, CHANGED, "control character"),
    "prints two lines": (_prints_two_lines, CHANGED, "refused in 2 lines"),
    "prints a long line": (_prints_long_line, CHANGED, "a line of"),
    "warns": (_warns, CHANGED, "other lines on stderr"),
    "prints no line": (_prints_no_line, CHANGED, "refused in 0 lines"),
    "exits with 7": (_exits_with_7, CHANGED, "exit status 7"),
    "crashes": (_crashes, CHANGED, "SIGSEGV"),
    "exits": (_exits, CHANGED, "exited with wait status"),
}


def planted(name: str) -> Format:
    command = Command((f"{shlex.quote(name)} sample.json",), str)
    return Format(name, "sample", "sample.json", "json", (command,))


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Arena:
    """Return an arena: a directory with a sample file, and several readers of this file. All
    readers are correct while the arena is prepared. Then the readers named in FAULTS are replaced
    by faulty readers."""
    arena = Arena(tmp_path_factory.mktemp("arena"), LIMITS)
    (arena.samples / "sample").mkdir(parents=True)
    (arena.samples / "sample" / "sample.json").write_text('{"value": 5}')
    names = ["sound", *FAULTS]
    arena.readers |= dict.fromkeys(names, _read)
    arena.prepare(map(planted, names), jobs=1)
    arena.readers |= {name: reader for name, (reader, *_) in FAULTS.items()}
    return arena


def case_of(name: str, change: Change) -> Case:
    faulty = planted(name)
    return Case(0, 0, faulty, faulty.commands[0], change, is_sealed=False)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_a_finding(arena, name):
    _, change, message = FAULTS[name]
    ((_, verdict),) = arena.run([case_of(name, change)], 1)
    assert verdict.outcome == "finding" and message in verdict.kind, verdict


def test_correct_reader_has_no_finding(arena):
    """The sample contains no hash, so a correct reader cannot detect a changed value. If the reader
    prints the changed value, the outcome must be "other", which is not a finding."""
    correct = planted("sound")
    changes = [mutate(random.Random(n), b'{"value": 5}', "json") for n in range(60)]
    cases = [
        Case(0, n, correct, correct.commands[0], change, True) for n, change in enumerate(changes)
    ]
    outcomes = [verdict.outcome for _, verdict in arena.run(cases, 2)]
    assert len(outcomes) == 60 and set(outcomes) == {"same", "other", "refused"}
    assert not list(arena.folder.glob("case-*"))


def test_reader_that_imports_a_new_module_has_no_finding(arena, tmp_path, monkeypatch):
    """If a process is the first to import a module, Python writes the bytecode of the module next
    to its source, outside of the directory of the case. The drill must not report this file as a
    finding."""

    def imports(words: Sequence[str]) -> int:
        importlib.import_module("module_of_a_reader")
        return _read(words)

    (tmp_path / "module_of_a_reader.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setitem(arena.readers, "sound", imports)
    ((_, verdict),) = arena.run([case_of("sound", Change("same", b'{"value": 5}'))], 1)
    assert verdict.outcome == "same", verdict


def test_finding_that_needs_earlier_cases_says_so(arena, monkeypatch):
    """A reader fails only in the third case of a process, and not if this case runs alone. The text
    of the finding must begin with "only after other cases"."""
    calls: list[int] = []

    def raises_later(words: Sequence[str]) -> int:
        calls.append(1)
        return _raises(words) if len(calls) > 2 else _read(words)

    monkeypatch.setitem(arena.readers, "sound", raises_later)
    cases = [case_of("sound", Change("same", b'{"value": 5}')) for _ in range(3)]
    verdicts = [verdict for _, verdict in arena.run(cases, 1)]
    assert [verdict.outcome for verdict in verdicts] == ["same", "same", "finding"]
    assert verdicts[-1].kind.startswith("only after other cases: traceback")


def test_limits_of_the_drill_are_those_of_the_docs():
    limits = Limits()
    assert (limits.cpu_s, limits.idle_s, limits.memory_bytes) == (5.0, 5.0, 256 << 20)
