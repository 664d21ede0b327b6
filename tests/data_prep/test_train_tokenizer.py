"""Tests of the training of a tokenizer: limited memory, checked output, damaged input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from data_prep.cli import main
from data_prep.sources import documents
from tests.data_prep.corpus import peak_memory, refused


def train(source: Path, out: Path, *more: str) -> list[str]:
    words = ["train-tokenizer", "--input", str(source), "--vocab-size", "300", "--out", str(out)]
    return [*words, *more]


def test_memory_of_training_does_not_depend_on_file_sizes(tmp_path):
    """The peak memory for 36 MB of JSON lines is at most 18 MB above the peak for 8 MB."""
    lines = [
        json.dumps({"text": f"{number} " + ("abcdefgh" * 40 + " ") * 8}) for number in range(100)
    ]
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl"
    small.write_text("\n".join(lines * 30))  # more text than is in memory at once
    large.write_text("\n".join(lines * 140))

    def peak(source: Path, *more: str) -> int:
        return peak_memory(train(source, tmp_path / "t.json", *more))

    base = peak(small)
    for more in ([], ["--on-error", "quarantine"]):
        assert peak(large, *more) - base < 18e6 < large.stat().st_size


def test_impossible_output_of_training_is_refused_first(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 99)
    (tmp_path / "file").write_text("x")
    for out, needle in (
        (tmp_path, "is a directory; name a file"),
        (tmp_path / "file" / "t.json", "t.json' cannot be made: "),
    ):
        error = refused(capsys, train(tmp_path / "a.txt", out), needle)
        assert "tmp" not in error.replace(str(out), "")
    assert main(train(tmp_path / "a.txt", tmp_path / "new" / "t.json")) == 0


def test_quarantined_file_does_not_change_the_tokenizer(tmp_path):
    """The quarantined file is truncated. Training must use no text of the file, not even of its
    readable first half."""
    (tmp_path / "a.txt").write_text("some text " * 99)
    packed = gzip.compress(b"quite other words " * 9999)
    assert main(train(tmp_path, tmp_path / "out" / "one.json")) == 0
    (tmp_path / "b.txt.gz").write_bytes(packed[: len(packed) // 2])
    more = ["--on-error", "quarantine", "--exclude", "*.json"]
    assert main(train(tmp_path, tmp_path / "out" / "two.json", "--exclude", "*.json")) == 2
    assert main(train(tmp_path, tmp_path / "out" / "two.json", *more)) == 0
    expected, trained = (
        (tmp_path / "out" / name).read_bytes() for name in ("one.json", "two.json")
    )
    assert expected == trained


def test_long_text_that_changes_during_reading_is_refused(tmp_path, capsys, monkeypatch):
    text, survey = tmp_path / "a.txt", documents.survey
    text.write_text("some text " * 1_000_000)

    def survey_then_change(stream):
        result = survey(stream)
        text.write_bytes(text.read_bytes()[:-1] + b"\xff")
        return result

    monkeypatch.setattr(documents, "survey", survey_then_change)
    refused(capsys, train(text, tmp_path / "t.json"), "a.txt: changed while it was read: ")
