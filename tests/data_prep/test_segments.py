"""Tests of checkpoints within a unit of work: a run that was killed continues from the last
checkpoint, and writes the same bytes."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import signal
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.runtime.memory import Limits
from data_prep.sources.documents import NO_LIMITS, Document, InputReader, Position, Problem
from data_prep.sources.inputs import InputFile
from data_prep.tokenize import writer
from data_prep.tokenize.store import TokenArrayWriter
from data_prep.tokenize.writer import Segments, State, UnitWriter
from data_prep.tokenizer.tokenizer import Encoder
from optimus.errors import DataError
from optimus.io import files
from tests.data_prep.corpus import killed_until_done, run_arguments, run_killed_at, tree, words


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """Write files, some of which are alone in a unit of work, while others share a unit. Set the
    distance of checkpoints to 3 kB. Return the folder of the files."""
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 3000)
    rng = random.Random(6)
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [json.dumps({"text": words(rng, rng.randint(1, 60))}) + "\n" for _ in range(200)]
    (folder / "a.jsonl").write_text("".join(lines))
    with gzip.open(folder / "b.jsonl.gz", "wt") as file:
        file.write("\n".join(lines[::-1]))
    (folder / "c.txt").write_text(words(rng, 900))
    (folder / "d.jsonl").write_text("".join(lines[:9]))
    return folder


def arguments(text: Path, made, out: Path) -> list[str]:
    return run_arguments(text, made.tokenizer, out, "--unit-size", "30000")


def checkpoint_names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "tokens").glob("*.part-*"))


def test_kills_at_each_commit_change_no_byte_of_units_with_checkpoints(made, text, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(arguments(text, made, whole)) == 0
    assert not checkpoint_names(whole)
    kills, largest = killed_until_done(
        arguments(text, made, out), lambda: len(checkpoint_names(out))
    )
    assert kills > 20 and largest >= 5
    assert tree(out) == tree(whole)


def test_documents_before_a_checkpoint_are_not_encoded_again(made, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    command = arguments(text, made, out)
    assert run_killed_at(command, 12, before=False) == -signal.SIGKILL
    assert len(checkpoint_names(out)) >= 4
    encoded: list[str] = []
    real = Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda self, texts: encoded.extend(texts) or real(self, texts)
    )
    assert main(command) == 0
    lines = (text / "a.jsonl").read_text().splitlines()
    first = [json.loads(line)["text"] for line in lines[:10]]
    assert not set(first) & set(encoded[:20])


def test_input_changed_after_a_checkpoint_is_refused(made, text, tmp_path, capfd):
    out = tmp_path / "out"
    command = arguments(text, made, out)
    assert run_killed_at(command, 10, before=False) == -signal.SIGKILL and checkpoint_names(out)
    data = (text / "a.jsonl").read_bytes()
    (text / "a.jsonl").write_bytes(data.replace(b"abc", b"acb").replace(b"de", b"ed"))
    assert main(command) == 2
    assert "a.jsonl: changed since" in capfd.readouterr().err


def _state(source):
    return State(source, None, [], [])


def test_damaged_and_foreign_checkpoints_are_ignored(tmp_path, monkeypatch):
    checkpoints = Segments(tmp_path, 0, "plan")
    for number in range(3):
        checkpoints.save(_state(number), [b"x" * number, b"yz"])
    states = [checkpoint[1:] for checkpoint in Segments(tmp_path, 0, "plan").read()]
    assert states == [(_state(n), [b"x" * n, b"yz"]) for n in range(3)]
    assert not list(Segments(tmp_path, 0, "other").read())
    with monkeypatch.context() as later:
        later.setattr(writer, "_VERSION", 3)
        assert not list(Segments(tmp_path, 0, "plan").read())
    path = tmp_path / "unit-00000.part-0001"
    path.write_bytes(path.read_bytes().replace(b"yz", b"zy"))
    assert len(list(Segments(tmp_path, 0, "plan").read())) == 1
    path.write_bytes(b"")
    assert len(list(Segments(tmp_path, 0, "plan").read())) == 1
    Segments(tmp_path, 0, "plan").remove()
    assert not list(tmp_path.iterdir())


def test_kill_during_the_removal_of_checkpoints(tmp_path, monkeypatch):
    """A kill during `remove` leaves some checkpoints. The next call of `remove` removes them."""
    for kills in range(4):
        checkpoints = Segments(tmp_path, 0, "plan")
        for number in range(4):
            checkpoints.save(_state(number), [])
        unlinked, real = 0, os.unlink

        def unlink(path):
            nonlocal unlinked
            if unlinked == kills:  # noqa: B023 - called within this turn of the loop
                raise KeyboardInterrupt
            unlinked += 1
            real(path)  # noqa: B023

        monkeypatch.setattr("data_prep.tokenize.writer.os.unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.remove()
        monkeypatch.undo()
        assert len(list(tmp_path.iterdir())) == 4 - kills
        Segments(tmp_path, 0, "plan").remove()
        assert not list(tmp_path.iterdir())


def test_run_without_quarantine_fails_on_quarantined_input(made, text, tmp_path, capfd):
    """The run fails even if the quarantined input occurs only in checkpoints of an incomplete
    unit."""
    out = tmp_path / "out"
    lines = (text / "a.jsonl").read_text()
    (text / "a.jsonl").write_text("no JSON\n" + lines)
    command = arguments(text, made, out)
    assert (
        run_killed_at([*command, "--on-error", "quarantine"], 10, before=False) == -signal.SIGKILL
    )
    assert checkpoint_names(out) and not list((out / "tokens").glob("unit-*.json"))
    capfd.readouterr()
    assert main(command) == 2
    assert "a.jsonl:1: invalid JSON" in capfd.readouterr().err.splitlines()[-1]
    assert main([*command, "--on-error", "quarantine"]) == 0


def test_checkpoints_of_a_damaged_input_are_removed(made, tmp_path):
    """All checkpoints of the unit are removed, because they can contain documents of the damaged
    input. The next checkpoint contains all documents of the other inputs."""
    with open(tmp_path / "array", "wb") as file:
        array = TokenArrayWriter(file, 400, "uint16", 0, packed=False)
        encoder, checkpoints = Encoder(made.tokenizer), Segments(tmp_path, 0, "plan")
        unit = UnitWriter(encoder, {"train": array}, 0, checkpoints, range(3), NO_LIMITS)
        for source in (0, 1):
            unit.add(source, Document("some text", b"some text", 1), "")
            unit.save(source + 1, None)
        assert len(list(Segments(tmp_path, 0, "plan").read())) == 2
        unit.quarantine_input(1, Problem(3, "cut"))
        assert list(Segments(tmp_path, 0, "plan").read()) == []
        unit.save(2, None)
        ((_, state, blobs),) = Segments(tmp_path, 0, "plan").read()
    ids = [*encoder.encode(["some text"])[0].tolist(), 0]
    assert np.frombuffer(blobs[0], "<u2").tolist() == ids
    assert state.set_aside == [{"input": 1, "line": 3, "reason": "cut"}]


def test_earlier_input_of_a_unit_changed_after_a_checkpoint_is_refused(
    made, tmp_path, monkeypatch, capfd
):
    """The changed input has the same size, so only its hash differs."""
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 1)
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abcd":
        (folder / f"{name}.txt").write_text(f"text of {name} " * 30)
    command = arguments(folder, made, tmp_path / "out")
    assert run_killed_at(command, 8, before=False) == -signal.SIGKILL and checkpoint_names(
        tmp_path / "out"
    )
    (folder / "a.txt").write_text("tixt of a " * 30)
    assert main(command) == 2
    assert "a.txt: changed since" in capfd.readouterr().err


def test_table_continues_within_a_row_group(made, tmp_path, monkeypatch):
    """Runs are killed at each commit, and continue from checkpoints at rows within a row group."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(writer, "SEGMENT_BYTES", 3000)
    monkeypatch.setattr("data_prep.sources.parquet._ROWS", 16)
    rng, folder = random.Random(9), tmp_path / "text"
    folder.mkdir()
    texts = [words(rng, rng.randint(1, 60)) for _ in range(300)]
    table = pyarrow.table({"id": list(range(300)), "text": texts})
    parquet.write_table(table, folder / "a.parquet", row_group_size=90)
    assert parquet.ParquetFile(folder / "a.parquet").num_row_groups == 4
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(arguments(folder, made, whole)) == 0
    offsets = set()

    def read_offsets() -> int:
        for checkpoint in (out / "tokens").glob("*.part-*"):
            data = checkpoint.read_bytes()
            head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            offsets.add(head["state"]["start"]["offset"])
        return len(offsets)

    assert killed_until_done(arguments(folder, made, out), read_offsets)[1] > 5
    assert any(row % 90 for row in offsets), "a checkpoint is within a group"
    assert tree(out) == tree(whole)


def test_removal_of_duplicates_continues_after_kills(made, text, tmp_path):
    """Each run is killed after 10 commits. The unit has many more checkpoints."""
    lines = [json.loads(line) for line in (text / "a.jsonl").read_text().splitlines()]
    lines = [{**line, "id": number % (len(lines) - 1)} for number, line in enumerate(lines)]
    for path in text.iterdir():
        path.unlink()
    (text / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = ["--on-error", "quarantine"]
    assert main([*arguments(text, made, tmp_path / "whole"), *more]) == 0
    out, kills = tmp_path / "out", 0
    command = [*arguments(text, made, out), *more]
    while run_killed_at(command, 10, before=False) == -signal.SIGKILL:
        kills += 1
        assert kills < 30, "no progress"
    assert kills > 3
    assert tree(out) == tree(tmp_path / "whole")


def _forge(path, change_head=lambda head: None, blobs=None):
    """Change a checkpoint, and write the hash of the changed content."""
    body = path.read_bytes()[:-16]
    size = 8 + int.from_bytes(body[:8], "little")
    head, rest = json.loads(body[8:size]), body[size:]
    if blobs is not None:
        head["blobs"], rest = [len(blob) for blob in blobs], b"".join(blobs)
    change_head(head)
    text = json.dumps(head).encode()
    body = len(text).to_bytes(8, "little") + text + rest
    path.write_bytes(body + files.xxh3_bytes(body).encode())


@pytest.fixture
def two_checkpoints(made, tmp_path):
    """Write two checkpoints of a unit with the inputs 0 to 4. Return (path of the second
    checkpoint, function that opens the writer of the unit)."""
    inputs, stack = range(5), contextlib.ExitStack()

    def open_writer(packed=False):
        file = stack.enter_context((tmp_path / "array").open("w+b"))
        array = TokenArrayWriter(file, 400, "uint16", 0, packed)
        encoder, checkpoints = Encoder(made.tokenizer), Segments(tmp_path, 0, "plan")
        return UnitWriter(encoder, {"train": array}, 0, checkpoints, inputs, NO_LIMITS)

    unit = open_writer()
    for source in (0, 1):
        unit.add(source, Document("some text", b"some text", 1), "")
        unit.hashes.append("0" * 16)
        unit.save(source + 1, None)
    with stack:
        yield tmp_path / "unit-00000.part-0001", open_writer


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("state", 5, "state is not an object"),
        ("state.source", 5, "state.source is not an input of the unit"),
        ("state.source", -1, "state.source is not an input of the unit"),
        ("state.source", "2", "state.source is not a whole number"),
        ("state.hashes", ["0" * 16], "does not have one hash for each input"),
        ("state.hashes", ["0" * 16, "x" * 16], "does not have one hash for each input"),
        ("state.set_aside", [{"input": 3, "line": 1, "reason": ""}], "names an input after"),
        ("state.set_aside", [{"input": 1, "line": -1, "reason": ""}], "an impossible line"),
        ("state.set_aside", [{"input": 1}], "state.set_aside.line is missing"),
        ("state.start", {}, "state.start.offset is missing"),
        (
            "state.start",
            {"offset": 0, "line": -1, "raw_bytes": 1, "raw_xxh3": "0" * 16},
            "state.start is an impossible position",
        ),
        (
            "state.start",
            {"offset": 1, "line": 1, "raw_bytes": 0, "raw_xxh3": "0" * 16},
            "state.start is an impossible position",
        ),
        (
            "state.start",
            {"offset": 1, "line": 2, "raw_bytes": 1, "raw_xxh3": "0" * 16},
            "state.start is an impossible position",
        ),
        ("state.set_aside", [{"input": 1, "line": 1, "reason": "x" * 99999}], "is too long"),
        ("blobs", [22, 24, -1], "not the size that its head states"),
        ("blobs", [1 << 60, 24, 16], "not the size that its head states"),
        ("blobs", [62], "does not have 3 blobs per split"),
        ("blobs", None, "blobs is not a list"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_forged_head_of_a_checkpoint_is_refused(two_checkpoints, key, value, problem):
    path, open_writer = two_checkpoints
    *above, last = key.split(".")

    def change(head):
        if key == "blobs" and value == [62]:
            return head.update(blobs=[sum(head["blobs"])])
        for name in above:
            head = head[name]
        head[last] = value

    assert open_writer().source == 2
    _forge(path, change)
    with pytest.raises(DataError, match=problem) as error:
        open_writer()
    assert str(error.value).startswith(f"{path}: ")


def _rows(*rows):
    return np.array(rows, "<i8").tobytes()


@pytest.mark.parametrize(
    ("blobs", "problem"),
    [
        ((np.array([7, 8, 0], "<u2").tobytes(), _rows((13, 1, 1)), b""), "number of id hashes"),
        ((np.array([7, 8, 0], "<u2").tobytes(), b"xyz", b""), "buffer size"),
        ((b"x", b"", b""), "buffer size"),
        ((np.array([7, 400, 0], "<u2").tobytes(), _rows((13, 1, 1)), bytes(16)), "outside the voc"),
        ((np.array([7, 8, 9], "<u2").tobytes(), _rows((13, 1, 1)), bytes(16)), "at an EOS id"),
        ((np.array([7, 8, 0], "<u2").tobytes(), _rows((12, 1, 1)), bytes(16)), "at an EOS id"),
        ((np.array([7, 8, 0], "<u2").tobytes(), b"", b""), "at an EOS id"),
        ((np.array([7, 8, 0], "<u2").tobytes(), _rows((13, 3, 1)), bytes(16)), "outside the unit"),
        ((np.array([7, 8, 0], "<u2").tobytes(), _rows((13, -1, 1)), bytes(16)), "outside the unit"),
        ((np.array([7, 8, 0], "<u2").tobytes(), _rows((13, 1, -1)), bytes(16)), "impossible line"),
    ],
    ids=lambda value: str(value)[-12:],
)
def test_forged_tokens_of_a_checkpoint_are_refused(two_checkpoints, blobs, problem):
    path, open_writer = two_checkpoints
    _forge(path, blobs=blobs)
    with pytest.raises(DataError, match=problem):
        open_writer()


def test_checkpoint_larger_than_the_memory_is_refused(two_checkpoints):
    """The checkpoint is a sparse file of 3 GiB, which must be refused without reading its
    content."""
    path, _ = two_checkpoints
    os.truncate(path, 3 << 30)
    checkpoints = Segments(path.parent, 0, "plan", Limits(1 << 30))
    with pytest.raises(DataError, match=r"a checkpoint of 3221225472 bytes needs .*remove it"):
        list(checkpoints.read())


def test_position_after_the_end_of_an_input_is_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    file = InputFile(str(path), path.stat().st_size)
    raw = files.xxh3_file(path)
    reader = InputReader(file, "text", lambda count: None, Position(1 << 50, 1, file.size, raw))
    with pytest.raises(DataError, match="ends before the position that an earlier run"):
        list(reader)


def test_packed_checkpoint_is_not_unpacked_at_once(two_checkpoints):
    """A frame of 100 kB that unpacks to 1 GB is refused without the memory for 1 GB."""
    zstandard = pytest.importorskip("zstandard")
    path, open_writer = two_checkpoints
    path.unlink()
    compressor = zstandard.ZstdCompressor().compressobj(size=1 << 30)
    ids = b"\1\0" * (1 << 19)
    frame = b"".join(compressor.compress(ids) for _ in range(1 << 10)) + compressor.flush()
    _forge(path.with_name("unit-00000.part-0000"), blobs=[frame, _rows((13, 1, 1)), bytes(16)])
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="at an EOS id"):
            open_writer(packed=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 28
    for cut in (frame[:-9], frame[:4], b""):
        _forge(path.with_name("unit-00000.part-0000"), blobs=[cut, b"", b""])
        with pytest.raises(DataError, match=r"unit-00000.part-0000: .*optimus-data did not write"):
            open_writer(packed=True)
