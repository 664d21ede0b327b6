"""Conversion of a sentencepiece model to a tokenizer.json with the same ids.

The model file is a protobuf message. The field numbers are from sentencepiece_model.proto of the
sentencepiece project (ModelProto, TrainerSpec, NormalizerSpec).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_prep.sentencepiece_model import SentencePieceTokenizer
from optimus.errors import DataError

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_NEVER = -1e6
"""Score of control symbols. It is so low that no text is encoded as a control symbol."""
_SPACE = "\u2581"
_PROBES = (
    "The quick brown fox; it's 3.14159 (x_1)!",
    " leading and trailing ",
    "a  b   c\n\nd\te",
    " ",
    "na\u00efve caf\u00e9 \u212b \ufb01 \u00bd \uff46\uff55 e\u0301",
    "\u6f22\u5b57 \ud55c\uad6d \u0639\u0631\u0628 \U0001f3f3\ufe0f \x00\x7f",
    f"a{_SPACE}b {_SPACE}",
    "x" * 300,
    "\n",
    "def f(x):\n    return x + 1\n",
)
"""Texts whose ids are compared between the sentencepiece model and the tokenizer.json."""


def sentencepiece_as_json(path: Path) -> str:
    """Return the text of a tokenizer.json with the ids of the sentencepiece model at `path`.

    Raises:
        DataError: The model is neither BPE nor unigram, or the ids differ for a text of `_PROBES`
            or for a text with a user-defined symbol.
    """
    reference = SentencePieceTokenizer(path)
    pieces, trainer, normalizer = _read(path.read_bytes())
    symbols = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    probes = [*_PROBES, *(f"a{symbol} {symbol}b" for symbol in symbols[:20])]
    expected = [ids.tolist() for ids in reference.encode(probes)]
    # A space prepended by the normalizer gives the right ids for text with a leading space. A space
    # prepended by the pre-tokenizer gives the right ids for text with user-defined symbols.
    for as_normalizer in (True, False):
        tokenizer = _convert(pieces, trainer, normalizer, as_normalizer)
        actual = [tokenizer.encode(text, add_special_tokens=False).ids for text in probes]
        if actual == expected:
            return tokenizer.to_str()
    text = next(p for p, a, b in zip(probes, expected, actual, strict=True) if a != b)
    raise DataError(f"{path}: a tokenizer.json cannot reproduce the ids of the text {text!r:.60}")


def has_pieces(data: bytes) -> bool:
    """Return True if `data`, the content of a file, has the structure of a sentencepiece model: a
    complete protobuf message with a list of pieces."""
    try:
        pieces, _, _ = _read(data)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error):
        return False
    return bool(pieces) and data[:1] == b"\n"


def _convert(
    pieces: Sequence[tuple[str, float, int]],
    trainer: Mapping[int, Any],
    normalizer: Mapping[int, Any],
    prepend_as_normalizer: bool,
) -> Tokenizer:
    byte_fallback = bool(trainer.get(35, 0))
    unknown = next((i for i, (_, _, kind) in enumerate(pieces) if kind == _UNKNOWN), None)
    kind = trainer.get(3, _UNIGRAM)
    model: models.Model
    if kind == _UNIGRAM:
        vocabulary = [(p, _NEVER if kind == _CONTROL else score) for p, score, kind in pieces]
        model = models.Unigram(vocabulary, unk_id=unknown, byte_fallback=byte_fallback)
    elif kind == _BPE:
        model = models.BPE(
            {piece: number for number, (piece, _, _) in enumerate(pieces)},
            _merges(pieces),
            unk_token=None if unknown is None else pieces[unknown][0],
            fuse_unk=True,
            byte_fallback=byte_fallback,
        )
    else:
        raise DataError(f"sentencepiece type {kind} cannot become a tokenizer.json; use BPE")
    tokenizer = Tokenizer(model)
    charsmap, dummy_prefix, strips = normalizer.get(2), normalizer.get(3, 1), normalizer.get(4, 1)
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if strips:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if dummy_prefix and prepend_as_normalizer:
        steps.append(normalizers.Prepend(" "))
    steps.append(normalizers.Replace(" ", _SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    if not prepend_as_normalizer:
        scheme = "first" if dummy_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, scheme, split=False)
    ending = [decoders.Strip(" ", 1, 0)] if dummy_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ending]
    )
    for piece, _, kind in pieces:
        if kind in (_UNKNOWN, _CONTROL):
            tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(piece, normalized=True, special=False)])
    tokenizer.encode_special_tokens = True  # for the comparison of ids; it is not saved
    return tokenizer


def _merges(pieces: Sequence[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return the BPE merges: all pairs of pieces whose concatenation is a piece.

    The pairs are in descending order of the score of the concatenation, because sentencepiece
    merges the pair with the highest score first.
    """
    numbers = {piece: number for number, (piece, _, kind) in enumerate(pieces) if kind == _NORMAL}
    merges = []
    for piece, number in numbers.items():
        for cut in range(1, len(piece)):
            left, right = numbers.get(piece[:cut]), numbers.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-pieces[number][1], left, right))
    return [(pieces[left][0], pieces[right][0]) for _, left, right in sorted(merges)]


def _read(data: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """Parse a model file. Return its pieces as (text, score, type), and the fields of TrainerSpec
    and NormalizerSpec by number."""
    pieces: list[tuple[str, float, int]] = []
    specs: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in _fields(data):
        if number == _PIECES:
            piece = dict(_fields(value))
            pieces.append((piece[1].decode(), piece.get(2, 0.0), piece.get(3, _NORMAL)))
        elif number in specs:
            specs[number] = dict(_fields(value))
    return pieces, specs[_TRAINER], specs[_NORMALIZER]


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a protobuf message. A varint is an int, a 32-bit
    field a float, and any other field bytes."""
    offset = 0

    def varint() -> int:
        nonlocal offset
        value = 0
        for shift in range(0, 64, 7):
            byte = data[offset]
            offset += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a varint has more than 64 bits")

    while offset < len(data):
        key = varint()
        number, wire = key >> 3, key & 7
        if wire == 0:
            yield number, varint()
            continue
        size = varint() if wire == 2 else {1: 8, 5: 4}[wire]
        value = data[offset : offset + size]
        if len(value) != size:
            raise ValueError("the message ends within a field")
        offset += size
        yield number, struct.unpack("<f", value)[0] if wire == 5 else value
