"""Tests of `optimus-data plan`: the command prints estimates that are close to the values of a real
run, or the reason why no estimate is possible."""

from __future__ import annotations

import errno
import json
from types import SimpleNamespace

import pytest

from data_prep.cli import main
from data_prep.pipeline.plan import duration
from tests.data_prep.corpus import measured, refused, run_arguments, tree


def test_plan_estimates_a_run(made, tmp_path, capsys):
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    assert main(["plan", *words[1:], "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    manifest = json.loads((made.data / "manifest.json").read_text())
    held_out = json.loads((made.data / "eval" / "manifest.json").read_text())
    tokens = manifest["tokens"] + held_out["tokens"]
    assert abs(value["tokens"] / tokens - 1) < 0.15
    assert abs(value["documents"] / (manifest["documents"] + held_out["documents"]) - 1) < 0.3
    on_disk = sum(len(content) for name, content in tree(made.data).items() if ".npy" in name)
    assert abs(value["disk_final_bytes"] / on_disk - 1) < 0.3
    assert abs(value["instances"] / manifest["num_instances"] - 1) < 0.2
    assert abs(value["eval_instances"] / held_out["num_instances"] - 1) < 0.5
    assert value["fits"] and value["dtype"] == "uint16" and value["tokenize_s"] > 0
    assert not (tmp_path / "out").exists(), "it writes no output"
    assert not list(tmp_path.iterdir())
    assert main(["plan", *words[1:]]) == 0
    output = capsys.readouterr().out
    assert "fits" in output and "held out" in output


def test_plan_of_a_run_larger_than_the_disk_exits_with_1(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    assert main(["plan", *words[1:]]) == 1
    assert "does NOT fit" in capsys.readouterr().out


WITHOUT_TEXT = {
    "empty files": ("", "the start of each sampled file contains no text"),
    "another field": ('{"body": "x"}\n', "a.jsonl:1: no field 'text'"),
    "no JSON": ("x\n", "a.jsonl:1: invalid JSON"),
}


@pytest.mark.parametrize("case", WITHOUT_TEXT)
def test_plan_without_text_is_refused_with_the_reason(made, tmp_path, capsys, case):
    content, reason = WITHOUT_TEXT[case]
    (tmp_path / "a.jsonl").write_text(content)
    words = run_arguments(tmp_path / "a.jsonl", made.tokenizer, tmp_path / "out")
    error = refused(capsys, ["plan", *words[1:]])
    assert (
        f"no text of 1 input can be sampled: {tmp_path / reason if 'a.' in reason else reason}"
        in error
    )


def test_plan_on_a_read_only_disk_estimates_without_disk_speed(made, tmp_path, capsys, monkeypatch):
    """Each write and each removal of a file fails."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "plan.tmp")

    monkeypatch.setattr("data_prep.pipeline.plan.os.fsync", refuse)
    monkeypatch.setattr("data_prep.pipeline.plan.Path.unlink", refuse)
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    assert main(["plan", *words[1:]]) == 0
    assert "? to shard" in capsys.readouterr().out


def test_duration_has_a_suitable_unit():
    assert [duration(s) for s in (5, 90, 7200, 200_000)] == [
        "5.0 s",
        "1.5 min",
        "2.0 h",
        "2.3 days",
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_plan_keeps_its_memory_or_is_refused_as_the_run(made, tmp_path, name):
    text = "the cat sat on the mat " * 1_000_000
    (tmp_path / name).write_text(text if name == "a.txt" else json.dumps({"text": text}) + "\n")
    words = run_arguments(tmp_path / name, made.tokenizer, tmp_path / "out", "--memory", "250MB")
    status, peak, error = measured(["plan", *words[1:]])
    assert peak <= 250e6
    assert status == (0 if name == "a.txt" else 2), error
    assert name == "a.txt" or "a.jsonl:1: a line of 23" in error


def test_plan_refuses_a_document_too_large_for_the_tokenizer(made, tmp_path, capsys):
    config = json.loads(made.tokenizer.read_text()) | {"normalizer": {"type": "NFKC"}}
    (tmp_path / "t.json").write_text(json.dumps(config))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words " * 30_000}) + "\n")
    words = run_arguments(tmp_path / "a.jsonl", tmp_path / "t.json", tmp_path / "o")
    error = refused(capsys, ["plan", *words[1:], "--memory", "260MB"])
    assert "a.jsonl:1: a document of 330000 bytes needs 99 MB" in error
    assert main(["plan", *words[1:], "--memory", "400MB"]) == 0
