"""Values by which files of the golden corpus are compared, as the corpus was made and in tests."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from safetensors.torch import load_file

from optimus.data.dataset import TokenDataset
from tests.helpers.runs import weights_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
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
