"""A corpus, its tokenizer and its data set, each made once; tests must not change them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from data_prep.cli import main
from tests.data_prep.corpus import run_arguments, train_arguments, write_corpus


@dataclass(frozen=True)
class Made:
    """Where the parts of the example lie."""

    text: Path
    tokenizer: Path
    data: Path


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Text, tokenizer.json and the data set that one worker made of them."""
    base = tmp_path_factory.mktemp("made")
    made = Made(base / "text", base / "tokenizer.json", base / "data")
    write_corpus(made.text)
    assert main(train_arguments(made.text, made.tokenizer)) == 0
    assert main(run_arguments(made.text, made.tokenizer, made.data)) == 0
    return made


@pytest.fixture
def text(tmp_path) -> Path:
    """Where `arguments` looks for text; empty."""
    (tmp_path / "text").mkdir()
    return tmp_path / "text"
