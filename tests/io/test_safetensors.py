"""Tests that invalid headers and index files of safetensors, which can come from untrusted sources,
are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimus.errors import CheckpointError
from optimus.io.safetensors import TensorFiles


def entry(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(directory: Path, header: Any, body: int) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(body)
    (directory / "model.safetensors").write_bytes(content)


BAD = {
    "negative": ({"a": entry([-2, -3], [0, 24])}, 24),
    "float": ({"a": entry([2.0, 3], [0, 24])}, 24),
    "float-offsets": ({"a": entry([2, 3], [0.0, 24.0])}, 24),
    "bool": ({"a": entry([True], [0, 4])}, 4),
    "no-shape": ({"a": entry(None, [0, 4])}, 4),
    "text": ({"a": entry("12", [0, 4])}, 4),
    "types": ({"a": entry([1], [0, 4], ["F32"])}, 4),
    "huge": ({"a": entry([1 << 60, 1 << 60, 0], [0, 0])}, 0),
    "huge-and-empty": ({"a": entry([1 << 50, 1 << 50, 0], [0, 0])}, 0),
    "deep": (b"[" * 100_000, 0),
    "deep-tables": (b'{"a":' * 50_000, 0),
    "list": ([], 0),
    "twice": ({"a": entry([1], [0, 4]), "b": entry([1], [0, 4])}, 4),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_header_is_refused(tmp_path, name):
    write(tmp_path, *BAD[name])
    with pytest.raises(CheckpointError, match="header"):
        TensorFiles(tmp_path).find("a")


def test_header_of_more_than_16_mib_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(((16 << 20) + 1).to_bytes(8, "little"))
    with open(path, "r+b") as file:
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="16,777,217 bytes, the limit is 16,777,216"):
        TensorFiles(tmp_path)


def test_empty_tensor_is_read_at_any_position(tmp_path):
    write(
        tmp_path, {"a": entry([1], [0, 4]), "z": entry([3, 0], [0, 0]), "y": entry([0], [4, 4])}, 4
    )
    files = TensorFiles(tmp_path)
    assert [files.find(name)[1].shape for name in "azy"] == [(1,), (3, 0), (0,)]


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../b"}}',
        '{"weight_map": {"a": "\\ud800"}}',
        "[" * 100_000,
        "[]",
        "{}",
    ],
)
def test_invalid_index_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="not readable"):
        TensorFiles(tmp_path)
