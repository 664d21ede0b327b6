"""Conversion of a sentencepiece model to a tokenizer.json that encodes texts to the same ids.

The file of a sentencepiece model is a protobuf message, whose field numbers are defined in
sentencepiece_model.proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from data_prep.dataset import SentencePieceTokenizer, fields, library_errors
from optimus.errors import DataError, one_line

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_PIECE_TYPES = {1: bytes, 2: float, 3: int}
_SPEC_TYPES: dict[int, dict[int, type]] = {
    _TRAINER: {3: int, 35: int},  # model_type, byte_fallback
    _NORMALIZER: {2: bytes, 3: int, 4: int},  # charsmap, add_dummy_prefix, remove_extra_whitespaces
}
_NEVER = -1e6
"""Score of control symbols. With this low score, no text is encoded as a control symbol."""
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
"""Texts that the sentencepiece model and the tokenizer.json must encode to the same ids."""


def sentencepiece_as_json(path: Path) -> str:
    """Convert the sentencepiece model at `path` to a tokenizer.json. Return the content of the
    tokenizer.json, which encodes texts to the same ids as the model.

    Raises:
        DataError: The model is neither BPE nor unigram, or no tokenizer.json encodes all test texts
            to the ids of the model.
    """
    reference = SentencePieceTokenizer(path)
    with library_errors(path):
        try:
            return _as_json(path, reference)
        except DataError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exception
            raise DataError(
                f"{path}: cannot be converted to a tokenizer.json: {one_line(error)}; use another "
                "tokenizer"
            ) from None


def _as_json(path: Path, reference: SentencePieceTokenizer) -> str:
    pieces, trainer, normalizer = _read(path.read_bytes())
    symbols = [piece for piece, _, kind in pieces if kind == _USER_DEFINED]
    probes = [*_PROBES, *(f"a{symbol} {symbol}b" for symbol in symbols[:20])]
    expected = [ids.tolist() for ids in reference.encode(probes)]
    # Either the normalizer or the pre-tokenizer can prepend a space to a text, as sentencepiece
    # does. The normalizer gives the right ids for texts with a leading space. The pre-tokenizer
    # gives the right ids for texts with user-defined symbols.
    for as_normalizer in (True, False):
        tokenizer = _convert(pieces, trainer, normalizer, as_normalizer)
        actual = [tokenizer.encode(text, add_special_tokens=False).ids for text in probes]
        if actual == expected:
            return tokenizer.to_str()
    text = next(p for p, a, b in zip(probes, expected, actual, strict=True) if a != b)
    raise DataError(
        f"{path}: a tokenizer.json cannot reproduce the model's ids of the text {text!r:.60}; use "
        "another tokenizer"
    )


def has_pieces(data: bytes) -> bool:
    """Return True if `data` has the structure of a sentencepiece model with at least one piece
    (token)."""
    try:
        pieces, _, _ = _read(data)
    except ValueError:
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
        raise DataError(
            f"a sentencepiece model with model_type = {kind} cannot be converted to a "
            f"tokenizer.json; use a BPE model (model_type = {_BPE})"
        )
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
    # For the comparison of ids in `_as_json`. A tokenizer.json does not contain this setting.
    tokenizer.encode_special_tokens = True
    return tokenizer


def _merges(pieces: Sequence[tuple[str, float, int]]) -> list[tuple[str, str]]:
    """Return the BPE merges of a sentencepiece model.

    A merge is a pair of normal pieces whose concatenation is a normal piece. The merges are sorted
    by the score of the concatenation, the highest score first.
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
    """Parse a sentencepiece model.

    Returns:
        The list of pieces (text, score, type), a dict of the fields of TrainerSpec, and a dict of
        the fields of NormalizerSpec. The keys of these dicts are field numbers.

    Raises:
        ValueError: `data` is not a valid protobuf message, or a field has an invalid value.
    """
    pieces: list[tuple[str, float, int]] = []
    specs: dict[int, dict[int, Any]] = {_TRAINER: {}, _NORMALIZER: {}}
    for number, value in fields(data):
        if number == _PIECES:
            piece = _fields_of(value, _PIECE_TYPES)
            if 1 not in piece:
                raise ValueError("a piece has no text")
            pieces.append((piece[1].decode(), piece.get(2, 0.0), piece.get(3, _NORMAL)))
        elif number in specs:
            specs[number] |= _fields_of(value, _SPEC_TYPES[number])
    return pieces, specs[_TRAINER], specs[_NORMALIZER]


def _fields_of(message: object, types: Mapping[int, type]) -> dict[int, Any]:
    """Parse a nested protobuf message.

    Args:
        message: Value of the outer field, the bytes of the nested message.
        types: Maps field numbers to the expected types of the field values. Fields that are not in
            `types` are ignored.

    Returns:
        A dict that maps the numbers of the fields to their values.

    Raises:
        ValueError: `message` is a number, or a field has a value of a wrong type.
    """
    if not isinstance(message, bytes):
        raise ValueError("a field contains a number instead of a message")
    values = {number: value for number, value in fields(message) if number in types}
    for number, value in values.items():
        if not isinstance(value, types[number]):
            raise ValueError(f"field {number} is not of type {types[number].__name__}")
    return values
