"""A sampled continuation as text."""

from __future__ import annotations

import torch
from torch import nn

from optimus.data.dataset import TokenDataset
from optimus.data.tokenizer import TextTokenizer
from optimus.evaluate.generate import generate

_PROMPT_TOKENS = 16


def sample_text(model: nn.Module, dataset: TokenDataset, new_tokens: int, seed: int) -> str:
    """The beginning of the first instance of `dataset`, continued by the model."""
    device = next(model.parameters()).device
    instance = torch.from_numpy(dataset.read(0, 1))[0].to(device)
    prompt = instance[: min(_PROMPT_TOKENS, dataset.context)]
    new = generate(model, prompt, new_tokens, context=dataset.context, seed=seed)
    return TextTokenizer(dataset.tokenizer_file).decode(torch.cat([prompt, new]).tolist())
