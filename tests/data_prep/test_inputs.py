"""Packed files, tables, lists of inputs, sentencepiece models: read whole, or refused by line."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from pathlib import Path

import pytest

from data_prep.cli import main
from tests.data_prep.test_bad_input import arguments, one_error
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


@pytest.fixture
def text(tmp_path) -> Path:
    (tmp_path / "text").mkdir()
    return tmp_path / "text"


def ids_of(made, tmp_path: Path) -> list[tuple[int, list[int]]]:
    assert main(arguments(made, tmp_path)) == 0
    return [(line, ids) for _, line, ids in stored_documents(tmp_path / "out")]


@pytest.mark.parametrize("kind", ["jsonl.zst", "json.zst", "parquet"])
def test_the_same_documents_as_from_plain_lines(made, tmp_path, text, kind):
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
def test_damaged_files_are_refused_or_left_out_whole(made, tmp_path, text, capsys, name):
    content, needle = BAD_PACKED[name]
    (text / name).write_bytes(content)
    (text / "z.txt").write_text("good text " * 20)
    assert main(arguments(made, tmp_path)) == 2
    assert needle in (error := one_error(capsys)) and name in error
    assert main(arguments(made, tmp_path, "--on-error", "quarantine")) == 0
    assert [Path(name).name for name, _, _ in stored_documents(tmp_path / "out")] == ["z.txt"]


def test_null_and_missing_columns(made, tmp_path, text, capsys):
    table(text / "a.parquet", ["good", None, "more"])
    assert main(arguments(made, tmp_path)) == 2
    assert "a.parquet:2: column 'text' is null" in one_error(capsys)
    table(text / "a.parquet", ["good"], name="body")
    assert main([*arguments(made, tmp_path), "--out", str(tmp_path / "other")]) == 2
    assert "has no column 'text', only id, body; --text-field" in one_error(capsys)


def test_columns_that_cannot_be_told_or_are_no_text(made, tmp_path, text, capsys):
    import pyarrow

    strings = pyarrow.array(["one", "two"])
    for columns, names, told in (
        ([strings, strings], ["text", "text"], "has several columns 'text'; rename all but one"),
        ([strings] * 3, ["id", "text", "id"], "has several columns 'id'; rename all but one"),
        ([strings.dictionary_encode()], ["text"], "not text; write it as string"),
    ):
        parquet.write_table(pyarrow.Table.from_arrays(columns, names), text / "a.parquet")
        assert main(arguments(made, tmp_path)) == 2
        assert told in one_error(capsys)
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    ("package", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")]
)
def test_a_missing_package_is_named(made, tmp_path, text, capsys, monkeypatch, package, name):
    (text / name).write_bytes(b"whatever")
    real = builtins.__import__

    def without(wanted, *rest):
        if wanted.split(".")[0] == package:
            raise ImportError(wanted)
        return real(wanted, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(arguments(made, tmp_path)) == 2
    assert f"pip install {package}" in one_error(capsys)


def test_gzip_without_isal_gives_the_same(made, tmp_path, monkeypatch):
    from data_prep.documents import InputReader
    from data_prep.sources import InputFile

    file = made.text / "b.jsonl.gz"
    found = []
    for present in (True, False):
        if not present:
            monkeypatch.setitem(sys.modules, "isal.igzip", None)
        reader = InputReader(InputFile(str(file), file.stat().st_size), "text", lambda _: None)
        found.append((list(reader), reader.xxh3))
    assert found[0] == found[1] and len(found[0][0]) == 80


def test_lists_of_inputs(made, tmp_path, text, capsys):
    for name in ("a b.txt", "#c.txt", "d1.txt", "d2.txt", "no.txt"):
        (text / name).write_text(f"good text of {name}")
    listed = tmp_path / "list"
    listed.write_text(f"# comment\n{text}/a b.txt\n\n{text}/d?.txt\n")
    given = arguments(made, tmp_path)
    given[given.index("--input") + 1] = f"@{listed}"
    assert main(given) == 0
    names = [Path(name).name for name, _, _ in stored_documents(tmp_path / "out")]
    assert names == ["a b.txt", "d1.txt", "d2.txt"]
    capsys.readouterr()
    listed.write_text("# nothing\n")
    assert main(given) == 2 and "names nothing" in one_error(capsys)
    listed.unlink()
    assert main(given) == 2 and "is not a file" in one_error(capsys)


def test_sentencepiece_ids_are_the_librarys(made, tmp_path, text, capsys):
    model = tmp_path / "spm.model"
    with open(model, "wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 3 + ["abc def ghi jkl </s> mno"] * 20),
            model_writer=file,
            vocab_size=300,
            hard_vocab_limit=False,
            byte_fallback=True,
            minloglevel=2,
        )
    (text / "a.jsonl").write_bytes(LINES + b'{"text": "x </s> y<s>  \\n z"}\n{"text": ""}\n')
    given = arguments(made, tmp_path)
    given[given.index("--tokenizer") + 1] = str(model)
    assert main(given) == 0
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    expected = [library.encode(t) for t in [*TEXTS, "x </s> y<s>  \n z", ""]]
    found = stored_documents(tmp_path / "out")
    assert [ids for _, _, ids in found] == [[*ids, library.eos_id()] for ids in expected]
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert main(["inspect", str(tmp_path / "out"), "0"]) == 0
    assert main([*given, "--eos", "text"]) == 2
    assert "not one of its control symbols" in one_error(capsys)
