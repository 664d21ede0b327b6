"""`plan`: near the truth, and a reason where it cannot tell."""

from __future__ import annotations

import errno
import json
from types import SimpleNamespace

import pytest

from data_prep.cli import main
from data_prep.pipeline.plan import duration
from tests.data_prep.corpus import measured, refused, run_arguments, tree


def test_plan_is_near_the_truth(made, tmp_path, capsys):
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    assert main(["plan", *words[1:], "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    manifest = json.loads((made.data / "manifest.json").read_text())
    held = json.loads((made.data / "eval" / "manifest.json").read_text())
    tokens = manifest["tokens"] + held["tokens"]
    assert abs(value["tokens"] / tokens - 1) < 0.15
    assert abs(value["documents"] / (manifest["documents"] + held["documents"]) - 1) < 0.3
    on_disk = sum(len(content) for name, content in tree(made.data).items() if ".npy" in name)
    assert abs(value["disk_final_bytes"] / on_disk - 1) < 0.3
    assert abs(value["instances"] / manifest["num_instances"] - 1) < 0.2
    assert abs(value["eval_instances"] / held["num_instances"] - 1) < 0.5
    assert value["fits"] and value["dtype"] == "uint16" and value["tokenize_s"] > 0
    assert not (tmp_path / "out").exists(), "it leaves nothing behind"
    assert not list(tmp_path.iterdir())
    assert main(["plan", *words[1:]]) == 0
    told = capsys.readouterr().out
    assert "fits" in told and "held out" in told


def test_plan_says_when_it_does_not_fit(made, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    assert main(["plan", *words[1:]]) == 1
    assert "does NOT fit" in capsys.readouterr().out


WITHOUT_TEXT = {
    "empty files": ("", "what was read of them holds no text"),
    "another field": ('{"body": "x"}\n', "a.jsonl:1: no field 'text'"),
    "no JSON": ("x\n", "a.jsonl:1: invalid JSON"),
}


@pytest.mark.parametrize("case", WITHOUT_TEXT)
def test_plan_says_why_nothing_can_be_sampled(made, tmp_path, capsys, case):
    content, why = WITHOUT_TEXT[case]
    (tmp_path / "a.jsonl").write_text(content)
    words = run_arguments(tmp_path / "a.jsonl", made.tokenizer, tmp_path / "out")
    told = refused(capsys, ["plan", *words[1:]])
    assert f"nothing of 1 input can be sampled: {tmp_path / why if 'a.' in why else why}" in told


def test_plan_where_nothing_may_be_written(made, tmp_path, capsys, monkeypatch):
    """As on a read-only file system: neither the file nor its removal."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "plan.tmp")

    monkeypatch.setattr("data_prep.pipeline.plan.os.fsync", refuse)
    monkeypatch.setattr("data_prep.pipeline.plan.Path.unlink", refuse)
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    assert main(["plan", *words[1:]]) == 0
    assert "? to shard" in capsys.readouterr().out


def test_durations():
    assert [duration(s) for s in (5, 90, 7200, 200_000)] == [
        "5.0 s",
        "1.5 min",
        "2.0 h",
        "2.3 days",
    ]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_plan_holds_its_memory_or_refuses_as_the_run_does(made, tmp_path, name):
    text = "the cat sat on the mat " * 1_000_000
    (tmp_path / name).write_text(text if name == "a.txt" else json.dumps({"text": text}) + "\n")
    words = run_arguments(tmp_path / name, made.tokenizer, tmp_path / "out", "--memory", "250MB")
    status, peak, error = measured(["plan", *words[1:]])
    assert peak <= 250e6
    assert status == (0 if name == "a.txt" else 2), error
    assert name == "a.txt" or "a.jsonl:1: a line of 23" in error


def test_plan_refuses_what_an_unrecognised_tokenizer_cannot_take_whole(made, tmp_path, capsys):
    config = json.loads(made.tokenizer.read_text()) | {"normalizer": {"type": "NFKC"}}
    (tmp_path / "t.json").write_text(json.dumps(config))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "some words " * 30_000}) + "\n")
    words = run_arguments(tmp_path / "a.jsonl", tmp_path / "t.json", tmp_path / "o")
    error = refused(capsys, ["plan", *words[1:], "--memory", "260MB"])
    assert "a.jsonl:1: a document of 330000 bytes needs 99 MB" in error
    assert main(["plan", *words[1:], "--memory", "400MB"]) == 0
