"""Evaluation of checkpoints and generation of text: `optimus eval` and `optimus generate`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from optimus import platform
from optimus.checkpoint import store
from optimus.checkpoint.convert import eos_token_ids
from optimus.checkpoint.weights import CONFIG, fill, model_config_of, open_weights
from optimus.config import load_saved_config
from optimus.data.dataset import TokenDataset
from optimus.data.loader import Microbatch
from optimus.data.tokenizer import TextTokenizer, tokenizer_path
from optimus.distributed.collectives import ALONE
from optimus.errors import DataError, refuse_if
from optimus.evaluate.generate import generate
from optimus.evaluate.held_out import CrossEntropies, by_model, held_out_loss
from optimus.model.transformer import Transformer
from optimus.observe.log import bar_size, redirect_lines


def load_model(
    path: str | os.PathLike,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Transformer:
    """Load the model at `path`.

    Args:
        path: A Hugging Face directory, a checkpoint or a run directory. From a run directory, the
            newest valid full checkpoint is loaded.
        dtype: Dtype of the parameters and logits.
        device: Device of the model.

    Returns:
        The model, in evaluation mode. `model(tokens)` maps int64 [batch, sequence] to logits
        [batch, sequence, vocabulary].

    Raises:
        CheckpointError: There is no valid model at `path`.
    """
    return load_resolved(store.resolve(path), dtype, device)


def load_resolved(
    source: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Transformer:
    """Load and return the model from `source`, a checkpoint or a Hugging Face directory.

    `source` must not be a run directory. To load from a run directory, use `load_model`.
    """
    config = model_config_of(source)
    with open_weights(config, source) as weights:  # refuses wrong sizes before memory is allocated
        with torch.device(device):
            model = Transformer(config).to(dtype)
        fill(model, weights)
    return model.eval()


def evaluate_checkpoint(
    checkpoint: str, data: str, batch_size: int, instances: int
) -> dict[str, Any]:
    """Return the held-out loss of a model, computed on one device.

    The setting `data.document_mask` is read from the configuration that is saved with the model. If
    no configuration is saved, the setting is false.

    Args:
        checkpoint: Path of a checkpoint, a run directory or a Hugging Face directory.
        data: Directory of a data set.
        batch_size: Instances per forward pass.
        instances: Number of instances to evaluate; 0 for all instances.

    Returns:
        A dict with the keys `checkpoint`, `data`, `document_mask`, `loss` and `tokens`. `loss` is
        the mean cross-entropy in nats. `tokens` is the number of tokens in the evaluated instances.

    Raises:
        ConfigError: An argument is invalid.
        DataError: The data set does not fit the model.
    """
    refuse_if(
        batch_size < 1 or instances < 0,
        f"--batch-size {batch_size}, --instances {instances}: --batch-size must be at least 1, and "
        "--instances at least 0",
    )
    source = store.resolve(checkpoint)
    dataset = TokenDataset(data)
    device = platform.pick_device(0)
    model = load_resolved(source, device=device)
    vocab_size = model.config.vocab_size
    if dataset.vocab_size > vocab_size:
        raise DataError(
            f"{data} has a vocabulary of {dataset.vocab_size} ids, but the model has {vocab_size}; "
            "use data that is encoded with the model's tokenizer"
        )
    longest = model.config.max_position_embeddings
    if dataset.context > longest:
        raise DataError(
            f"{data}: an instance has {dataset.context} tokens, but the model supports at most "
            f"{longest} (max_position_embeddings); prepare data with a smaller --context"
        )
    config_file = source / CONFIG
    document_mask = config_file.is_file() and load_saved_config(config_file).data.document_mask
    count = min(instances or dataset.num_instances, dataset.num_instances)
    with _progress(by_model(model, device), count) as cross_entropies:
        result = held_out_loss(
            cross_entropies,
            dataset,
            batch_size,
            ALONE,
            max_instances=instances,
            document_mask=document_mask,
        )
    settings = {"checkpoint": checkpoint, "data": data, "document_mask": document_mask}
    return {**settings, **vars(result)}


@contextlib.contextmanager
def _progress(compute: CrossEntropies, instances: int) -> Iterator[CrossEntropies]:
    """Yield a function that calls `compute` and advances a progress bar by the number of evaluated
    instances. The length of the bar is `instances`. The bar is shown only on a terminal."""
    with (
        tqdm(total=instances, unit="instance", disable=None, **bar_size()) as bar,
        contextlib.ExitStack() as stack,
    ):
        if not bar.disable:
            redirect_lines(lambda line: bar.write(line, file=sys.stderr))
            stack.callback(redirect_lines, None)

        def compute_and_count(batches: list[Microbatch]) -> list[Tensor]:
            sums = []
            for batch in batches:
                sums += compute([batch])
                bar.update(len(batch.tokens))
            return sums

        yield compute_and_count


def continue_text(
    checkpoint: str, prompt: str, new_tokens: int, *, temperature: float, top_k: int, seed: int
) -> str:
    """Return `prompt` and its sampled continuation.

    A token in the model's `eos_token_ids` ends the sampling early.

    Args:
        checkpoint: Path of a checkpoint, a run directory or a Hugging Face directory.
        prompt: Text to continue; must not be empty.
        new_tokens: Maximum number of tokens to sample.
        temperature: Sampling temperature; 0 selects the most likely token.
        top_k: Number of most likely tokens to sample from; 0 for all tokens.
        seed: Seed of the random draws.

    Raises:
        ConfigError: An argument is invalid.
        DataError: The tokenizer is missing or does not fit the model.
    """
    refuse_if(
        new_tokens < 1 or temperature < 0 or top_k < 0,
        f"--tokens {new_tokens}, --temperature {temperature}, --top-k {top_k}: --tokens must be at "
        "least 1, and --temperature and --top-k at least 0",
    )
    refuse_if(not 0 <= seed < 1 << 63, f"--seed {seed} must be at least 0 and below 2^63")
    source = store.resolve(checkpoint)
    file = tokenizer_path(source)
    if not file.is_file():
        raise DataError(
            f"{file} is missing; copy the tokenizer of the model's data set to this path"
        )
    refuse_if(
        any("\ud800" <= character <= "\udfff" for character in prompt),
        "--prompt is not UTF-8 text; use a terminal and a shell with UTF-8",
    )
    tokenizer = TextTokenizer(file)
    ids = tokenizer.encode(prompt)
    refuse_if(not ids, "--prompt is empty; set it to the text to continue")
    device = platform.pick_device(0)
    model = load_resolved(source, device=device)
    vocab_size = model.config.vocab_size
    if max(ids) >= vocab_size:
        raise DataError(
            f"{file} encodes --prompt with id {max(ids)}, but the model's vocabulary has "
            f"{vocab_size} ids; use the tokenizer of the model's data set"
        )
    new = generate(
        model,
        torch.tensor(ids, device=device),
        new_tokens,
        context=model.config.max_position_embeddings,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stop_tokens=eos_token_ids(source, model.config),
    )
    return tokenizer.decode([*ids, *new.tolist()])
