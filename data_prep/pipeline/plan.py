"""`optimus-data plan`: estimate the number of tokens, the disk space, the memory and the time of a
run.

The estimate is based on a few MB of the inputs and on the present speed of this machine. If the
inputs are similar to each other, the estimated numbers of documents and tokens usually differ from
the true numbers by a few percent.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data_prep import layout
from data_prep.pipeline.run import TokenizeRequest, memory_of
from data_prep.pipeline.shard import divide_memory
from data_prep.pipeline.shuffle import ShuffleRequest
from data_prep.runtime.memory import Limits
from data_prep.runtime.progress import say, short
from data_prep.shuffle.order import rows_of_shard
from data_prep.sources.documents import DamagedFile, InputReader, LongText, Problem
from data_prep.sources.inputs import InputFile, find_inputs, group_units, kind_of, require_file
from data_prep.tokenize.packed import packed_share, require_zstd
from data_prep.tokenizer.tokenizer import read_facts, shared_encoder
from optimus.errors import DataError, counted
from optimus.io import files
from optimus.launch.environment import usable_memory

_SAMPLE_FILES = 16
_SAMPLE_TEXT_BYTES = 256 << 10
"""Bytes of text to tokenize from each sampled file."""
_SAMPLE_DISK_BYTES = 8 << 20
"""Bytes to read from each sampled file, to measure the ratio (size of the text) / (size of the
file)."""
_LARGEST_WHOLE = 64 << 20
"""Size in bytes above which a text file is not sampled: sampling would read the whole file."""
_DOC_BYTES = 40
"""Bytes that a document takes on the disk in addition to its tokens: 24 for a row in the table of
documents, and 16 for the hash of the document's id."""
_PROBE_BYTES = 32 << 20


@dataclass
class Sample:
    """Estimated totals over all inputs. For each group of files with the same suffix and similar
    sizes, a single file is sampled. The counts in this file are extrapolated to the group."""

    text_bytes: float = 0.0
    documents: float = 0.0
    tokens: float = 0.0
    """Number of tokens, not counting EOS."""
    encoded_bytes: int = 0
    encode_s: float = 0.0
    """CPU seconds to encode `encoded_bytes` bytes of text."""
    ids: list[np.ndarray] = field(default_factory=list)
    """Token ids of a sample of the encoded text, uint32."""
    problem: str = ""
    """Description of the first problem in the sampled documents; "" if there is none."""


def estimate(
    request: TokenizeRequest,
    shuffle: ShuffleRequest,
    *,
    memory_bytes: int,
    world: int,
    fused: bool,
    strategy: str,
) -> dict[str, Any]:
    """Estimate the counts, disk space, memory and time of a run.

    Args:
        request: The inputs and the parameters of tokenization.
        shuffle: The length and order of the instances, and the size of the shards.
        memory_bytes: The memory limit of a rank while it writes shards.
        world: The number of ranks.
        fused: True: estimate a run with `--fused`, which removes the token arrays at the end of the
            run.
        strategy: `--strategy` of the run: "auto", "gather" or "bucket".

    Returns:
        A dict with counts, sizes in bytes (keys that end with `_bytes`), times in seconds (keys
        that end with `_s`), `dtype`, `strategy`, and `fits`, which is True if the disk has enough
        free space.

    Raises:
        DataError, ConfigError: The run would fail with the same error.
    """
    tokenizer = require_file(request.tokenizer, "--tokenizer")
    dtype = layout.dtype_name(read_facts(tokenizer, request.eos).vocab_size)
    inputs = find_inputs(request.inputs, request.exclude, request.out, say)
    shard_workers, block_bytes = divide_memory(memory_bytes, request.workers)
    limits = memory_of(request, tokenizer)[1]
    sample = take_sample(inputs, request.text_field, str(tokenizer), limits)
    input_bytes = sum(file.size for file in inputs)
    units = len(group_units(inputs, request.unit_bytes))
    counts = _counts(sample, request.eval_fraction, shuffle, units)
    token_bytes = counts["tokens"] * layout.little_endian(dtype).itemsize
    row_bytes = shuffle.context * layout.little_endian(dtype).itemsize
    rows = rows_of_shard(counts["instances"], row_bytes, shuffle.shard_bytes)
    shard_bytes = (counts["instances"] + counts["eval_instances"]) * row_bytes
    docs_bytes = counts["documents"] * _DOC_BYTES
    if strategy == "auto":  # use the strategy that the run probably selects
        strategy = "gather" if world > 1 or shard_bytes < usable_memory() // 2 else "bucket"
    writes = 2 if strategy == "bucket" else 1  # number of times that each row is written
    waiting = token_bytes
    if fused:
        require_zstd()
        ids = np.concatenate(sample.ids).astype(layout.little_endian(dtype))
        waiting = round(token_bytes * packed_share(ids)) if len(ids) else 0
    peak = waiting + docs_bytes + shard_bytes * writes
    final = shard_bytes + docs_bytes + (0 if fused else token_bytes)
    out = request.out.absolute()
    folder = next(filter(Path.is_dir, (out, *out.parents)))
    free = shutil.disk_usage(folder).free
    encode_s = sample.text_bytes * sample.encode_s / max(1, sample.encoded_bytes)
    written_per_s = _write_speed(folder)
    return {
        "inputs": len(inputs),
        "input_bytes": input_bytes,
        "units": units,
        **counts,
        "shards": -(-counts["instances"] // rows),
        "dtype": dtype,
        "strategy": strategy,
        "workers": request.workers,
        "world": world,
        "disk_peak_bytes": peak,
        "disk_final_bytes": final,
        "disk_free_bytes": free,
        "memory_bytes": min(memory_bytes, shard_workers * (block_bytes + (200 << 20))),
        "tokenize_s": encode_s / (request.workers * world),
        # The factor 2 counts a read and a write of each byte. None: the speed of the disk could not
        # be measured.
        "shard_s": 2 * writes * shard_bytes / written_per_s / world if written_per_s else None,
        "sampled_bytes": sample.encoded_bytes,
        "fits": peak <= free,
    }


def _counts(
    sample: Sample, eval_fraction: float, shuffle: ShuffleRequest, units: int
) -> dict[str, int]:
    """Return the expected number of documents, of tokens, of training instances (`instances`) and
    of held-out instances (`eval_instances`)."""
    documents = round(sample.documents)
    tokens = round(sample.tokens) + documents
    tails = 0 if shuffle.carry_tails else units * shuffle.context // 2
    held_out = round(tokens * eval_fraction)
    return {
        "documents": documents,
        "tokens": tokens,
        "instances": max(0, tokens - held_out - tails) // shuffle.context,
        "eval_instances": held_out // shuffle.context,
    }


def take_sample(
    inputs: Sequence[InputFile], text_field: str, tokenizer: str, limits: Limits
) -> Sample:
    """Estimate the number of documents, the number of tokens and the bytes of text in the inputs.

    Inputs with the same suffix and similar sizes form a stratum. The start of one file per stratum
    is read. Documents that cannot be used are left out. Raises DataError if no text can be sampled,
    or if a document exceeds `limits`.
    """
    known = [file for file in inputs if file.size <= _LARGEST_WHOLE or kind_of(file.name) != "text"]
    by_suffix: dict[str, list[InputFile]] = {}
    for file in sorted(known, key=lambda file: (file.size, file.name)):
        by_suffix.setdefault(Path(file.name).name.partition(".")[2].lower(), []).append(file)
    whole = max(1, sum(file.size for file in known))
    sample = Sample()
    for similar in by_suffix.values():
        share = sum(file.size for file in similar) / whole
        count = min(len(similar), max(1, round(_SAMPLE_FILES * share)))
        edges = [len(similar) * n // count for n in range(count + 1)]
        for first, stop in itertools.pairwise(edges):
            _sample_stratum(similar[first:stop], text_field, tokenizer, sample, limits)
    if not sample.encoded_bytes:
        reason = sample.problem or "the start of each sampled file contains no text"
        if not known:
            size = f"{_LARGEST_WHOLE >> 20} MiB"
            reason = f"all are text files above {size}, which plan does not read"
        raise DataError(f"no text of {counted(len(inputs), 'input')} can be sampled: {reason}")
    left_out = sum(file.size for file in inputs) / max(1, sum(file.size for file in known))
    sample.text_bytes *= left_out
    sample.tokens *= left_out
    sample.documents *= len(inputs) / len(known) if left_out > 1 else 1
    return sample


def _sample_stratum(
    stratum: Sequence[InputFile], text_field: str, tokenizer: str, sample: Sample, limits: Limits
) -> None:
    """Sample the middle file of a stratum, and add an estimate for all files of the stratum to
    `sample`."""
    file = stratum[len(stratum) // 2]
    encoder = shared_encoder(tokenizer)
    read = text = documents = encoded = tokens = 0

    def advance(count: int) -> None:
        nonlocal read
        read += count

    reader = InputReader(file, text_field, advance, limits=limits)
    try:
        for document in reader:
            if isinstance(document, Problem):
                sample.problem = sample.problem or document.at(file.name)
                continue
            size = document.size if isinstance(document, LongText) else len(document.data)
            if (
                encoder.cutter is None and size > _SAMPLE_TEXT_BYTES
            ):  # the run has to encode the whole document at once
                needs, where = size * encoder.bytes_per_byte, f"{file.name}:{document.line}"
                limits.refuse(where, f"a document of {size} bytes", needs)
            documents += 1
            text += size
            if encoded < _SAMPLE_TEXT_BYTES:
                block = next(document.blocks) if isinstance(document, LongText) else document.text
                block = block[:_SAMPLE_TEXT_BYTES]
                start = time.process_time()
                ids = encoder.encode([block])[0]
                sample.encode_s += time.process_time() - start
                tokens += len(ids)
                encoded += len(block.encode())
                sample.ids.append(ids)
            if isinstance(document, LongText):
                read = file.size  # the file is this document
                break
            if read >= _SAMPLE_DISK_BYTES:
                break
    except DamagedFile as error:  # the run will report the damage
        sample.problem = sample.problem or error.problem.at(file.name)
    scale = sum(other.size for other in stratum) / max(1, min(read, file.size))
    sample.documents += documents * (len(stratum) if read >= file.size else scale)
    sample.text_bytes += text * scale
    sample.tokens += tokens / max(1, encoded) * text * scale
    sample.encoded_bytes += encoded


def _write_speed(folder: Path) -> float | None:
    """Return the speed of writes to `folder` in bytes per second, or None if a write fails."""
    path = files.temporary_name(folder / "plan")
    block = os.urandom(1 << 20)
    try:
        start = time.perf_counter()
        with open(path, "xb", buffering=0) as file:
            path.unlink()  # now, so that the file does not remain if this process is killed
            for _ in range(_PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
        return _PROBE_BYTES / (time.perf_counter() - start)
    except OSError:
        return None


def describe(value: dict[str, Any]) -> list[str]:
    """Return the lines of text that describe `value`, the result of `estimate`."""
    shard_s = "?" if value["shard_s"] is None else duration(value["shard_s"])
    peak, free = short(value["disk_peak_bytes"]), short(value["disk_free_bytes"])
    verdict = "fits" if value["fits"] else "does NOT fit: use another disk, --fused or less text"
    return [
        f"input   {counted(value['inputs'], 'file')}, {short(value['input_bytes'])}B, in "
        f"{counted(value['units'], 'unit')}; about {short(value['documents'])} documents, "
        f"{short(value['tokens'])} tokens",
        f"output  about {short(value['instances'])} instances in "
        f"{counted(value['shards'], 'shard')} "
        f"({value['dtype']})"
        + (f", {short(value['eval_instances'])} held out" if value["eval_instances"] else ""),
        f"disk    {peak}B at most, {short(value['disk_final_bytes'])}B at the end, {free}B free: "
        f"{verdict}",
        f"memory  {short(value['memory_bytes'])}B at most while sharding, limited by --memory",
        f"time    {duration(value['tokenize_s'])} to tokenize with "
        f"{counted(value['workers'], 'worker')} "
        f"on {counted(value['world'], 'rank')}, {shard_s} to shard ({value['strategy']})",
    ]


def duration(seconds: float) -> str:
    """Return a text for a time of `seconds` seconds, in a suitable unit: `1.5 min` for 90."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
