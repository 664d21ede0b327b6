"""Tests of the import of token files of other programs. The tests write such files according to the
definitions of the formats."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import xxhash

from data_prep.cli import main
from data_prep.pipeline import import_run as importing
from tests.data_prep.corpus import refused, tree
from tests.data_prep.test_tokenize import stored_documents

VOCAB, EOS_ID = 400, 0
CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "H": 8}


def write_megatron(
    stem: Path, documents: list[list[list[int]]], code: str = "H", **damage: int
) -> Path:
    """Write .bin and .idx files of documents with `struct`, and return the path of the .bin file. A
    document is a list of sequences. `code` is the struct format of an id. `damage` contains wrong
    values of fields of the index."""
    sequences = [sequence for document in documents for sequence in document]
    size, bounds, offset, pointers = struct.calcsize(f"<{code}"), [0], 0, []
    for sequence in sequences:
        pointers.append(offset)
        offset += size * len(sequence)
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    flat = [token for sequence in sequences for token in sequence]
    stem.with_suffix(".bin").write_bytes(struct.pack(f"<{len(flat)}{code}", *flat))
    lengths = [len(sequence) for sequence in sequences]
    pointers = [pointer + damage.get("shift", 0) for pointer in pointers]
    stem.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", damage.get("version", 1))
        + struct.pack("<B", damage.get("type", CODES[code]))
        + struct.pack("<QQ", len(sequences), len(bounds))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(pointers)}q", *pointers)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )
    return stem.with_suffix(".bin")


def some_documents(seed: int, count: int = 60) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(1, VOCAB - 1) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def flatten(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in [*document, EOS_ID]]


def import_arguments(made, out: Path, *inputs: Path, more: tuple[str, ...] = ()) -> list[str]:
    words = ["import", "--tokenizer", str(made.tokenizer), "--out", str(out), *more]
    return [*words, "--workers", "1", "--input", *map(str, inputs)]


def run_import(*arguments, **more) -> int:
    return main(import_arguments(*arguments, **more))


def imported(out: Path) -> list[list[int]]:
    """Return the ids of each document in the data set `out`, which was made from one file. The EOS
    of each document is removed."""
    stored = stored_documents(out)
    assert [(line, ids[-1]) for _, line, ids in stored] == [(n + 1, 0) for n in range(len(stored))]
    return [ids[:-1] for _, _, ids in stored]


@pytest.mark.parametrize("code", ["H", "i", "q", "h"])
def test_import_of_megatron_files(made, tmp_path, monkeypatch, capsys, code):
    """Half of the documents consist of one sequence without EOS. The other half consist of several
    sequences with EOS. Documents cross the ends of the blocks that are read."""
    monkeypatch.setattr(importing, "_BLOCK_TOKENS", 37)
    documents = some_documents(1)
    stored = [
        [document[:3], document[3:], [EOS_ID]] if i % 2 else [document]
        for i, document in enumerate(documents)
    ]
    write_megatron(tmp_path / "a", stored, code)
    assert run_import(made, tmp_path / "out", tmp_path / "a.bin", more=("--json",)) == 0
    assert imported(tmp_path / "out") == documents
    answer = json.loads(capsys.readouterr().out)
    assert answer["documents"] == 60 and answer["eos_added"] == 30
    assert answer["tokens"] == sum(map(len, documents)) + 60 and answer["empty_documents"] == 0


def test_import_of_megatron_files_divides_at_eos_and_skips_empty_documents(made, tmp_path, capsys):
    write_megatron(tmp_path / "a", [[[]], [[5, EOS_ID, 6]], [[]], [[]], [[7, EOS_ID]], [[EOS_ID]]])
    assert run_import(made, tmp_path / "out", tmp_path / "a.bin", more=("--json",)) == 0
    assert imported(tmp_path / "out") == [[5], [6], [7], []]
    assert json.loads(capsys.readouterr().out)["empty_documents"] == 3


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("block", [1, 7, 1 << 20])
def test_import_of_dolma_files(made, tmp_path, monkeypatch, dtype, block):
    monkeypatch.setattr(importing, "_BLOCK_TOKENS", block)
    documents = [*some_documents(2, 20), [], [], [3]]
    flat = flatten(documents)
    code = {"uint16": "H", "uint32": "I"}[dtype]
    (tmp_path / "part-0.npy").write_bytes(struct.pack(f"<{len(flat)}{code}", *flat))
    (tmp_path / "part-0.csv.gz").write_bytes(b"ignored")
    arguments = [tmp_path / "part-*"]
    assert run_import(made, tmp_path / "out", *arguments, more=("--dtype", dtype)) == 0
    assert imported(tmp_path / "out") == documents


def test_import_reads_a_npy_header_of_python_2_without_a_warning(made, tmp_path, recwarn):
    flat = np.array(flatten(some_documents(3)), np.int64)
    np.save(tmp_path / "a.npy", flat)
    data = (tmp_path / "a.npy").read_bytes()
    shape, long_shape = f"({len(flat)},), ".encode(), f"({len(flat)}L,),".encode()
    assert data.count(shape) == 1
    (tmp_path / "a.npy").write_bytes(data.replace(shape, long_shape))
    assert run_import(made, tmp_path / "out", tmp_path / "a.npy") == 0
    assert not recwarn.list


def test_import_reads_the_dtype_of_a_npy_header(made, tmp_path, capsys):
    documents = some_documents(3)
    np.save(tmp_path / "a.npy", np.array(flatten(documents)[:-1], np.int64))  # without the last EOS
    assert run_import(made, tmp_path / "out", tmp_path / "a.npy", more=("--json",)) == 0
    assert imported(tmp_path / "out") == documents
    assert json.loads(capsys.readouterr().out)["eos_added"] == 1


def test_imported_arrays_are_shuffled_sharded_and_repaired(made, tmp_path):
    """The arrays do not depend on the number of workers, and a missing unit is made again."""
    for seed in (1, 2, 3):
        write_megatron(tmp_path / f"m{seed}", [[document] for document in some_documents(seed)])
    flat = flatten(some_documents(4))
    (tmp_path / "d.npy").write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    single, parallel = tmp_path / "one", tmp_path / "two"
    inputs = [tmp_path / "m*", tmp_path / "d.npy"]
    assert run_import(made, single, *inputs, more=("--dtype", "uint16")) == 0
    assert run_import(made, parallel, *inputs, more=("--dtype", "uint16", "--workers", "3")) == 0
    assert tree(single) == tree(parallel)
    before = tree(single)
    (single / "tokens" / "unit-00001.json").unlink()
    (single / "tokens" / "unit-00001.npy").write_bytes(b"half")
    assert run_import(made, single, *inputs, more=("--dtype", "uint16")) == 0
    assert tree(single) == before
    assert main(["shuffle", str(single), "--context", "16"]) == 0
    assert main(["shard", str(single), "--workers", "1"]) == 0
    assert main(["verify", str(single)]) == 0


def test_documents_are_held_out_by_their_ids(made, tmp_path, monkeypatch, capsys):
    """The xxh3 hash of a document's ids decides if the document is held out, for all formats,
    dtypes and block sizes. Each document is stored once."""
    documents = [*some_documents(7, 200), *some_documents(8, 30)]
    write_megatron(tmp_path / "m", [[document] for document in documents[:200]], "i")
    flat = flatten(documents[200:])
    (tmp_path / "d.npy").write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    monkeypatch.setattr(importing, "_BLOCK_TOKENS", 100)
    more = ("--dtype", "uint16", "--eval-fraction", "0.3", "--json")
    out, inputs = tmp_path / "out", [tmp_path / "m.bin", tmp_path / "d.npy"]
    assert run_import(made, out, *inputs, more=more) == 0
    answer = json.loads(capsys.readouterr().out)
    for split, folder, held_out in (("", out, False), ("held-out", out / "eval", True)):
        expected, stored = [], []
        for document in documents:
            content = struct.pack(f"<{len(document)}I", *document)
            if (xxhash.xxh3_64_intdigest(content) < 0.3 * 2**64) == held_out:
                expected.append(document)
        for name, line, ids in stored_documents(folder):
            first = 200 if name.endswith("d.npy") else 0
            assert [*documents[first + line - 1], EOS_ID] == ids
            stored.append(ids[:-1])
        assert sorted(stored) == sorted(expected) and len(stored) > 30
        assert (answer[split] if split else answer)["documents"] == len(stored)
    assert answer["eos_added"] == 200
    assert main(["shuffle", str(out), "--context", "16"]) == 0
    assert main(["shard", str(out), "--workers", "1"]) == 0
    assert main(["verify", str(out)]) == 0 and (out / "eval" / "manifest.json").exists()
    error = refused(capsys, import_arguments(made, out, *inputs, more=more[:2]))
    assert "eval_fraction = 0.3, now 0.0" in error


def assert_not_imported(
    made, tmp_path, capsys, needle: str, *inputs: Path, more: tuple[str, ...] = ()
):
    refused(capsys, import_arguments(made, tmp_path / "out", *inputs, more=more), needle)
    assert not list(tmp_path.glob("out/tokens/unit-*.json"))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_damaged_token_files_are_refused(made, tmp_path, capsys):
    a = tmp_path / "a"
    good = [[document] for document in some_documents(1, 5)]
    path = write_megatron(a, good)
    index, content = a.with_suffix(".idx").read_bytes(), path.read_bytes()
    path.write_bytes(content[:-2])
    assert_not_imported(made, tmp_path, capsys, "its index lists", path)
    path.write_bytes(content[:-1])
    assert_not_imported(made, tmp_path, capsys, "bytes of a uint16 id", path)
    path.write_bytes(content)
    for cut in (0, 8, 30, len(index) - 1):
        a.with_suffix(".idx").write_bytes(index[:cut])
        assert_not_imported(made, tmp_path, capsys, "a.idx: ", path)
    a.with_suffix(".idx").write_bytes(index + bytes(5))
    assert_not_imported(made, tmp_path, capsys, "damaged or multimodal", path)
    a.with_suffix(".idx").unlink()
    assert_not_imported(made, tmp_path, capsys, "a.idx", path)
    a.with_suffix(".idx").write_bytes(index)
    (tmp_path / "b.idx").write_bytes(index)
    assert_not_imported(
        made, tmp_path, capsys, "b.bin is missing; copy it, or --exclude the index", tmp_path
    )
    (tmp_path / "b.idx").unlink()
    assert_not_imported(
        made, tmp_path, capsys, "do not match their lengths", write_megatron(a, good, shift=2)
    )
    assert_not_imported(made, tmp_path, capsys, "version 2", write_megatron(a, good, version=2))
    assert_not_imported(made, tmp_path, capsys, "dtype code 7", write_megatron(a, good, type=7))
    (tmp_path / "b.txt").write_text("text")
    assert_not_imported(made, tmp_path, capsys, "b.txt: is neither", tmp_path / "b.txt")


@pytest.mark.parametrize("code", ["H", "i", "q"])
def test_ids_outside_the_vocabulary_are_refused(made, tmp_path, capsys, code):
    """A conversion to 16 bits would change 65541 to 5 and -65530 to 6."""
    wrong = [VOCAB] if code == "H" else [VOCAB, 65541, -1, -65530]
    for token in wrong:
        path = write_megatron(tmp_path / "a", [[[1, 2, 3]], [[4, token, 5]]], code)
        assert_not_imported(
            made, tmp_path, capsys, f"a.bin: id {token} at token 4 is outside", path
        )


def test_unsuitable_npy_files_are_refused(made, tmp_path, capsys):
    path = tmp_path / "a.npy"
    path.write_bytes(struct.pack("<4H", 5, 6, 7, 8))
    assert_not_imported(made, tmp_path, capsys, "set --dtype to the dtype", path)
    assert_not_imported(
        made, tmp_path, capsys, "has no <|endoftext|>", path, more=("--dtype", "uint16")
    )
    path.write_bytes(bytes(5))
    assert_not_imported(made, tmp_path, capsys, "not a multiple", path, more=("--dtype", "uint32"))
    for array in (np.zeros((2, 3), np.uint16), np.zeros(3, np.float32)):
        np.save(path, array)
        assert_not_imported(
            made, tmp_path, capsys, "write a one-dimensional array of integers", path
        )
    np.save(path, np.zeros(3, np.uint16))
    assert_not_imported(
        made,
        tmp_path,
        capsys,
        "its header has the dtype uint16, not --dtype uint32",
        path,
        more=("--dtype", "uint32"),
    )
    path.write_bytes(path.read_bytes()[:-1])
    assert_not_imported(made, tmp_path, capsys, "damaged .npy", path)


def test_changed_import_into_a_data_set_is_refused(made, tmp_path, capsys):
    flat = flatten(some_documents(5))
    (tmp_path / "a.npy").write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    out, path = tmp_path / "out", tmp_path / "a.npy"
    assert run_import(made, out, path, more=("--dtype", "uint16")) == 0
    refused(capsys, import_arguments(made, out, path, more=("--dtype", "uint32")), "import uint16")
    flat[0] += 1
    path.write_bytes(struct.pack(f"<{len(flat)}H", *flat))
    error = refused(capsys, import_arguments(made, out, path, more=("--dtype", "uint16")))
    assert "a.npy: changed since" in error
