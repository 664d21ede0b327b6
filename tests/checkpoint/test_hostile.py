"""Tests that invalid checkpoints with valid hashes are refused in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import xxhash

from optimus.checkpoint import format as format_module
from optimus.checkpoint.format import (
    GENERATION_CONFIG,
    MANIFEST,
    SIDECARS,
    TEMPLATES,
    read_manifest,
)
from optimus.checkpoint.index import ADAMW_STATES, INDEX, ShardReport, decode, encode
from optimus.checkpoint.inspect import show, verify
from optimus.checkpoint.load import Readers, ReadRequest
from optimus.checkpoint.shard_file import Identity, ShardWriter
from optimus.checkpoint.slices import ParamSlice, whole_box
from optimus.checkpoint.store import write_checkpoint
from optimus.checkpoint.weights import ShardWeights
from optimus.cli import main
from optimus.errors import CheckpointError
from optimus.io import files
from optimus.io.tensor_file import INDEX as WEIGHTS_INDEX
from optimus.io.tensor_file import MODEL

SHAPES = {"embed.weight": (6, 4), "head.weight": (4, 4)}
ROWS = (((0, 3), (0, 4)), ((3, 6), (0, 4)))
"""Index ranges (start, stop) of rows and columns, for each half of embed.weight."""


def write_full(path: Path, frozen: str = "", order: Sequence[int] = range(4)) -> Path:
    """Write a full checkpoint of one writer. embed.weight has two slices, with the index ranges in
    ROWS. head.weight has two slices of 8 elements. The shard file contains all masters, then all
    exp_avg, then all exp_avg_sq, each with the slices in `order`. The parameter `frozen` has only
    masters."""

    def write(directory: Path) -> None:
        slices = [
            ParamSlice("embed.weight", (ROWS[0][:1], ROWS[0][1:]), 0, 12),
            ParamSlice("embed.weight", (ROWS[1][:1], ROWS[1][1:]), 0, 12),
            ParamSlice("head.weight", whole_box(SHAPES["head.weight"]), 0, 8),
            ParamSlice("head.weight", whole_box(SHAPES["head.weight"]), 8, 16),
        ]
        offsets = {(state, slices[n]): -1 for state in range(3) for n in order}
        written = [key for key in offsets if key[0] == 0 or key[1].name != frozen]
        with ShardWriter(directory, Identity("g", 3, 0), 4096 + 64 * len(written)) as file:
            for key in written:
                values = numpy.zeros(16, dtype=numpy.float32)  # a multiple of 64 bytes
                offsets[key] = file.write(memoryview(values).cast("B"))
            shard = file.finish()
        boxes = list(dict.fromkeys(param[:2] for param in slices))
        rows = [
            (
                boxes.index(param[:2]),
                param.start,
                param.stop,
                *(offsets[n, param] for n in range(3)),
            )
            for param in slices
        ]
        (directory / INDEX).write_bytes(
            encode("g", 3, ADAMW_STATES, [ShardReport(shard, boxes, rows)], SHAPES)
        )
        (directory / "config.toml").write_text("")

    ranks = {"pp": 1, "dp": 1, "ep": 1, "tp": 1, "per_node": 1}
    settings = {"optim.sharding": "so", "train.dtype": "fp32", "parallel.schedule": "1f1b"}
    if frozen:
        settings["optim.frozen"] = [frozen]
    return write_checkpoint(path, write, kind="full", step=3, ranks=ranks, settings=settings).path


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> Path:
    return write_full(tmp_path_factory.mktemp("valid") / "c")


@pytest.fixture
def checkpoint(valid, tmp_path) -> Path:
    shutil.copytree(valid, tmp_path / "c")
    return tmp_path / "c"


def rewrite_manifest(path: Path, **fields: object) -> None:
    """Change fields of a manifest, and store the correct hash of the changed manifest."""
    raw = json.loads((path / MANIFEST).read_bytes())
    raw.pop("self_xxh3")
    (path / MANIFEST).write_bytes(files.checked_json(raw | fields))


def rewrite_index(path: Path, change) -> None:
    """Change the parsed lines of the index with the function `change`, and store correct hashes."""
    lines = [json.loads(line) for line in (path / INDEX).read_text().splitlines()]
    change(*lines)
    data = "\n".join([*map(json.dumps, lines), ""]).encode()
    (path / INDEX).write_bytes(data)
    entries = json.loads((path / MANIFEST).read_bytes())["files"]
    for entry in entries:
        if entry["name"] == INDEX:
            entry |= {"size": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}
    rewrite_manifest(path, files=entries)


def problem_of(path: Path, capsys) -> str:
    """Assert that `verify` and `show` refuse a checkpoint. Return the error line of `verify`."""
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "DAMAGED" in lines[0], lines
    try:
        about = show(path)
    except CheckpointError as error:
        assert "\n" not in str(error)
    else:
        assert about["state"] == "damaged" and "\n" not in about["problem"]
    return lines[1]


def test_the_checkpoint_is_valid_before_it_is_changed(checkpoint):
    read_manifest(checkpoint).verify()
    assert show(checkpoint)["state"] == "valid"
    rewrite_index(checkpoint, lambda head, embed, rest: None)
    read_manifest(checkpoint).verify()
    assert show(checkpoint)["params"] == 40


def nested(depth: int = 100_000) -> bytes:
    return b'{"format": 2, "kind": ' + b"[" * depth + b"]" * depth + b"}"


ENTRY = {"name": "x", "size": 0, "xxh3": "0" * 16}


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "evil"},
        {"step": "x"},
        {"step": -1},
        {"step": 1 << 56},
        {"step": True},
        {"tokens": 1.5},
        {"updates": None},
        {"origin": 5},
        {"settings": []},
        {"settings": {"optim.sharding": 5}},
        {"settings": {"checkpoint.interval": "x"}},
        {"files": 5},
        {"files": [5]},
        {"files": [{"name": "x"}]},
        {"files": [ENTRY, ENTRY]},
        {"files": [ENTRY | {"name": 5}]},
        {"files": [ENTRY | {"name": "a\0b"}]},
        {"files": [ENTRY | {"name": "/dev/zero"}]},
        {"files": [ENTRY | {"name": "../../etc/hostname"}]},
        {"files": [ENTRY | {"name": "a/../../b"}]},
        {"files": [ENTRY | {"name": "a\\b"}]},
        {"files": [ENTRY | {"name": "\ud800"}]},
        {"files": [ENTRY | {"name": ""}]},
        {"files": [ENTRY | {"size": -1}]},
        {"files": [ENTRY | {"size": 2**70}]},
        {"files": [ENTRY | {"xxh3": "0" * 15 + "G"}]},
        {"ranks": {"pp": 0, "per_node": 1}},
        {"ranks": {"pp": 1}},
        {"ranks": {"pp": 1 << 20, "dp": 1 << 20, "per_node": 1}},
        {"loss_scale": {"scale": "x"}},
        {"loss_scale": {"scale": 1.0}},
        {"loss_scale": {"scale": float("nan"), "good_steps": 0, "skipped": 0}},
        {"begun": "x"},
        {"begun": 4},
        {"updates": 4},
        {"tokens": (1 << 56) - 1},
        {"settings": {"a": 1}},
        {"settings": {"../x.y": 1}},
        {"ranks": {"pp": 1, "per_node": 1, "x": 1}},
        {"kind": "model"},
        {"files": []},
        {"files": [ENTRY | {"name": INDEX}]},
        {
            "files": [
                ENTRY | {"name": INDEX, "size": (1 << 30) + 1},
                ENTRY | {"name": "config.toml"},
            ]
        },
        {"files": [ENTRY | {"name": INDEX}, ENTRY | {"name": "config.toml", "size": 400 << 30}]},
        {"files": [ENTRY | {"name": "config.toml"}]},
        {"kind": "model", "files": [ENTRY | {"name": "config.toml"}]},
        {"kind": "model", "files": [ENTRY | {"name": "model.safetensors"}]},
        {"settings": {"optim.frozen": [5]}},
        {"settings": {"optim.frozen": ["x"] * 1001}},
        {"settings": {"optim.frozen": ["*" * 257]}},
    ],
    ids=str,
)
def test_a_manifest_that_no_save_wrote_is_refused(checkpoint, capsys, fields):
    rewrite_manifest(checkpoint, **fields)
    with pytest.raises(CheckpointError, match=r"manifest\.json: not readable"):
        read_manifest(checkpoint)
    message = problem_of(checkpoint, capsys)
    assert "manifest.json: not readable" in message and "Value error" not in message


def test_a_manifest_is_parsed_only_if_its_hash_is_right(checkpoint, monkeypatch):
    data = (checkpoint / MANIFEST).read_bytes()
    (checkpoint / MANIFEST).write_bytes(data.replace(b'"step": 3', b'"step": 4'))
    monkeypatch.setattr(json, "loads", lambda *_: pytest.fail("parsed"))
    with pytest.raises(CheckpointError, match="does not match the hash"):
        read_manifest(checkpoint)
    (checkpoint / MANIFEST).write_bytes(bytes((4 << 20) + 1))
    with pytest.raises(CheckpointError, match="larger than 4,194,304 bytes"):
        read_manifest(checkpoint)


def test_only_format_1_has_no_hash(checkpoint):
    raw = json.loads((checkpoint / MANIFEST).read_bytes())
    raw.pop("self_xxh3")
    text = json.dumps(raw)[1:]
    (checkpoint / MANIFEST).write_text('{"format": 1, ' + text)  # the key occurs twice
    with pytest.raises(CheckpointError, match="of format 2; this version reads"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("content", [nested(), b"[" * 100_000, b"1" * 5000, b"\xff"])
def test_a_manifest_that_is_no_json_is_refused(checkpoint, capsys, content):
    (checkpoint / MANIFEST).write_bytes(content)
    assert "manifest.json: not readable" in problem_of(checkpoint, capsys)


def set_head(**fields):
    return lambda head, embed, rest: head.update(fields)


def set_rows(*rows):
    return lambda head, embed, rest: embed.update(rows=list(rows))


FIRST, SECOND = [0, 0, 0, 12, 4096, 4352, 4608], [0, 1, 0, 12, 4160, 4416, 4672]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_head(block_bytes=-4), "block_bytes = -4"),
        (set_head(block_bytes="x"), "block_bytes = 'x'"),
        (set_head(block_bytes=1 << 50), "block_bytes = 1125"),
        (set_head(step="x"), "step = 'x'"),
        (set_head(generation=5), "generation = 5"),
        (set_head(shards=[["x", 4864, "0" * 16]]), "invalid writer = 'x'"),
        (set_head(shards=[[0, 4864, 5]]), "invalid writer = 0, size = 4864 or hashes"),
        (set_head(shards=[[0, 4864, ""]]), "hashes of shard file 0"),
        (set_head(shards=[[0, 4864, "0" * 16]] * 2), "listed twice"),
        (set_head(shards=5), "not readable"),
        (set_head(shapes="ab"), "not readable"),
        (set_head(shapes={"embed.weight": "ab", "head.weight": [4, 4]}), "shape of embed.weight"),
        (set_head(shapes={"embed.weight": [1 << 50] * 2, "head.weight": [4, 4]}), "shape of embed"),
        (set_head(shapes={"embed.weight": [6, 4]}), "exactly one line for each parameter"),
        (set_head(shapes={"embed.weight": [6, 5], "head.weight": [4, 4]}), "the boxes do not"),
        (set_head(shapes={"e" * 501: [6, 4], "head.weight": [4, 4]}), "shape of eee"),
        (set_rows(), "rows are not lists"),
        (set_rows(FIRST, SECOND[:-1]), "parameter embed.weight"),
        (set_rows([0.5, *FIRST[1:]], SECOND), "rows are not lists of 7 integers"),
        (set_rows([1 << 100, *FIRST[1:]], SECOND), "a shard file number outside"),
        (set_rows([*FIRST[:4], -1 << 70, *FIRST[5:]], SECOND), "outside its shard file"),
        (set_rows([*FIRST[:4], 1 << 70, *FIRST[5:]], SECOND), "outside its shard file"),
        (set_rows(["0", *FIRST[1:]], SECOND), "rows are not lists of 7 integers"),
        (set_rows([1, *FIRST[1:]], SECOND), "a shard file number outside 0 to 0"),
        (set_rows([-1, *FIRST[1:]], SECOND), "a shard file number outside"),
        (set_rows(FIRST, [0, 2, *SECOND[2:]]), "a box number outside"),
        (set_rows([0, 0, -10, *FIRST[3:]], SECOND), "a row is not a range of elements"),
        (set_rows([0, 0, 0, 13, *FIRST[4:]], SECOND), "a row is not a range of elements"),
        (set_rows([0, 0, 12, 12, *FIRST[4:]], SECOND), "a row is not a range of elements"),
        (set_rows(FIRST, [0, 1, 1, *SECOND[3:]]), "every element of parameter embed.weight"),
        (set_rows(FIRST, [0, 1, 0, 11, *SECOND[4:]]), "every element of parameter embed.weight"),
        (set_rows(FIRST), "every element of parameter embed.weight"),
        (set_rows(SECOND, FIRST), "every element of parameter embed.weight"),
        (set_rows(FIRST, FIRST, SECOND), "every element of parameter embed.weight"),
        (set_rows([*FIRST[:4], 4848, *FIRST[5:]], SECOND), "outside its shard file"),
        (set_rows([*FIRST[:4], 0, *FIRST[5:]], SECOND), "outside its shard file"),
        (set_rows([*FIRST[:4], 4097, *FIRST[5:]], SECOND), "not a multiple of 64"),
        (set_rows([*FIRST[:4], -2, *FIRST[5:]], SECOND), "outside its shard file"),
        (set_rows([*FIRST[:4], -1, -1, -1], SECOND), "a row needs the offset of master"),
        (set_rows([*FIRST[:5], -1, FIRST[6]], SECOND), "a row needs the offset of master"),
        (set_rows([*FIRST[:5], -1, -1], [*SECOND[:5], -1, -1]), "lacks some of its states"),
        (set_rows([*FIRST[:4], 4100, *FIRST[5:]], SECOND), "not a multiple of 64"),
        (set_rows([*FIRST[:4], 4112, *FIRST[5:]], SECOND), "not a multiple of 64"),
        (set_rows([*FIRST[:4], 4160, 4416, 4672], SECOND), "two rows refer to the same bytes"),
        (set_rows([*FIRST[:4], 4160, *FIRST[5:]], SECOND), "two rows refer to the same bytes"),
        (set_rows([*FIRST[:4], 4160, *FIRST[5:]], [*SECOND[:4], 4096, *SECOND[5:]]),
         "two consecutive rows"),
        (set_rows([*FIRST[:5], 4416, 4608], [*SECOND[:5], 4352, 4672]), "two consecutive rows"),
        (set_rows([*FIRST[:6], 4672], [*SECOND[:6], 4608]), "two consecutive rows"),
        (set_rows([*FIRST[:4], 4352, 4096, 4608], [*SECOND[:4], 4416, 4160, 4672]),
         "the states of a row are not in the order master, exp_avg"),
        (set_rows([*FIRST[:4], 4096, 4608, 4352], [*SECOND[:4], 4160, 4672, 4416]),
         "the states of a row are not in the order master, exp_avg"),
        (lambda head, embed, rest: embed.update(boxes=[[[[0, 6]], [[0, 4]]]] * 2), "the boxes"),
        (lambda head, embed, rest: embed.update(boxes=[[[[0, 6]], [[0, 2]]], [[[0, 3]], [[0, 4]]]]),
         "the boxes do not contain every element exactly once"),
        (lambda head, embed, rest: embed.update(boxes=[[[[0, 3]]]]), "a box has 1 dim"),
        (lambda head, embed, rest: embed.update(boxes=[[[[0, 7]], [[0, 4]]]]), "inside the shape"),
        (lambda head, embed, rest: embed.update(boxes=[[[[0, "x"]], [[0, 4]]]]), "of integers"),
        (lambda head, embed, rest: embed.pop("boxes"), "boxes"),
    ],
)  # fmt: skip
def test_an_index_that_no_save_wrote_is_refused(checkpoint, capsys, change, message):
    """`verify`, `show` and a load must refuse the checkpoint. A load detects only faults of a
    single parameter and state."""
    rewrite_index(checkpoint, change)
    assert message in problem_of(checkpoint, capsys)
    with pytest.raises(CheckpointError, match=message.partition("exp_avg")[0]):
        ShardWeights(read_manifest(checkpoint))  # reads every row, as conversions do
    # A load reads each parameter and state separately, so it cannot detect faults that concern
    # several parameters or states.
    if any(text in message for text in ("two rows", "lacks some of its", "two consecutive")):
        return
    with pytest.raises(CheckpointError, match=r"^/[^\n]*$"):
        load(checkpoint)


def test_a_frozen_parameter_has_a_master_alone(tmp_path):
    read_manifest(write_full(tmp_path / "a", frozen="embed.weight")).verify()
    read_manifest(write_full(tmp_path / "b", frozen="head.weight")).verify()


def test_bytes_that_belong_to_no_parameter_are_refused(checkpoint, capsys):
    """The index lists only the masters of the frozen parameter embed.weight, but the shard file
    also contains its moments."""
    rewrite_index(checkpoint, set_rows([*FIRST[:5], -1, -1], [*SECOND[:5], -1, -1]))
    rewrite_manifest(checkpoint, settings={"optim.frozen": ["embed.*"]})
    assert "bytes to which no row refers" in problem_of(checkpoint, capsys)


@pytest.mark.parametrize("columns", [(5,), (5, 6)])
def test_states_on_both_sides_of_a_frozen_row_are_not_exchanged(tmp_path, capsys, columns):
    """Exchange the offsets of the moments between the two rows of head.weight in the index.
    `verify` detects this, although frozen masters are between the masters of these rows in the
    shard file."""
    path = write_full(tmp_path / "c", frozen="embed.weight", order=(2, 0, 1, 3))
    read_manifest(path).verify()

    def change(head, embed, head_weight) -> None:
        first, second = head_weight["rows"]
        for column in columns:
            first[column], second[column] = second[column], first[column]

    rewrite_index(path, change)
    assert "two consecutive rows" in problem_of(path, capsys)


def write_model(directory: Path, num_files: int) -> None:
    """Write a model's weights to `num_files` files, with one tensor in each file."""
    names = [f"model-{n + 1}.safetensors" for n in range(num_files)] if num_files > 1 else [MODEL]
    for n, name in enumerate(names):
        header = json.dumps({f"w{n}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
        data = len(header).to_bytes(8, "little") + header.encode() + bytes(4)
        (directory / name).write_bytes(data)
    if num_files > 1:
        table = {f"w{n}": name for n, name in enumerate(names)}
        (directory / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": table}))
    (directory / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("num_files", "name", "content", "message"),
    [
        (1, MODEL, b"garbage that is no safetensors", "truncated, or not a safetensors file"),
        (2, "model-2.safetensors", b"garbage that is no safetensors", "truncated"),
        (2, "model-2.safetensors", None, "names model-2.safetensors, which the manifest does not"),
        (2, WEIGHTS_INDEX, b'{"weight_map": {"w0": "../x"}}', "not readable"),
        (2, WEIGHTS_INDEX, b'{"weight_map": {"w0": "a.bin"}}', "names a.bin, which"),
    ],
)
def test_a_model_whose_weights_cannot_be_read_is_refused(
    tmp_path, capsys, num_files, name, content, message
):
    def write(directory: Path) -> None:
        write_model(directory, num_files)
        if content is not None:
            (directory / name).write_bytes(content)
        else:
            (directory / name).unlink()

    write_checkpoint(
        tmp_path / "m", lambda directory: write_model(directory, num_files), kind="model"
    )
    read_manifest(tmp_path / "m").verify()
    write_checkpoint(tmp_path / "c", write, kind="model")
    assert main(["checkpoint", "verify", str(tmp_path / "c")]) == 1
    assert message in capsys.readouterr().out


@pytest.mark.parametrize(
    "name",
    [
        *("model-2.safetensors", MODEL, WEIGHTS_INDEX, "config.json", *SIDECARS),
        *(f"{TEMPLATES}/a.jinja", f"{TEMPLATES}/folder/a.jinja"),
    ],
)
def test_files_that_readers_open_by_name_must_be_listed(checkpoint, capsys, name):
    listed = "tokenizer.model" if name == "tokenizer.json" else "tokenizer.json"
    (checkpoint / listed).write_text("{}")
    entries = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
    entries.append({"name": listed, "size": 2, "xxh3": xxhash.xxh3_64_hexdigest(b"{}")})
    rewrite_manifest(checkpoint, files=entries)
    (checkpoint / name).parent.mkdir(parents=True, exist_ok=True)
    (checkpoint / name).write_text("{}")
    assert f"{name}: the checkpoint's manifest does not list" in problem_of(checkpoint, capsys)
    with pytest.raises(CheckpointError, match="does not list this file"):
        read_manifest(checkpoint).check()


def test_a_tokenizer_may_be_added_to_a_checkpoint_without_tokenizer(checkpoint):
    """Without a tokenizer, `generate` asks the user to add tokenizer files to the checkpoint."""
    (checkpoint / TEMPLATES).mkdir()
    for name in {*SIDECARS, f"{TEMPLATES}/a.jinja"} - {TEMPLATES, GENERATION_CONFIG}:
        (checkpoint / name).write_text("{}")
    read_manifest(checkpoint).check()


@pytest.mark.parametrize("limit", ["_MAX_TEMPLATES", "_MAX_LEVELS"])
def test_folder_of_templates_with_too_many_entries_or_levels_is_refused(
    checkpoint, monkeypatch, limit
):
    """The folder of templates and the two folders in it are three levels. The folder contains three
    entries: two folders and a file."""
    (checkpoint / TEMPLATES / "a" / "b").mkdir(parents=True)
    (checkpoint / TEMPLATES / "x.jinja").write_text("{}")
    monkeypatch.setattr(format_module, limit, 3)
    read_manifest(checkpoint).check()
    monkeypatch.setattr(format_module, limit, 2)
    with pytest.raises(CheckpointError, match=f"{TEMPLATES}: more than .* levels of folders"):
        read_manifest(checkpoint).check()


GOLDEN = Path(__file__).parents[1] / "golden/v1/runs/moe-fp32/checkpoints"


def write_header(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace the header of model.safetensors, and remove the data after the last tensor that the
    new header lists."""
    data = (path / MODEL).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8:end]))
    stop = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    text = json.dumps(header).encode()
    (path / MODEL).write_bytes(len(text).to_bytes(8, "little") + text + data[end : end + stop])


def without_metadata(header: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {name: entry | fields for name, entry in header.items() if name != "__metadata__"}


def edit_config(path: Path, old: str, new: str) -> None:
    text = (path / "config.toml").read_text()
    assert text.count(f"\n{old}\n") == 1
    (path / "config.toml").write_text(text.replace(f"\n{old}\n", f"\n{new}\n"))


def update_manifest(path: Path, **settings: object) -> None:
    """Change `settings` of the manifest, and store the correct sizes and hashes of all files in the
    manifest."""
    raw = json.loads((path / MANIFEST).read_bytes())
    entries = [
        {"name": name, "size": (path / name).stat().st_size, "xxh3": files.xxh3_file(path / name)}
        for name in (entry["name"] for entry in raw["files"])
    ]
    rewrite_manifest(path, files=entries, settings=raw["settings"] | settings)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "step-00000002",
            lambda path: edit_config(path, "num_layers = 2", "num_layers = 3"),
            "num_layers = 3, but its weights have 2",
        ),
        (
            "step-00000002",
            lambda path: edit_config(path, "attention_bias = false", "attention_bias = true"),
            r"tensor blocks\.\S+ is missing",
        ),
        ("step-00000002", lambda path: (path / "config.toml").write_text(""), "model is missing"),
        (
            "step-00000002",
            lambda path: update_manifest(path, **{"optim.frozen": ["*"]}),
            r"optim.frozen = \[\], but the manifest has \['\*'\]",
        ),
        (
            "model-00000002",
            lambda path: write_header(path, lambda _: {}),
            "num_hidden_layers = 2, but .* have 0 layers",
        ),
        (
            "model-00000002",
            lambda path: write_header(
                path, lambda _: {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
            ),
            "num_hidden_layers = 2, but .* have 0 layers",
        ),
        (
            "model-00000002",
            lambda path: write_header(path, lambda header: without_metadata(header, dtype="ZZZ")),
            "has dtype ZZZ, which is not supported",
        ),
        ("model-00000002", lambda path: (path / "config.toml").write_text(""), "model is missing"),
        ("model-00000002", lambda path: (path / "config.toml").write_text("[[[x"), "as TOML"),
        (
            "model-00000002",
            lambda path: (path / "config.toml").write_text("base = '/dev/zero'"),
            "a checkpoint has no base files",
        ),
        ("model-00000002", lambda path: (path / "config.json").write_text("{"), "as JSON"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_not_valid(tmp_path, name, change, message):
    """Hashes and sizes are correct, but a file cannot be parsed, or files contradict each other."""
    path = Path(shutil.copytree(GOLDEN / name, tmp_path / "c"))
    update_manifest(path)
    assert verify(path)["valid"]
    change(path)
    update_manifest(path)
    read_manifest(path).verify()
    (problem,) = verify(path)["checkpoints"][0]["problems"]
    assert re.search(message, problem) and "\n" not in problem


def load(checkpoint: Path) -> None:
    request = ParamSlice("embed.weight", whole_box((6, 4)), 0, 24)
    memory = numpy.empty(24, dtype=numpy.float32)
    with Readers(checkpoint, read_manifest(checkpoint).index(), 1) as readers:
        readers.read([ReadRequest("master", [(request, 0)], memoryview(memory).cast("B"))])


def test_a_full_checkpoint_without_an_index_is_refused_by_a_load(checkpoint):
    rewrite_manifest(checkpoint, files=[])
    with pytest.raises(CheckpointError, match="lacks index.jsonl"):
        read_manifest(checkpoint).index()


@pytest.mark.parametrize("name", [MANIFEST, INDEX, "shard-00000.bin", "x"])
def test_a_fifo_is_refused_and_not_waited_for(checkpoint, name):
    if name == "x":
        entries = json.loads((checkpoint / MANIFEST).read_bytes())["files"]
        rewrite_manifest(checkpoint, files=[*entries, ENTRY])
    else:
        (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    with pytest.raises(CheckpointError, match="not a regular file|bytes, but"):
        read_manifest(checkpoint).verify()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy: the code checks the result
@pytest.mark.parametrize(
    ("old", "new"), [("[0,0", "[0--0"), ("],[", "],"), ("]]}", "],]}"), ("0,", "0-")]
)
def test_rows_that_are_no_integers_are_refused(checkpoint, old, new):
    index = decode((checkpoint / INDEX).read_bytes())
    table, key, rows = index.lines["embed.weight"].partition('"rows":')
    lines = {**index.lines, "embed.weight": table + key + rows.replace(old, new, 1)}
    with pytest.raises(CheckpointError, match=r"parameter embed\.weight: "):
        replace(index, lines=lines).stored("embed.weight")


def test_show_escapes_control_characters(checkpoint, capsys):
    rewrite_manifest(checkpoint, origin="\x1b]0;owned\x07\nstate  valid")
    assert main(["checkpoint", "show", str(checkpoint)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\\x1b]0;owned\\x07\\nstate  valid" in printed
