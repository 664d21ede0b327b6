"""Text to ids and back, by the tokenizer file that lies beside a data set or in a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from data_prep import layout
from data_prep.sentencepiece_model import SentencePieceTokenizer
from data_prep.tokenizer import open_tokenizer


def tokenizer_beside(folder: Path) -> Path:
    """The tokenizer of a data set or a checkpoint, called by its kind; it need not exist."""
    return layout.tokenizer_file(folder)


class TextTokenizer:
    """A tokenizer.json or a sentencepiece model, read as `optimus-data` reads it."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Raises DataError where the file is neither."""
        self._tokenizer = open_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        """All ids of a text; what spells a special token is plain text."""
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            return self._tokenizer.encode([text])[0].tolist()
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens by their names."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
