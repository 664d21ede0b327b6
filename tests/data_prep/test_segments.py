"""Checkpoints within a unit: a kill costs what came since the last, and changes no byte."""

from __future__ import annotations

import gzip
import json
import random
import signal
from pathlib import Path

import pytest

from data_prep import segments
from data_prep.cli import main
from data_prep.segments import Segments
from data_prep.tokenizer import Encoder
from tests.data_prep.corpus import run_arguments, run_killed_at, tree, words


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """Large files, alone and sharing a unit, with checkpoints after every 3 kB."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 3000)
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


def test_kills_at_every_commit_change_no_byte(made, text, tmp_path, capfd):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(arguments(text, made, whole)) == 0
    assert not parts(whole)
    given, kills, most = arguments(text, made, out), 0, 0
    while run_killed_at(given, 1 + kills % 8, before=kills // 8 % 2 == 0) == -signal.SIGKILL:
        kills += 1
        most = max(most, len(parts(out)))
    assert kills > 20 and most >= 5
    assert main(given) == 0
    assert tree(out) == tree(whole)
    capfd.readouterr()


def test_what_stands_is_not_encoded_again(made, text, tmp_path, monkeypatch, capfd):
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
    capfd.readouterr()


def test_an_input_changed_behind_a_checkpoint_is_refused(made, text, tmp_path, capfd):
    out = tmp_path / "out"
    given = arguments(text, made, out)
    assert run_killed_at(given, 10, before=False) == -signal.SIGKILL and parts(out)
    data = (text / "a.jsonl").read_bytes()
    (text / "a.jsonl").write_bytes(data.replace(b"abc", b"acb").replace(b"de", b"ed"))
    assert main(given) == 2
    assert "a.jsonl: changed since" in capfd.readouterr().err


def test_a_damaged_checkpoint_does_not_count(tmp_path):
    checkpoints = Segments(tmp_path, 0, "plan")
    for number in range(3):
        checkpoints.save({"n": number}, [b"x" * number, b"yz"])
    found = list(Segments(tmp_path, 0, "plan").read())
    assert found == [({"n": n}, [b"x" * n, b"yz"]) for n in range(3)]
    assert not list(Segments(tmp_path, 0, "other").read())
    path = tmp_path / "unit-00000.part-0001"
    path.write_bytes(path.read_bytes().replace(b"yz", b"zy"))
    assert len(list(Segments(tmp_path, 0, "plan").read())) == 1
    path.write_bytes(b"")
    assert len(list(Segments(tmp_path, 0, "plan").read())) == 1
    Segments(tmp_path, 0, "plan").remove()
    assert not list(tmp_path.iterdir())


def test_a_table_goes_on_in_the_middle_of_a_group_of_rows(made, tmp_path, monkeypatch, capfd):
    """Killed at every commit; what stands is not encoded again."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    monkeypatch.setattr(segments, "SEGMENT_BYTES", 3000)
    monkeypatch.setattr("data_prep.parquet._ROWS", 16)
    rng, folder = random.Random(9), tmp_path / "text"
    folder.mkdir()
    texts = [words(rng, rng.randint(1, 60)) for _ in range(300)]
    table = pyarrow.table({"id": list(range(300)), "text": texts})
    parquet.write_table(table, folder / "a.parquet", row_group_size=90)
    assert parquet.ParquetFile(folder / "a.parquet").num_row_groups == 4
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(arguments(folder, made, whole)) == 0
    given, kills, stood = arguments(folder, made, out), 0, set()
    while run_killed_at(given, 1 + kills % 8, before=kills // 8 % 2 == 0) == -signal.SIGKILL:
        kills += 1
        for checkpoint in (out / "tokens").glob("*.part-*"):
            data = checkpoint.read_bytes()
            head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            stood.add(head["state"]["start"]["offset"])
    assert len(stood) > 5 and any(row % 90 for row in stood), "behind rows within a group"
    assert main(given) == 0
    assert tree(out) == tree(whole)
    capfd.readouterr()
