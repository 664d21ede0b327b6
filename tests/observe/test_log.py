"""Tests of log lines: their format, and the ranks that print them."""

from __future__ import annotations

import ast
import logging
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimus.observe.log import indented, redirect_lines, set_up_logging

ROOT = Path(__file__).resolve().parents[2]
logger = logging.getLogger("optimus.test")


@pytest.fixture
def restored() -> Iterator[None]:
    """After the test, set up logging again with lines that go to stderr."""
    yield
    redirect_lines(None)
    set_up_logging()


def log_each_level() -> None:
    logger.debug("not printed")
    logger.info("step %d", 3)
    logger.warning("careful")
    logger.error("no")


@pytest.mark.parametrize("columns", [0, 120])
def test_progress_bar_is_shown_on_a_terminal_without_a_size(columns):
    """A new pseudo-terminal has 0 columns, for which tqdm would print an empty bar."""
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24 if columns else 0, columns))
    code = "from optimus.observe.log import *; Progress(0, 7, 1).close()"
    subprocess.run([sys.executable, "-c", code], stderr=terminal, check=True)
    assert b"0/7" in os.read(main, 4096)
    os.close(main)
    os.close(terminal)


def test_lines_have_program_and_level(restored, capsys):
    set_up_logging()
    log_each_level()
    lines = ["optimus: step 3", "optimus: warning: careful", "optimus: error: no"]
    assert capsys.readouterr() == ("", "\n".join([*lines, ""]))


def test_other_ranks_print_warnings_with_their_number(restored, capsys):
    set_up_logging(2, "optimus-data")
    log_each_level()
    assert capsys.readouterr().err.splitlines() == [
        "optimus-data: [rank 2] warning: careful",
        "optimus-data: [rank 2] error: no",
    ]


def test_set_up_twice_prints_once(restored, capsys):
    set_up_logging()
    set_up_logging()
    logger.info("once")
    assert capsys.readouterr().err == "optimus: once\n"


def test_control_characters_are_escaped_and_lines_stay(restored, capsys):
    set_up_logging()
    logger.warning("%s\n  second line", "\x1b[2J")
    assert capsys.readouterr().err == "optimus: warning: \\x1b[2J\n  second line\n"


def test_lines_go_to_the_progress_bar(restored, capsys):
    lines: list[str] = []
    redirect_lines(lines.append)
    logger.info("above")
    redirect_lines(None)
    logger.info("below")
    assert lines == ["optimus: above"] and capsys.readouterr().err == "optimus: below\n"


def test_only_commands_print():
    """Only cli.py, commands.py and reference.py call `print`. All other modules log."""
    allowed = {"cli.py", "commands.py", "reference.py"}
    calls = [
        f"{path}:{node.lineno}"
        for path in (ROOT / "optimus").rglob("*.py")
        if path.name not in allowed
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert not calls


def test_a_line_does_not_wait_for_another_thread_inside_the_log(restored, monkeypatch):
    """The handlers of Python's logging take a lock for each line. The handler of Optimus must take
    no lock: while a thread waits in a write, another thread must be able to log a line."""
    set_up_logging()
    blocked, release = threading.Event(), threading.Event()
    lines: list[str] = []

    class Stream:
        def write(self, text: str) -> None:
            if "saved" in text:
                blocked.set()
                release.wait(30)
            lines.append(text)

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stderr", Stream())
    saving = threading.Thread(target=logger.warning, args=["saved"], daemon=True)
    saving.start()
    assert blocked.wait(30)
    stopping = threading.Thread(target=logger.info, args=["stopping"], daemon=True)
    stopping.start()
    stopping.join(10)
    assert lines == ["optimus: stopping\n"]
    release.set()
    saving.join(30)


def test_text_of_a_model_sends_no_control_characters_to_the_terminal():
    text = "def f():\n\treturn 'é\u200d'\r\x1b[2J\x9b\x07\u202e\u2028\ud800"
    assert indented(text) == (
        "    def f():\n    \treturn 'é\u200d'\\r\\x1b[2J\\x9b\\x07\\u202e\\u2028\\ud800"
    )
