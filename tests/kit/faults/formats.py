"""File formats that Optimus reads, with an unchanged sample of each format and the commands that
read the sample.

samples.py makes the samples. Each entry of `FORMATS` has the file to mutate, its syntax (see
`mutate` in mutations.py), and the commands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tests.kit.runs.results import hash_files

Content = Callable[[str], Any]
"""Function that returns the content that a command has read. The function finds this content in its
argument, which is the standard output of the command, or in files in the working directory. The
function returns None if the command reports damaged input."""


@dataclass(frozen=True)
class Command:
    """Command that reads a sample. The command lines run in order until one of them fails."""

    lines: tuple[str, ...]
    content: Content
    same: str = "intact"
    """Condition under which an accepted file must have the content of the sound sample: "always",
    "never", or "intact" (if no hashes were replaced)."""
    codes: tuple[int, ...] = (2,)
    """Exit statuses of a refusal."""
    lists: bool = False
    """True if a refusal is a list of problems instead of one line."""

    @property
    def name(self) -> str:
        return " && ".join(self.lines)


@dataclass(frozen=True)
class Format:
    """A file that is mutated, the sample that contains the file, and the commands that read the
    file."""

    name: str
    sample: str
    file: str
    syntax: str
    commands: tuple[Command, ...]
    has_hash: bool = True
    """True if a hash in another file or in this file detects changes."""
    names_files: bool = False
    """True if the file is permitted to contain paths of files in other directories. This is true
    for a configuration and for the order of a data set (docs/trust.md)."""
    weight: int = 2
    """Relative frequency of cases of this format."""
    cpu_s: float = 0.0
    """Limit of processor seconds, if larger than `Limits.cpu_s`. The plan of a configuration takes
    4 ms for each layer, and a configuration has up to 4,096 layers."""


# Functions of the type Content.


def _nothing(text: str) -> str:
    return ""


def _text(text: str) -> str:
    return re.sub(r"\d+(\.\d+)? (s|d|h|min)\b|[\d,.]+ MB/s|\d{4}-\d\d-\d\dT\S+", "_", text)


def _shown(text: str) -> Any:
    value = json.loads(text)
    if value["state"] != "valid":
        return None
    return {key: value[key] for key in value if key not in ("age_s", "saved_at", "bytes")}


def _listed(text: str) -> Any:
    """Return the names in the output of `checkpoint list`; None if a checkpoint is damaged."""
    checkpoints = json.loads(text)["checkpoints"]
    if any(checkpoint["state"] != "valid" for checkpoint in checkpoints):
        return None
    return [checkpoint["name"] for checkpoint in checkpoints]


def _weights(text: str) -> str:
    """Return the hash of the tensors in `out`, a Hugging Face directory or a model-only
    checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(Path("out").glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        tensors = json.loads(data[8:start])
        tensors.pop("__metadata__", None)
        for name, entry in sorted(tensors.items()):
            first, last = entry["data_offsets"]
            digest.update(f"{name} {entry['dtype']} {entry['shape']}".encode())
            digest.update(data[start + first : start + last])
    return digest.hexdigest()


def _tokens(text: str) -> dict[str, str]:
    """Return the hashes of the token arrays in `out`."""
    hashes = hash_files(Path("out"))
    return {name: hashes[name] for name in hashes if name.endswith(".npy")}


def _instances(text: str) -> str:
    """Return the hash of two epochs of the data set `data`, in the order of training."""
    from tests.kit.runs.results import hash_instances

    return hash_instances(Path("data"))


def _inspected(text: str) -> Any:
    return json.loads(text)


def _state_of_run(text: str) -> Any:
    """Return the output of `status --json`, without the time since the last event."""
    value = json.loads(text)
    value.pop("last_event_s")
    return value


def _rows(text: str) -> dict[str, str]:
    """Return the hashes of the shards in `out`."""
    hashes = hash_files(Path("out"))
    return {name: hashes[name] for name in hashes if re.search(r"shards/.*npy$", name)}


def _text_and_picture(text: str) -> str:
    assert Path("run/report.png").read_bytes()[:4] == b"\x89PNG"
    return text


def _read_peaks(words: Sequence[str]) -> int:
    """Read a peak.json as `optimus doctor` and a run do, and print the peaks."""
    from optimus.peak import Peak, kept_peaks, read_peak

    result = read_peak(Path("peaks/peak.json"))
    for path, peak in kept_peaks():
        print(path, peak, peak.setup, peak.is_reliable)
    if isinstance(result, Peak):
        return 0
    print(f"optimus: error: {result or 'no peak'}", file=sys.stderr)
    return 2


def _read_markers(words: Sequence[str]) -> int:
    """Read markers as the supervisor does, and print them."""
    from optimus.resilience.supervision.markers import read_markers

    markers = read_markers("run", "")
    print(ascii(markers))
    return 0


def _read_skipped_steps(words: Sequence[str]) -> int:
    """Read the steps to skip as a run does, and print them."""
    from optimus.errors import ConfigError
    from optimus.resilience.supervision.attempt import read_skipped_steps

    try:
        print(read_skipped_steps("run"))
    except ConfigError as error:
        print(f"optimus: error: {error}", file=sys.stderr)
        return 2
    return 0


Reader = Callable[[Sequence[str]], int]
READERS: Mapping[str, Reader] = {
    "read-markers": _read_markers,
    "read-peaks": _read_peaks,
    "read-skipped-steps": _read_skipped_steps,
}
"""Functions by name. A command line that begins with such a name calls the function instead of a
program. The function receives the arguments and returns the exit status."""

# Replacement of the hashes of a changed file.


def seal(folder: Path, file: Path, before: bytes) -> None:
    """Hide a change of a file from checks of hashes and sizes.

    In all JSON files below `folder`, replace the old hash and size of `file` by the new hash and
    size. Then do the same for the hash and size of each JSON file that was changed.

    Args:
        folder: The sample.
        file: The changed file.
        before: Content of `file` before the change.
    """
    if file.name == "events.jsonl":
        _seal_ledger(file)
        return
    if ".part-" in file.name:
        body = file.read_bytes()[:-16]
        file.write_bytes(body + xxhash.xxh3_64_hexdigest(body).encode())
        return
    changed = [(file, before)]
    for path, old in changed:
        new = path.read_bytes()
        hashes = {hash_of(old): hash_of(new) for hash_of in (xxhash.xxh3_64_hexdigest, _sha256)}
        for other in _json_files(folder, path):
            content = other.read_bytes()
            if not any(value.encode() in content for value in hashes):
                continue
            lines = content.splitlines() if other.suffix == ".jsonl" else [content]
            trees = [json.loads(line) for line in lines]
            for tree in trees:
                tree.pop("self_xxh3", None)
                _replace(tree, hashes, len(old), len(new))
            if other.suffix == ".jsonl":
                text = "\n".join([*map(json.dumps, trees), ""]).encode()
            else:
                text = with_self_hash(json.dumps(trees[0], indent=1).encode())
            other.write_bytes(text)
            if all(other != path for path, _ in changed):
                changed.append((other, content))


def _seal_ledger(path: Path) -> None:
    """Compute the hash of each line in a changed ledger again, and store the last hash in
    nodes.json."""
    from optimus.resilience.supervision.ledger import NODES

    lines, last_hash = [], b""
    for line in path.read_bytes().splitlines():
        if (at := line.rfind(b', "hash": "')) >= 0:
            last_hash = xxhash.xxh3_64_hexdigest(last_hash + b"\n" + line[:at]).encode()
            line = line[:at] + b', "hash": "' + last_hash + b'"}'
        lines.append(line)
    path.write_bytes(b"\n".join([*lines, b""]))
    summary = json.loads(path.with_name(NODES).read_bytes())
    summary |= {"events": len(lines), "last_hash": last_hash.decode()}
    path.with_name(NODES).write_text(json.dumps(summary, indent=1))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _json_files(folder: Path, excluded: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*.json*")):
        if path != excluded and path.is_file() and not path.is_symlink():
            yield path


def _replace(tree: Any, hashes: dict[str, str], old_size: int, new_size: int) -> None:
    """In `tree`, replace each hash that is a key of `hashes` by its value. In each dict or list
    that contains such a hash, replace `old_size` by `new_size`."""
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    has_hash = any(isinstance(value, str) and value in hashes for _, value in items)
    for key, value in items:
        if isinstance(value, (dict, list)):
            _replace(value, hashes, old_size, new_size)
        elif isinstance(value, str) and value in hashes:
            tree[key] = hashes[value]
        elif has_hash and value == old_size and not isinstance(value, bool):
            tree[key] = new_size


def with_self_hash(text: bytes) -> bytes:
    """Return the JSON text of an object with the additional key "self_xxh3", the hash of the text,
    as files.checked_json does."""
    body = text.rstrip()
    if not body.endswith(b"}"):
        return text
    body = body[:-1].rstrip()
    return body + f',\n "self_xxh3": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode()


# The table of formats.

_STEP = "run/checkpoints/step-00000002"


def _checkpoint(path: str, run: bool, tensors: str = "intact") -> tuple[Command, ...]:
    """Return commands that read a checkpoint.

    Args:
        path: The checkpoint.
        run: True to add commands that read the run directory `run`, to which the checkpoint
            belongs.
        tensors: Value of `Command.same` for commands that read the weights.
    """
    of_run = (
        Command(("optimus checkpoint list run --json",), _listed, "never"),
        Command(("optimus train run.toml --nproc 2 --dry-run",), _text, "intact"),
        Command(("optimus convert to-hf run out",), _weights, tensors),
    )
    return (
        Command((f"optimus checkpoint show {path} --json",), _shown, codes=(1, 2), lists=True),
        Command((f"optimus checkpoint show {path}",), _text, "never", (1, 2), lists=True),
        Command(
            (f"optimus checkpoint verify {path}", f"optimus convert to-hf {path} out"),
            _weights,
            tensors,
            (1, 2),
            lists=True,
        ),
        Command((f"optimus convert to-hf {path} out",), _weights, tensors),
        Command((f"optimus generate {path} --prompt ba --tokens 2 --temperature 0",), _text),
        *(of_run if run else ()),
    )


_HF = (
    Command(("optimus convert from-hf hf out",), _weights, "never"),
    Command(("optimus generate hf --prompt ba --tokens 2",), _text, "never"),
)
_TRAIN = Command(("optimus train run.toml --nproc 2 --dry-run",), _text, "never", (1, 2))
_VERIFY = Command(("optimus-data verify data",), _instances, "always", (1, 2), lists=True)
# A shard with another token and new hashes is a valid data set with other content.
_VERIFY_SHARD = dataclasses.replace(_VERIFY, same="intact")
_INSPECT = Command(("optimus-data inspect data 3 --json",), _inspected, "intact", (1, 2))
_INSPECT_ANY = dataclasses.replace(_INSPECT, same="never")
_STATS = Command(("optimus-data stats data",), _text, "never", (1, 2))
_SHUFFLE = Command(
    (
        "optimus-data shuffle data --to out --context 8 --rank 0 --world 1",
        "optimus-data shard out --workers 1 --rank 0 --world 1",
    ),
    _rows,
    "intact",
    (1, 2),
)
_DATA = (_VERIFY, _VERIFY, _INSPECT_ANY, _STATS, _SHUFFLE)


def _tokenize(file: str, same: str = "never", tokenizer: str = "words.json") -> tuple[Command]:
    line = f"optimus-data tokenize --input {file} --tokenizer {tokenizer} --out out --workers 1"
    return (Command((f"{line} --memory 240MB --rank 0 --world 1",), _tokens, same, (1, 2)),)


def _continue(command: str) -> tuple[Command]:
    line = (
        f"optimus-data {command} --input text/one --tokenizer words.json --out out "
        "--eval-fraction 0.2 --unit-size 1500 --workers 1 --memory 240MB --rank 0 --world 1"
    )
    return (Command((line,), _tokens if command == "tokenize" else _rows, codes=(1, 2)),)


_FUSED = _continue("run --context 16 --shard-size 1024 --fused")


def _import(file: str) -> tuple[Command]:
    line = f"optimus-data import --input {file} --tokenizer words.json --out out --workers 1"
    return (Command((f"{line} --rank 0 --world 1",), _tokens, "never", (1, 2)),)


_BLEND = (_VERIFY, _INSPECT_ANY, _STATS)
_REPORT = (Command(("optimus report run",), _text_and_picture, "never"),)

_EXPORT = (*_HF, Command(("optimus convert to-hf hf out",), _weights, "never"))
_DRY_RUN = "optimus train moe-fp32-so.toml train.run_dir=new --nproc 2 --dry-run"
_CONFIGURATION = (
    Command((_DRY_RUN,), _text, "never", (1, 2)),
    Command(("optimus plan moe-fp32-so.toml",), _text, "never"),
)
_KERNELS = (
    Command(("optimus kernels status --json",), _text, "never"),
    Command(("optimus kernels status",), _text, "never"),
)
_PEAKS = (Command(("read-peaks",), _text),)
_STATUS = (
    Command(("optimus status run --json",), _state_of_run, "intact"),
    Command(("optimus status run",), _text, "intact"),
)
_MARKERS = (Command(("read-markers",), _text),)
_SKIPPED = (Command(("read-skipped-steps",), _text),)
_RESUME = (dataclasses.replace(_TRAIN, same="intact"),)
_FULL = _checkpoint(_STEP, run=True, tensors="always")
_MODEL = _checkpoint("model", run=False)

FORMATS: tuple[Format, ...] = (
    Format("checkpoint manifest", "run", f"{_STEP}/manifest.json", "json", _FULL, weight=4),
    Format("checkpoint index", "run", f"{_STEP}/index.jsonl", "json lines", _FULL, weight=5),
    *(
        Format(f"checkpoint {name}", "run", f"{_STEP}/{name}", syntax, commands, True, names_files)
        for name, syntax, commands, names_files in (
            ("shard-00001.bin", "padded json", _checkpoint(_STEP, run=True), False),
            ("config.toml", "toml", _checkpoint(_STEP, run=False), True),
            ("tokenizer.json", "json", _checkpoint(_STEP, False, "always"), False),
        )
    ),
    *(
        Format(f"model {name}", "model", f"model/{file}", syntax, commands)
        for name, file, syntax, commands in (
            ("manifest", "manifest.json", "json", _checkpoint("model", False, "always")),
            ("weights", "model.safetensors", "safetensors", _MODEL),
            ("config.json", "config.json", "json", _MODEL),
        )
    ),
    *(
        Format(f"hf {name}", sample, f"hf/{file}", syntax, commands, has_hash=False, weight=weight)
        for name, sample, file, syntax, commands, weight in (
            ("config.json", "hf", "config.json", "json", _HF, 3),
            ("weights", "hf", "model.safetensors", "safetensors", _HF, 3),
            ("tokenizer", "hf", "tokenizer.json", "json", _HF, 2),
            ("tokenizer config", "hf", "tokenizer_config.json", "json", _EXPORT, 1),
            ("generation config", "hf", "generation_config.json", "json", _EXPORT, 1),
            ("index", "split", "model.safetensors.index.json", "json", _HF, 2),
            ("part", "split", "model-00002-of-00002.safetensors", "safetensors", _HF, 1),
        )
    ),
    *(
        Format(name, sample, file, "toml", commands, False, True, weight, cpu_s=20.0)
        for name, sample, file, commands, weight in (
            ("configuration", "settings", "moe.toml", _CONFIGURATION, 4),
            ("base configuration", "settings", "run.toml", _CONFIGURATION, 2),
            ("run config.toml", "run", "run.toml", (_TRAIN,), 1),
        )
    ),
    Format("metrics", "run", "run/metrics.jsonl", "json lines", _REPORT, has_hash=False, weight=1),
    Format("evaluations", "run", "run/eval.jsonl", "json lines", _REPORT, has_hash=False, weight=1),
    Format("ledger", "launched", "run/events.jsonl", "json lines", _STATUS),
    Format("states of nodes", "launched", "run/nodes.json", "json", _STATUS, has_hash=False),
    *(
        Format(name, "launched", f"run/{file}", "json", commands, has_hash=False, weight=1)
        for name, file, commands in (
            ("marker", "log/nonfinite-rank2.json", _MARKERS),
            ("skipped steps", "skipped_steps.json", _SKIPPED),
        )
    ),
    Format("peak", "peak", "peaks/peak.json", "json", _PEAKS),
    Format("kernel", "kernel", "kernels/cpu-entry/info.json", "json", _KERNELS, has_hash=False),
    Format(
        "training manifest", "run", "data/words/manifest.json", "json", _RESUME, names_files=True
    ),
    Format("training tokenizer", "run", "data/words/tokenizer.json", "json", _RESUME, weight=1),
    *(
        Format(name, "data", f"data/{file}", "json", _DATA, True, True, weight)
        for name, file, weight in (
            ("data manifest", "manifest.json", 4),
            ("data order", "order.json", 2),
        )
    ),
    *(
        Format(name, "data", f"data/{file}", syntax, commands, weight=weight)
        for name, file, syntax, commands, weight in (
            (
                "data shard",
                "shards/shard-00000.npy",
                "npy",
                (_VERIFY_SHARD, _INSPECT_ANY, _STATS),
                2,
            ),
            ("shard sidecar", "shards/shard-00001.json", "json", (_VERIFY, _INSPECT), 1),
            ("data tokenizer", "tokenizer.json", "json", (_VERIFY, _INSPECT), 2),
            ("token plan", "tokens/plan.json", "json", _DATA, 2),
            ("token sidecar", "tokens/unit-00001.json", "json", _DATA, 2),
            ("token array", "tokens/unit-00002.npy", "npy", (_VERIFY, _SHUFFLE), 2),
            (
                "documents",
                "tokens/unit-00001.docs.npy",
                "npy",
                (_VERIFY, _INSPECT_ANY, _SHUFFLE),
                2,
            ),
            ("token ids", "tokens/unit-00001.ids.npy", "npy", (_VERIFY, _SHUFFLE), 1),
            ("duplicates", "tokens/duplicates.json", "json", (_VERIFY, _SHUFFLE), 1),
        )
    ),
    *(
        Format(name, f"interrupted-{sample}", f"out/tokens/{file}", syntax, commands)
        for name, sample, file, syntax, commands in (
            (
                "unit checkpoint",
                "tokenize",
                "unit-00002.part-0000",
                "safetensors",
                _continue("tokenize"),
            ),
            ("packed checkpoint", "fused", "unit-00002.part-0001", "safetensors", _FUSED),
            ("packed array", "fused", "unit-00001.packed", "bytes", _FUSED),
        )
    ),
    Format("blend order", "blend", "data/order.json", "json", _BLEND, True, True, 1),
    Format("blend manifest", "blend", "data/manifest.json", "json", _BLEND, True, True, 1),
    *(
        Format(
            name, "texts", file, syntax, commands, has_hash=name in ("gzip", "zstd"), weight=weight
        )
        for name, file, syntax, commands, weight in (
            ("JSON lines", "in.jsonl", "json lines", _tokenize("in.jsonl"), 2),
            ("text", "in.txt", "bytes", _tokenize("in.txt"), 1),
            ("gzip", "gz.jsonl.gz", "bytes", _tokenize("gz.jsonl.gz", "always"), 2),
            ("zstd", "zst.jsonl.zst", "bytes", _tokenize("zst.jsonl.zst", "always"), 2),
            ("parquet", "table.parquet", "bytes", _tokenize("table.parquet"), 3),
            ("tokenizer.json", "words.json", "json", _tokenize("in.jsonl"), 2),
            (
                "byte tokenizer",
                "bytes.json",
                "json",
                _tokenize("in.jsonl", "never", "bytes.json"),
                1,
            ),
            (
                "sentencepiece",
                "pieces.model",
                "bytes",
                _tokenize("in.jsonl", "never", "pieces.model"),
                2,
            ),
            ("Megatron index", "mega.idx", "bytes", _import("mega.bin"), 2),
            ("Megatron ids", "mega.bin", "bytes", _import("mega.bin"), 1),
            ("npy ids", "ids.npy", "npy", _import("ids.npy"), 2),
        )
    ),
)
"""All formats. Some samples need a package or a compiler that can be missing: see `available`."""


def available(samples: Path) -> list[Format]:
    """Return the formats whose sample exists in `samples`."""
    return [entry for entry in FORMATS if (samples / entry.sample / entry.file).is_file()]
