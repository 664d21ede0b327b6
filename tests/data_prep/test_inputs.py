"""Tests of packed files, tables and sentencepiece models: they are read completely, or refused with
the number of the invalid line."""

from __future__ import annotations

import builtins
import gzip
import io
import json
import os
import random
import shutil
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.sources.parquet import DamagedTable, read_column
from data_prep.sources.streams import DamagedStream, damage_of_gzip, unpack
from tests.data_prep.corpus import refused, write_sentencepiece
from tests.data_prep.test_bad_input import arguments
from tests.data_prep.test_tokenize import stored_documents

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")
sentencepiece = pytest.importorskip("sentencepiece")

TEXTS = [f"text number {number} é漢 " * (number % 7) for number in range(600)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zst(data: bytes, frame_bytes: int = 10_000) -> bytes:
    packer = zstandard.ZstdCompressor()
    frames = range(0, len(data), frame_bytes)
    return b"".join(packer.compress(data[i : i + frame_bytes]) for i in frames)


def table(path: Path, values: list[str | None], name: str = "text") -> None:
    columns = pyarrow.table({"id": list(range(len(values))), name: values})
    parquet.write_table(columns, path, row_group_size=100)


def ids_of(made, tmp_path: Path) -> list[tuple[int, list[int]]]:
    assert main(arguments(made, tmp_path)) == 0
    return [(line, ids) for _, line, ids in stored_documents(tmp_path / "out")]


@pytest.mark.parametrize("kind", ["jsonl.zst", "json.zst", "parquet"])
def test_packed_and_table_inputs_have_the_ids_of_plain_lines(made, tmp_path, text, kind):
    (text / "a.jsonl").write_bytes(LINES)
    expected = ids_of(made, tmp_path)
    (text / "a.jsonl").unlink()
    if kind == "parquet":
        table(text / "a.parquet", TEXTS)
    else:
        (text / f"a.{kind}").write_bytes(zst(LINES))
    (tmp_path / "out").rename(tmp_path / "before")
    assert ids_of(made, tmp_path) == expected


BAD_PACKED = {
    "cut.jsonl.zst": (zst(LINES)[:-9], "damaged zstd: the file ends within a frame"),
    "junk.jsonl.zst": (zst(LINES) + b"junk, no frame", "damaged zstd"),
    "empty.jsonl.zst": (b"", ":1: damaged zstd: the file is empty"),
    "cut.parquet": (b"PAR1 and no more", ":1: damaged parquet"),
}


@pytest.mark.parametrize("name", BAD_PACKED)
def test_damaged_files_are_refused_or_left_out(made, tmp_path, text, capsys, name):
    content, needle = BAD_PACKED[name]
    (text / name).write_bytes(content)
    (text / "z.txt").write_text("good text " * 20)
    error = refused(capsys, arguments(made, tmp_path), needle)
    assert name in error
    assert main(arguments(made, tmp_path, "--on-error", "quarantine")) == 0
    assert [Path(name).name for name, _, _ in stored_documents(tmp_path / "out")] == ["z.txt"]


def test_null_values_and_missing_columns_are_refused(made, tmp_path, text, capsys):
    table(text / "a.parquet", ["good", None, "more"])
    refused(capsys, arguments(made, tmp_path), "a.parquet:2: column 'text' is null")
    table(text / "a.parquet", ["good"], name="body")
    error = refused(capsys, arguments(made, tmp_path, "--out", str(tmp_path / "other")))
    assert "has no column 'text', only id, body; set --text-field" in error


def invalid_text(values: list[bytes]) -> pyarrow.Array:
    """Return a column of strings with the bytes in `values`, which can be invalid UTF-8. Some
    programs write such columns."""
    raw = pyarrow.array(values, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), len(values), raw.buffers())


@pytest.mark.parametrize("column", ["text", "id"])
def test_invalid_utf8_in_a_table_is_refused_by_row(made, tmp_path, text, capsys, column):
    bad = invalid_text([b"one", b"not \xff\xfe text", b"three"])
    columns = {"text": ["good", "some", "more"], "id": ["a", "b", "c"], column: bad}
    parquet.write_table(pyarrow.table(columns), text / "a.parquet")
    error = refused(capsys, arguments(made, tmp_path))
    assert "a.parquet:2: " in error and ("invalid UTF-8: " if column == "text" else "'id'") in error
    assert main(arguments(made, tmp_path, "--on-error", "quarantine")) == 0
    assert [line for _, line, _ in stored_documents(tmp_path / "out")] == [1, 3]


@pytest.mark.parametrize("packing", ["zst", "gz"])
def test_unpacking_takes_little_memory_at_a_ratio_of_a_thousand(tmp_path, packing):
    data = b"x" * (1 << 26)
    path = tmp_path / f"a.txt.{packing}"
    path.write_bytes(zstandard.compress(data) if packing == "zst" else gzip.compress(data))
    size = peak_bytes = 0
    with open(path, "rb") as file:
        stream = unpack(file, str(path))
        tracemalloc.start()
        try:
            while block := stream.read(1 << 16):
                size += len(block)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert size == len(data) and peak_bytes < 8 << 20


def test_zstd_frames_of_all_kinds_are_read_and_cut_frames_refused(tmp_path):
    """The frames have checksums, sizes, raw blocks and blocks that repeat one byte. Skippable
    frames are between these frames. The test also cuts the data at random positions."""
    rng, skipped = random.Random(3), struct.pack("<II", 0x184D2A5B, 5) + b"aside"
    for number in range(64):
        packer = zstandard.ZstdCompressor(
            write_checksum=bool(number & 1), write_content_size=bool(number & 2)
        )
        data = rng.randbytes(2000) + b"a" * rng.randrange(400_000) + LINES[: rng.randrange(20_000)]
        whole = packer.compress(data) if number & 4 else packer.compress(data[:200])
        data = data if number & 4 else data[:200]
        assert unpack(io.BytesIO(skipped + whole + skipped + whole), "a.zst").read() == 2 * data
        with pytest.raises(DamagedStream, match="ends within a frame"):
            unpack(io.BytesIO(whole + whole[: rng.randrange(1, len(whole))]), "a.zst").read()
        with pytest.raises(DamagedStream, match="ends within a frame"):
            unpack(io.BytesIO(whole + skipped[:-2]), "a.zst").read()


def test_search_for_gzip_damage_takes_little_memory(tmp_path):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n" + b"x" * (1 << 26))[:-9])
    tracemalloc.start()
    try:
        line, reason = damage_of_gzip(str(path))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert line == 3 and "end-of-stream" in reason and peak_bytes < 8 << 20


def test_ambiguous_and_nontext_columns_are_refused(made, tmp_path, text, capsys):
    strings = pyarrow.array(["one", "two"])
    for columns, names, needle in (
        ([strings, strings], ["text", "text"], "has several columns 'text'; rename all but one"),
        ([strings] * 3, ["id", "text", "id"], "has several columns 'id'; rename all but one"),
        ([strings.dictionary_encode()], ["text"], "not text; write it as string"),
    ):
        parquet.write_table(pyarrow.Table.from_arrays(columns, names), text / "a.parquet")
        refused(capsys, arguments(made, tmp_path), needle)
        shutil.rmtree(tmp_path / "out")


def test_damaged_column_names_of_a_table_are_refused(made, text, tmp_path, capsys):
    columns = pyarrow.table({"text": ["good"], "café": [1]})
    parquet.write_table(columns, text / "a.parquet")
    content = (text / "a.parquet").read_bytes()
    (text / "a.parquet").write_bytes(content.replace("é".encode(), b"\xff\xa9"))
    refused(capsys, arguments(made, tmp_path), "a.parquet:1: damaged parquet: ")


def test_damaged_counts_of_a_table_lose_no_row(tmp_path):
    """A table with a damaged row count is read completely or refused. Without this check, pyarrow
    would return only as many rows as the damaged count says, and no rows if the count is
    negative."""
    path = tmp_path / "a.parquet"
    columns = pyarrow.table({"text": [f"good text {n}" for n in range(200)]})
    parquet.write_table(columns, path, row_group_size=100, write_statistics=False)
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    hundred = b"\xc8\x01"  # as Thrift writes it
    offsets = [
        offset
        for offset in range(footer, len(content) - 8)
        if content[offset : offset + 2] == hundred
    ]
    refused = 0
    for offset in offsets:
        for damage in (b"\xc8\x00", b"\xc9\x01", b"\x80\x00", b"\xc8\x03"):
            path.write_bytes(content[:offset] + damage + content[offset + 2 :])
            try:
                assert len(list(read_column(str(path), "text"))) == 200
            except DamagedTable:
                refused += 1
    assert len(offsets) >= 4 and refused >= 8


def test_tables_with_unusual_names_are_read(made, tmp_path, monkeypatch):
    """Some file names look like URIs, and one file name is not UTF-8."""
    text = tmp_path / "text"
    (text / "gs:").mkdir(parents=True)
    names = ["s3:x.parquet", "file:y.parquet", "gs:/z.parquet", os.fsdecode(b"caf\xe9.parquet")]
    for number, name in enumerate(names):
        table(tmp_path / "made.parquet", [f"good text {number}"])
        os.rename(tmp_path / "made.parquet", text / name)
    monkeypatch.chdir(text)
    command = arguments(made, tmp_path, "--id-field", "")
    command[command.index("--input") + 1 : command.index("--input") + 2] = names
    assert main(command) == 0
    assert len(stored_documents(tmp_path / "out")) == len(names)


@pytest.mark.parametrize(
    ("package", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")]
)
def test_missing_package_is_named(made, tmp_path, text, capsys, monkeypatch, package, name):
    (text / name).write_bytes(b"whatever")
    real = builtins.__import__

    def without(wanted, *rest):
        if wanted.split(".")[0] == package:
            raise ImportError(wanted)
        return real(wanted, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    refused(capsys, arguments(made, tmp_path), f"pip install {package}")


def test_gzip_without_isal_gives_the_same_documents(made, tmp_path, monkeypatch):
    from data_prep.sources.documents import InputReader
    from data_prep.sources.inputs import InputFile

    file = made.text / "b.jsonl.gz"
    results = []
    for present in (True, False):
        if not present:
            monkeypatch.setitem(sys.modules, "isal.igzip", None)
        reader = InputReader(InputFile(str(file), file.stat().st_size), "text", lambda _: None)
        results.append((list(reader), reader.xxh3))
    assert results[0] == results[1] and len(results[0][0]) == 80


def test_sentencepiece_ids_are_the_librarys(made, tmp_path, text, capsys):
    model = tmp_path / "spm.model"
    write_sentencepiece(model, TEXTS * 3 + ["abc def ghi jkl </s> mno"] * 20)
    (text / "a.jsonl").write_bytes(LINES + b'{"text": "x </s> y<s>  \\n z"}\n{"text": ""}\n')
    command = arguments(made, tmp_path, "--tokenizer", str(model))
    assert main(command) == 0
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    expected = [library.encode(t) for t in [*TEXTS, "x </s> y<s>  \n z", ""]]
    stored = stored_documents(tmp_path / "out")
    assert [ids for _, _, ids in stored] == [[*ids, library.eos_id()] for ids in expected]
    refused(capsys, [*command, "--eos", "text"], "not one of its control symbols")
