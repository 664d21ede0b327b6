"""Options of `optimus-data`, and the types of their values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from optimus.errors import ConfigError, one_line

if TYPE_CHECKING:
    from data_prep.runtime.ranks import WorkerGroup

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ConfigError for wrong arguments. The argparse parser would print
    its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{one_line(message)}; see {self.prog} --help")


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a function that converts a text to a whole number from `low` to `high`. If `high` is
    None, there is no upper limit."""

    def parse(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else low - 1
        if value < low or (high is not None and value > high):
            bounds = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return value

    return parse


def fraction(text: str) -> float:
    """Convert `text` to a number. Raises ArgumentTypeError unless the number is in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction, at least 0 and below 1")
    return value


def folder(text: str) -> str:
    """Return `text`, the path of an output. Raise ArgumentTypeError if `text` is empty or not
    UTF-8.

    pathlib would read an empty path as the working directory.
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; use . for the working directory")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not UTF-8, the encoding of names in a data set; choose another name"
        ) from None
    return text


def size(text: str) -> int:
    """Convert a text such as `2GB`, `512MiB` or `4096` to a number of bytes."""
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
    """Add the options that select input text, and `--on-error` for text that cannot be read."""
    _add_patterns(
        parser,
        "files, directories or quoted globs (** matches any folders): text and source files "
        "(one document per file), .jsonl, .jsonl.gz, .jsonl.zst (one per line), .parquet (one per "
        "row). In directories, names with a leading dot are skipped, and their number is printed; "
        "a broken link is an error. @FILE: inputs listed in FILE, one per line, with comments "
        "after #",
        "skip files whose full path matches, such as '*/site-packages/*'",
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="field with the text (default: text)"
    )
    parser.add_argument(
        "--on-error",
        choices=("fail", "quarantine"),
        default="fail",
        help="fail: stop at text that cannot be read; quarantine: skip such text and list it in a "
        "file (default: fail)",
    )


def add_tokenize(parser: argparse.ArgumentParser) -> None:
    """Add the options that control tokenization."""
    from data_prep.sources.inputs import UNIT_BYTES

    _add_tokenizer(parser, "tokenizer.json, or .model file of sentencepiece")
    parser.add_argument(
        "--id-field",
        metavar="NAME",
        help="field with the id of a document in JSON lines and tables; different documents must "
        "have different ids or no id; '': do not read ids (default: id)",
    )
    parser.add_argument(
        "--max-document",
        type=size,
        metavar="SIZE",
        help="limit of the size of a document; --on-error applies to larger documents (default: "
        "no limit)",
    )
    parser.add_argument(
        "--unit-size",
        type=size,
        default=UNIT_BYTES,
        metavar="SIZE",
        help="maximum total size on disk of small files that share a token array (default: 4MiB)",
    )


def add_import(parser: argparse.ArgumentParser) -> None:
    """Add the options that select token files of other programs, and the options for the tokenizer
    with which these files were made."""
    files = ".bin files of Megatron-LM with their .idx files, and .npy files of dolma or OLMo"
    _add_patterns(parser, files, "skip files whose full path matches")
    _add_tokenizer(parser, "tokenizer.json of the tokenizer that made the ids")
    parser.add_argument(
        "--dtype", choices=("uint16", "uint32"), help="dtype of ids in .npy files without a header"
    )


def _add_patterns(parser: argparse.ArgumentParser, files: str, exclude: str) -> None:
    parser.add_argument(
        "--input", nargs="+", required=True, action="extend", metavar="GLOB", help=files
    )
    parser.add_argument(
        "--exclude", nargs="+", default=[], action="extend", metavar="PATTERN", help=exclude
    )


def _add_tokenizer(parser: argparse.ArgumentParser, text: str) -> None:
    """Add `--eos`, `--eval-fraction` and `--tokenizer`, whose help is `text`."""
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help=text)
    parser.add_argument(
        "--eos",
        metavar="TOKEN",
        help="end-of-document token (default: the special token with a usual name, such as </s>)",
    )
    parser.add_argument(
        "--eval-fraction",
        type=fraction,
        default=0.0,
        metavar="F",
        help="fraction of the documents to hold out, written to OUT/eval (default: 0)",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add the option `--out`, the output directory."""
    parser.add_argument("--out", required=True, type=folder, metavar="DIR", help="output directory")


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Add the positional argument for the directory of a finished data set."""
    parser.add_argument("dataset", metavar="DIR", help="directory of a data set")


def add_shuffle(parser: argparse.ArgumentParser) -> None:
    """Add the options for the length and order of instances, and for the size of shards."""
    parser.add_argument(
        "--context", type=whole(2), required=True, metavar="C", help="tokens per instance"
    )
    parser.add_argument(
        "--seed",
        type=whole(0, (1 << 64) - 1),
        default=0,
        metavar="S",
        help="seed of the shuffle (default: 0)",
    )
    parser.add_argument(
        "--carry-tails",
        action="store_true",
        help="let an instance continue in the next token array, so that the last tokens of an "
        "array are not left out",
    )
    parser.add_argument(
        "--shard-size",
        type=size,
        default=0,
        metavar="SIZE",
        help="maximum size of a shard (default: 1/64 of the data, but at least 4MiB and at most "
        "1GiB)",
    )


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the option for the number of processes."""
    parser.add_argument(
        "--workers",
        type=whole(1, 4096),
        default=0,
        metavar="N",
        help="number of processes, which does not change the output (default: the number of "
        "available cores)",
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option `--memory`, the limit of the memory of all processes of this rank together."""
    parser.add_argument(
        "--memory",
        type=size,
        metavar="SIZE",
        help="memory limit of all processes of this rank together. The default to tokenize is half "
        "of the machine's memory. The default to shard is 135MB per process, but at most half of "
        "the machine's memory. Each default is at least 2GB",
    )


def add_fused(parser: argparse.ArgumentParser) -> None:
    """Add the option `--fused`, which removes token arrays when the shards are complete."""
    parser.add_argument(
        "--fused",
        action="store_true",
        help="compress token arrays, and remove them when the shards are complete. Compared with "
        "a run without --fused, the run writes about 25%% fewer bytes, and the output takes half "
        "of the space. To change the context or the seed later, the text must be tokenized again",
    )


def add_blend(parser: argparse.ArgumentParser) -> None:
    """Add the options for the sources of a blend."""
    parser.add_argument(
        "--source",
        nargs="+",
        required=True,
        action="extend",
        metavar="DIR=WEIGHT",
        help="directory with token arrays, and its weight, such as code=0.3. The number of "
        "instances from a directory is proportional to its weight",
    )
    parser.add_argument(
        "--instances",
        type=whole(1),
        default=0,
        metavar="N",
        help="total number of instances; if a source has too few instances, its instances are "
        "repeated (default: the largest number for which no instance is repeated)",
    )


def add_strategy(parser: argparse.ArgumentParser) -> None:
    """Add the option for the strategy of reading token arrays: gather, bucket or auto."""
    parser.add_argument(
        "--strategy",
        choices=("auto", "gather", "bucket"),
        default="auto",
        help="gather: read rows at random positions; bucket: first sort the rows into files (all "
        "reads are long, but the rows are read and written twice); auto: the strategy that is "
        "probably faster. All strategies write the same output (default: auto)",
    )


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options for the rank of this process and the number of ranks that share the work."""
    parser.add_argument(
        "--rank",
        type=whole(0),
        metavar="R",
        help="rank of this process, from 0 (default: as set by srun, mpiexec, torchrun or a job "
        "array)",
    )
    parser.add_argument(
        "--world",
        type=whole(1),
        metavar="W",
        help="number of processes that share the work (default: as set by the launcher); 1: this "
        "process does all work, even if a launcher started several processes",
    )
    parser.add_argument("--patience", type=_refuse_patience, help=argparse.SUPPRESS)


def _refuse_patience(text: str) -> NoReturn:
    raise ConfigError(
        f"--patience {text} is not an option any more: ranks do not do the work of a lost rank; "
        "leave out --patience. When a rank is lost, run the same command again on all ranks"
    )


def worker_group_of(args: argparse.Namespace) -> WorkerGroup:
    """Return the `WorkerGroup` of this rank, from the options or the variables of the launcher.

    Args:
        args: Parsed arguments of a command that has the options of `add_ranks`.

    Raises:
        ConfigError: The rank is not below the number of ranks.
        LaunchError: The launcher's variables are missing or contradict each other.
    """
    from data_prep.runtime.ranks import WorkerGroup
    from optimus.launch.environment import read_job_rank

    rank, world = args.rank, args.world
    if world == 1:
        rank = rank or 0
    if rank is None or world is None:
        launched = read_job_rank(world=world)
        rank = launched.rank if rank is None else rank
        world = launched.world if world is None else world
    if not rank < world:
        raise ConfigError(f"--rank {rank} must be below --world {world}; ranks start at 0")
    return WorkerGroup(rank, world)
