"""Loading of a model from a directory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from optimus.checkpoint import store
from optimus.checkpoint.weights import fill, model_config_of, open_weights
from optimus.model.transformer import Transformer


def load_model(
    path: str | os.PathLike,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Transformer:
    """Load the model at `path`.

    Args:
        path: A Hugging Face directory, a checkpoint or a run directory. The newest valid
            checkpoint of a run directory is loaded.
        dtype: Dtype of the parameters and logits.
        device: Device of the model.

    Returns:
        The model, in evaluation mode. `model(tokens)` maps int64 [batch, sequence] to logits
        [batch, sequence, vocabulary].

    Raises:
        CheckpointError: `path` has no usable model.
    """
    return load_resolved(store.resolve(path), dtype, device)


def load_resolved(
    source: Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Transformer:
    """Load the model from a directory that `store.resolve` returned."""
    config = model_config_of(source)
    with open_weights(config, source) as weights:  # refuses wrong sizes before memory is allocated
        with torch.device(device):
            model = Transformer(config).to(dtype)
        fill(model, weights)
    return model.eval()
