"""The commands `optimus checkpoint list | verify | show | export`. `list` and `show` do not import
torch."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Mapping
from typing import Any

from optimus.errors import CheckpointError, ConfigError, counted, one_line, printable

logger = logging.getLogger(__name__)


def add_to(commands: argparse._SubParsersAction) -> None:
    """Add the command `checkpoint` and its subcommands to the parser of `optimus`."""
    text = "List, check, show and export the checkpoints of a run."
    parser = commands.add_parser("checkpoint", help=text, description=text)
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _add(actions, "list", _list, "List the checkpoints, and show which of them are valid.")
    verify = _add(
        actions,
        "verify",
        _verify,
        "Compare files with their checksums, and weights with the model configuration.",
    )
    verify.add_argument(
        "--threads",
        type=int,
        default=0,
        metavar="N",
        help="number of threads; 0, the default: 2 per core, at most 16",
    )
    _add(
        actions,
        "show",
        _show,
        "Show a checkpoint, or the newest valid full checkpoint of a run, in detail.",
    )
    export = _add(actions, "export", _export, "Write the weights as a Hugging Face directory.")
    export.add_argument("out", help="directory to create; it must not exist")
    export.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="dtype to write (default: as stored)"
    )


def _add(
    actions: argparse._SubParsersAction, name: str, run: Any, text: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text)
    parser.add_argument("path", help="run directory or checkpoint")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)
    return parser


def _list(args: argparse.Namespace, arguments: list[str]) -> int:
    from optimus.checkpoint.inspect import list_checkpoints

    result = list_checkpoints(args.path)
    print(json.dumps(result) if args.json else _format_list(result))
    return 0


def _verify(args: argparse.Namespace, arguments: list[str]) -> int:
    """Run `optimus checkpoint verify`. The exit status is 1 if a checkpoint is damaged."""
    from optimus.checkpoint.inspect import verify

    if args.threads < 0:
        raise ConfigError(
            f"--threads {args.threads} is negative; use 1 or more, or 0 for 2 per core (at most 16)"
        )
    result = verify(args.path, args.threads)
    print(json.dumps(result) if args.json else _format_verify(result))
    return 0 if result["valid"] else 1


def _show(args: argparse.Namespace, arguments: list[str]) -> int:
    """Run `optimus checkpoint show`. The exit status is 1 if the checkpoint is damaged."""
    from optimus.checkpoint.inspect import show

    result = show(args.path)
    print(json.dumps(result) if args.json else _format_show(result))
    return 1 if result["state"] == "damaged" else 0


def _export(args: argparse.Namespace, arguments: list[str]) -> int:
    """Run `optimus checkpoint export`, an alias of `optimus convert to-hf`. The exit status is 1 if
    the checkpoint is damaged."""
    from optimus.checkpoint.convert import to_hf
    from optimus.checkpoint.inspect import find
    from optimus.launch.signals import raising_keyboard_interrupt

    find(args.path)
    try:
        with raising_keyboard_interrupt():
            source = to_hf(args.path, args.out, args.dtype)
    except CheckpointError as error:
        logger.error(one_line(error))
        return 1
    result = {"from": str(source), "out": args.out}
    print(json.dumps(result) if args.json else f"wrote {args.out} from {source}")
    return 0


def _format_list(result: Mapping[str, Any]) -> str:
    head = ("checkpoint", "state", "step", "tokens", "size", "B/param", "age", "layout")
    rows = [head]
    for about in result["checkpoints"]:
        per_param = about["bytes_per_param"]
        rows.append(
            (
                ("set-aside/" if about["set_aside"] else "") + about["name"],
                about["state"],
                _number(about["step"]),
                _number(about["tokens"]),
                _size(about["bytes"]),
                "-" if per_param is None else f"{per_param:.2f}",
                "-" if about["age_s"] is None else _age(about["age_s"]),
                printable(about["layout"] or "-"),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    lines += [
        printable(f"{about['name']}: {about['problem']}")
        for about in result["checkpoints"]
        if about["problem"]
    ]
    if result["full_by_model"]:
        lines.append(
            f"a model-only checkpoint has 1/{result['full_by_model']:.2f} of the bytes of a full "
            "checkpoint (1/8 in the Optimus paper, which also counts gradients)"
        )
    if any(about["kind"] == "full" for about in result["checkpoints"]):
        start = result["next_start"] or "nothing: no full checkpoint is valid"
        lines.append(f"checkpoint.load = auto resumes from {start}")
    return "\n".join(lines)


def _format_verify(result: Mapping[str, Any]) -> str:
    lines = []
    for about in result["checkpoints"]:
        size, seconds = about["bytes"], about["s"]
        speed = f"{_size(size)} in {seconds:.2f} s, {size / seconds / 1e6:,.0f} MB/s"
        lines.append(f"{about['name']}: " + ("DAMAGED" if about["problems"] else f"valid; {speed}"))
        lines += [f"    {printable(problem)}" for problem in about["problems"]]
    return "\n".join(lines)


def _format_show(about: Mapping[str, Any]) -> str:
    facts = [
        ("checkpoint", about["path"]),
        ("state", about["state"] + (f": {about['problem']}" if about["problem"] else "")),
        ("kind", about["kind"]),
        ("step", f"{about['step']:,} ({counted(about['updates'], 'update')} of this optimizer)"),
        ("tokens", f"{about['tokens']:,}"),
        ("saved", f"{about['saved_at']}, {_age(about['age_s'])} ago"),
        ("origin", f"checkpoint.load = {about['origin']}"),
        ("layout", about["layout"] or "-"),
        ("size", f"{counted(about['bytes'], 'byte')} in {counted(len(about['files']), 'file')}"),
    ]
    if about["params"]:
        facts.append(("parameters", f"{about['params']:,}; {about['bytes_per_param']:.3f} B each"))
    if writers := about["writers"]:
        facts.append(
            (
                "written by",
                f"{writers['files']} of "
                f"{counted(about['ranks'], 'rank') if about['ranks'] else '? ranks'}",
            )
        )
        if "rank_max_by_mean" in writers:
            facts.append(
                (
                    "balance",
                    f"checkpoint.scatter = {about['scatter']}; maximum / mean of the bytes "
                    f"written by a rank: {writers['rank_max_by_mean']:.3f}, by a node: "
                    f"{writers['node_max_by_mean']:.3f} (greatest ratios of all pipeline stages)",
                )
            )
    width = max(len(name) for name, _ in facts)
    return "\n".join(f"{name:<{width}}  {printable(str(value))}" for name, value in facts)


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _size(size: int) -> str:
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= bytes_:
            return f"{size / bytes_:.2f} {unit}"
    return f"{size / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
