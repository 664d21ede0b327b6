"""Training of a byte-level BPE tokenizer. The result does not depend on the number of cores."""

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
"""The special token that ends each document. Its id is 0."""
MIN_VOCAB = 257
"""Smallest number of ids: one for each of the 256 byte values, and one for EOS."""

_BATCH_BYTES = 4 << 20


def train_tokenizer(
    inputs: Sequence[InputFile],
    vocab_size: int,
    out: str | os.PathLike,
    *,
    text_field: str = "text",
    quarantine: bool = False,
) -> tuple[int, list[str]]:
    """Train a BPE tokenizer that uses the pre-tokenizer and byte alphabet of GPT-2. Write the
    tokenizer to `out`.

    Args:
        inputs: The files with the text.
        vocab_size: The maximum number of ids. The tokenizer may have fewer.
        out: The path of the tokenizer.json to write.
        text_field: The JSON field or table column that contains the text.
        quarantine: True: leave out documents that cannot be used. False: raise an error.

    Returns:
        (number of ids, list of descriptions of the documents and files that were left out).

    Raises:
        ConfigError: `vocab_size` is too small.
        DataError: `out` or a text cannot be used.
    """
    if vocab_size < MIN_VOCAB:
        raise ConfigError(
            f"--vocab-size {vocab_size} must be at least {MIN_VOCAB}: one id for each of the 256 "
            "byte values, and one for EOS"
        )
    out = Path(out)
    if out.is_dir():
        raise DataError(f"--out {str(out)!r} is a directory; name a file, such as tokenizer.json")
    make_folder(out.parent, out)  # an error must occur before hours of training
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
    size = 0
    for file in inputs:
        if quarantine:
            try:  # read the file to its end first: no text of a damaged file must be used
                for _ in InputReader(file, text_field, lambda count: None):
                    pass
            except DamagedFile as error:
                set_aside.append(error.problem.at(file.name))
                continue
        for text in _texts(file, text_field, progress):
            if not isinstance(text, Problem):
                batch.append(text)
                size += len(text)
            elif quarantine:
                set_aside.append(text.at(file.name))
            else:
                raise DataError(text.at(file.name))
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
    progress.note("merging pairs")


def _texts(file: InputFile, text_field: str, progress: Progress) -> Iterator[str | Problem]:
    """Yield the text of each document in a file, or the problem of a document that cannot be used.
    Raises DataError if the file is damaged."""
    try:
        for document in InputReader(file, text_field, progress.advance):
            yield document if isinstance(document, Problem) else document.text
    except DamagedFile as error:
        raise DataError(error.problem.at(file.name)) from None
    except (
        UnicodeDecodeError,
        DamagedStream,
    ) as error:  # in a long text that `InputReader` has checked before
        raise DataError(f"{file.name}: changed while it was read: {one_line(error)}") from None
