"""The options of `optimus-data` and what their texts mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn

from optimus.errors import ConfigError, one_line

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other mistake is said."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{one_line(message)}; see {self.prog} --help")


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """A parser of whole numbers in [low, high]."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else low - 1
        if value < low or (high is not None and value > high):
            upper = f"to {high}" if high is not None else "or more"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, {low} {upper}")
        return value

    return parse


def fraction(text: str) -> float:
    """A number in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction, at least 0 and below 1")
    return value


def size(text: str) -> int:
    """Bytes of `2GB`, `512MiB`, `4096`."""
    upper = text.strip().upper()
    digits = upper.rstrip("KMGTIB")
    factor = (_DECIMAL | _BINARY).get(upper[len(digits) :])
    try:
        value = int(float(digits) * factor) if factor else 0
    except (ValueError, OverflowError):
        value = 0
    if not 1 <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 2GB or 512MiB")
    return value


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Which text is read, and what happens to text that cannot be."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        action="extend",
        metavar="GLOB",
        help="files, directories or quoted globs (** crosses directories): text and source files "
        "(a document each), .jsonl, .jsonl.gz, .jsonl.zst (a document a line), .parquet (a row); "
        "@FILE: the inputs that FILE lists, one a line",
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=[],
        action="extend",
        metavar="PATTERN",
        help="leave out files whose whole name matches, such as '*/site-packages/*'",
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="JSON field of the text (text)"
    )
    parser.add_argument(
        "--on-error",
        choices=("fail", "quarantine"),
        default="fail",
        help="stop at text that cannot be read, or set it aside and list it (fail)",
    )


def add_tokenize(parser: argparse.ArgumentParser) -> None:
    """How text becomes token arrays."""
    from data_prep.sources import UNIT_BYTES

    parser.add_argument(
        "--tokenizer", required=True, metavar="FILE", help="a tokenizer.json or .model"
    )
    parser.add_argument(
        "--eos", metavar="TOKEN", help="its end-of-document token, where its name does not tell"
    )
    parser.add_argument(
        "--eval-fraction",
        type=fraction,
        default=0.0,
        metavar="F",
        help="hold out this share of the documents, into OUT/eval (0)",
    )
    parser.add_argument(
        "--unit-size",
        type=size,
        default=UNIT_BYTES,
        metavar="SIZE",
        help="small files share a token array up to this many bytes (4MiB)",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Where output goes."""
    parser.add_argument("--out", required=True, metavar="DIR", help="the output directory")


def add_shuffle(parser: argparse.ArgumentParser) -> None:
    """How token arrays become an order of instances."""
    parser.add_argument(
        "--context", type=whole(2), required=True, metavar="C", help="tokens of an instance"
    )
    parser.add_argument(
        "--seed", type=whole(0, (1 << 64) - 1), default=0, metavar="S", help="of the shuffle (0)"
    )
    parser.add_argument(
        "--carry-tails",
        action="store_true",
        help="let instances cross from one token array into the next, so that no tail is lost",
    )
    parser.add_argument(
        "--shard-size",
        type=size,
        default=0,
        metavar="SIZE",
        help="bytes of a shard (a 64th of the data, from 4MiB to 1GiB)",
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """How many processes work."""
    parser.add_argument(
        "--workers",
        type=whole(1, 4096),
        default=0,
        metavar="N",
        help="processes (as many as this process may use cores); the output does not depend on it",
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """How much memory sharding takes."""
    parser.add_argument(
        "--memory",
        type=size,
        default=2 * 10**9,
        metavar="SIZE",
        help="limit for sharding, all processes together (2GB)",
    )
