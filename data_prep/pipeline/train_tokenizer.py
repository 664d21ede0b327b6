"""A byte-level BPE tokenizer from text: the same files give the same bytes, whatever the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from data_prep.runtime.progress import Progress
from data_prep.runtime.workspace import make_folder
from data_prep.sources.documents import DamagedFile, InputReader, Problem
from data_prep.sources.inputs import InputFile
from data_prep.sources.streams import DamagedStream
from optimus.errors import ConfigError, DataError, one_line
from optimus.io import files

EOS = "<|endoftext|>"
"""The special token that ends every document; it gets id 0."""
MIN_VOCAB = 257
"""256 bytes and EOS."""

_BATCH_BYTES = 4 << 20


def train_tokenizer(
    inputs: Sequence[InputFile],
    vocab_size: int,
    out: str | os.PathLike,
    *,
    text_field: str = "text",
    quarantine: bool = False,
) -> tuple[int, list[str]]:
    """Write a tokenizer.json of at most `vocab_size` ids; returns its size and what was set aside.

    GPT-2's pre-tokenizer and byte alphabet, so every text can be encoded and decoded exactly.
    Raises ConfigError for a vocabulary too small, DataError for text that cannot be read.
    """
    if vocab_size < MIN_VOCAB:
        raise ConfigError(f"--vocab-size {vocab_size} must be at least {MIN_VOCAB}: 256 bytes, EOS")
    out = Path(out)
    if out.is_dir():
        raise DataError(f"--out {str(out)!r} is a directory; name a file, such as tokenizer.json")
    make_folder(out.parent, out)  # before hours are spent on its content
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    set_aside: list[str] = []
    with Progress("train-tokenizer", sum(file.size for file in inputs), "B") as progress:
        texts = _batches(inputs, text_field, quarantine, set_aside, progress)
        tokenizer.train_from_iterator(texts, trainer)
    files.write_bytes(out, tokenizer.to_str(pretty=True).encode())
    return tokenizer.get_vocab_size(), set_aside


def _batches(
    inputs: Sequence[InputFile],
    text_field: str,
    quarantine: bool,
    set_aside: list[str],
    progress: Progress,
) -> Iterator[list[str]]:
    batch: list[str] = []
    held = 0
    for file in inputs:
        if quarantine and (problem := _damage(file, text_field)):
            set_aside.append(_line(file, problem))
            continue
        for text in _texts(file, text_field, progress):
            if not isinstance(text, Problem):
                batch.append(text)
                held += len(text)
            elif quarantine:
                set_aside.append(_line(file, text))
            else:
                raise DataError(_line(file, text))
            if held >= _BATCH_BYTES:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch
    progress.note("merging pairs")


def _texts(file: InputFile, text_field: str, progress: Progress) -> Iterator[str | Problem]:
    """Texts and problems of a file; damage of the whole file is a DataError."""
    try:
        for item in InputReader(file, text_field, progress.advance):
            yield item if isinstance(item, Problem) else item.text
    except DamagedFile as error:
        raise DataError(_line(file, error.problem)) from None
    except (UnicodeDecodeError, DamagedStream) as error:  # a long text, found sound a moment ago
        raise DataError(f"{file.name}: changed while it was read: {one_line(error)}") from None


def _damage(file: InputFile, text_field: str) -> Problem | None:
    """Why none of a file counts, if so: known at its end, so it is read once for that."""
    try:
        for _ in InputReader(file, text_field, lambda count: None):
            pass
    except DamagedFile as error:
        return error.problem
    return None


def _line(file: InputFile, problem: Problem) -> str:
    return f"{file.name}:{problem.line}: {problem.reason}"
