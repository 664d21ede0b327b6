"""Unchanged samples of the file formats that Optimus reads, made from the golden corpus
(tests/golden)."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import json
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from tests.kit.runs.results import GOLDEN

SOURCE = GOLDEN / "v1"


def make_samples(folder: Path) -> None:
    """Make all samples, each as a directory of `folder`."""
    run = folder / "run"
    shutil.copytree(SOURCE / "runs/moe-fp32-so", run / "run")
    _copy_data(run / "data/words")
    _write_run_toml(run)
    shutil.copytree(
        SOURCE / "runs/moe-bf16-ep-epso/checkpoints/model-00000002", folder / "model/model"
    )
    shutil.copytree(SOURCE / "configs", folder / "settings")
    _copy_data(folder / "settings/data/words")
    shutil.copytree(SOURCE / "data/words", folder / "data/data")
    shutil.copytree(SOURCE / "data/blend", folder / "blend/data")
    for name in ("words", "more"):
        shutil.copytree(SOURCE / f"data/{name}", folder / f"blend/{name}")
    for name in ("tokenize", "fused"):
        shutil.copytree(SOURCE / "interrupted" / name, folder / f"interrupted-{name}/out")
        shutil.copytree(SOURCE / "text/one", folder / f"interrupted-{name}/text/one")
        shutil.copyfile(SOURCE / "words.json", folder / f"interrupted-{name}/words.json")
    _make_texts(folder / "texts")
    _make_peak(folder / "peak/peaks")
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):  # no compiler
        _make_kernel(folder / "kernel/kernels")
    _make_hf(folder)
    make_ledger(folder / "launched/run")


def make_ledger(run_dir: Path) -> None:
    """Make the files of a supervised run of three nodes, of which one has failed."""
    from optimus.io.workspace import Workspace
    from optimus.resilience.supervision.attempt import SKIPPED_STEPS, encode_skipped_steps
    from optimus.resilience.supervision.ledger import (
        AttemptEnded,
        AttemptStarted,
        Ledger,
        NextJob,
        NodeMarked,
        Progress,
        SupervisorStarted,
        VerdictReached,
    )
    from optimus.resilience.supervision.markers import Instance, LayerOutput, write_marker

    run_dir.mkdir(parents=True)
    workspace = Workspace.open(run_dir / ".supervisor")
    ledger, nodes, times = Ledger(run_dir, workspace), ("a", "b"), iter(range(1000, 2000))

    def add(kind: Any, **fields: Any) -> None:
        ledger.add(kind(time=float(next(times)), **fields))

    add(SupervisorStarted, host="a", pid=7, job="5", nodes=(*nodes, "c"), settings="ab")
    add(NextJob, job="6")
    for attempt, used in ((1, nodes), (2, ("a", "c"))):
        start = {
            "nodes": used,
            "ranks_per_node": 2,
            "port": 3000,
            "workspace": f"attempt-{attempt}",
        }
        add(AttemptStarted, attempt=attempt, **start, skipped_steps=(3,))
        add(Progress, attempt=attempt, milestone="checkpoint", step=4)
        end = {"attempt": attempt, "step": 5, "updates": 4, "seconds": {"update": 2.0}}
        if attempt == 1:
            failure = {"failure": "soft", "nodes": ("b",), "signature": "s", "evidence": ("e",)}
            add(AttemptEnded, outcome="failed", **end, **failure)
            add(NodeMarked, node="b", standing="excluded", reason="a NaN")
        else:
            add(AttemptEnded, outcome="done", **end)
    add(VerdictReached, verdict="done", reason="the last step", status=0)
    ledger.close()
    layer = LayerOutput(min=0.0, max=1.0, mean=0.5, nonfinite=0.5)
    figures = {
        "text": "loss is nan",
        "microbatch": 0,
        "direction": "forward",
        "layers": {"a": layer},
    }
    write_marker(workspace, run_dir, 2, 5, instances=(Instance(data="d", instance=1),), **figures)
    workspace.close()
    (run_dir / SKIPPED_STEPS).write_bytes(encode_skipped_steps([3, 8]))


def _copy_data(target: Path) -> None:
    """Copy the files of a data set that training reads, without the token arrays."""
    ignored = shutil.ignore_patterns("tokens", "eval", "order.json")
    shutil.copytree(SOURCE / "data/words", target, ignore=ignored)


def _write_run_toml(folder: Path) -> None:
    """Write run.toml, the configuration with which the sample `run` continues."""
    text = (folder / "run/config.toml").read_text()
    (folder / "run.toml").write_text(re.sub(r'run_dir = ".*"', 'run_dir = "run"', text))


def _make_texts(folder: Path) -> None:
    folder.mkdir()
    for name in ("words", "bytes"):
        shutil.copyfile(SOURCE / f"{name}.json", folder / f"{name}.json")
    text = (SOURCE / "text/one/0.jsonl").read_bytes()
    (folder / "in.jsonl").write_bytes(text)
    (folder / "in.txt").write_bytes(text[:600])
    (folder / "gz.jsonl.gz").write_bytes(gzip.compress(text, mtime=0))
    documents = [json.loads(line) for line in text.splitlines()]
    with contextlib.suppress(ImportError):
        import zstandard

        packed = zstandard.ZstdCompressor(write_checksum=True).compress(text)
        (folder / "zst.jsonl.zst").write_bytes(packed)
    with contextlib.suppress(ImportError):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist(documents)
        parquet.write_table(table, folder / "table.parquet", write_page_checksum=True)
    lengths = np.array([5, 3, 7], "<i4")
    starts = np.array([0, 10, 16], "<i8")
    ids = np.array([1, 2, 3, 4, 0, 5, 6, 0, 7, 8, 9, 10, 11, 12, 0], "<u2")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    ends = np.arange(4, dtype="<i8")
    (folder / "mega.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + ends.tobytes())
    (folder / "mega.bin").write_bytes(ids.tobytes())
    np.save(folder / "ids.npy", ids)
    with contextlib.suppress(ImportError):
        import sentencepiece

        with open(folder / "pieces.model", "wb") as file:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(document["text"] for document in documents),
                model_writer=file,
                vocab_size=300,
                hard_vocab_limit=False,
                byte_fallback=True,
                minloglevel=2,
            )


def _make_peak(folder: Path) -> None:
    from optimus.peak import Peak, Setup, write_peak

    folder.mkdir(parents=True, mode=0o700)
    setup = Setup("cpu", "a processor", "float32", "torch", "2.0", 1)
    write_peak(folder / "peak.json", Peak(setup, 1e12, 0.01, "measured", "2026-01-01T00:00:00Z"))


def _make_kernel(folder: Path) -> None:
    """Make an entry of the kernel cache. The library in this entry contains only a function that
    returns the version of the kernel interface."""
    from optimus_kernels import build

    target, _ = build.plan("cpu")
    entry = folder / target.name
    entry.mkdir(parents=True, mode=0o755)
    code = f"int optimus_kernels_abi(void) {{ return {build.interface_version()}; }}"
    library = entry / "liboptimus_cpu.so"
    command = ["gcc", "-shared", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=code.encode(), check=True)
    entry_info = {
        **dataclasses.asdict(target),
        "compiler_path": "g++",
        "library": library.name,
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "built_at": 1.7e9,
    }
    (entry / "info.json").write_text(json.dumps(entry_info, indent=1))
    entry.rename(folder / "cpu-entry")
    for path in (folder, folder / "cpu-entry", *(folder / "cpu-entry").iterdir()):
        path.chmod(path.stat().st_mode & ~0o022)


def _make_hf(folder: Path) -> None:
    """Export the model checkpoint as one safetensors file, and as two files with an index."""
    from optimus.checkpoint.convert import to_hf

    (folder / "hf").mkdir()
    to_hf(folder / "model/model", folder / "hf/hf")
    split = folder / "split"
    shutil.copytree(folder / "hf", split)
    whole = split / "hf/model.safetensors"
    data = whole.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8:start])
    tensors.pop("__metadata__", None)
    names, weight_map = sorted(tensors), {}
    for number in (0, 1):
        file, header, body = f"model-0000{number + 1}-of-00002.safetensors", {}, b""
        for name in names[number::2]:
            first, last = tensors[name]["data_offsets"]
            header[name] = tensors[name] | {"data_offsets": [len(body), len(body) + last - first]}
            body += data[start + first : start + last]
            weight_map[name] = file
        text = json.dumps(header).encode()
        (split / "hf" / file).write_bytes(len(text).to_bytes(8, "little") + text + body)
    whole.unlink()
    index = {"metadata": {"total_size": len(data) - start}, "weight_map": weight_map}
    (split / "hf/model.safetensors.index.json").write_text(json.dumps(index, indent=1))
