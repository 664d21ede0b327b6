"""A sampled continuation as text."""

from __future__ import annotations

import torch
from torch import nn

from optimus.data.dataset import TokenDataset
from optimus.data.tokenizer import TextTokenizer
from optimus.evaluate.generate import generate

_PROMPT_TOKENS = 16


def sample_text(model: nn.Module, dataset: TokenDataset, new_tokens: int, seed: int) -> str:
    """The beginning of the first instance of `dataset`, continued by the model, up to the first of
    `eos_token_ids`. Tokens behind are drawn too: passes may be collectives.

    Token ids as text where the data set carries no tokenizer.
    """
    device = next(model.parameters()).device
    instance = torch.from_numpy(dataset.read(0, 1))[0].to(device)
    prompt = instance[: min(_PROMPT_TOKENS, dataset.context)]
    new = generate(model, prompt, new_tokens, context=dataset.context, seed=seed).tolist()
    ends = (at for at, token in enumerate(new, 1) if token in model.config.eos_token_ids)
    return decode(dataset.tokenizer_file, prompt.tolist() + new[: next(ends, None)])


def decode(tokenizer_file: str | None, ids: list[int]) -> str:
    """Text of token ids, by the tokenizer file beside a data set or in a checkpoint."""
    if tokenizer_file is None:
        return " ".join(map(str, ids))
    return TextTokenizer(tokenizer_file).decode(ids)
