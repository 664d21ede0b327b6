"""Tokenizers in sentencepiece's `.model` format. This module needs the sentencepiece package.

sentencepiece never returns the id of a control symbol (`<s>`, `</s>`) for a text: the text `<s>` is
encoded as plain text. In contrast, the text of a user-defined symbol is encoded as the id of this
symbol.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from data_prep.layout import TOKENIZER_BYTES
from data_prep.tokenizer.growth import MAX_GROWTH, max_growth_by_map
from optimus.errors import DataError, one_line
from optimus.io import files

_NORMALIZER, _DENORMALIZER, _CHARSMAP = 3, 5, 2
"""Field numbers in sentencepiece_model.proto: `normalizer_spec` and `denormalizer_spec` of
ModelProto, and `precompiled_charsmap` of NormalizerSpec."""


def is_sentencepiece(path: str | os.PathLike) -> bool:
    """Return True if the first bytes of a file belong to a sentencepiece model.

    Return False if the file cannot be read.
    """
    try:
        with files.open_regular(path) as file:
            head = file.read(65)
    except OSError:
        return False  # the reader of a tokenizer.json reports the error
    return head[:1] == b"\n" and head[1:].lstrip()[:1] not in (b"{", b"[", b"")


class SentencePieceTokenizer:
    """Tokenizer of a sentencepiece model, with the methods that data preparation uses.

    Args:
        path: A `.model` file.

    Raises:
        DataError: The file is not a sentencepiece model; the normalizer or denormalizer of the
            model could make a text more than MAX_GROWTH times as long; or the sentencepiece package
            is not installed.
    """

    def __init__(self, path: str | os.PathLike):
        try:
            import sentencepiece
        except ImportError:
            raise DataError(
                f"{path}: sentencepiece models need the sentencepiece package: "
                "pip install sentencepiece"
            ) from None
        try:
            content = files.read_regular(path, TOKENIZER_BYTES)
            growth = _max_growth(content)
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError, OSError) as error:
            raise DataError(f"{path} is not a sentencepiece model: {one_line(error)}") from None
        if growth > MAX_GROWTH:
            raise DataError(
                f"{path}: its normalizer or denormalizer makes texts up to {growth:.3g} times as "
                f"long; use a tokenizer that makes texts at most {MAX_GROWTH} times as long"
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model. The ids are 0 to `vocab_size` - 1."""
        return self._model.get_piece_size()

    @property
    def default_eos(self) -> str | None:
        """End-of-sentence symbol; None if the model was trained without an end-of-sentence
        symbol."""
        eos = self._model.eos_id()
        return self._model.id_to_piece(eos) if eos >= 0 else None

    def control_id(self, piece: str) -> int | None:
        """Return the id of `piece`, or None if `piece` is not a control symbol of the model."""
        number = self._model.piece_to_id(piece)
        known = self._model.id_to_piece(number) == piece
        return number if known and self._model.is_control(number) else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, uint32 [T], without control symbols."""
        return [np.array(self._model.encode(text, out_type=int), np.uint32) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`. The text includes the names of control symbols unless
        `skip_special_tokens` is True."""
        texts: list[str] = []
        for is_control, run in itertools.groupby(ids, self._model.is_control):
            if not is_control:
                texts.append(self._model.decode(list(run)))
            elif not skip_special_tokens:
                texts += map(self._model.id_to_piece, run)
        return "".join(texts)


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Parse a protobuf message, and yield the number and the value of each field.

    Yields:
        (number, value). The value is an int for a varint, a float for a 32-bit field, and bytes for
        any other field.

    Raises:
        ValueError: The message is damaged.
    """
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = 0
        for shift in range(0, 64, 7):
            if offset == len(message):
                raise ValueError("the protobuf message ends within a varint")
            byte = message[offset]
            offset += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a varint has more than 64 bits")

    while offset < len(message):
        key = varint()
        number, wire = key >> 3, key & 7
        if not 0 < key >> 3 < 1 << 29:  # protobuf's own parser would drop the upper bits
            raise ValueError(f"the field number {number} is out of range")
        if wire == 0:
            yield number, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError(f"field {number} has the unknown wire type {wire}")
        size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        value = message[offset : offset + size]
        if len(value) != size:
            raise ValueError("the protobuf message ends within a field")
        offset += size
        yield number, struct.unpack("<f", value)[0] if wire == 5 else value


def _max_growth(model: bytes) -> float:
    """Return an upper bound of the factors by which the character maps of a sentencepiece model
    lengthen a text. The bound applies to each map separately.

    Args:
        model: The content of the model file.

    Raises:
        ValueError: The model is damaged, or has more than two maps.
    """
    # Skip the pieces (tokens), which are at the start and are most of the model. A piece consists
    # of the byte 10 (the key), a byte with the size of the content (below 128), and the content.
    offset = 0
    while model[offset : offset + 1] == b"\n" and model[offset + 1 : offset + 2] < b"\x80":
        offset += 2 + int.from_bytes(model[offset + 1 : offset + 2], "little")
    maps = [
        charsmap
        for number, spec in fields(model[offset:])
        if number in (_NORMALIZER, _DENORMALIZER) and isinstance(spec, bytes)
        for key, charsmap in fields(spec)
        if key == _CHARSMAP and isinstance(charsmap, bytes)
    ]
    # A model has a map in the normalizer and a map in the denormalizer. The check of a map takes a
    # second, so a file with many maps is refused.
    if len(maps) > 2:
        raise ValueError(f"the model has {len(maps)} character maps, but at most 2 are supported")
    return max(map(max_growth_by_map, maps), default=1.0)
