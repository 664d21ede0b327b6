"""Results of runs that tests compare: metrics, whole states, and hashes as in the golden corpus
(tests/golden)."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file

from optimus.checkpoint import store
from optimus.checkpoint.format import Manifest
from optimus.checkpoint.load import Readers, ReadRequest
from optimus.checkpoint.slices import ParamSlice, whole_box
from optimus.data.dataset import TokenDataset
from optimus.io.safetensors import as_bytes, check_shapes
from optimus.observe.metrics import read_json_lines

TIMES = ("step_time_s", "tokens_per_s", "tflops_per_device", "mfu", "mem_bytes")
"""Keys of metrics.jsonl whose values are measured and therefore differ between two equal runs."""


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without the keys TIMES."""
    lines = read_json_lines(run_dir / "metrics.jsonl")
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return all states of the newest full checkpoint as whole fp32 tensors. The keys of the result
    are `state.parameter`, for example `master.embed.weight`."""
    newest = store.newest_valid(run_dir)
    assert newest is not None, f"{run_dir} has no valid checkpoint"
    index = newest.index()
    tensors: dict[str, torch.Tensor] = {}
    for state in index.states:
        whole = {name: torch.empty(shape) for name, shape in index.shapes.items()}
        if state != "master":  # frozen parameters have only masters
            column = 4 + index.states.index(state)
            trained = {name for name in whole if (index.stored(name).rows[:, column] >= 0).all()}
            whole = {name: whole[name] for name in trained}
        read_whole(newest, whole, state)
        tensors |= {f"{state}.{name}": tensor for name, tensor in whole.items()}
    return tensors


def assert_same_run(run_dir: Path, reference: Path) -> None:
    """Assert that two runs have the same metrics and the same bits of all states."""
    assert metrics_of(run_dir) == metrics_of(reference)
    states, expected = weights_of(run_dir), weights_of(reference)
    assert states.keys() == expected.keys()
    different = [name for name in states if not torch.equal(states[name], expected[name])]
    assert not different


def read_whole(manifest: Manifest, into: Mapping[str, torch.Tensor], state: str = "master") -> None:
    """Read a state of a full checkpoint in one process.

    Args:
        manifest: The checkpoint.
        into: Maps the name of a parameter to the tensor for the result: a contiguous fp32 tensor on
            the host with the whole shape of the parameter. For the state "master", `into` contains
            all parameters. For "exp_avg" and "exp_avg_sq", it contains only trained parameters.
        state: The state.

    Raises:
        CheckpointError: Names or shapes differ from the checkpoint's, or the checkpoint is damaged.
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
"""Update after which each run of the golden corpus was stopped."""
CONTINUED = 4
"""Last update of the runs that continue the runs of the golden corpus."""


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return xxh3-64 of the names, shapes and bits of all tensors. The order of the tensors has no
    effect."""
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hash_states(run_dir: Path) -> dict[str, str]:
    """Return the hash of each state of a run's newest full checkpoint, by the state's name."""
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights_of(run_dir).items():
        state, _, parameter = name.partition(".")
        states.setdefault(state, {})[parameter] = tensor
    return {state: hash_tensors(states[state]) for state in sorted(states)}


def hash_weights(directory: Path) -> str:
    """Return the hash of all tensors in the safetensors files of a Hugging Face directory."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    assert tensors, f"{directory} has no weights"
    return hash_tensors(tensors)


def hash_files(folder: Path) -> dict[str, str]:
    """Return xxh3-64 of each file below `folder`, by its relative name."""
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_64_hexdigest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def hash_instances(dataset: Path) -> str:
    """Return xxh3-64 of the token ids of epochs 0 and 1, as uint32 in the order of training."""
    source = TokenDataset(dataset)
    tokens = source.read(0, 2 * source.num_instances)
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(tokens, dtype="<u4").tobytes())


def machine() -> dict[str, str]:
    """Return the properties on which the bits of a sum depend: processor, the vector instructions
    that torch uses, and the version of torch."""
    processor = platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = [line.partition(":") for line in file if ":" in line]
        values = {key.strip(): value.strip() for key, _, value in fields}
        names = ("vendor_id", "cpu family", "model", "stepping")
        processor = " ".join([processor, *(values.get(name, "?") for name in names)])
    return {
        "processor": processor,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }
