"""The subcommands of `optimus-data`. Each function imports the packages that it needs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.cli import options
from optimus.errors import DataError, counted, printable_lines

if TYPE_CHECKING:
    from data_prep.dataset.manifest import Manifest
    from data_prep.pipeline.run import ShardRequest, TokenizeRequest
    from data_prep.pipeline.shuffle import ShuffleRequest
    from data_prep.runtime.ranks import WorkerGroup


def run_command(argv: Sequence[str] | None) -> int:
    """Run a subcommand and return its exit status.

    Args:
        argv: The arguments. None: use the command line of this process.

    Raises:
        OptimusError: The arguments are wrong, or the command fails.
    """
    try:
        args = _parser().parse_args(argv)
        return args.run(args)
    finally:
        sys.stdout.flush()  # flush here: the caller handles a closed pipe


_Group = Callable[[argparse.ArgumentParser], None]
_SHARDING = (options.add_workers, options.add_memory, options.add_strategy, options.add_ranks)
_WHOLE_RUN = (
    options.add_inputs,
    options.add_tokenize,
    options.add_shuffle,
    options.add_out,
    options.add_fused,
    *_SHARDING,
)


def _parser() -> argparse.ArgumentParser:
    parser = options.Parser(
        prog="optimus-data",
        description="Convert text to shuffled shards of tokens.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_makers(commands)
    _add_steps(commands)
    _add_readers(commands)
    return parser


def _add_makers(commands: Any) -> None:
    """Add the subcommands `train-tokenizer`, `run`, `plan` and `blend` to the parser."""
    text = "Train a byte-level BPE tokenizer."
    add = _add(commands, "train-tokenizer", _train_tokenizer, text, options.add_inputs)
    add.add_argument(
        "--vocab-size",
        type=options.whole(1, 1 << 24),
        required=True,
        metavar="N",
        help="maximum number of token ids",
    )
    add.add_argument(
        "--out",
        required=True,
        type=options.folder,
        metavar="FILE",
        help="tokenizer.json to write",
    )

    text = "Tokenize, shuffle and shard. The same command continues an interrupted run."
    _add(commands, "run", _run, text, *_WHOLE_RUN)
    _add(commands, "plan", _plan, "Estimate the disk space, memory and time of a run.", *_WHOLE_RUN)
    text = "Mix several sources into one data set, in exact proportion to their weights."
    groups = (options.add_blend, options.add_shuffle, options.add_out, *_SHARDING)
    _add(commands, "blend", _blend, text, *groups)


def _add_steps(commands: Any) -> None:
    """Add the subcommands for the separate steps of the subcommand `run`."""
    text = "Step 1 of run: convert text to token arrays."
    groups: tuple[_Group, ...] = (options.add_inputs, options.add_tokenize, options.add_out)
    groups += (options.add_workers, options.add_memory, options.add_ranks)
    _add(commands, "tokenize", _tokenize, text, *groups)

    text = "Replace tokenize: convert token files of Megatron-LM, dolma or OLMo to token arrays."
    groups = (options.add_import, options.add_out, options.add_workers, options.add_ranks)
    _add(commands, "import", _import, text, *groups)

    add = _add(commands, "shuffle", _shuffle, "Step 2 of run: order the instances.")
    add.add_argument("out", metavar="OUT", help="directory with token arrays")
    add.add_argument(
        "--to",
        type=options.folder,
        metavar="NEW",
        help="directory of the data set (default: OUT); with --to, OUT is not changed",
    )
    options.add_shuffle(add)
    options.add_ranks(add)

    add = _add(commands, "shard", _shard, "Step 3 of run: write shards and manifest.", *_SHARDING)
    add.add_argument("out", metavar="OUT", help="directory in which shuffle wrote order.json")


def _add_readers(commands: Any) -> None:
    """Add the subcommands that read a finished data set."""
    text = "Check all files of a data set; the exit status is 1 if a file is damaged."
    _add(commands, "verify", _verify, text, options.add_dataset)

    text = "Show the text and the sources of an instance."
    add = _add(commands, "inspect", _inspect, text, options.add_dataset)
    add.add_argument("instance", metavar="K", type=options.whole(0), help="instance number, from 0")

    text = "Print counts, entropy, and unigram and bigram losses."
    add = _add(commands, "stats", _stats, text, options.add_dataset)
    add.add_argument(
        "--eval",
        metavar="EVAL_DIR",
        help="data set on which the losses are computed (default: the folder eval of the data set, "
        "if this folder exists)",
    )


def _add(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *groups: _Group,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    for group in groups:
        group(parser)
    return parser


def _answer(args: argparse.Namespace, value: dict[str, Any], lines: Sequence[str]) -> int:
    text = json.dumps(value) if args.json else "\n".join(lines)
    try:
        print(text)
    except UnicodeEncodeError:  # the name of a file may have bytes that are not text
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "backslashreplace").decode(encoding))
    return 0


def _workers(args: argparse.Namespace) -> int:
    from data_prep.runtime.pool import cores_of_this_rank

    return args.workers or cores_of_this_rank()


def _train_tokenizer(args: argparse.Namespace) -> int:
    from data_prep.pipeline.train_tokenizer import train_tokenizer
    from data_prep.runtime.progress import say
    from data_prep.sources.inputs import find_inputs

    start = time.monotonic()
    inputs = find_inputs(args.input, args.exclude, say=say)
    size, set_aside = train_tokenizer(
        inputs,
        args.vocab_size,
        args.out,
        text_field=args.text_field,
        quarantine=args.on_error == "quarantine",
    )
    value = {
        "out": args.out,
        "vocab_size": size,
        "inputs": len(inputs),
        "input_bytes": sum(file.size for file in inputs),
        "quarantined": set_aside,
        "wall_s": round(time.monotonic() - start, 3),
    }
    lines = [f"quarantined {problem}" for problem in set_aside]
    if size < args.vocab_size:
        lines.append(
            f"the vocabulary has {size} ids, fewer than --vocab-size {args.vocab_size}, because "
            "the text has no more pairs to merge"
        )
    lines.append(
        f"{args.out}: {counted(size, 'id')} from {counted(len(inputs), 'file')} in "
        f"{value['wall_s']:.1f} s"
    )
    return _answer(args, value, lines)


def _tokenize_request(args: argparse.Namespace) -> TokenizeRequest:
    from data_prep.pipeline.run import TokenizeRequest

    return TokenizeRequest(
        inputs=args.input,
        tokenizer=args.tokenizer,
        out=Path(args.out),
        workers=_workers(args),
        exclude=args.exclude,
        eos=args.eos,
        text_field=args.text_field,
        eval_fraction=args.eval_fraction,
        unit_bytes=args.unit_size,
        quarantine=args.on_error == "quarantine",
        memory_bytes=args.memory,
        max_document=args.max_document,
        id_field=args.id_field,
    )


def _shuffle_request(args: argparse.Namespace) -> ShuffleRequest:
    from data_prep.pipeline.shuffle import ShuffleRequest

    return ShuffleRequest(args.context, args.seed, args.carry_tails, args.shard_size)


def _shard_request(args: argparse.Namespace) -> ShardRequest:
    from data_prep.pipeline.run import ShardRequest
    from data_prep.pipeline.shard import memory_for

    workers = _workers(args)
    return ShardRequest(workers, args.memory or memory_for(workers), args.strategy)


def _run(args: argparse.Namespace) -> int:
    from data_prep.pipeline.run import prepare

    start, group = time.monotonic(), options.worker_group_of(args)
    request, order = _tokenize_request(args), _shuffle_request(args)
    manifests = prepare(request, order, _shard_request(args), fused=args.fused, group=group)
    return _report(args, Path(args.out), manifests, start, group)


def _tokenize(args: argparse.Namespace) -> int:
    from data_prep.pipeline.run import tokenize

    start = time.monotonic()
    tokenize(_tokenize_request(args), options.worker_group_of(args))
    value: dict[str, Any] = {"out": args.out, "wall_s": round(time.monotonic() - start, 3)}
    counts, lines = _token_arrays(Path(args.out))
    return _answer(args, value | counts, lines)


def _token_arrays(out: Path) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Count the tokens and documents of each split in the directory `out`.

    Returns:
        A dict that maps the name of each split to a dict with the keys `tokens` and `documents`,
        and a list with a line of text for each split.
    """
    from data_prep.pipeline.shuffle import data_sets
    from data_prep.tokenize.token_set import read_token_set

    counts, lines = {}, []
    for dataset in data_sets(out):
        _, _, records = read_token_set(dataset / "tokens")
        sums = {key: sum(record[key] for record in records) for key in ("tokens", "documents")}
        counts[records[0]["part"]] = sums
        lines.append(
            f"{dataset}/tokens: {counted(sums['tokens'], 'token')} of "
            f"{counted(sums['documents'], 'document')} in {counted(len(records), 'array')}"
        )
    return counts, lines


def _import(args: argparse.Namespace) -> int:
    from data_prep.pipeline.import_run import ImportRequest, import_tokens

    start, out = time.monotonic(), Path(args.out)
    request = ImportRequest(
        inputs=args.input,
        tokenizer=args.tokenizer,
        out=out,
        workers=_workers(args),
        exclude=args.exclude,
        eos=args.eos,
        dtype=args.dtype,
        eval_fraction=args.eval_fraction,
    )
    corrections = import_tokens(request, options.worker_group_of(args))
    counts, lines = _token_arrays(out)
    lines[0] += f"; EOS added to {counted(corrections['eos_added'], 'document')}, "
    lines[0] += f"{counted(corrections['empty_documents'], 'empty document')} left out"
    value = {"out": args.out, **counts.pop("train"), **corrections, **counts}
    value["wall_s"] = round(time.monotonic() - start, 3)
    return _answer(args, value, lines)


def _shuffle(args: argparse.Namespace) -> int:
    from data_prep.pipeline.shuffle import shuffle

    source = Path(args.out)
    target = Path(args.to) if args.to else source
    orders = shuffle(source, target, _shuffle_request(args), options.worker_group_of(args))
    value = {
        order.part: {
            "instances": order.num_instances,
            "shards": order.num_shards,
            "tail_tokens": order.tail_tokens,
        }
        for order in orders
    }
    lines = [
        f"{target}: {split}: {counted(order['instances'], 'instance')} for "
        f"{counted(order['shards'], 'shard')}, {counted(order['tail_tokens'], 'token')} in no "
        "instance"
        for split, order in value.items()
    ]
    return _answer(args, {"out": str(target), **value}, lines)


def _shard(args: argparse.Namespace) -> int:
    from data_prep.pipeline.run import shard

    start, out, group = time.monotonic(), Path(args.out), options.worker_group_of(args)
    return _report(args, out, shard(out, _shard_request(args), group), start, group)


def _blend(args: argparse.Namespace) -> int:
    from data_prep.pipeline.run import shard
    from data_prep.pipeline.shuffle import blend

    start, out, group = time.monotonic(), Path(args.out), options.worker_group_of(args)
    blend(args.source, out, _shuffle_request(args), args.instances, group)
    return _report(args, out, shard(out, _shard_request(args), group), start, group)


def _plan(args: argparse.Namespace) -> int:
    from data_prep.pipeline.plan import describe, estimate

    value = estimate(
        _tokenize_request(args),
        _shuffle_request(args),
        memory_bytes=_shard_request(args).memory_bytes,
        world=args.world or 1,
        fused=args.fused,
        strategy=args.strategy,
    )
    _answer(args, value, describe(value))
    return 0 if value["fits"] else 1


def _report(
    args: argparse.Namespace,
    out: Path,
    manifests: Sequence[Manifest],
    start: float,
    group: WorkerGroup,
) -> int:
    """Print a report on a finished data set as text or JSON. Ranks above 0 print nothing. Return
    the exit status, 0."""
    if group.rank > 0:
        return 0
    from data_prep.dataset.describe import report

    return _answer(args, *report(str(out), manifests, time.monotonic() - start))


def _existing(path: str) -> Path:
    if not Path(path).is_dir():
        raise DataError(f"{path} is not a directory; give the directory of a data set")
    return Path(path)


def _verify(args: argparse.Namespace) -> int:
    from data_prep.pipeline.verify import verify
    from data_prep.runtime.progress import say

    damage = []
    for line in verify(_existing(args.dataset)):
        damage.append(line)
        say(f"damage: {line}")
    _answer(
        args,
        {"dataset": args.dataset, "whole": not damage, "damage": damage},
        [f"{args.dataset}: {counted(len(damage), 'problem') if damage else 'no damage found'}"],
    )
    return 1 if damage else 0


def _inspect(args: argparse.Namespace) -> int:
    from data_prep.dataset.describe import inspect

    value = inspect(_existing(args.dataset), args.instance)
    lines = [f"instance {args.instance}: {value['shard']} row {value['row']}"]
    if value["epoch"]:
        lines[0] += (
            f"; the data set has {counted(value['instances'], 'instance')}, so this is position "
            f"{value['place']} of epoch {value['epoch']} (the first epoch is 0)"
        )
    for source in value["sources"]:
        document = source["input"] + (f":{source['line']}" if source["line"] else "")
        lines.append(
            f"tokens {source['first']} to {source['stop'] - 1}: {document}, "
            f"from token {source['document_token']} of this document"
        )
    lines += ["", value["text"]]
    if sys.stdout.isatty():  # a terminal would execute escape sequences in a name or a text
        lines = [printable_lines(line) for line in lines]
    return _answer(args, value, lines)


def _stats(args: argparse.Namespace) -> int:
    from data_prep.dataset.describe import default_held_out, for_training, stats
    from data_prep.dataset.manifest import read_manifest

    dataset = _existing(args.dataset)
    held_out = _existing(args.eval) if args.eval else default_held_out(dataset)
    value = stats(dataset, held_out)
    losses = value.get("held_out", {})
    flat = {key: figure for key, figure in value.items() if key != "held_out"}
    flat |= {f"held-out {key}": figure for key, figure in losses.items()}
    lines = [
        f"{key.replace('_', ' '):24} {figure:{',.4f' if isinstance(figure, float) else ''}}"
        for key, figure in flat.items()
    ]
    manifest = read_manifest(dataset)
    if manifest.part == "train":
        lines.append(for_training(manifest))
    return _answer(args, value, lines)
