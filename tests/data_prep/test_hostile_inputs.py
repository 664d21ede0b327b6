"""Hostile inputs of optimus-data: tokenizers, character maps, Parquet tables and .npy files.

Each input is refused with one line that contains the path of the file.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_prep.sources import parquet
from data_prep.sources.foreign import open_foreign
from data_prep.tokenizer.tokenizer import Encoder, open_tokenizer
from optimus.data.tokenizer import TextTokenizer
from optimus.errors import DataError, OptimusError
from tests.data_prep.test_growth import growth
from tests.kit.ranks.processes import python


def a_tokenizer(path: Path, **changes: object) -> Path:
    """Write a tokenizer.json of two letters and return its path."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    for key, value in changes.items():
        setattr(tokenizer, key, value)
    path.write_text(tokenizer.to_str())
    return path


def test_tokenizer_in_a_folder_with_a_non_utf8_name_is_read(tmp_path):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    assert Encoder(a_tokenizer(folder / "tokenizer.json")).encode(["ab"])[0].tolist() == [0, 1]


def test_damaged_table_of_a_normalizer_is_refused_without_output(tmp_path, capfd):
    path = a_tokenizer(tmp_path / "table.json", normalizer=normalizers.NFC())
    tree = json.loads(path.read_text())
    for table, problem in (("AAAAAA==", "the tokenizers library fails"), ("AAAA", "")):
        tree["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": table}
        path.write_text(json.dumps(tree))
        with pytest.raises(DataError, match=f"table.json: {problem}"):
            open_tokenizer(path)
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


EXIT_WHILE_ENCODING = """
import os, sys
from data_prep.tokenizer.tokenizer import Encoder, library_errors
encoder = Encoder(sys.argv[1])
with library_errors(sys.argv[1]):
    os.write(2, b"last words")
    os._exit(3)
"""


def test_output_before_an_exit_during_encoding_is_printed(tmp_path):
    """The output before the exit can be the line about a signal, or the library's message that
    memory is full."""
    path = a_tokenizer(tmp_path / "tokenizer.json")
    done = python("-c", EXIT_WHILE_ENCODING, str(path))
    assert (done.returncode, done.stderr) == (3, "last words")


def test_panic_of_the_library_on_a_text_is_a_data_error(tmp_path):
    """The search for the pattern needs more steps in this text than the library permits."""
    pattern = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    slow = a_tokenizer(tmp_path / "slow.json", pre_tokenizer=pattern)
    text = "a" * 40 + "b"
    for encode in (Encoder(slow).encode, TextTokenizer(slow).encode):
        with pytest.raises(DataError, match="slow.json: the tokenizers library fails .* search"):
            encode([text] if encode.__self__.__class__ is Encoder else text)


def test_error_of_the_library_on_a_text_is_a_data_error(tmp_path):
    """The vocabulary contains no token for unknown words, so the library fails on a text with an
    unknown word."""
    path = tmp_path / "words.json"
    Tokenizer(models.WordLevel({"a": 0}, "<unk>")).save(str(path))
    assert TextTokenizer(path).encode("a") == [0]
    problem = r"words.json: the tokenizers library fails .* Missing \[UNK\] token"
    with pytest.raises(DataError, match=problem):
        Encoder(path).encode(["b"])
    with pytest.raises(DataError, match=problem):
        TextTokenizer(path).encode("b")


class FakeTable:
    """Metadata of a table with one column. Access to the column calls `read`."""

    num_row_groups, num_columns, num_rows = 1, 1, 1

    def __init__(self, read: Callable[[], object]) -> None:
        self.read = read

    def row_group(self, number: int) -> FakeTable:
        return self

    def column(self, index: int) -> None:
        self.read()


@pytest.mark.parametrize("name", ["normalizer", "decoder"])
def test_tokenizer_that_makes_texts_much_longer_is_refused(tmp_path, name):
    """The steps of a normalizer or decoder can replace a letter by many letters. Without the
    refusal, such steps would use all memory, and the process would be aborted."""
    of, key = (normalizers, "normalizer") if name == "normalizer" else (decoders, "decoder")
    bomb = [of.Sequence([of.Replace("a", "a" * 1000)] * 2), of.Replace(Regex("a*"), "b" * 99)]
    path = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    for steps in ([bomb[0], bomb[0]], [bomb[1]]):
        setattr(tokenizer, key, of.Sequence(steps))
        tokenizer.save(str(path))
        with pytest.raises(DataError, match=rf"its {name} makes texts up to (1e\+12|100) times"):
            open_tokenizer(path)
    usual = [of.Replace(" ", "\u2581"), of.Replace("\u2581", " ")]
    setattr(tokenizer, key, of.Sequence(usual))
    if name == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), usual[0]])
    tokenizer.save(str(path))
    open_tokenizer(path)


def character_map(letter: bytes, content: bytes) -> normalizers.Precompiled:
    """Return a sentencepiece character map with one entry."""
    units = [0] * 2048
    units[0] = 256 << 10
    units[256 ^ letter[0]] = (512 ^ 256 ^ letter[0]) << 10 | 1 << 8 | letter[0]
    trie = struct.pack(f"<{len(units)}I", *units)  # the value (offset 0) is in unit 512
    return normalizers.Precompiled(struct.pack("<I", len(trie)) + trie + content + b"\0")


def test_character_map_that_makes_texts_much_longer_is_refused(tmp_path):
    long = character_map(b"a", b"x" * 20000)
    assert len(long.normalize_str("ab")) == 20001 and growth(long) == 20000
    with pytest.raises(DataError, match=r"its normalizer makes texts up to 2e\+04 times"):
        open_tokenizer(a_tokenizer(tmp_path / "tokenizer.json", normalizer=long))
    assert growth(character_map(b"a", b"x "), normalizers.Replace(" ", "123")) == 4


def test_table_whose_description_ends_the_process_is_damaged():
    """pyarrow aborts the process when it reads some damaged statistics of a column."""
    with pytest.raises(parquet.DamagedTable, match="description of its columns"):
        parquet._check_metadata("a.parquet", FakeTable(os.abort))


def no_memory() -> None:
    raise MemoryError


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal 9 ended the child process"),
        (no_memory, "memory was short"),
        (lambda: time.sleep(60), "no result within 0 s"),
    ],
)
def test_check_of_a_table_ended_by_the_machine_is_not_damage(monkeypatch, read, reason):
    monkeypatch.setattr(parquet, "_CHECK_S", 0.4)
    with pytest.raises(OptimusError, match=f"a.parquet: cannot check .*{reason}") as caught:
        parquet._check_metadata("a.parquet", FakeTable(read))
    assert not isinstance(caught.value, DataError) and caught.value.exit_code == 1


def test_check_of_a_table_without_a_new_process_is_not_damage(monkeypatch):
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(OptimusError, match=r"no process can be started \(Resource temporarily"):
        parquet._check_metadata("a.parquet", FakeTable(int))


def test_table_is_checked_where_sigchld_is_ignored():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        parquet._check_metadata("a.parquet", FakeTable(int))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_tokenizer_that_is_not_json_is_refused_by_the_encoder(tmp_path):
    path = a_tokenizer(tmp_path / "tokenizer.json")
    path.write_text(path.read_text().replace('"version":"1.0"', '"vers0"', 1))
    TextTokenizer(path)
    with pytest.raises(DataError, match="is not a tokenizer.json: Expecting ':' delimiter"):
        Encoder(path)


@pytest.mark.parametrize(
    "shape", [f"({1 << 62},)", "(-5,)", "(" * 300 + ")" * 300, "(1, 'a')", "[]", "(1 << 9,)"]
)
def test_damaged_npy_header_is_a_data_error(tmp_path, shape):
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path = tmp_path / "ids.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    with pytest.raises(DataError, match=r"ids.npy: is a damaged .npy file: "):
        open_foreign(str(path), None)


def test_npy_header_with_open_brackets_is_a_data_error(tmp_path):
    path = tmp_path / "ids.npy"
    text = "{'descr': '<u2', 'shape': (8,".ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())
    with pytest.raises(DataError, match="is a damaged .npy file"):
        open_foreign(str(path), None)
