"""Tests of the command line of optimus-data: imports, training of a tokenizer, JSON on standard
output, and progress lines."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from data_prep.cli import main
from data_prep.cli.options import size
from data_prep.pipeline.train_tokenizer import EOS
from data_prep.runtime.progress import Progress, short
from tests.data_prep.corpus import documents, refused, run_arguments, train_arguments, tree
from tests.kit.ranks.processes import ROOT, python


def test_parser_loads_no_numpy_and_no_module_loads_torch():
    code = (
        "import sys, pkgutil, importlib, data_prep\n"
        "from data_prep.cli.commands import _parser; _parser()\n"
        "print(*sorted({'numpy', 'tokenizers', 'torch', 'tqdm'} & set(sys.modules)))\n"
        "for module in pkgutil.walk_packages(data_prep.__path__, 'data_prep.'):\n"
        "    importlib.import_module(module.name)\n"
        "print('torch' in sys.modules)\n"
    )
    done = python("-c", code)
    assert done.stdout.splitlines() == ["", "False"], done.stderr


def test_train_tokenizer_is_deterministic_and_lossless(made, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.sources.documents.LONG_BYTES", 30)  # texts are read in blocks
    assert main(train_arguments(made.text, tmp_path / "again.json")) == 0
    assert (tmp_path / "again.json").read_bytes() == made.tokenizer.read_bytes()
    tokenizer = Tokenizer.from_file(str(made.tokenizer))
    assert tokenizer.get_vocab_size() == 400 and tokenizer.token_to_id(EOS) == 0
    tokenizer.encode_special_tokens = True
    for _, _, text in documents(made.text):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_train_tokenizer_on_short_text_prints_a_smaller_vocabulary(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab ab")
    assert main(train_arguments(tmp_path / "a.txt", tmp_path / "t.json", 5000)) == 0
    assert "has 259 ids, fewer than --vocab-size 5000" in capsys.readouterr().out


def test_train_tokenizer_with_quarantine_counts_bad_files(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_bytes(b"\xff")
    arguments = train_arguments(tmp_path / "*.txt", tmp_path / "t.json", 260)
    refused(capsys, arguments, "b.txt:1: invalid UTF-8")
    assert not (tmp_path / "t.json").exists()
    assert main([*arguments, "--on-error", "quarantine", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["quarantined"]) == 1


def test_standard_output_has_only_json(made, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(run_arguments(made.text, made.tokenizer, out, "--json")) == 0
    output = capsys.readouterr()
    answer = json.loads(output.out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert answer["train"]["instances"] == manifest["num_instances"]
    assert answer["held-out"]["documents"] > 0
    assert [line.split(":")[0] for line in output.err.splitlines()] == [
        *("tokenize", "shard held-out", "shard")
    ]


def test_separate_steps_give_the_bytes_of_run(made, tmp_path, capsys):
    out = str(tmp_path / "out")
    words = run_arguments(made.text, made.tokenizer, tmp_path / "out")
    options = dict(zip(words[1::2], words[2::2], strict=True))
    names = ("--input", "--tokenizer", "--out", "--eval-fraction", "--unit-size")
    assert main(["tokenize", *(word for name in names for word in (name, options[name]))]) == 0
    names = ("--context", "--seed", "--shard-size")
    assert main(["shuffle", out, *(word for name in names for word in (name, options[name]))]) == 0
    assert main(["shard", out, "--workers", "2"]) == 0
    assert tree(tmp_path / "out") == tree(made.data)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2GB", 2 * 10**9), ("512MiB", 512 << 20), ("1.5k", None), ("1.5kb", 1500), ("4096", 4096)],
)
def test_size_reads_decimal_and_binary_units(text, value):
    if value is None:
        with pytest.raises(Exception, match="not a size"):
            size(text)
    else:
        assert size(text) == value


def test_progress_lines_are_sparse(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress("work", 1000, "B") as progress:
        for _ in range(1000):
            now[0] += 0.03
            progress.advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "to go" in lines[0]
    assert lines[-1] == "work: 1k/1kB in 30.0 s, 33.3B/s"


def test_short_numbers_have_a_unit():
    assert [short(x) for x in (0, 7, 31_525_224, 999.6e6, 0.25)] == [
        "0",
        "7",
        "31.5M",
        "1000M",
        "0.25",
    ]


def test_command_succeeds_with_closed_standard_output(made):
    words = [sys.executable, "-m", "data_prep.cli", "inspect", str(made.data), "0"]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(words)} >&-"], stderr=subprocess.PIPE, cwd=ROOT, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("[ps]*/*.sh")), ids=str)
def test_job_scripts_print_help(script):
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--dry-run" in done.stdout and done.stderr == ""
    assert "set -euo" not in done.stdout and not done.stdout.startswith("#")
