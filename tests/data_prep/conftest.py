"""Fixtures: a corpus, its tokenizer and its data set, which are made once. Tests must not change
these files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep.cli import main
from tests.data_prep.corpus import run_arguments, train_arguments, write_corpus


@dataclass(frozen=True)
class Made:
    """Paths of the corpus, the tokenizer and the data set."""

    text: Path
    tokenizer: Path
    data: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a corpus, its tokenizer.json, and the data set that a run with one worker made from
    the corpus and the tokenizer."""
    base = tmp_path_factory.mktemp("made")
    made = Made(base / "text", base / "tokenizer.json", base / "data")
    write_corpus(made.text)
    assert main(train_arguments(made.text, made.tokenizer)) == 0
    assert main(run_arguments(made.text, made.tokenizer, made.data)) == 0
    return made


@pytest.fixture
def text(tmp_path) -> Path:
    """Return an empty folder for text files, which `arguments` in test_bad_input uses as input."""
    (tmp_path / "text").mkdir()
    return tmp_path / "text"
