"""Tests that bad input is refused with its file and line and exit status 2, or is listed in
quarantine."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.sources.documents import InputReader
from data_prep.sources.inputs import InputFile, find_inputs
from optimus.errors import DataError
from tests.data_prep.corpus import refused, tree
from tests.data_prep.test_tokenize import stored_documents
from tests.kit.ranks.processes import ROOT

GOOD = json.dumps({"text": "good text"}) + "\n"
WHOLE_GZ = gzip.compress((GOOD * 50_000).encode(), mtime=0)
INVERTED_GZ = WHOLE_GZ[:10] + bytes([WHOLE_GZ[10] ^ 255]) + WHOLE_GZ[11:]
"""A gzip file whose first deflate block is invalid. For this file, isal raises IsalError instead of
an exception of the standard library."""

BAD = {
    "bytes.txt": (b"fine\nnot \xff fine", 2, "invalid UTF-8"),
    "cut.txt": ("cut é".encode()[:-1], 1, "invalid UTF-8"),
    "a.jsonl": ((GOOD + "{nope\n" + GOOD).encode(), 2, "invalid JSON"),
    "cut.jsonl": ((GOOD + GOOD[:-5]).encode(), 2, "invalid JSON"),
    "b.jsonl": (GOOD.encode() + b'{"text": "\xc3"}\n', 2, "invalid UTF-8"),
    "c.jsonl": ((GOOD + '{"body": "x"}\n').encode(), 2, "no field 'text'; set --text-field"),
    "d.jsonl": ((GOOD * 2 + '{"text": 5}\n').encode(), 3, "field 'text' is int, not a string"),
    "e.jsonl": (b'["text"]\n', 1, "a JSON list where an object was expected"),
    "f.jsonl": (b'{"text": "\\ud800"}\n', 1, "not Unicode text"),
    "g.jsonl": (b"[" * 200_000 + b"\n", 1, "invalid JSON"),
    "cut.jsonl.gz": (WHOLE_GZ[: len(WHOLE_GZ) // 2], None, "damaged gzip"),
    "flip.jsonl.gz": (WHOLE_GZ[:-6] + b"\0" + WHOLE_GZ[-5:], None, "damaged gzip"),
    "inverted.jsonl.gz": (INVERTED_GZ, None, "damaged gzip"),
    "not.txt.gz": (b"plain", 1, "damaged gzip"),
    "empty.jsonl.gz": (b"", 1, "damaged gzip: the file is empty"),
}


def arguments(made, tmp_path: Path, *more: str) -> list[str]:
    return [
        *("run", "--input", str(tmp_path / "text"), "--tokenizer", str(made.tokenizer)),
        *("--out", str(tmp_path / "out"), "--context", "4", "--workers", "1", *more),
    ]


def test_depth_limit_of_json_does_not_depend_on_the_process(made, tmp_path, text):
    """A worker refuses nested JSON at the same depth as the main process. With Python's recursion
    limit (about 1000) the depths would differ, because this limit also counts the calling frames,
    of which a worker has more."""
    for name in "ab":
        lines = [
            json.dumps({"text": f'good {d} \\" [[[ ' + "[" * 600})[:-1]
            + f', "x": {"[" * d}{"]" * d}}}'
            for d in (9, 499, 500, 963, 968, 973, 990)
        ]
        (text / f"{name}.jsonl").write_text("\n".join(lines))
    trees = []
    for workers in "12":
        more = ["--unit-size", "1", "--on-error", "quarantine", "--workers", workers]
        out = tmp_path / workers
        assert main([*arguments(made, tmp_path, *more), "--out", str(out)]) == 0
        trees.append(tree(out))
    assert trees[0] == trees[1]
    listed = [json.loads(line) for line in (out / "quarantine.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in listed] == [3, 4, 5, 6, 7] * 2
    assert {entry["reason"] for entry in listed} == {"invalid JSON: nested too deeply"}


@pytest.mark.parametrize("name", BAD)
def test_bad_text_is_refused_by_file_and_line(made, tmp_path, text, capsys, name):
    content, line, needle = BAD[name]
    path = text / name
    path.write_bytes(content)
    error = refused(capsys, arguments(made, tmp_path))
    assert f"{path}:{line}: " in error if line else f"{path}:" in error
    assert needle in error and "--on-error quarantine" in error
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_quarantine_lists_bad_input_and_keeps_good_documents(made, tmp_path, text, capsys, workers):
    for name, (content, _, _) in BAD.items():
        (text / name).write_bytes(content)
    (text / "z.txt").write_text("a good text " * 10)
    more = ["--on-error", "quarantine", "--json", "--unit-size", "1", "--workers", workers]
    assert main(arguments(made, tmp_path, *more)) == 0
    assert json.loads(capsys.readouterr().out)["quarantined"] == len(BAD)
    listed = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    by_name = {Path(entry["input"]).name: entry for entry in map(json.loads, listed)}
    assert set(by_name) == set(BAD)
    for name, (_, line, needle) in BAD.items():
        assert needle in by_name[name]["reason"] and (line is None or by_name[name]["line"] == line)
    good = {"a.jsonl": 2, "cut.jsonl": 1, "b.jsonl": 1, "c.jsonl": 1, "d.jsonl": 2, "z.txt": 1}
    kept: dict[str, int] = {}
    for name, _, _ in stored_documents(tmp_path / "out"):
        kept[Path(name).name] = kept.get(Path(name).name, 0) + 1
    assert kept == good, "and nothing of a damaged gzip file"
    assert main(["verify", str(tmp_path / "out")]) == 0


def test_documents_of_a_damaged_file_are_removed_from_an_array(made, tmp_path, text, capsys):
    """The first documents of the file are written to the array before the damage is detected. These
    documents must be removed."""
    (text / "a.jsonl").write_text(GOOD * 3)
    (text / "b.jsonl.gz").write_bytes(WHOLE_GZ[:-9])
    (text / "c.jsonl").write_text(GOOD * 2)
    assert main(arguments(made, tmp_path, "--on-error", "quarantine")) == 0
    assert main(["verify", str(tmp_path / "out")]) == 0
    names = [Path(name).name for name, _, _ in stored_documents(tmp_path / "out")]
    assert names == ["a.jsonl"] * 3 + ["c.jsonl"] * 2
    assert len({tuple(ids) for _, _, ids in stored_documents(tmp_path / "out")}) == 1


def test_failed_run_continues_with_quarantine_but_not_without(made, tmp_path, text, capsys):
    """Completed work of a failed run is kept. A later run with quarantine continues this work. A
    later run without quarantine refuses the quarantined input."""
    (text / "a.jsonl").write_text(GOOD * 9)
    (text / "b.jsonl").write_text("nope\n")
    base = arguments(made, tmp_path, "--unit-size", "1")
    assert main(base) == 2
    assert main([*base, "--on-error", "quarantine"]) == 0
    refused(capsys, base, "b.jsonl:1: invalid JSON")


@pytest.mark.parametrize(
    "name",
    ["x.parquet.gz", "x.tar.zst", "x.json", "x.jsonl.bz2", "x.xz", "x.zip", "x.tar.gz"],
)
def test_unsupported_kinds_of_files_are_refused_by_name(made, tmp_path, text, capsys, name):
    (text / "a.txt").write_text("good")
    (text / name).write_bytes(b"whatever")
    refused(capsys, arguments(made, tmp_path), f"{name}: ")
    assert not (tmp_path / "out").exists()
    assert main(arguments(made, tmp_path, "--exclude", f"*{name}", "--context", "2")) == 0


def test_an_input_that_grew_since_it_was_planned_is_refused(tmp_path):
    """The plan divides the inputs into units of work by file size, so each file must still have the
    size that is recorded in the plan."""
    path = tmp_path / "a.txt"
    path.write_text("text")
    for size in (3, 5):
        reader = InputReader(InputFile(str(path), size), "text", lambda count: None)
        with pytest.raises(DataError, match=f"had {size} bytes when .* planned and has 4"):
            list(reader)


def test_inputs_are_listed_once_and_sorted(tmp_path):
    (tmp_path / "b" / "c").mkdir(parents=True)
    for name in ("b/x.txt", "a.txt", "b/c/y.txt", ".hidden.txt", "out/own.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b" / "loop").symlink_to(".")
    (tmp_path / "b" / "link.txt").symlink_to("x.txt")
    patterns = [str(tmp_path), f"{tmp_path}/./b//x.txt", f"{tmp_path}/**/*.txt"]
    inputs = find_inputs(patterns, out=tmp_path / "out")
    names = [os.path.relpath(file.name, tmp_path) for file in inputs]
    assert names == ["a.txt", "b/c/y.txt", "b/link.txt"]
    assert [file.size for file in inputs] == [5, 9, 7]
    inputs = find_inputs([f"{tmp_path}/b/x.txt"], out=tmp_path / "out")
    assert [Path(file.name).name for file in inputs] == ["x.txt"]


MISTAKES = {
    "no command": ([], "COMMAND"),
    "unknown command": (["tokenise"], "invalid choice: 'tokenise'"),
    "unknown option": (["verify", "x", "--fast"], "unrecognized arguments: --fast"),
    "abbreviated option": (["run", "--inp", "x"], "required: --input"),
    "missing option": (["run", "--input", "x"], "--tokenizer, --context, --out"),
    "empty output": (["--out", ""], "--out: the path is empty"),
    "empty input": (["--input", ""], "--input '' names nothing"),
    "no such input": (["--input", "nowhere/*.txt"], "--input 'nowhere/*.txt' matches no file"),
    "all excluded": (["--exclude", "*"], "--exclude leaves none of the"),
    "no such tokenizer": (["--tokenizer", "nowhere.json"], "--tokenizer 'nowhere.json'"),
    "not a tokenizer": (["--tokenizer", __file__], "is not a tokenizer.json"),
    "unknown eos": (["--eos", "<stop>"], "--eos '<stop>'"),
    "context 0": (["--context", "0"], "--context: '0' is not a whole number of at least 2"),
    "context word": (["--context", "long"], "--context: 'long'"),
    "too long a context": (["--context", "100000000"], "make no instance of 100000000"),
    "workers 0": (["--workers", "0"], "--workers: '0'"),
    "negative seed": (["--seed=-1"], "--seed: '-1'"),
    "huge seed": (["--seed", str(1 << 64)], "--seed: "),
    "memory": (["--memory", "1MB"], "--memory 1MB is too little"),
    "memory word": (["--memory", "much"], "--memory: 'much' is not a size"),
    "memory zero": (["--memory", "0GB"], "--memory: '0GB' is not a size"),
    "fraction 1": (["--eval-fraction", "1"], "--eval-fraction: '1'"),
    "fraction nan": (["--eval-fraction", "nan"], "--eval-fraction: 'nan'"),
    "on error": (["--on-error", "ignore"], "--on-error: invalid choice: 'ignore'"),
    "out is a file": (["--out", __file__], "--out"),
    "tiny vocabulary": (["train-tokenizer", "--vocab-size", "256"], "--vocab-size 256 must be"),
    "not a data set": (["stats", str(ROOT)], "manifest.json is missing: "),
    "no directory": (["inspect", "nowhere", "0"], "nowhere is not a directory"),
    "shard first": (["shard", str(ROOT / "docs")], "order.json: cannot be read"),
    "shuffle first": (
        ["shuffle", str(ROOT / "docs"), "--context", "4", "--to", "TMP"],
        "has no token arrays; give the output",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_refused(made, tmp_path, capsys, case):
    words, needle = MISTAKES[case]
    words = [str(tmp_path / "to") if word == "TMP" else word for word in words]
    if words and words[0] == "train-tokenizer":
        words += ["--input", str(made.text), "--out", str(tmp_path / "t.json")]
    elif words and words[0].startswith("-"):
        base = ["run", "--input", str(made.text), "--tokenizer", str(made.tokenizer)]
        base += ["--out", str(tmp_path / "out"), "--context", "8", "--workers", "1"]
        if words[0] == "--input":
            del base[1:3]
        words = base + words
    refused(capsys, words, needle)


def test_output_in_a_read_only_directory_is_refused(made, tmp_path, capsys):
    if os.geteuid() == 0:
        pytest.skip("root can write to every directory")
    (tmp_path / "locked").mkdir(mode=0o500)
    error = refused(capsys, [*arguments(made, tmp_path), "--out", str(tmp_path / "locked" / "out")])
    assert "cannot be made" in error
