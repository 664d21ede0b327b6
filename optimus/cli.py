"""The `optimus` command. Each subcommand imports the packages that it needs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from optimus.errors import (
    ConfigError,
    DoesNotFit,
    OptimusError,
    as_optimus_error,
    counted,
    printable_lines,
    refuse_if,
)

_PIPE_CLOSED = 128 + signal.SIGPIPE  # a shell's exit status for a program that SIGPIPE ended
_STALL_S = 5.0
"""Maximum time, in seconds, for which a write to standard error waits until the stream accepts
data."""
_SLOW_TO_START = (["train"], ["eval"], ["generate"], ["bench"])
"""Commands whose start takes seconds because they import torch. On a terminal, each of them first
prints the line `optimus: starting COMMAND`."""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that make waiting OpenMP threads spin or sleep."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in `argv` (default: `sys.argv[1:]`) and return its exit status. README lists
    the statuses."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parse(arguments)
        return args.run(args, arguments)
    except Exception as error:
        kernels = sys.modules.get("optimus_kernels.cache")
        if kernels is not None and isinstance(error, kernels.KernelError):
            return _end(ConfigError(str(error)))
        shown = as_optimus_error(error)
        if shown is None:
            raise
        return _end(shown)
    except KeyboardInterrupt:
        # Another Ctrl-C would print a traceback.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            from optimus.launch.signals import report_interrupt

            return report_interrupt()
        finally:
            if before is not None:  # None if C code had installed the handler
                signal.signal(signal.SIGINT, before)


def process() -> NoReturn:
    """Run the command in `sys.argv` and end this process with the command's exit status."""
    _open_standard_streams()
    from optimus.launch.environment import is_launched, prints_start, read_rank
    from optimus.launch.signals import (
        STOP_SIGNALS,
        exit_on_signals,
        report_early_stop,
        report_interrupt,
    )
    from optimus.observe.log import set_up_logging

    set_up_logging(read_rank())
    set_library_variables()
    # Ranks of a launcher keep the default actions of the stop signals except SIGINT. A default
    # action ends a rank even while the rank waits for other ranks, when Python runs no handlers. In
    # training, `StopRequest` installs other handlers later.
    if sys.argv[1:2] == ["train"] and not is_launched():
        exit_on_signals(STOP_SIGNALS, report_early_stop)
    elif not is_launched():
        exit_on_signals([signal.SIGTERM], report_interrupt)
    exit_on_signals([signal.SIGINT], report_interrupt)
    if sys.argv[1:2] in _SLOW_TO_START and sys.stderr.isatty() and prints_start():
        print(f"optimus: starting {sys.argv[1]}", file=sys.stderr)
    try:
        code = main()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(1, 0)
        closed = select.POLLERR | select.POLLHUP  # of a pipe or a socket
        reader_is_gone = any(event & closed for _, event in poll.poll(0))
        if not reader_is_gone:  # a pipe other than standard output broke
            raise
        code = _PIPE_CLOSED
    except SystemExit as end:  # argparse has printed a help text or a usage error
        assert isinstance(end.code, int), end.code
        code = end.code
    except Exception:
        if not _leaves_at_once():
            raise
        with _without_output_errors():
            traceback.print_exc()
        code = 1
    if _leaves_at_once():  # the interpreter's shutdown could hang or abort
        os._exit(code if _flush() else code or 1)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter's exit flushes once more
        code = code or _PIPE_CLOSED
    except (OSError, ValueError):
        pass  # the interpreter's exit reports the error
    sys.exit(code)


def set_library_variables() -> None:
    """Set OMP_WAIT_POLICY and PYTHONSAFEPATH, environment variables that libraries read at their
    import."""
    # By default, waiting OpenMP threads spin and occupy cores that other threads need.
    if not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"
    # Libraries such as torch.compile start interpreters, which must not import from the working
    # directory: it may belong to another user.
    os.environ["PYTHONSAFEPATH"] = "1"


class _Stderr:
    """Standard error that drops text instead of raising an error or blocking.

    If nobody reads the output, the first write waits for at most _STALL_S seconds. Later writes
    drop their text at once, until the output is read again. The wait must be short: if this rank
    waits too long, the other ranks consider this rank lost.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._text = stream, ""
        self._lock = threading.RLock()  # reentrant, since a signal handler may print during a write
        self._wait_s, self._dropped = _STALL_S, 0
        self._cut = False  # True if the last write ended inside a line

    def write(self, text: str) -> int:
        with self._lock:
            self._text += text
            if "\n" in text:
                self.flush()
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._text = self._text, ""
            data = text.encode("utf-8", "backslashreplace")
            try:
                self._emit(data)
            except OSError:
                return

    def _emit(self, data: bytes) -> None:
        poll = select.poll()  # not shared: a signal handler may print during this poll
        poll.register(self._stream.fileno(), select.POLLOUT)
        waiting = data
        if self._dropped:
            lines = f"{counted(self._dropped, 'line')} {'was' if self._dropped == 1 else 'were'}"
            note = f"optimus: nobody read the output, and {lines} dropped here\n"
            waiting = b"\n" * self._cut + note.encode() + data
        while waiting:
            if not poll.poll(1000 * self._wait_s):
                self._wait_s, self._dropped = 0, self._dropped + data.count(b"\n")
                return
            # A pipe that is ready takes at least PIPE_BUF bytes without blocking.
            written = os.write(self._stream.fileno(), waiting[: select.PIPE_BUF])
            self._cut = waiting[written - 1 : written] != b"\n"
            waiting = waiting[written:]
        self._wait_s, self._dropped = _STALL_S, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _open_standard_streams() -> None:
    """Open each closed standard stream on os.devnull, and wrap standard error in `_Stderr`."""
    # Otherwise, a file that the command opens could get the descriptor of a closed stream. The
    # output of the stream would then be written to this file.
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is `number`
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):  # a printed path may have undecodable bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr = _Stderr(sys.stderr)


def _leaves_at_once() -> bool:
    world = sys.modules.get("optimus.distributed.world")
    return world is not None and world.leaves_at_once()


def _without_output_errors() -> contextlib.suppress:
    """Return a context manager that ignores the errors of writing to a closed stream."""
    return contextlib.suppress(OSError, ValueError)


def _flush() -> bool:
    """Flush standard output and standard error. Return False if a flush failed."""
    done = True
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            done = False
    return done


def _end(error: OptimusError) -> int:
    """Print `error`, unless another rank prints it, and return the exit status."""
    from optimus.distributed.agreement import end_alone
    from optimus.launch.environment import is_started_by_launcher

    ended = end_alone(error)
    if is_started_by_launcher():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # status 143 could replace the run's status
    if ended.prints:
        with _without_output_errors():
            print(ended.line, file=sys.stderr, flush=True)
    ended.leave()
    return ended.exit_code


def _parser() -> argparse.ArgumentParser:
    from optimus.bench.commands import add_to as add_bench
    from optimus.checkpoint.commands import add_to as add_checkpoint
    from optimus.study.commands import add_to as add_study
    from optimus.train.commands import add_command
    from optimus.train.commands import add_to as add_train

    parser = argparse.ArgumentParser(
        prog="optimus", description="Pretrain Mixture-of-Experts and dense language models."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        add_train,
        _add_plan,
        add_study,
        _add_convert,
        add_checkpoint,
        _add_eval,
        _add_generate,
    ):
        add(commands)
    report = add_command(
        commands, "report", _report, "Draw the curves of a run and print a summary."
    )
    report.add_argument("run_dir", help="a run directory; the picture is written to it")
    add_bench(commands)
    _add_kernels(commands)
    text = "Report the devices, packages and kernels of this machine."
    doctor = add_command(commands, "doctor", _doctor, text)
    doctor.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    # argparse ends a list of positional arguments at the first option, but overrides may also
    # follow options.
    if any(text.startswith("-") or "=" not in text for text in rest) or (
        rest and not hasattr(args, "overrides")
    ):
        if hasattr(args, "overrides"):
            rest = [text for text in rest if text.startswith("-") or "=" not in text]
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def _add_plan(commands: argparse._SubParsersAction) -> None:
    from optimus.planner.commands import add_options
    from optimus.train.commands import add_command, add_config

    parser = add_command(
        commands, "plan", _plan, "Predict parameters, FLOPs, memory and step time of a run."
    )
    add_config(parser)
    parser.add_argument(
        "--resolved",
        action="store_true",
        help="instead of a prediction, print mesh, batch, data, first step and settings of the run",
    )
    add_options(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _plan(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.config import load_config
    from optimus.planner.allocation import allocate
    from optimus.planner.commands import (
        check_options,
        find_misfit,
        run_comparison,
        run_search,
        write_hosts,
        write_planned_step,
    )

    config = load_config(args.config, args.overrides)
    args.machine = args.machine or config.train.machine or None
    check_options(args)
    if args.against:
        return run_comparison(args, config)
    allocation = allocate(args.machine, args.nodes, args.hosts)
    if args.search:
        return run_search(args, config, allocation)
    if args.resolved:
        from optimus.distributed.mesh import make_mesh
        from optimus.train.autotune import choices_before_start
        from optimus.train.resolve import RunPlan
        from optimus.train.startup import check_run
        from optimus.train.summary import format_resolved, resolved_tree

        world_size = allocation.world_size if allocation else None
        run_plan = check_run(config, make_mesh(config.parallel, world_size).world_size)
        assert isinstance(run_plan, RunPlan), "the data was checked"
        choices = choices_before_start(config, run_plan.start.full)
        if args.json:
            print(json.dumps(resolved_tree(config, run_plan, choices)))
        else:
            print(format_resolved(config, run_plan, choices))
        return 0
    from optimus.planner.plan import format_plan, plan

    try:
        result = plan(config, allocation, args.load)
    except DoesNotFit as error:  # no placement fits, so there is no other result
        if args.json:
            print(json.dumps({"missing": error.missing}))
        raise
    if (args.trace or args.picture) and allocation is not None:
        write_planned_step(config, result["mesh"], allocation, args.trace, args.picture)
    misfit = find_misfit(config, result, arguments)
    if args.write_hosts and allocation is not None and misfit is None:
        write_hosts(config, result["mesh"], allocation, args.write_hosts)
    print(json.dumps(result) if args.json else format_plan(result))
    if misfit is not None:
        raise misfit
    return 0


def _add_convert(commands: argparse._SubParsersAction) -> None:
    from optimus.train.commands import add_command

    parser = add_command(
        commands, "convert", _convert, "Convert between Hugging Face directories and checkpoints."
    )
    parser.add_argument("direction", choices=("from-hf", "to-hf"))
    parser.add_argument(
        "source", help="from-hf: a Hugging Face directory; to-hf: a checkpoint or run directory"
    )
    parser.add_argument("out", help="directory to create; it must not exist")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="to-hf: dtype to write (default: as stored)"
    )


def _convert(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.checkpoint.convert import from_hf, to_hf
    from optimus.launch.signals import raising_keyboard_interrupt

    with raising_keyboard_interrupt():
        if args.direction == "from-hf":
            refuse_if(args.dtype, "convert from-hf cannot change dtypes; remove --dtype")
            from_hf(args.source, args.out)
        else:
            to_hf(args.source, args.out, args.dtype)
    print(f"wrote {args.out}")
    return 0


def _add_eval(commands: argparse._SubParsersAction) -> None:
    from optimus.train.commands import add_command

    parser = add_command(commands, "eval", _eval, "Compute the loss of a checkpoint on a data set.")
    parser.add_argument(
        "checkpoint", help="a checkpoint, a run directory or a Hugging Face directory"
    )
    parser.add_argument("data", help="a data set written by optimus-data, such as OUT/eval")
    parser.add_argument(
        "--instances", type=int, default=0, metavar="N", help="number of instances (0: all)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=8,
        metavar="N",
        help="instances per forward pass (default: 8)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _eval(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.launch.imports import without_collections

    with without_collections():
        from optimus.evaluate import evaluate_checkpoint

    result = evaluate_checkpoint(args.checkpoint, args.data, args.batch_size, args.instances)
    if args.json:
        print(json.dumps(result))
    else:
        print(
            f"loss {result['loss']:.4f} nats over {counted(result['tokens'], 'token')} "
            f"of {args.data}"
        )
    return 0


def _add_generate(commands: argparse._SubParsersAction) -> None:
    from optimus.train.commands import add_command

    parser = add_command(commands, "generate", _generate, "Continue a text.")
    parser.add_argument(
        "checkpoint", help="a checkpoint, a run directory or a Hugging Face directory"
    )
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    for name, kind, default, meaning in (
        ("tokens", int, 64, "maximum number of sampled tokens"),
        ("temperature", float, 0.8, "temperature of the sampling; 0: the likeliest token"),
        ("top-k", int, 50, "sample from the N likeliest tokens; 0: from the whole vocabulary"),
        ("seed", int, 0, "seed of the sampling"),
    ):
        help_text = f"{meaning} (default: {default})"
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=help_text)


def _generate(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.launch.imports import without_collections

    with without_collections():
        from optimus.evaluate import continue_text

    text = continue_text(
        args.checkpoint,
        args.prompt,
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        seed=args.seed,
    )
    if sys.stdout.isatty():  # a terminal would execute escape sequences in the model's text
        text = printable_lines(text)
    print(text)
    return 0


def _report(args: argparse.Namespace, arguments: list[str]) -> int:
    from pathlib import Path

    from optimus.launch.signals import raising_keyboard_interrupt
    from optimus.observe.report import write_report

    with raising_keyboard_interrupt():
        picture, summary = write_report(Path(args.run_dir))
    print(f"{summary}\n{picture}")
    return 0


def _add_kernels(commands: argparse._SubParsersAction) -> None:
    from optimus.train.commands import add_command

    parser = add_command(
        commands, "kernels", _kernels, "Compile kernels before a run, or list compiled kernels."
    )
    parser.add_argument("action", choices=("build", "status"))
    parser.add_argument(
        "backends",
        nargs="*",
        metavar="BACKEND",
        help="build: sycl, cuda or cpu; default: each backend whose compiler is installed",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")


def _kernels(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.doctor import build_kernels, format_status, kernels_status
    from optimus.launch.signals import raising_keyboard_interrupt
    from optimus.platform import import_ipex

    if args.action == "status" and args.backends:
        raise ConfigError(f"kernels status lists all backends; remove {args.backends[0]!r}")
    import_ipex()  # some versions of torch have xpu devices only with IPEX
    if args.action == "build":
        with raising_keyboard_interrupt():
            build_kernels(args.backends)
    status = kernels_status()
    print(json.dumps(status) if args.json else format_status(status))
    return 0


def _doctor(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.doctor import examine, format_examination

    examination = examine()
    print(json.dumps(examination) if args.json else format_examination(examination))
    return 0


if __name__ == "__main__":
    process()
