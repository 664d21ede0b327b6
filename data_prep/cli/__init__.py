"""The process of `optimus-data`: signals, a closed output, exit status.

Nothing that takes time is imported before `main` has taken over the signals. Until then an
interrupt is reported by Python itself, with a traceback.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import FrameType

_INTERRUPTED = 130
"""Exit status after Ctrl-C and after SIGTERM."""
_PIPE_CLOSED = 128 + signal.SIGPIPE
"""What a shell reports of a program that SIGPIPE ended."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return the exit status, as docs/formats/dataset.md lists them.

    Without `argv` this is the process of the command: Ctrl-C and SIGTERM end it with one line.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before the start
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if argv is None:  # a path need not be text in any encoding
            getattr(sys, name).reconfigure(errors="backslashreplace")
    if argv is None:
        os.environ["PYTHONSAFEPATH"] = "1"  # no child imports from the working directory
        _StopSignals().take_over()
        from optimus.observe.log import set_up_logging

        set_up_logging(program="optimus-data")
    try:
        return _main(argv)
    except BrokenPipeError:
        _discard_output()
        return _PIPE_CLOSED
    finally:
        if argv is None:  # the outcome is decided, and an exit is not to be interrupted
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _main(argv: Sequence[str] | None) -> int:
    from optimus.errors import DamageError, OptimusError, one_line

    try:
        from data_prep.cli.commands import run_command

        return run_command(argv)
    except BrokenPipeError:
        raise
    except OptimusError as error:
        text = one_line(error)
        if isinstance(error, DamageError) and "verify" not in text:
            text += "; optimus-data verify DIR, with the data set's directory, names the repair"
        print(f"optimus-data: error: {text}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(f"optimus-data: error: {what}; fix it and give the command again", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # only where a caller gave `argv`
        print(_stop_line(signal.SIGINT), file=sys.stderr)
        return _INTERRUPTED


def _discard_output() -> None:
    """Send buffered output nowhere, so that the exit does not fail on it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _stop_line(number: int, kept: Iterable[object] = ()) -> str:
    name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    line = f"optimus-data: stopped by {name}"
    if places := ", ".join(map(str, kept)):
        line += f"; what is complete in {places} is kept, give the same command again to continue"
    return line


class _StopSignals:
    """Ends the process at the first Ctrl-C or SIGTERM: workers, temporary files, one line, exit.

    It ends in the handler instead of raising an exception, because imports, destructors and exit
    functions would swallow that or print a traceback. Complete files are safe: each is renamed to
    its name only when it is whole.
    """

    def take_over(self) -> None:
        """Handle the signals from now on. One that the parent ignores (nohup, `&`) stays ignored.

        A thread waits for them too: the main thread cannot run a handler during a library call,
        and training a tokenizer is one call of minutes.
        """
        self._pid, self._ending = os.getpid(), _thread.allocate_lock()
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        _thread.start_new_thread(self._watch, ())

    def _watch(self) -> None:
        self._end(os.read(self._read, 1)[0])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:  # else a worker that was forked a moment ago
            self._end(number)

    def _end(self, number: int) -> None:
        if not self._ending.acquire(blocking=False):
            while True:  # the other thread ends the process
                time.sleep(60)
        try:
            kept = _kill_and_clean()
            # After a progress bar or the terminal's ^C.
            start = "\n" if os.isatty(2) else ""
            line = f"{start}{_stop_line(number, kept)}\n"
            os.write(2, line.encode(errors="backslashreplace"))
        finally:
            os._exit(_INTERRUPTED)


def _kill_and_clean() -> list[object]:
    """Kill the workers and remove temporary files of this command; the directories it wrote to.

    Modules that are still being imported are skipped: nothing was started or written then.
    """
    pids = {os.getpid()}
    module = sys.modules.get("multiprocessing.process")
    processes: list = getattr(module, "active_children", list)()
    for child in processes:
        child.kill()
    for child in processes:
        child.join()
        pids.add(child.pid)
    workspace = sys.modules.get("data_prep.runtime.workspace")
    return list(getattr(workspace, "remove_temporaries", lambda pids: ())(pids))
