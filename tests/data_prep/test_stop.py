"""Tests of Ctrl-C and SIGTERM at any time: the command prints one line, exits with status 130 and
leaves no temporary file, and the next run completes the output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.cli import main
from optimus.io import files
from tests.data_prep.corpus import run_arguments, tree
from tests.kit.ranks.processes import ROOT, wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")

SIGNAL_AT_COMMIT = """
import os, signal, sys, time
from optimus.io import files
real, left, number = files.commit, int(sys.argv.pop(1)), getattr(signal, sys.argv.pop(1))
def commit(temporary, final):
    global left
    left -= 1
    if left == 0:
        os.killpg(0, number)
        time.sleep(60)
    real(temporary, final)
files.commit = commit
from data_prep.cli import main
sys.exit(main())
"""


def start(words: list[str]) -> subprocess.Popen[str]:
    """Start a command in a new session, wait until its process has signal handlers, and return the
    process."""
    process = subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/kernels"},
        start_new_session=True,
    )
    wait_until(lambda: handles(process.pid, signal.SIGTERM), within_s=60)
    return process


def handles(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def session_is_empty(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return True
    return False


def assert_stopped(process: subprocess.Popen[str], name: str) -> str:
    """Assert that a process ended with 130 and one line in addition to progress, and that its
    session is empty. Return the line."""
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    lines = [line for line in error.splitlines() if line.startswith("optimus-data: ")]
    assert len(lines) == 1 and lines[0].startswith(f"optimus-data: stopped by {name}"), error
    assert "Traceback" not in error and "rror" not in error, error
    wait_until(lambda: session_is_empty(process.pid), within_s=60)
    return lines[0]


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_signal_at_any_time_ends_a_run_with_a_line(made, tmp_path, name):
    """Signals arrive during imports, in workers and at the end of the run. Half of the signals are
    sent to all processes, as a terminal or a scheduler does. The other half are sent only to the
    main process of the command."""
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--workers", "2")
    number, stopped = getattr(signal, name), 0
    for moment, delay_s in enumerate((0, 0.01, 0.03, 0.05, 0.1, 0.2, 0.4, 0.8)):
        process = start(["-m", "data_prep.cli", *arguments])
        time.sleep(delay_s)
        if process.poll() is None:
            (os.killpg if moment % 2 else os.kill)(process.pid, number)
        if process.wait(60) == 0:  # the run ended before the signal
            process.communicate()
            continue
        stopped += 1
        assert_stopped(process, "Ctrl-C" if name == "SIGINT" else name)
        assert not any(files.is_temporary(path) for path in out.rglob("*"))
    assert stopped >= 5
    assert main(arguments) == 0 and tree(out) == tree(made.data)


@pytest.mark.parametrize(("name", "workers"), [("SIGINT", "2"), ("SIGTERM", "1")])
def test_signal_during_a_write_leaves_no_temporary_file(made, tmp_path, name, workers):
    out = tmp_path / "data"
    arguments = run_arguments(made.text, made.tokenizer, out, "--workers", workers)
    words = ["-c", SIGNAL_AT_COMMIT, "7", name, *arguments]
    line = assert_stopped(start(words), "Ctrl-C" if name == "SIGINT" else name)
    assert f"complete files in {out} are kept; run the same command again" in line
    assert not any(files.is_temporary(path) for path in out.rglob("*"))
    assert main(arguments) == 0 and tree(out) == tree(made.data)


def test_signal_during_a_long_call_of_a_library_ends_the_run(made):
    """During a long call of a library, such as the training of a tokenizer, Python calls no signal
    handler until the call returns to the main thread."""
    code = "import hashlib, sys; from data_prep import cli; "
    code += "from data_prep.cli import commands; "
    # The call takes minutes, much longer than the test waits.
    code += "long = lambda: hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000); "
    code += "commands.run_command = lambda argv: (print('begins', flush=True), long()); "
    code += "sys.exit(cli.main())"
    process = start(["-c", code])
    assert process.stdout.readline() == "begins\n"
    time.sleep(0.3)  # until the call has started
    process.send_signal(signal.SIGINT)
    assert_stopped(process, "Ctrl-C")


LIBRARY_WORK = {
    "encode": " with tokenizer.library_errors('tokenizer.json'):\n"
    "  print('begins', flush=True); time.sleep(60)\n",
    "check": " print('begins', flush=True)\n"
    " tokenizer._in_child('tokenizer.json', 0, lambda: time.sleep(60))\n",
}


@pytest.mark.parametrize("work", LIBRARY_WORK)
def test_signal_during_work_of_the_tokenizers_library_prints_its_line(made, work):
    """The signal arrives while the library encodes, or while a child process checks a tokenizer."""
    code = "import sys, time; from data_prep import cli; from data_prep.cli import commands\n"
    code += "from data_prep.tokenizer import tokenizer\n"
    code += f"def work(argv):\n{LIBRARY_WORK[work]}"
    code += "commands.run_command = work; sys.exit(cli.main())"
    process = start(["-c", code])
    assert process.stdout.readline() == "begins\n"
    process.send_signal(signal.SIGTERM)
    assert_stopped(process, "SIGTERM")


def test_ignored_interrupt_is_still_ignored(made):
    """A command that a shell script starts with `&` ignores SIGINT. The handlers of optimus-data
    must not change this."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    code += "from data_prep.cli import main; sys.exit(main())"
    process = start(["-c", code, "stats", str(made.data)])
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error


def test_closed_output_does_not_end_a_run(made, tmp_path):
    """If the output is closed, as in `optimus-data run ... 2>&1 | head -1`, all files are written,
    and the exit status is 141."""
    out = tmp_path / "data"
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "data_prep.cli", *run_arguments(made.text, made.tokenizer, out)]
    assert subprocess.run(words, cwd=ROOT, stdout=write, stderr=write).returncode == 141
    os.close(write)
    assert tree(out) == tree(made.data)
