"""The tokenizer file of a data set or a checkpoint: text to ids and back, and as transformers reads
it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data_prep import layout
from data_prep.sentencepiece_model import SentencePieceTokenizer, is_sentencepiece
from data_prep.tokenizer import library_panics, open_tokenizer, read_facts
from optimus.data.sentencepiece_json import sentencepiece_as_json
from optimus.errors import DataError

TOKENIZER_CONFIG = "tokenizer_config.json"


def tokenizer_beside(folder: Path) -> Path:
    """The tokenizer of a data set or a checkpoint, called by its kind; it need not exist."""
    return layout.tokenizer_file(folder)


class TextTokenizer:
    """A tokenizer.json or a sentencepiece model, read as `optimus-data` reads it."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Raises DataError where the file is neither."""
        self._path, self._tokenizer = path, open_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        """All ids of a text; what spells a special token is plain text. Raises DataError."""
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            return self._tokenizer.encode([text])[0].tolist()
        with library_panics(self._path):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def token_id(self, name: str) -> int | None:
        """The id of a token by its text, of a sentencepiece model a control symbol."""
        if isinstance(self._tokenizer, SentencePieceTokenizer):
            return self._tokenizer.control_id(name)
        return self._tokenizer.token_to_id(name)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, special tokens by their names. Raises DataError."""
        with library_panics(self._path):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def eos_from_names(file: Path) -> int | None:
    """Return the id of a tokenizer's end-of-document token: the only special token of a usual name,
    or the only special token at all; None if that leaves it open."""
    try:
        return read_facts(file).eos_id
    except DataError:
        tokenizer = open_tokenizer(file)
    if isinstance(tokenizer, SentencePieceTokenizer):
        return None
    special = _special_tokens(tokenizer)
    return next(iter(special)) if len(special) == 1 else None


def add_transformers_files(
    file: Path, *, eos: int | None, bos: int | None, pad: int | None, ids: int, max_length: int
) -> int | None:
    """Write into the directory of a tokenizer file what `AutoTokenizer` needs to give the same ids.

    That is a tokenizer_config.json and, where the file is a sentencepiece model or its
    post-processor adds tokens that the data did not have, another tokenizer.json.

    Args:
        file: tokenizer.json or tokenizer.model, as `tokenizer_beside` names it.
        eos: id of the token that ends a document; `bos` and `pad` alike; None if not known.
        ids: size of the model's vocabulary, which the padding token must be in.
        max_length: `model_max_length`, in tokens.

    Returns:
        The id of the padding token: `pad`, else that of a special token named after padding, else
        `eos`. None if there is none.

    Raises:
        DataError: the file cannot be read, or no tokenizer.json gives the ids of a sentencepiece
            model.
    """
    open_tokenizer(file)  # refuses what is no tokenizer
    text = sentencepiece_as_json(file) if is_sentencepiece(file) else file.read_text("utf-8")
    tokenizer = Tokenizer.from_str(text)
    special = _special_tokens(tokenizer)
    if pad is None or tokenizer.id_to_token(pad) is None:
        named = (one for one, name in special.items() if "pad" in name.lower() and one < ids)
        pad = next(named, eos)
    config: dict[str, Any] = {
        # Taken by transformers 4 and 5 alike, and neither puts another pre-tokenizer into it.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        # A decoder continues the end of its prompt: padding belongs before it.
        "padding_side": "left",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    named_ids = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    tokens = {key: tokenizer.id_to_token(one) for key, one in named_ids.items() if one is not None}
    config |= {key: token for key, token in tokens.items() if token is not None}
    if unknown := getattr(tokenizer.model, "unk_token", None):
        config["unk_token"] = unknown
    if others := [name for name in special.values() if name not in config.values()]:
        config["additional_special_tokens"] = others
    if is_sentencepiece(file):
        if file.name != layout.SENTENCEPIECE:  # as data sets of an earlier version call it
            file.rename(file.with_name(layout.SENTENCEPIECE))
        file.with_name(layout.TOKENIZER).write_text(text, encoding="utf-8")
    elif tokenizer.num_special_tokens_to_add(False):
        tree = json.loads(text) | {"post_processor": None}
        file.write_text(json.dumps(tree, ensure_ascii=False, indent=2), encoding="utf-8")
    written = json.dumps(config, ensure_ascii=False, indent=2) + "\n"
    file.with_name(TOKENIZER_CONFIG).write_text(written, encoding="utf-8")
    return pad


def _special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Special tokens by id, ascending."""
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    return {number: token.content for number, token in added if token.special}
