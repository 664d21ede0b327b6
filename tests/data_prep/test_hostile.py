"""Files of a data set with wrong content and valid hashes, as if somebody had changed a file and
its hash.

Each file is refused with one line that contains its path, and `verify` reports the file as damaged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.dataset.describe import inspect
from data_prep.dataset.manifest import read_manifest
from data_prep.layout import npy_header
from data_prep.pipeline.begin import check_tokenizer, write_once
from data_prep.pipeline.verify import verify
from data_prep.runtime.ranks import RankFiles
from data_prep.shuffle.order import read_order
from data_prep.sources.foreign import open_foreign
from data_prep.tokenize.plan import read_plan
from data_prep.tokenize.token_set import read_unit
from data_prep.tokenize.writer import Segments
from data_prep.tokenizer.tokenizer import open_tokenizer
from optimus.data.dataset import TokenDataset
from optimus.errors import DamageError, DataError
from optimus.io import files
from tests.data_prep.corpus import run_arguments

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture(scope="module")
def copied(made, tmp_path_factory):
    """Return a copy of the data set, which tests change and restore."""
    out = tmp_path_factory.mktemp("hostile") / "data"
    shutil.copytree(made.data, out)
    return out


@pytest.fixture
def restored(copied):
    """Return the data set `copied`. After the test, restore the files that the test has changed."""
    names = ("manifest.json", "order.json", "tokens/plan.json", "tokens/unit-00000.json")
    before = {copied / name: (copied / name).read_bytes() for name in names}
    before |= {path: path.read_bytes() for path in (copied / "shards").iterdir()}
    yield copied
    for path, content in before.items():
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def write(path: Path, changes: dict) -> None:
    """Change keys of a JSON file that contains its hash, and write the new hash.

    Keys of `changes` are paths such as `a.0.b`. The value None removes a key. A string `raw:TEXT`
    writes TEXT without quotes.
    """
    value = json.loads(path.read_text())
    del value["self_xxh3"]
    raw = {}
    for key_path, new in changes.items():
        inner = value
        *above, last = key_path.split(".")
        for key in above:
            inner = inner[int(key) if isinstance(inner, list) else key]
        if new is None:
            del inner[last]
            continue
        if isinstance(new, str) and new.startswith("raw:"):
            raw[json.dumps(new[:8])] = new[4:]
            new = new[:8]
        inner[int(last) if isinstance(inner, list) else last] = new
    body = json.dumps(value, indent=1).encode()[:-2]
    for name, text in raw.items():
        body = body.replace(name.encode(), text.encode())
    tail = f',\n "self_xxh3": "{files.xxh3_bytes(body)}"\n}}\n'
    path.write_bytes(body + tail.encode())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"context": None}, "context is missing"),
        ({"context": 0}, "context = 0 is not from 1 to"),
        ({"context": -64}, "context = -64 is not from 1 to"),
        ({"context": 1 << 50}, "context = 1125899906842624 is not from 1 to"),
        ({"context": 32}, "a shard has size = "),
        ({"context": "raw:NaN"}, "context is not a whole number"),
        ({"context": "64"}, "context is not a whole number"),
        ({"context": True}, "context is not a whole number"),
        ({"eval_fraction": "raw:NaN"}, "eval_fraction is not a number between -2^64 and 2^64"),
        ({"eval_fraction": "raw:1e400"}, "eval_fraction is not a number between -2^64 and 2^64"),
        ({"eval_fraction": 1}, "eval_fraction = 1 is not in the range [0, 1)"),
        ({"documents": f"raw:{DEEP}"}, "its JSON objects are nested too deeply"),
        ({"documents": f"raw:{'9' * 5000}"}, "Exceeds the limit"),
        ({"documents": -1}, "a count or size is negative or too large"),
        ({"tokens": 1 << 63}, "a count or size is negative or too large"),
        ({"tokens": 1 << 200}, "tokens is not a number between -2^64 and 2^64"),
        ({"dtype": "int16"}, "dtype = 'int16', but a vocabulary of 400 ids needs uint16"),
        ({"dtype": "uint32"}, "dtype = 'uint32', but a vocabulary of 400 ids needs uint16"),
        ({"dtype": "object"}, "dtype = 'object'"),
        ({"vocab_size": 0}, "vocab_size = 0 is not from 1 to 2^32"),
        ({"vocab_size": 1 << 40}, "is not from 1 to 2^32"),
        ({"eos_id": -1}, "eos_id = -1 is outside the vocabulary of 400"),
        ({"eos_id": 400}, "eos_id = 400 is outside the vocabulary of 400"),
        ({"tokenizer_sha256": "x" * 64}, "tokenizer_sha256 is not 64 hexadecimal digits"),
        ({"seed": -1}, "seed = -1 is not from 0 to 2^64 - 1"),
        ({"part": "evil"}, "part is none of train, held-out"),
        ({"order_xxh3": "0" * 15}, "an xxh3 hash is not 16 hexadecimal digits"),
        ({"tails": {}}, "tails is not a list"),
        ({"tails.0": 10**6}, "tail_tokens is not the sum of tails"),
        ({"tokens_dir": "a\0b"}, "a tokens_dir is not a relative path"),
        ({"tokens_dir": "/etc"}, "a tokens_dir is not a relative path"),
        ({"inputs.0.name": "\ud800"}, "the name of an input is not a path"),
        ({"inputs.0.size": None}, "inputs.size is missing"),
        ({"inputs.0": []}, "inputs is not an object"),
        ({"quarantined": 5}, "quarantined is not an object"),
        ({"quarantined.size": -1}, "a count or size is negative or too large"),
        ({"blend": 5}, "blend is not a list"),
        ({"instances_per_shard": 0}, "instances_per_shard = 0 is not from 1 to"),
        ({"instances_per_shard": -2}, "instances_per_shard = -2 is not from 1 to"),
        ({"instances_per_shard": 1}, "lists 7 shards, but num_instances = "),
        ({"num_instances": 1 << 50}, "lists 7 shards, but num_instances = "),
        ({"shards": []}, "lists 0 shards, but num_instances = "),
        ({"shards.0.name": 7}, "shards.name is not a string"),
        ({"shards.0.name": "/etc/shard-00000.npy"}, "a shard has name = '/etc/shard-00000.npy'"),
        ({"shards.0.name": "shards/../x.npy"}, "a shard has name = 'shards/../x.npy'"),
        ({"shards.1.name": "shards/shard-00000.npy"}, "a shard has name = "),
        ({"shards.0.instances": 0}, "a shard has instances = 0"),
        ({"shards.0.instances": 1 << 50}, "a shard has instances = "),
        ({"shards.0.size": 129}, "a shard has size = 129"),
        ({"shards.0.xxh3": "X" * 16}, "an xxh3 hash is not 16 hexadecimal digits"),
        ({"shards.0.xxh3": None}, "shards.xxh3 is missing"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_manifest_with_impossible_values_is_refused(restored, changes, problem):
    write(restored / "manifest.json", changes)
    with pytest.raises(DataError) as error:
        TokenDataset(restored)
    line = str(error.value)
    assert line.startswith(f"{restored / 'manifest.json'}: ") and problem in line
    assert "\n" not in line and len(line) < 500
    lines = list(verify(restored))
    assert any(problem in line and "; repair: rm -f " in line for line in lines)


def test_keys_of_a_later_program_are_ignored(restored):
    before = read_manifest(restored)
    write(restored / "manifest.json", {"shards.0.note": [1], "later": {"a": 1}})
    assert read_manifest(restored) == before


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1},
        {"documents": 1},
        {"carry_tails": True},
        {"part": "held-out"},
        {"permutation": "evil"},
        {"eos_id": 1},
        {"eos_token": "x"},
        {"eval_fraction": 0.3},
        {"text_field": "x"},
        {"seed": 8},
        {"tokens_dir": "other"},
        {"inputs.0.name": "x"},
        {"inputs.0.xxh3": "0" * 16},
        {"quarantined.count": 1, "quarantined.xxh3": "0" * 16},
    ],
    ids=lambda value: str(value)[:40],
)
def test_verify_compares_the_manifest_with_its_order(restored, changes):
    write(restored / "manifest.json", changes)
    key = next(iter(changes)).split(".")[0]
    lines = list(verify(restored))
    assert any(re.search(rf"manifest.json: {key} (= |differs)", line) for line in lines)


@pytest.mark.parametrize("version", [True, 1.0, "1", 0, 9])
def test_versions_that_are_not_written_are_refused(restored, version):
    write(restored / "manifest.json", {"version": version})
    with pytest.raises(DataError, match="manifest.json: is optimus-dataset version"):
        TokenDataset(restored)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (lambda table: table[:-1], "unit-00000.ids.npy: its header is damaged"),
        (lambda table: np.add(table, [0, 50, 0]), "names an input outside the unit"),
        (lambda table: np.subtract(table, [0, 1, 0]), "names an input outside the unit"),
        (lambda table: np.subtract(table, [0, 0, 50]), "names an impossible line of an input"),
        (lambda table: np.add(table, [0, 0, 1 << 60]), "names an impossible line of an input"),
        (lambda table: np.c_[table[:, :2], table[::-1, 2]], "not sorted by input and line"),
        (lambda table: table - [[1, 0, 0]] * (table == table[0])[:, :1], "do not end where its"),
        (
            lambda table: np.multiply(table, [-1, 1, 1]),
            "the document ends in column 0 do not increase",
        ),
        (lambda table: np.add(table, [1, 0, 0]), "unit-00000.docs.npy: has "),
    ],
)
def test_impossible_table_of_documents_with_correct_hashes_is_damage(restored, changes, problem):
    """The hash of the table is in the sidecar of its unit, in the order and in the manifest."""
    path = restored / "tokens/unit-00000.docs.npy"
    before = path.read_bytes()
    table = changes(np.load(path))
    path.write_bytes(npy_header(table.shape, "int64") + table.astype("<i8").tobytes())
    docs = {"docs.xxh3": files.xxh3_file(path), "docs.size": path.stat().st_size}
    write(restored / "tokens/unit-00000.json", docs | {"documents": len(table)})
    write(restored / "order.json", {"units.0.docs_xxh3": docs["docs.xxh3"]})
    write(restored / "manifest.json", {"order_xxh3": files.xxh3_file(restored / "order.json")})
    try:
        lines = list(verify(restored))
    finally:
        path.write_bytes(before)
    assert any(problem in line for line in lines)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("order.json", {"context": 0}, "context = 0 is not from 1 to"),
        ("order.json", {"instances_per_shard": 0}, "instances_per_shard = 0 is not from 1 to"),
        ("order.json", {"dtype": "zzz"}, "dtype is none of uint16, uint32"),
        ("order.json", {"seed": 1 << 64}, "seed is not a number between -2^64 and 2^64"),
        ("order.json", {"units": []}, "it lists no units"),
        ("order.json", {"units.0.kept": 1 << 40}, "a count of a unit is negative or too large, or"),
        ("order.json", {"units.0.tokens": "x"}, "units.tokens is not a whole number"),
        ("order.json", {"units.0.xxh3": None}, "units.xxh3 is missing"),
        ("order.json", {"units": f"raw:{DEEP}"}, "its JSON objects are nested too deeply"),
        ("order.json", {"permutation": "x"}, "permutation = 'x', but this version of optimus-data"),
        ("order.json", {"carry_tails": True}, "the kept tokens of a unit do not follow from"),
        ("order.json", {"units.0.kept": 7}, "the kept tokens of a unit do not follow from"),
        ("order.json", {"tokens_dir": "\0"}, "tokens_dir is not a relative path"),
        ("order.json", {"tokens_dir": "/etc"}, "tokens_dir is not a relative path"),
        ("tokens/plan.json", {"units.0": [0]}, "units is not a list of 2 values"),
        ("tokens/plan.json", {"units.0": [0, 1 << 40]}, "units are not consecutive ranges"),
        ("tokens/plan.json", {"tokenizer.vocab_size": 0}, "vocab_size = 0 is not from 1"),
        ("tokens/plan.json", {"inputs.0.size": "x"}, "inputs.size is not a whole number"),
        ("tokens/plan.json", {"max_document": "x"}, "max_document is not a whole number"),
        ("tokens/unit-00000.json", {"array": []}, "array is not an object"),
        ("tokens/unit-00000.json", {"array.size": "x"}, "array.size is not a whole number"),
        ("tokens/unit-00000.json", {"tokens": -1}, "tokens or documents is negative or too large"),
        ("tokens/unit-00000.json", {"inputs": 5}, "inputs is not a list"),
        ("tokens/unit-00000.json", {"dropped": -1}, "dropped, eos_added or empty_documents is"),
        ("shards/shard-00000.json", {"xxh3": None}, "xxh3 is missing"),
        ("shards/shard-00000.json", {"size": []}, "size is not a whole number"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_json_with_impossible_values_is_damage(restored, name, changes, problem):
    write(restored / name, changes)
    if name == "order.json":
        with pytest.raises(DataError, match="order.json: "):
            read_order(restored)
    elif name == "tokens/plan.json":
        with pytest.raises(DataError, match=problem):
            read_plan(restored / "tokens")
        problem = "its hash differs from the hash in order.json"
    elif name == "tokens/unit-00000.json":
        plan = files.xxh3_file(restored / "tokens" / "plan.json")
        with pytest.raises(DataError, match="unit-00000.json: "):
            read_unit(restored / "tokens", 0, plan)
    lines = list(verify(restored))
    assert any(line.startswith(f"{restored / name}: ") and problem in line for line in lines)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"part": "held-out"}, "part = held-out, but order.json says train"),
        ({"documents": 1}, "docs.npy: its header is damaged"),
    ],
)
def test_sidecar_that_contradicts_the_order_is_damage(restored, changes, problem):
    write(restored / "tokens/unit-00000.json", changes)
    assert any(problem in line for line in verify(restored))


@pytest.mark.parametrize(
    ("last_ids", "problem"),
    [
        ([65535, 0], "contains id 65535, outside the vocabulary of 400"),
        ([1, 1], "its documents do not end where its table of documents says"),
    ],
)
def test_impossible_ids_with_correct_hashes_are_damage(restored, last_ids, problem):
    path = restored / "tokens/unit-00000.npy"
    before = path.read_bytes()
    path.write_bytes(before[:-4] + np.array(last_ids, "<u2").tobytes())
    xxh3 = files.xxh3_file(path)
    write(restored / "tokens/unit-00000.json", {"array.xxh3": xxh3})
    write(restored / "order.json", {"units.0.xxh3": xxh3})
    write(restored / "manifest.json", {"order_xxh3": files.xxh3_file(restored / "order.json")})
    try:
        lines = list(verify(restored))
    finally:
        path.write_bytes(before)
    assert any(f"unit-00000.npy: {problem}" in line for line in lines)


def test_dtype_of_a_plan_that_contradicts_its_arrays_is_damage(made, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(made.data, data)
    for folder in (data, data / "eval"):
        plan = folder / "tokens/plan.json"
        write(plan, {"tokenizer.vocab_size": 70_000})
        plan_xxh3 = files.xxh3_file(plan)
        for sidecar in sorted((folder / "tokens").glob("unit-*.json")):
            write(sidecar, {"plan": plan_xxh3})
        write(folder / "order.json", {"plan": plan_xxh3})
    lines = list(verify(data))
    assert any("unit-00000.npy: its header does not describe" in line for line in lines)


def test_damaged_array_is_damage_also_if_a_mark_says_that_arrays_are_removed(restored):
    path, mark = restored / "tokens/unit-00000.npy", restored / "tokens/removed.json"
    before = path.read_bytes()
    plan = files.xxh3_file(restored / "tokens/plan.json")
    value = {"format": "optimus-tokens-removed", "version": 1, "plan": plan}
    mark.write_bytes(files.checked_json(value))
    path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        lines = list(verify(restored))
    finally:
        mark.unlink()
        path.write_bytes(before)
    assert any("unit-00000.npy: its content is damaged" in line for line in lines)


def test_stray_list_of_quarantined_documents_is_damage(restored):
    path = restored / "quarantine.jsonl"
    path.write_text("{}")
    try:
        assert any("manifest.json does not list this file" in line for line in verify(restored))
    finally:
        path.unlink()


def test_held_out_split_of_another_data_set_is_damage(made, restored, tmp_path):
    """The other data set has the same tokenizer and another fraction of held-out documents."""
    out = tmp_path / "out"
    assert main(run_arguments(made.text, made.tokenizer, out, "--eval-fraction", "0.4")) == 0
    shutil.move(restored / "eval", tmp_path / "eval")
    try:
        shutil.copytree(out / "eval", restored / "eval")
        assert any("has another plan than" in line for line in verify(restored))
    finally:
        shutil.rmtree(restored / "eval")
        shutil.move(tmp_path / "eval", restored / "eval")


def test_quotas_of_a_blend_that_contradict_its_weights_are_damage(made, tmp_path):
    blend = tmp_path / "blend"
    shutil.copytree(made.data, tmp_path / "copy")
    sources = [f"--source={made.data}=3", f"--source={tmp_path / 'copy'}=1"]
    assert main(["blend", *sources, "--context", "64", "--out", str(blend)]) == 0
    assert main(["shard", str(blend), "--workers", "1"]) == 0
    assert list(verify(blend)) == []
    write(blend / "order.json", {"blended.0.weight": "1"})
    assert any("but the weights give (" in line for line in verify(blend))


def test_an_order_of_another_length_is_refused_by_inspect(restored):
    """The permutation would not terminate for a position outside its range."""
    write(restored / "order.json", {"units.0.tokens": 0, "units.0.kept": 0})
    with pytest.raises(
        DataError, match=r"order.json: num_instances or context differs from manifest.json"
    ):
        inspect(restored, 0)


def test_inspect_refuses_token_arrays_of_another_plan(restored):
    """An order.json can contain the path of token arrays of another data set. The content of these
    arrays must not be printed."""
    write(restored / "order.json", {"plan": "0" * 16})
    with pytest.raises(
        DamageError, match=r"plan.json: its hash differs from the hash in order.json"
    ):
        inspect(restored, 0)


SECRET = files.checked_json({"format": "a-secret", "version": "a-key"})


@pytest.mark.parametrize("command", ["inspect", "verify", "shard"])
def test_commands_do_not_print_files_of_a_folder_in_an_order(
    restored, capsys, monkeypatch, command
):
    """The key `tokens_dir` of order.json can be the path of any folder of the user. The commands
    must not print the content of files in this folder, and must not propose to remove these
    files."""
    outside = restored.parent / "outside"
    outside.mkdir(exist_ok=True)
    for name in ("plan.json", "removed.json", "unit-00000.json", "unit-00000.docs.npy"):
        (outside / name).write_bytes(SECRET)
    write(restored / "order.json", {"tokens_dir": "../outside"})
    write(restored / "manifest.json", {"order_xxh3": files.xxh3_file(restored / "order.json")})
    opened, read = [], files.read_regular
    monkeypatch.setattr(
        files,
        "read_regular",
        lambda path, *rest: opened.append(Path(path)) or read(path, *rest),
    )
    assert main([command, str(restored), *["0"] * (command == "inspect")]) == 1
    printed = "".join(capsys.readouterr())
    assert "outside/plan.json: its hash differs from the hash in order.json" in printed
    assert "a-secret" not in printed and "a-key" not in printed
    for removed in re.findall(r"rm -f ([^;]*)", printed):  # sidecars of shards with another order
        assert re.fullmatch(r"\S+/shards/shard-\d+\.json", removed)
    assert {path.name for path in opened if path.parent.name == "outside"} == {"plan.json"}


def test_shell_code_in_a_folder_name_is_quoted_in_a_repair(restored):
    write(restored / "order.json", {"tokens_dir": "../$(reboot)/tokens"})
    (line,) = [line for line in verify(restored) if "plan.json" in line]
    assert f"repair: optimus-data verify '{restored}/../$(reboot)', or the same" in line


def test_held_out_rule_of_a_blend_needs_the_plan_of_its_order(made, tmp_path):
    """The held-out rule of a blend is in plan.json of its first source. `held_out` reads this file
    from the folder that order.json names, and returns None if the file is not the plan whose hash
    is in order.json."""
    order = ["blend", "--source", f"{made.data}=1", "--context", "64", "--out"]
    blend = tmp_path / "blend"
    assert main([*order, str(blend)]) == 0
    assert main(["shard", str(blend), "--workers", "1"]) == 0
    assert TokenDataset(blend).held_out() == TokenDataset(made.data).held_out() is not None
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "plan.json").write_bytes(SECRET)
    changes = {"tokens_dir": "../outside", "blend.0.tokens_dir": "../outside"}
    write(blend / "manifest.json", changes)
    assert TokenDataset(blend).held_out() == TokenDataset(made.data).held_out()
    write(blend / "order.json", {"blended.0.order.tokens_dir": "../outside"})
    assert TokenDataset(blend).held_out() is None
    (blend / "order.json").write_text("{}")
    with pytest.raises(DataError, match="order.json"):
        TokenDataset(blend).held_out()
    (blend / "order.json").unlink()
    assert TokenDataset(blend).held_out() is None


def test_fifos_in_a_data_set_are_refused(restored, capsys):
    fifo = restored / "shards" / "shard-00000.npy"
    fifo.unlink()
    os.mkfifo(fifo)
    with pytest.raises(DataError, match="shard-00000.npy: cannot be read: not a regular file"):
        TokenDataset(restored).read(0, 1)
    assert any(line.startswith(f"{fifo}: has 0 bytes") for line in verify(restored))
    manifest = restored / "manifest.json"
    manifest.unlink()
    os.mkfifo(manifest)
    with pytest.raises(DataError, match="manifest.json: cannot be read: not a regular file"):
        TokenDataset(restored)


def test_fifo_as_a_tokenizer_is_refused(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="tokenizer.json: cannot be read: not a regular file"):
        open_tokenizer(tmp_path / "tokenizer.json")


def test_a_fifo_in_an_output_directory_is_refused(tmp_path, made):
    """Opening a FIFO waits for a writer without a limit."""
    os.mkfifo(tmp_path / "tokenizer.json")
    os.mkfifo(tmp_path / "unit-00000.part-0000")
    for read in (
        lambda: check_tokenizer(made.tokenizer, tmp_path),
        lambda: write_once(tmp_path / "tokenizer.json", b"{}"),
        lambda: list(Segments(tmp_path, 0, "work").read()),
    ):
        with pytest.raises(DataError, match=r"cannot be read: not a regular file"):
            read()
    rank_files = RankFiles(tmp_path)
    os.mkfifo(tmp_path / ".failed-rank-1.a.1.b.tmp")
    rank_files.check()


@pytest.mark.parametrize(
    ("name", "command"),
    [("manifest.json", "stats"), ("tokenizer.json", "verify"), ("tokens/plan.json", "verify")],
)
def test_file_larger_than_the_limit_is_not_read(restored, capsys, name, command):
    path = restored / name
    content = path.read_bytes()
    with open(path, "ab") as file:
        file.truncate(1 << 40)  # sparse
    try:
        assert main([command, str(restored)]) in (1, 2)
    finally:
        path.write_bytes(content)
    assert "larger than" in capsys.readouterr().err


def test_an_index_is_compared_with_its_size_before_it_is_read(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 0, 0)
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(head)
        file.truncate(1 << 40)  # sparse
    with pytest.raises(DataError, match="its size of 1099511627776 bytes"):
        open_foreign(str(tmp_path / "a.bin"), None)


def test_unordered_table_of_documents_is_damage(made, tmp_path, capsys):
    """The hash of the table in order.json is valid, so only the content of the table shows the
    damage."""
    out = tmp_path / "data"
    shutil.copytree(made.data, out)
    docs = out / "tokens" / "unit-00000.docs.npy"
    content = bytearray(docs.read_bytes())
    content[128:136] = np.array(-1, "<i8").tobytes()
    docs.write_bytes(content)
    write(out / "order.json", {"units.0.docs_xxh3": files.xxh3_file(docs)})
    number = json.loads((out / "manifest.json").read_text())["num_instances"]
    codes = {main(["inspect", str(out), str(k)]) for k in range(min(number, 20))}
    assert codes <= {0, 1} and 1 in codes
    assert "the document ends in column 0 do not increase" in capsys.readouterr().err
