"""Entry point of `optimus-data`. `main` handles stop signals and a closed output pipe, and returns
the exit status.

`main` sets the signal handlers before it imports other modules. Before the handlers are set, Ctrl-C
makes Python print a traceback.
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
"""Exit status of a command that Ctrl-C or SIGTERM has ended."""
_PIPE_CLOSED = 128 + signal.SIGPIPE
"""Exit status if the output pipe is closed. A shell reports the same status for a program that
SIGPIPE killed."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        argv: The arguments. None: use the command line of this process, and set signal handlers, so
            that Ctrl-C or SIGTERM ends this process with a message of one line.

    Returns:
        The exit status. docs/formats/dataset.md lists the values.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the stream was closed before the process started
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        if argv is None:  # a path may have bytes that no encoding can print
            getattr(sys, name).reconfigure(errors="backslashreplace")
    if argv is None:
        os.environ["PYTHONSAFEPATH"] = "1"  # children must not import from the working directory
        _StopSignals().take_over()
        from optimus.observe.log import set_up_logging

        set_up_logging(program="optimus-data")
    try:
        return _main(argv)
    except BrokenPipeError:
        _discard_output()
        return _PIPE_CLOSED
    finally:
        if argv is None:  # the exit status is known: a late signal must not change it
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)


def _main(argv: Sequence[str] | None) -> int:
    from optimus.errors import DamageError, OptimusError, as_optimus_error, one_line

    try:
        from data_prep.cli.commands import run_command

        return run_command(argv)
    except BrokenPipeError:
        raise
    except OptimusError as error:
        text = one_line(error)
        if isinstance(error, DamageError) and "verify" not in text:
            text += "; run optimus-data verify on the data set to see how to repair it"
        print(f"optimus-data: error: {text}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        shown = as_optimus_error(error)
        print(f"optimus-data: error: {one_line(shown)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # if `argv` is not None; else a handler ends the process
        print(_stop_line(signal.SIGINT), file=sys.stderr)
        return _INTERRUPTED


def _discard_output() -> None:
    """Flush stdout and stderr. If the pipe of a stream is closed, redirect the stream to /dev/null.

    Without this redirection, the flush that Python performs at exit would fail.
    """
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
    if folders := ", ".join(map(str, kept)):
        line += f"; complete files in {folders} are kept; run the same command again to continue"
    return line


class _StopSignals:
    """Handler that ends the process at the first Ctrl-C or SIGTERM.

    The handler kills the workers, removes temporary files, prints one line and exits. The handler
    does not raise an exception. During an import, a destructor or an exit function, Python would
    ignore the exception or print a traceback. Incomplete output does not remain, because a file
    gets its final name only when the file is complete.
    """

    def take_over(self) -> None:
        """Set the handlers of SIGINT (Ctrl-C) and SIGTERM.

        A signal that is already ignored stays ignored: a process that was started by nohup or with
        `&` ignores some signals. Python does not run handlers while the main thread is inside a
        library call, and the call that trains a tokenizer takes minutes. Therefore a second thread
        also waits for the signals.
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
        if os.getpid() == self._pid:  # a newly forked worker inherits this handler
            self._end(number)

    def _end(self, number: int) -> None:
        if not self._ending.acquire(blocking=False):
            while True:  # the other thread ends the process
                time.sleep(60)
        try:
            kept = _kill_and_clean()
            start = "\n" if os.isatty(2) else ""  # the terminal line may have a progress bar or ^C
            line = f"{start}{_stop_line(number, kept)}\n"
            os.write(2, line.encode(errors="backslashreplace"))
        finally:
            os._exit(_INTERRUPTED)


def _kill_and_clean() -> list[object]:
    """Kill the workers, remove the temporary files, and return the output directories that are in
    use.

    The function does not import modules: a module that is not imported yet has not started workers
    or written files.
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
