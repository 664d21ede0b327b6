"""Functions to encode and decode text with the tokenizer of a data set or checkpoint, and to write
tokenizer files for transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_prep.dataset import (
    SENTENCEPIECE,
    TOKENIZER,
    SentencePieceTokenizer,
    is_sentencepiece,
    library_errors,
    open_tokenizer,
    read_facts,
    tokenizer_file,
)
from optimus.data.sentencepiece_json import sentencepiece_as_json
from optimus.errors import DataError

TOKENIZER_CONFIG = "tokenizer_config.json"


def tokenizer_path(folder: Path) -> Path:
    """Return the path of tokenizer.json in `folder`. If `folder` contains only tokenizer.model,
    return the path of tokenizer.model."""
    return tokenizer_file(folder)


class TextTokenizer:
    """Tokenizer that is loaded from a tokenizer.json or a sentencepiece model. With the same file,
    `optimus-data` encodes a text to the same ids."""

    def __init__(self, path: str | os.PathLike, check: bool = True) -> None:
        """Load the tokenizer from the file `path`. If `check` is True, a forked child process loads
        and uses the tokenizer first, because a damaged file could crash this process. Raises
        DataError if the file is not a tokenizer."""
        self._path, self._tokenizer = path, open_tokenizer(path, check)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. Names of special tokens, such as <|endoftext|>, are
        encoded as plain text. Raises DataError if the tokenizer fails."""
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            return self._tokenizer.encode([text])[0].tolist()
        with library_errors(self._path):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def token_id(self, name: str) -> int | None:
        """Return the id of the token with the text `name`, or None if there is no such token. For a
        sentencepiece model, return None if the token is not a control symbol."""
        try:
            if isinstance(self._tokenizer, SentencePieceTokenizer):
                return self._tokenizer.control_id(name)
            return self._tokenizer.token_to_id(name)
        except UnicodeEncodeError:  # half of a surrogate pair, which no token contains
            return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that the token ids encode, including the names of special tokens. Raises
        DataError if the tokenizer fails."""
        with library_errors(self._path):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def eos_from_names(file: Path) -> int | None:
    """Return the id of a tokenizer's end-of-document token, or None if the id cannot be determined.

    In a tokenizer.json, the end-of-document token is a special token with a usual name, such as
    <|endoftext|>. If there is no such token, the end-of-document token is the only special token.
    In a sentencepiece model, the end-of-document token is the end-of-sentence symbol.

    Raises:
        DataError: The file is not a tokenizer.
    """
    try:
        return read_facts(file).eos_id
    except DataError:
        tokenizer = open_tokenizer(file)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return None
    special = _special_tokens(tokenizer)
    return next(iter(special)) if len(special) == 1 else None


def add_transformers_files(
    file: Path,
    *,
    eos: int | None,
    bos: int | None,
    pad: int | None,
    vocab_size: int,
    max_length: int,
) -> int | None:
    """Write tokenizer files for transformers to the folder of `file`. With these files,
    `AutoTokenizer` encodes texts to the same ids as the tokenizer in `file`.

    The function always writes tokenizer_config.json. If `file` is a sentencepiece model, the
    function also writes an equivalent tokenizer.json, and renames `file` to tokenizer.model. If
    `file` is a tokenizer.json that adds special tokens to texts, the function replaces `file` with
    a tokenizer.json that does not add special tokens.

    Args:
        file: tokenizer.json or tokenizer.model.
        eos, bos, pad: Ids of the end-of-document, beginning-of-sequence and padding tokens; None if
            not known.
        vocab_size: Size of the model's vocabulary. A special token with "pad" in its name becomes
            the padding token only if its id is less than this size.
        max_length: Value of `model_max_length` in tokenizer_config.json, in tokens.

    Returns:
        The id of the padding token: `pad` if the tokenizer has this id, else the id of a special
        token with "pad" in its name, else `eos`. None if there is no such token and `eos` is None.

    Raises:
        DataError: The file is not a tokenizer, or a tokenizer.json cannot reproduce the ids of the
            sentencepiece model.
    """
    open_tokenizer(file)  # raises DataError if the file is not a tokenizer
    text = sentencepiece_as_json(file) if is_sentencepiece(file) else file.read_text("utf-8")
    tokenizer = Tokenizer.from_str(text)
    special = _special_tokens(tokenizer)
    if pad is None or tokenizer.id_to_token(pad) is None:
        pads = (i for i, name in special.items() if "pad" in name.lower() and i < vocab_size)
        pad = next(pads, eos)
    config: dict[str, Any] = {
        # transformers 4 and transformers 5 support this class, and use the pre-tokenizer that is
        # in tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        # A decoder-only model generates after the last token of a prompt. Padding tokens must not
        # follow this token, so padding is on the left.
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    named_ids = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    tokens = {key: tokenizer.id_to_token(i) for key, i in named_ids.items() if i is not None}
    config |= {key: token for key, token in tokens.items() if token is not None}
    if unknown := getattr(tokenizer.model, "unk_token", None):
        config["unk_token"] = unknown
    if others := [name for name in special.values() if name not in config.values()]:
        config["additional_special_tokens"] = others
    if is_sentencepiece(file):
        if file.name != SENTENCEPIECE:  # an earlier version used the name tokenizer.json
            file.rename(file.with_name(SENTENCEPIECE))
        file.with_name(TOKENIZER).write_text(text, encoding="utf-8")
    elif tokenizer.num_special_tokens_to_add(False):
        tree = json.loads(text) | {"post_processor": None}
        file.write_text(json.dumps(tree, ensure_ascii=False, indent=2), encoding="utf-8")
    written = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    file.with_name(TOKENIZER_CONFIG).write_text(written, encoding="utf-8")
    return pad


def _special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return a dict that maps the id of each special token to the token's text. The ids are in
    ascending order."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return {number: token.content for number, token in added if token.special}
