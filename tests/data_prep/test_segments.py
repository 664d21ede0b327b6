"""Checkpoints within a unit: a kill costs what came since the last, and changes no byte."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.sources.documents import NO_LIMITS, Document, Problem
from data_prep.tokenize import writer
from data_prep.tokenize.store import TokenArrayWriter
from data_prep.tokenize.writer import Segments, UnitWriter
from data_prep.tokenizer.tokenizer import Encoder
from tests.data_prep.corpus import killed_until_done, run_arguments, run_killed_at, tree, words


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """Large files, alone and sharing a unit, with checkpoints after every 3 kB."""
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


def parts(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "tokens").glob("*.part-*"))


def test_kills_at_every_commit_change_no_byte(made, text, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(arguments(text, made, whole)) == 0
    assert not parts(whole)
    kills, most = killed_until_done(arguments(text, made, out), lambda: len(parts(out)))
    assert kills > 20 and most >= 5
    assert tree(out) == tree(whole)


def test_what_stands_is_not_encoded_again(made, text, tmp_path, monkeypatch):
    out = tmp_path / "out"
    given = arguments(text, made, out)
    assert run_killed_at(given, 12, before=False) == -signal.SIGKILL
    stood = len(parts(out))
    assert stood >= 4
    encoded: list[str] = []
    real = Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda self, texts: encoded.extend(texts) or real(self, texts)
    )
    assert main(given) == 0
    lines = (text / "a.jsonl").read_text().splitlines()
    first = [json.loads(line)["text"] for line in lines[:10]]
    assert not set(first) & set(encoded[:20])


def test_an_input_changed_behind_a_checkpoint_is_refused(made, text, tmp_path, capfd):
    out = tmp_path / "out"
    given = arguments(text, made, out)
    assert run_killed_at(given, 10, before=False) == -signal.SIGKILL and parts(out)
    data = (text / "a.jsonl").read_bytes()
    (text / "a.jsonl").write_bytes(data.replace(b"abc", b"acb").replace(b"de", b"ed"))
    assert main(given) == 2
    assert "a.jsonl: changed since" in capfd.readouterr().err


def test_a_damaged_checkpoint_does_not_count_nor_one_of_another_version(tmp_path, monkeypatch):
    checkpoints = Segments(tmp_path, 0, "plan")
    for number in range(3):
        checkpoints.save({"n": number}, [b"x" * number, b"yz"])
    found = list(Segments(tmp_path, 0, "plan").read())
    assert found == [({"n": n}, [b"x" * n, b"yz"]) for n in range(3)]
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


def test_a_kill_while_they_are_forgotten(tmp_path, monkeypatch):
    """Whatever is left is found by the next."""
    for kills in range(4):
        checkpoints = Segments(tmp_path, 0, "plan")
        for number in range(4):
            checkpoints.save({"n": number}, [])
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


def test_what_a_quarantine_set_aside_ends_a_run_that_is_to_fail(made, text, tmp_path, capfd):
    """Also where only checkpoints of it stand."""
    out = tmp_path / "out"
    lines = (text / "a.jsonl").read_text()
    (text / "a.jsonl").write_text("no JSON\n" + lines)
    given = arguments(text, made, out)
    assert run_killed_at([*given, "--on-error", "quarantine"], 10, before=False) == -signal.SIGKILL
    assert parts(out) and not list((out / "tokens").glob("unit-*.json"))
    capfd.readouterr()
    assert main(given) == 2
    assert "a.jsonl:1: invalid JSON" in capfd.readouterr().err.splitlines()[-1]
    assert main([*given, "--on-error", "quarantine"]) == 0


def test_a_damaged_input_takes_its_checkpoints_along(made, tmp_path):
    """They may hold some of it; what is left of the others is saved again by the next."""
    with open(tmp_path / "array", "wb") as file:
        array = TokenArrayWriter(file, 400, "uint16", 0, packed=False)
        encoder, checkpoints = Encoder(made.tokenizer), Segments(tmp_path, 0, "plan")
        unit = UnitWriter(encoder, {"train": array}, 0, checkpoints, 0, NO_LIMITS)
        for source in (0, 1):
            unit.add(source, Document("some text", b"some text", 1), "")
            unit.save(source + 1, None)
        assert len(list(Segments(tmp_path, 0, "plan").read())) == 2
        unit.quarantine_input(1, Problem(3, "cut"))
        assert list(Segments(tmp_path, 0, "plan").read()) == []
        unit.save(2, None)
        ((state, blobs),) = Segments(tmp_path, 0, "plan").read()
    ids = [*encoder.encode(["some text"])[0].tolist(), 0]
    assert np.frombuffer(blobs[0], "<u2").tolist() == ids
    assert state["set_aside"] == [{"input": 1, "line": 3, "reason": "cut"}]


def test_an_earlier_input_of_the_unit_changed_behind_a_checkpoint(
    made, tmp_path, monkeypatch, capfd
):
    """Of the same size: only its hash tells."""
    monkeypatch.setattr(writer, "SEGMENT_BYTES", 1)
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "abcd":
        (folder / f"{name}.txt").write_text(f"text of {name} " * 30)
    given = arguments(folder, made, tmp_path / "out")
    assert run_killed_at(given, 8, before=False) == -signal.SIGKILL and parts(tmp_path / "out")
    (folder / "a.txt").write_text("tixt of a " * 30)
    assert main(given) == 2
    assert "a.txt: changed since" in capfd.readouterr().err


def test_a_table_goes_on_in_the_middle_of_a_group_of_rows(made, tmp_path, monkeypatch):
    """Killed at every commit; what stands is not encoded again."""
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
    stood = set()

    def look() -> int:
        for checkpoint in (out / "tokens").glob("*.part-*"):
            data = checkpoint.read_bytes()
            head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            stood.add(head["state"]["start"]["offset"])
        return len(stood)

    assert killed_until_done(arguments(folder, made, out), look)[1] > 5
    assert any(row % 90 for row in stood), "behind rows within a group"
    assert tree(out) == tree(whole)


def test_tokenizing_without_duplicates_keeps_its_progress(made, text, tmp_path):
    """Each life makes as many commits, far fewer than the unit has checkpoints."""
    lines = [json.loads(line) for line in (text / "a.jsonl").read_text().splitlines()]
    lines = [{**line, "id": number % (len(lines) - 1)} for number, line in enumerate(lines)]
    for path in text.iterdir():
        path.unlink()
    (text / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = ["--on-error", "quarantine"]
    assert main([*arguments(text, made, tmp_path / "whole"), *more]) == 0
    out, life = tmp_path / "out", 0
    given = [*arguments(text, made, out), *more]
    while run_killed_at(given, 10, before=False) == -signal.SIGKILL:
        life += 1
        assert life < 30, "no progress"
    assert life > 3
    assert tree(out) == tree(tmp_path / "whole")
