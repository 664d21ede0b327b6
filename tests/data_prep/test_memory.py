"""Tests of long documents: they are encoded in sections, with the ids of the whole text and within
`--memory`, or are refused."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from data_prep.cli import main
from data_prep.runtime import memory
from data_prep.runtime.memory import Limits, bytes_of_line, divide_memory
from data_prep.sources import documents
from data_prep.sources.parquet import DamagedTable, _group, read_column
from data_prep.tokenize import writer
from data_prep.tokenizer import encoder
from data_prep.tokenizer.encoder import Cutter, NoCut, reference_encode
from data_prep.tokenizer.tokenizer import Encoder, open_tokenizer
from optimus.errors import ConfigError, DataError
from tests.data_prep.corpus import (
    EOS,
    killed_until_done,
    measured,
    refused,
    run_arguments,
    tree,
    words,
)
from tests.data_prep.test_bad_input import arguments
from tests.data_prep.test_encoder import random_text
from tests.data_prep.test_families import RECOGNISED, train_family
from tests.data_prep.test_tokenize import stored_documents


def short_sections(monkeypatch, chars: int = 40) -> None:
    monkeypatch.setattr(encoder, "SECTION_CHARS", chars)
    monkeypatch.setattr(writer, "SECTION_CHARS", chars)


SCRIPTS = [
    *(
        "مرحبا بالعالم",
        "الكِتَابُ",
        "كتاب\n",
        "؟ ",
        "Ωμέγα και",
        "ἀρχή",
        "Привет",
        "й ё",
        "и\u0306 ",
        "שָׁלוֹם עולם",
    ),
    *("नमस्ते दुनिया", "क\u093c ", "ไทย ภาษา", "বাংলা", "\u09c7\u09be", "Việt Nam", "e\u0323\u0302 a"),
    *(
        "漢字、仮名。",
        "が、か\u3099。",
        "か\n\u3099",
        "。\u3099",
        "한국어 말",
        "\u1112\u1161\u11ab",
        "각\n\u11a8",
    ),
    *(
        "\uff0c\u3002",
        "\uff01漢",
        "\u2018漢\u2019",
        "1 2",
        "½ ²",
        "٣ ٤",
        "🙂 🙂",
        "𐐀 𐐀",
        "\U00020000 \U00020000",
        " \u0301",
        "\n\u0301",
    ),
    *(
        " \u0378",
        "\n\u0378",
        " \u180e",
        " \u200b",
        " \ufeff",
        " \x1c",
        "\x1c\nb",
        "\x85\nb",
        " \u2003",
        "\u3000 x",
    ),
    *(
        "\n",
        "\n\n",
        "\r\n",
        " ",
        "  ",
        "\t",
        "...\n",
        "'s ",
        "' s",
        " 's",
        "= \u0338",
        "\u212a",
        ";\u037e",
        "<|endoftext|>",
        "return x",
    ),
    *("a", "B", "7", "-", " word"),
]
"""Fragments of text in many scripts. Tests join them, so that cuts are between all kinds of
characters."""


@pytest.mark.parametrize("family", RECOGNISED)
def test_sections_have_the_ids_of_the_text(tmp_path, monkeypatch, family):
    """The test cuts a text at each position where the encoder permits a cut, and compares the ids
    of the sections with the ids of the whole text."""
    short_sections(monkeypatch, 2)
    train_family(path := tmp_path / "t.json", family)
    encoder, library = Encoder(path), open_tokenizer(path)
    rng, cut, w = random.Random(7), 0, "word" * 7  # longer than any added token
    for number in range(1400):
        if number % 2:
            text = "".join(rng.choices(SCRIPTS, k=rng.randint(1, 40)))
        else:
            text = rng.choice(
                [f"{w}z\nB{w}", "; a b", f"{w}漢\n字{w}", f"{w} ab{w}", "( return x"]
            ).join(random_text(rng) for _ in range(4))
        blocks = [text[i : i + 7] for i in range(0, len(text), 7)]
        pieces = list(encoder.cutter.sections(blocks))
        cut += len(pieces) - 1
        assert "".join(pieces) == text
        ids = np.concatenate([np.array([], np.uint32), *encoder.encode(pieces)])
        assert ids.tolist() == reference_encode(library, [text])[0].tolist(), repr(text)
    assert cut > 1000


def test_characters_that_nfc_replaces_by_ascii():
    """`_TO_ASCII` matches exactly the characters that NFC replaces by ASCII in Python's version of
    Unicode. Later versions do not change the normalization of assigned characters."""
    chars = map(chr, [*range(0x80, 0xD800), *range(0xE000, 0x110000)])
    changed = [char for char in chars if unicodedata.normalize("NFC", char).isascii()]
    assert (
        "".join(changed)
        == "\u037e\u1fef\u212a"
        == "".join(filter(encoder._TO_ASCII.match, changed))
    )


def test_character_after_a_cut_is_not_white_space():
    """`NOT_SPACE` matches no character that is white space for the library, before or after NFC.
    The test compares with the library itself, because the library can have another version of
    Unicode than Python."""
    chars = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    allowed = [char for char in chars if re.match(encoder.NOT_SPACE, char)]
    assert len(allowed) > 0x1F000
    for split in (pre_tokenizers.Split(Regex(r"\s"), "removed", invert=True), None):
        text = "".join(allowed)
        text = normalizers.NFC().normalize_str(text) if split is None else text
        splitter = split or pre_tokenizers.Split(Regex(r"\s"), "removed", invert=True)
        assert splitter.pre_tokenize_str(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "مرحبا بالعالم ",
        "Ωμέγα και άλλα ",
        "Привет, как дела? ",
        "नमस्ते दुनिया ",
        "สวัสดี ชาวโลก ",
        "漢字、仮名。交じり文",
        "안녕하세요 세계\n",
        "1 22 333 ",
        "été\n",
        "«a» (b) ",
    ],
)
@pytest.mark.parametrize("added", [[], ["<|endoftext|>"]])
def test_text_of_all_scripts_is_divided(monkeypatch, text, added):
    short_sections(monkeypatch, 200)
    assert max(map(len, Cutter(added).sections([text * 200]))) < 400


def test_no_section_cuts_an_added_token(monkeypatch):
    short_sections(monkeypatch, 2)
    text = "ab cd\nef" * 3
    assert len(list(Cutter([]).sections([text]))) > 5
    assert "b c" in next(Cutter(["b c"]).sections([text]))
    assert "b K" in next(Cutter(["b K"]).sections(["ab K\nef" * 3]))
    joined = list(Cutter(["b K"]).sections(["ab \u212acd " * 3]))
    assert not [section for section in joined if section.endswith("b")], "NFC makes it the token"
    for blocks, size in (
        (["é" * 50, "b" * 50], 150),
        (["aa aaaaaaaaaaaaaaaa" * 2, "aa" * 20 + "é" * 50, "bé" * 50 + " ccc", "ddd"], 307),
    ):
        with pytest.raises(NoCut) as caught:
            list(Cutter([]).sections(blocks, max_bytes=60))
        assert caught.value.args == (size,)


@pytest.mark.parametrize(("text", "name"), [("QUJD", "a.txt"), (" ", "a.jsonl"), ("é+", "a.txt")])
def test_text_without_a_cut_needs_memory_for_all_of_it(
    made, tmp_path, capsys, monkeypatch, text, name
):
    monkeypatch.setattr(documents, "LONG_BYTES", 1000)
    (tmp_path / "text").mkdir()
    text = "before it " + "x" + text * (300_000 // len(text)) + "y and after"
    content = text if name == "a.txt" else json.dumps({"text": text}, ensure_ascii=False) + "\n"
    (tmp_path / "text" / name).write_text(content)
    command = ["tokenize", "--input", str(tmp_path / "text"), "--tokenizer", str(made.tokenizer)]
    command += ["--workers", "1", "--out"]
    assert main([*command, str(tmp_path / "out"), "--memory", "600MB"]) == 0
    ((_, _, ids),) = stored_documents(tmp_path / "out")
    assert ids[:-1] == reference_encode(open_tokenizer(made.tokenizer), [text])[0].tolist()
    command += [str(tmp_path / "other"), "--memory", "260MB"]
    error = refused(
        capsys, [*command, "--on-error", "quarantine"]
    )  # the limit of memory quarantines no document
    assert (
        "bytes that cannot be cut needs " in error and f"{name}:{int('jsonl' in name)}: " in error
    )
    enough = error.split("--memory ")[1].split(",")[0]
    command[command.index("260MB")] = enough
    assert main(command) == 0, enough


@pytest.fixture
def long_documents(monkeypatch) -> None:
    """Lower the limits so that all documents count as long: they are read in blocks and encoded in
    sections."""
    short_sections(monkeypatch)
    monkeypatch.setattr(documents, "LONG_BYTES", 30)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 11)
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 2000)


def test_documents_read_in_blocks_give_the_same_bytes(made, long_documents, tmp_path):
    out = tmp_path / "out"
    assert main(run_arguments(made.text, made.tokenizer, out)) == 0
    assert tree(out) == tree(made.data)


def test_kills_within_long_texts_change_no_byte(made, tmp_path, text, request):
    rng = random.Random(8)
    for name, opener in (("a.txt", open), ("b.txt.gz", gzip.open)):
        with opener(text / name, "wt") as file:
            file.write(words(rng, 2000) + "\n" + EOS)
    (text / "c.txt").write_text("short")
    command = run_arguments(text, made.tokenizer, tmp_path / "whole")
    assert main(command) == 0
    request.getfixturevalue("long_documents")
    command[command.index("--out") + 1] = str(tmp_path / "out")
    tokens = tmp_path / "out" / "tokens"
    kills, largest = killed_until_done(command, lambda: len(list(tokens.glob("*.part-*"))))
    assert kills > 8 and largest >= 4, "there are checkpoints within a document"
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_invalid_byte_late_in_a_long_text_is_refused_by_line(
    made, long_documents, tmp_path, text, capsys
):
    (text / "a.txt").write_bytes("é\n".encode() * 40 + b"\xff")
    error = refused(capsys, arguments(made, tmp_path))
    assert "a.txt:41: invalid UTF-8: invalid start byte (byte 120 " in error
    (text / "a.txt").write_bytes("é\n".encode() * 40 + b"\xc3")
    error = refused(capsys, arguments(made, tmp_path, "--out", str(tmp_path / "o")))
    assert "a.txt:41: invalid UTF-8: unexpected end of data (byte 120 " in error


LONG = "return " * 6_000_000
"""Text of 42 MB that is encoded in a short time."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc (Linux)")
@pytest.mark.parametrize(
    ("name", "memory"), [("a.txt", "240MB"), ("a.txt.gz", "240MB"), ("a.jsonl", "360MB")]
)
def test_memory_limit_is_kept_for_a_long_document(made, tmp_path, name, memory):
    (tmp_path / "text").mkdir()
    text = json.dumps({"text": LONG}) if "json" in name else LONG
    data = gzip.compress(text.encode(), 1) if name.endswith("gz") else text.encode()
    (tmp_path / "text" / name).write_bytes(data)
    command = arguments(made, tmp_path, "--memory", memory)
    status, peak, error = measured(command)
    assert status == 0, error
    assert peak <= int(memory[:-2]) * 10**6
    ((_, _, ids),) = stored_documents(tmp_path / "out")
    assert open_tokenizer(made.tokenizer).decode(ids[:-1]) == LONG


def test_line_larger_than_the_memory_is_refused(made, tmp_path, text, capsys):
    path = text / "a.jsonl"
    line = json.dumps({"text": "w" * 20_000_000})
    path.write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good too, good too"}}\n')
    command = arguments(made, tmp_path, "--memory", "250MB")
    error = refused(capsys, command)
    assert f"{path}:2: a line of {len(line) + 1} bytes needs 70 MB of memory" in error
    assert "--memory 2" in error and "--max-document" in error
    refused(
        capsys, [*command, "--on-error", "quarantine"]
    )  # the limit of memory quarantines no document
    limited = [*command, "--max-document", "1MB", "--out", str(tmp_path / "other")]
    refused(capsys, limited, "above --max-document 1000000")
    assert main([*limited, "--on-error", "quarantine"]) == 0
    (listed,) = (tmp_path / "other" / "quarantine.jsonl").read_text().splitlines()
    assert json.loads(listed)["line"] == 2
    assert [line for _, line, _ in stored_documents(tmp_path / "other")] == [1, 3]
    error = refused(
        capsys, [*command, "--out", str(tmp_path / "other"), "--on-error", "quarantine"]
    )
    assert "max_document = 1000000, now None" in error


SMALL = [f"small text {n} " * 20 for n in range(5000)]


def write_table(folder: Path, values: list[str], **options) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table({"text": values}), folder / "a.parquet", **options)


@pytest.mark.parametrize(
    ("values", "group"),
    [
        (["good", "x y " * 20_000_000], "0 (rows 1 to 2)"),
        ([*SMALL, "x y " * 20_000_000, *SMALL], "1 (rows 4001 to 8000)"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--max-document", "1MB"]])
def test_large_value_of_a_table_is_refused_before_it_is_read(made, tmp_path, values, group, more):
    write_table(tmp_path / "text", values, row_group_size=4000)
    status, peak, error = measured(arguments(made, tmp_path, "--memory", "240MB", *more))
    assert status == 2 and peak <= 240e6, peak
    assert f"row group {group}, whose texts have 8" in error and " bytes, needs " in error
    assert "write the table with smaller row groups" in error


VALUE = "return x " * 220_000
"""Text of 2 MB, the value of a row in a table."""
READ = """
import sys
import pyarrow.parquet
from data_prep.sources.documents import InputReader
from data_prep.runtime.memory import Limits
from data_prep.sources.inputs import InputFile

def memory(which):
    line = next(line for line in open("/proc/self/status") if line.startswith(which))
    return int(line.split()[1]) << 10

name, size, room = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
before, count = memory("VmRSS"), 0
for item in InputReader(InputFile(name, size), "text", lambda n: None, limits=Limits(room)):
    count += len(item.text)
    del item
print(memory("VmHWM") - before, count)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc (Linux)")
@pytest.mark.parametrize(
    ("values", "options"),
    [
        ([VALUE] * 60, {}),
        (
            [VALUE] * 60,
            {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
        ),
        ([*(f"{VALUE}{n}" for n in range(60)), *SMALL[:60]], {"row_group_size": 2}),
    ],
    ids=["a dictionary", "shared beginnings", "neighbours"],
)
def test_memory_limit_is_kept_for_any_row_groups(tmp_path, values, options):
    """The number of rows in a read depends on the largest values. If the number depended on the
    mean size, a read would use 240 MB or more.

    Allocators keep some of the freed memory. A worker has a reserve for this memory.
    """
    write_table(tmp_path / "text", values, **options)
    path, room = tmp_path / "text" / "a.parquet", 40_000_000
    words = [sys.executable, "-c", READ, str(path), str(path.stat().st_size), str(room)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    rise, count = map(int, done.stdout.split())
    assert count == sum(map(len, values)) and rise <= 2 * room + (20 << 20), rise


def test_size_that_a_damaged_page_states_takes_no_memory(tmp_path):
    import pyarrow

    options = {"use_dictionary": False, "compression": "none", "data_page_size": 1 << 30}
    write_table(tmp_path / "text", ["x" * 3_000_000], **options)
    path = tmp_path / "text" / "a.parquet"
    data = bytearray(path.read_bytes())
    size = b"\x94\x9b\xee\x02"  # 3,000,010 as a zigzag varint of Thrift
    assert data[:40].count(size) == 2  # sizes of the unpacked and packed page
    path.write_bytes(data.replace(size, b"\xfe\xff\xff\x7f", 2))  # 134,217,727 bytes
    before = pyarrow.default_memory_pool().max_memory()
    with pytest.raises(DamagedTable):
        list(read_column(str(path), "text"))
    assert pyarrow.default_memory_pool().max_memory() - before < 50_000_000


@pytest.mark.parametrize("packing", ["none", "snappy", "zstd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data_page_version": "2.0", "data_page_size": 700},
        {"use_dictionary": False, "data_page_size": 300, "write_batch_size": 3},
        {
            "use_dictionary": False,
            "column_encoding": {"text": "DELTA_BYTE_ARRAY"},
            "write_batch_size": 5,
        },
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
        {"dictionary_pagesize_limit": 900, "data_page_size": 200, "write_batch_size": 4},
    ],
)
def test_size_of_a_row_group_is_a_bound_of_its_values(tmp_path, packing, options):
    rng = random.Random(3)
    stock = ["".join(rng.choices("ab", k=rng.randint(0, 60))) for _ in range(30)]
    values = [rng.choice([*stock, words(rng, 9), None, "long " * 99]) for _ in range(400)]
    write_table(tmp_path / "text", values, row_group_size=150, compression=packing, **options)
    from pyarrow import parquet

    first = 0
    table = parquet.ParquetFile(tmp_path / "text" / "a.parquet")
    for number in range(table.num_row_groups):
        group = _group(table.metadata, number, first + 1, ["text"])
        rows, (size,) = group.rows, group.sizes
        sizes = [len(value or "") for value in values[first : first + rows]]
        assert size >= max(sizes) and group.needs(1) >= 4 * max(sizes)
        for run in (2, 7, 60):
            largest = max(sum(sizes[i : i + run]) for i in range(rows - run + 1))
            assert 4 * largest <= group.needs(run)
        first += rows


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.parquet"])
def test_max_document_applies_to_all_kinds_of_files(made, tmp_path, text, name):
    (text / "b.txt").write_text("good text " * 9)
    if name == "a.parquet":
        write_table(text, ["x" * 101, "good"])
    else:
        packed = gzip.compress(b"x" * 101)
        (text / name).write_bytes(packed if name.endswith("gz") else b"x" * 101)
    command = arguments(made, tmp_path, "--max-document", "100", "--on-error", "quarantine")
    assert main(command) == 0
    kept = [Path(name).name for name, _, _ in stored_documents(tmp_path / "out")]
    assert kept == (["a.parquet", "b.txt"] if name == "a.parquet" else ["b.txt"])


def test_unrecognised_tokenizer_needs_memory_for_a_document(made, tmp_path, text, capsys):
    config = json.loads(made.tokenizer.read_text()) | {"normalizer": {"type": "NFKC"}}
    (tmp_path / "t.json").write_text(json.dumps(config))
    (text / "a.txt").write_text("some words " * 30_000)
    command = arguments(
        made, tmp_path, "--tokenizer", str(tmp_path / "t.json"), "--memory", "260MB"
    )
    refused(capsys, command, "a.txt:0: a document of 330000 bytes needs 99 MB")
    assert main([*command, "--memory", "400MB"]) == 0


def test_memory_is_divided_among_workers(made):
    count, limits = divide_memory(10**9, 8, made.tokenizer, None)
    assert count == 3 and limits.room_bytes >= memory._LEAST_ROOM_BYTES
    with pytest.raises(ConfigError, match="--memory 100MB is too little to tokenize"):
        divide_memory(10**8, 1, made.tokenizer, None)
    with pytest.raises(DataError, match="x:1: it needs 2 MB"):
        Limits(10**6).refuse("x:1", "it", 2 * 10**6)


@pytest.mark.parametrize(
    ("line", "times"), [("a", 3.5), ("é", 6), ("🙂", 11), ("\\u00e9", 8), ("\\\\", 3.5)]
)
def test_memory_estimate_of_a_line_has_a_bound(line, times):
    data = b'{"text": "' + line.encode() * 1000 + b'"}'
    assert bytes_of_line(data) <= times * len(data)
