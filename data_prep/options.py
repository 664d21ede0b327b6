"""The options of `optimus-data` and what their texts mean."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from optimus.errors import ConfigError, one_line

if TYPE_CHECKING:
    from data_prep.ranks import Team

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


def folder(text: str) -> str:
    """The name of a directory, which an empty one, the working directory to many, is not."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no name; the working directory is .")
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "is not UTF-8, in which a data set writes names; choose another"
        raise argparse.ArgumentTypeError(f"{text!r} {what}") from None
    return text


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
    _add_patterns(
        parser,
        "files, directories or quoted globs (** crosses directories): text and source files "
        "(a document each), .jsonl, .jsonl.gz, .jsonl.zst (a document a line), .parquet (a row); "
        "below directories, names that begin with a dot are left out, and counted; a link to "
        "nothing is an error; @FILE: the inputs that FILE lists, one a line, behind a # a comment",
        "leave out files whose whole name matches, such as '*/site-packages/*'",
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

    _add_tokenizer(parser, "a tokenizer.json or .model")
    parser.add_argument(
        "--id-field",
        metavar="NAME",
        help="field of a document's id in JSON lines and tables, which no two may share; one "
        "without it is fine; '': ids may be anything (id)",
    )
    parser.add_argument(
        "--max-document",
        type=size,
        metavar="SIZE",
        help="a document above it cannot be used: --on-error says what happens (any size)",
    )
    parser.add_argument(
        "--unit-size",
        type=size,
        default=UNIT_BYTES,
        metavar="SIZE",
        help="small files share a token array up to this many bytes (4MiB)",
    )


def add_import(parser: argparse.ArgumentParser) -> None:
    """Which foreign token files are read, and how."""
    files = "Megatron-LM's .bin (its .idx beside it) and dolma's or OLMo's .npy files"
    _add_patterns(parser, files, "leave out")
    _add_tokenizer(parser, "the tokenizer.json that made the ids")
    parser.add_argument(
        "--dtype", choices=("uint16", "uint32"), help="of the ids in .npy files without a header"
    )


def _add_patterns(parser: argparse.ArgumentParser, files: str, exclude: str) -> None:
    parser.add_argument(
        "--input", nargs="+", required=True, action="extend", metavar="GLOB", help=files
    )
    parser.add_argument(
        "--exclude", nargs="+", default=[], action="extend", metavar="PATTERN", help=exclude
    )


def _add_tokenizer(parser: argparse.ArgumentParser, what: str) -> None:
    """Whose ids they are, and which documents are held out."""
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help=what)
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


def add_out(parser: argparse.ArgumentParser) -> None:
    """Where output goes."""
    parser.add_argument(
        "--out", required=True, type=folder, metavar="DIR", help="the output directory"
    )


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
    """How much memory work takes."""
    parser.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="limit for all processes of this rank together (to tokenize half of the machine's "
        "memory, at least 2GB; to shard 2GB, or 135MB a worker)",
    )


def add_fused(parser: argparse.ArgumentParser) -> None:
    """Whether the token arrays stay."""
    parser.add_argument(
        "--fused",
        action="store_true",
        help="keep the token arrays packed until the shards stand, then remove them: about three "
        "quarters of the bytes written, half of them kept; another context or seed then needs "
        "tokenizing again",
    )


def add_blend(parser: argparse.ArgumentParser) -> None:
    """What is blended."""
    parser.add_argument(
        "--source",
        nargs="+",
        required=True,
        action="extend",
        metavar="DIR=WEIGHT",
        help="a directory with token arrays and its share of the instances, such as code=0.3",
    )
    parser.add_argument(
        "--instances",
        type=whole(1),
        default=0,
        metavar="N",
        help="instances in all; sources too small repeat (the most that repeats none)",
    )


def add_strategy(parser: argparse.ArgumentParser) -> None:
    """How sharding reads."""
    parser.add_argument(
        "--strategy",
        choices=("auto", "gather", "bucket"),
        default="auto",
        help="gather rows at random, or sort them into buckets, which moves twice the bytes in "
        "long reads; the output does not depend on it (auto: what is likely to be faster)",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Which of several processes that share the work this one is."""
    from data_prep.ranks import PATIENCE_S

    parser.add_argument(
        "--rank",
        type=whole(0),
        metavar="R",
        help="number of this process, from 0 (from srun, mpiexec, torchrun or a job array)",
    )
    parser.add_argument(
        "--world",
        type=whole(1),
        metavar="W",
        help="how many processes share the work; 1: this one alone, whatever started it",
    )
    parser.add_argument(
        "--patience",
        type=whole(0),
        default=int(PATIENCE_S),
        metavar="S",
        help="take over the work of ranks that have not moved for so many seconds "
        f"({PATIENCE_S:.0f})",
    )


def team_of(args: argparse.Namespace) -> Team:
    """The place that the options or the launcher give. Raises ConfigError."""
    from data_prep.ranks import Team
    from optimus.launch.environment import read_place

    rank, world = args.rank, args.world
    if world == 1:
        rank = rank or 0
    if rank is None or world is None:
        place = read_place(world=world)  # the launcher's word for what is not given
        rank = place.rank if rank is None else rank
        world = place.world if world is None else world
    if not rank < world:
        raise ConfigError(f"--rank {rank} does not lie in --world {world}; ranks begin at 0")
    return Team(rank, world, float(args.patience))
