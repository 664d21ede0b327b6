"""Tests of `child.run`, which calls a function in a forked child process."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from data_prep.runtime import child
from data_prep.tokenizer import tokenizer
from optimus.errors import DataError
from tests.kit.ranks.processes import python


def test_results_and_exceptions_are_returned():
    assert child.run(lambda: None, limit_s=30) is None
    assert child.run(lambda: [][0], limit_s=30) == "list index out of range"
    assert child.run(lambda: print(end="x" * 99), limit_s=30) is None


@pytest.mark.parametrize("is_ignored", [False, True])
def test_crash_and_end_without_a_result_are_different_errors(is_ignored):
    """A crash raises CrashError, and an end without a result raises UnfinishedError. This must be
    so even if the process ignores SIGCHLD, and the system therefore keeps no exit status of the
    child."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with pytest.raises(child.CrashError, match=f"signal {int(signal.SIGSEGV)}"):
            child.run(lambda: os.kill(os.getpid(), signal.SIGSEGV), limit_s=30)
        with pytest.raises(child.UnfinishedError, match="signal 9 ended the child process"):
            child.run(lambda: os.kill(os.getpid(), signal.SIGKILL), limit_s=30)
        with pytest.raises(child.UnfinishedError, match="no result within 0 s"):
            child.run(signal.pause, limit_s=0.2)
        assert (signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN) == is_ignored
    finally:
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.parametrize("has_pidfd", [False, True])
def test_call_in_a_thread_with_sigchld_ignored_ends(monkeypatch, has_pidfd):
    """Only the main thread can set the handler of SIGCHLD, so in another thread the exit status of
    the child is lost. The call raises UnfinishedError."""
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    errors: list[BaseException] = []

    def call() -> None:
        for work in (lambda: os._exit(9), signal.pause):
            try:
                child.run(work, limit_s=0.2)
            except BaseException as error:
                errors.append(error)

    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(30)
    finally:
        signal.signal(signal.SIGCHLD, handler)
    assert [type(error) for error in errors] == [child.UnfinishedError] * 2


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux)")
def test_crash_is_seen_while_another_process_keeps_the_pipe_open(monkeypatch):
    """Another thread forks a process between the creation of the pipe and the fork of the child.
    The process of the other thread inherits the write end of the pipe and keeps the pipe open."""
    fork, others = os.fork, []

    def fork_twice() -> int:
        if other := fork():
            others.append(other)
        else:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            time.sleep(30)
            os._exit(0)
        return fork()

    monkeypatch.setattr(os, "fork", fork_twice)
    start = time.monotonic()
    try:
        with pytest.raises(child.CrashError):
            child.run(os.abort, limit_s=20)
        assert time.monotonic() - start < 15
    finally:
        for other in others:
            os.kill(other, signal.SIGKILL)
            os.waitpid(other, 0)


def test_child_does_not_call_handlers_of_its_parent(monkeypatch, tmp_path):
    """A signal that arrives directly after the fork ends the child, and the child does not call the
    parent's handler."""
    fork = os.fork
    path = tmp_path / "called"

    def fork_and_send() -> int:
        pid = fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            sum(range(1000))  # the interpreter calls handlers between instructions
        return pid

    handler = signal.signal(signal.SIGTERM, lambda *_: path.write_text(str(os.getpid())))
    monkeypatch.setattr(os, "fork", fork_and_send)
    try:
        with pytest.raises(child.UnfinishedError, match="signal 15"):
            child.run(lambda: None, limit_s=30)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not path.exists()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.parametrize("by_thread", [False, True])
def test_child_ends_if_a_handler_raises_at_the_fork(monkeypatch, by_thread):
    """A signal handler of the parent raises when `run` unblocks signals in the parent. With
    `by_thread`, the handler raises earlier: before `fork` has returned the child's process id. In
    both cases, the child must end."""
    fork, pids = os.fork, []

    def fork_and_send() -> int:
        if pid := fork():
            pids.append(pid)
            if by_thread:
                stop()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        return pid

    def stop(*_) -> None:
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGTERM, stop)
    monkeypatch.setattr(os, "fork", fork_and_send)
    try:
        with pytest.raises(KeyboardInterrupt):
            child.run(signal.pause, limit_s=30)
    finally:
        signal.signal(signal.SIGTERM, handler)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


CLOSED = """
import os, sys
from data_prep.runtime import child
os.closerange(int(sys.argv[1]), 3)
assert child.run(lambda: [][0], limit_s=30) == "list index out of range"
os._exit(7)
"""


@pytest.mark.parametrize("first", ["1", "2"])
def test_result_arrives_if_standard_descriptors_are_closed(first):
    assert python("-c", CLOSED, first).returncode == 7


def test_sentencepiece_model_that_crashes_the_library_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.model"
    path.write_bytes(b"\n\x09\n\x04text")
    monkeypatch.setattr(tokenizer, "SentencePieceTokenizer", lambda path: os.abort())
    with pytest.raises(DataError, match="x.model: the sentencepiece library fails .*: signal 6"):
        tokenizer.open_tokenizer(path)


def test_any_exception_of_a_check_names_the_file(tmp_path):
    """The exception of the check has no path in its message, but the DataError names the file."""
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json: the tokenizers library fails .*: no"):
        tokenizer._in_child(path, 2, lambda: (_ for _ in ()).throw(RuntimeError("no")))
