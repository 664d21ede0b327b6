"""Tokenizers in sentencepiece's `.model` format. Needs the sentencepiece package.

Control symbols (`<s>`, `</s>`) are never taken from text by that library, so special-token text is
plain text; user-defined symbols are matched as it matches them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from data_prep.layout import TOKENIZER_BYTES
from optimus.errors import DataError, one_line
from optimus.io import files


def is_sentencepiece(path: str | os.PathLike) -> bool:
    """Whether a file is a sentencepiece model: it begins with its list of pieces, no JSON does."""
    try:
        with files.open_regular(path) as file:
            head = file.read(65)
    except OSError:
        return False  # who reads it as JSON reports it
    return head[:1] == b"\n" and head[1:].lstrip()[:1] not in (b"{", b"[", b"")


class SentencePieceTokenizer:
    """A model, with the few methods that data preparation wants of a tokenizer."""

    def __init__(self, path: str | os.PathLike):
        """Raises DataError where the file is no model, or the package is missing."""
        try:
            import sentencepiece
        except ImportError:
            raise DataError(
                f"{path}: sentencepiece models need its package: pip install sentencepiece"
            ) from None
        try:
            content = files.read_regular(path, TOKENIZER_BYTES)
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError, OSError) as error:
            raise DataError(f"{path}: is not a sentencepiece model: {one_line(error)}") from None

    @property
    def vocab_size(self) -> int:
        """Pieces, which have the ids from 0."""
        return self._model.get_piece_size()

    @property
    def default_eos(self) -> str | None:
        """The end-of-sentence symbol, if the model was trained with one."""
        eos = self._model.eos_id()
        return self._model.id_to_piece(eos) if eos >= 0 else None

    def control_id(self, piece: str) -> int | None:
        """The id of a control symbol, which no text produces; None for any other piece."""
        found = self._model.piece_to_id(piece)
        known = self._model.id_to_piece(found) == piece
        return found if known and self._model.is_control(found) else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, uint32 [T], without any control symbol."""
        return [np.array(self._model.encode(text, out_type=int), np.uint32) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of these ids, control symbols by their names unless they are skipped."""
        runs: list[str] = []
        plain: list[int] = []
        for token in ids:
            if self._model.is_control(token):
                name = "" if skip_special_tokens else self._model.id_to_piece(token)
                runs += [self._model.decode(plain), name]
                plain = []
            else:
                plain.append(token)
        return "".join([*runs, self._model.decode(plain)])
