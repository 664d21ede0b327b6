"""Tests that a refused command does not change the output directory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from data_prep.cli import main
from data_prep.pipeline.verify import verify
from tests.data_prep.corpus import refused, run_arguments, train_arguments, tree


@pytest.fixture(scope="module")
def other(made, tmp_path_factory):
    """Return a folder that contains another tokenizer and a data set made with this tokenizer."""
    base = tmp_path_factory.mktemp("other")
    assert main(train_arguments(made.text, base / "t.json", 300)) == 0
    assert main(run_arguments(made.text / "tree", base / "t.json", base / "data")) == 0
    return base


def assert_refused_unchanged(arguments: list[str], out, needle: str, capsys) -> None:
    """Assert that a command is refused and does not change the files in `out`."""
    before = tree(out)
    refused(capsys, arguments, needle)
    assert tree(out) == before


def test_shuffle_into_another_data_set_is_refused(made, other, tmp_path, capsys):
    shutil.copytree(other / "data", tmp_path / "b")
    command = ["shuffle", str(made.data), "--context", "16", "--to", str(tmp_path / "b")]
    assert_refused_unchanged(command, tmp_path / "b", "was made of other token arrays", capsys)
    for name in ("b/order.json", "b/eval/order.json"):
        (tmp_path / name).unlink()
    assert_refused_unchanged(command, tmp_path / "b", "already contains token arrays", capsys)
    shutil.rmtree(tmp_path / "b" / "tokens")
    shutil.rmtree(tmp_path / "b" / "eval")
    assert_refused_unchanged(command, tmp_path / "b", "different tokenizers", capsys)


def test_blend_into_another_data_set_is_refused(made, other, tmp_path, capsys):
    shutil.copytree(other / "data", tmp_path / "b")
    command = ["blend", "--source", f"{made.data}=1", "--context", "16"]
    command += ["--out", str(tmp_path / "b")]
    assert_refused_unchanged(
        command, tmp_path / "b", "already contains another data set, no blend", capsys
    )
    (tmp_path / "b" / "order.json").unlink()
    assert_refused_unchanged(command, tmp_path / "b", "already contains token arrays", capsys)


@pytest.mark.parametrize("how", ["blend", "shuffle --to"])
def test_run_into_a_data_set_without_token_arrays_is_refused(made, other, tmp_path, capsys, how):
    out = tmp_path / "mix"
    if how == "blend":
        assert (
            main(["blend", "--source", f"{made.data}=1", "--context", "16", "--out", str(out)]) == 0
        )
    else:
        assert main(["shuffle", str(made.data), "--context", "16", "--to", str(out)]) == 0
        assert main(["shard", str(out)]) == 0
    for tokenizer in (other / "t.json", made.tokenizer):
        command = run_arguments(made.text, tokenizer, out)
        assert_refused_unchanged(command, out, "contains the order of other token arrays", capsys)
    assert list(verify(out)) == []


def test_tokenize_into_an_import_is_refused(made, tmp_path, capsys):
    source = tmp_path / "a.npy"
    shutil.copy(made.data / "tokens" / "unit-00000.npy", source)
    base = ["--tokenizer", str(made.tokenizer), "--out", str(tmp_path / "out")]
    assert main(["import", "--input", str(source), *base]) == 0
    command = ["tokenize", "--input", str(made.text), *base]
    assert_refused_unchanged(
        command, tmp_path / "out", "started with imported token files, now text", capsys
    )


def test_damaged_copy_of_the_tokenizer_is_written_again(made, tmp_path):
    shutil.copytree(made.data, tmp_path / "data")
    (tmp_path / "data" / "tokenizer.json").write_text("{")
    assert main(run_arguments(made.text, made.tokenizer, tmp_path / "data")) == 0
    assert tree(tmp_path / "data") == tree(made.data)


def test_output_with_a_non_utf8_name_is_refused_before_it_is_made(made, tmp_path, capsys):
    out = os.fsdecode(os.fsencode(tmp_path) + b"/o\xe9")
    assert main(run_arguments(made.text, made.tokenizer, Path(out))) == 2
    assert "is not UTF-8" in capsys.readouterr().err and not os.path.exists(out)


def test_inputs_in_the_output_directory_are_refused(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    error = refused(capsys, run_arguments(Path("*.txt"), made.tokenizer, Path(".")))
    assert "names only files below --out" in error and "--exclude" not in error
