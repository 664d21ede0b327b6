"""Results of runs, to be compared: metrics, whole states, and the hashes of the golden corpus."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from optimus.checkpoint import store
from optimus.checkpoint.format import Manifest
from optimus.checkpoint.load import Readers, ReadRequest
from optimus.checkpoint.slices import ParamSlice, whole_box
from optimus.data.dataset import TokenDataset
from optimus.io.safetensors import as_bytes, check_shapes
from optimus.observe.metrics import read_json_lines

TIMES = ("step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "mem_bytes")
"""Of metrics.jsonl: what no two runs share."""


def metrics_of(run_dir: Path) -> list[dict]:
    lines = read_json_lines(run_dir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every state of the newest checkpoint."""
    newest, tensors = store.newest_valid(run_dir), {}
    index = newest.index()
    for state in index.states:
        whole = {name: torch.empty(shape) for name, shape in index.shapes.items()}
        if state != "master":  # parameters that are not trained have none
            column = 4 + index.states.index(state)
            kept = {name for name in whole if (index.stored(name).rows[:, column] >= 0).all()}
            whole = {name: whole[name] for name in kept}
        read_whole(newest, whole, state)
        tensors |= {f"{state}.{name}": tensor for name, tensor in whole.items()}
    return tensors


def assert_same_run(one: Path, other: Path) -> None:
    assert metrics_of(one) == metrics_of(other)
    a, b = weights_of(one), weights_of(other)
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert not different


def read_whole(manifest: Manifest, into: Mapping[str, Tensor], state: str = "master") -> None:
    """Fill whole fp32 host tensors with a state of the parameters of these names, in one process:
    of all parameters, or, as those that are not trained have no moments, of some.

    Raises CheckpointError if they are not the checkpoint's, by name or shape, or it is damaged.
    """
    index = manifest.index()
    shapes = {name: tuple(tensor.shape) for name, tensor in into.items()}
    if state != "master":
        shapes = {name: index.shapes[name] for name in index.shapes} | shapes
    check_shapes(manifest.path, index.shapes, shapes)
    requests = []
    for name, tensor in into.items():
        assert tensor.dtype is torch.float32 and tensor.is_contiguous()
        param = ParamSlice(name, whole_box(tensor.shape), 0, tensor.numel())
        requests.append(ReadRequest(state, [(param, 0)], as_bytes(tensor)))
    with Readers(manifest.path, index, 1) as readers:
        readers.read(requests)


GOLDEN = Path(__file__).resolve().parents[2] / "golden"
STEP = 2
"""Update after which each run of the corpus was stopped; CONTINUED is where continuations end."""
CONTINUED = 4


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return xxh3-64 of names, shapes and bits of all tensors, whatever their order."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_states(run_dir: Path) -> dict[str, str]:
    """Return the hash of each state of a run's newest full checkpoint, by the state's name."""
    tensors = weights_of(run_dir)
    return {
        state: hash_tensors(
            {name.removeprefix(f"{state}."): t for name, t in tensors.items() if _is(name, state)}
        )
        for state in sorted({name.partition(".")[0] for name in tensors})
    }


def hash_weights(directory: Path) -> str:
    """Return the hash of all tensors in the safetensors files of a Hugging Face directory."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    assert tensors, f"{directory} holds no weights"
    return hash_tensors(tensors)


def _is(name: str, state: str) -> bool:
    return name.startswith(f"{state}.")


def hash_files(folder: Path) -> dict[str, str]:
    """Return xxh3-64 of every file below `folder`, by its relative name."""
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_64_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def hash_instances(dataset: Path) -> str:
    """Return the hash of the token ids of epochs 0 and 1, in the order in which training reads
    them, as uint32."""
    source = TokenDataset(dataset)
    tokens = source.read(0, 2 * source.num_instances)
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tokens, dtype="<u4"))


def machine() -> dict[str, str]:
    """Return what decides the bits of a sum on this machine: processor, its vector instructions
    that torch uses, and torch."""
    processor = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            facts = dict(map(str.strip, line.split(":", 1)) for line in file if ":" in line)
        names = ("vendor_id", "cpu family", "model", "stepping")
        processor = " ".join([processor, *(facts.get(name, "?") for name in names)])
    return {
        "processor": processor,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
