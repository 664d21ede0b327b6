"""Sampling continuations."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from optimus.data.dataset import InstanceSource
from optimus.data.tokenizer import TextTokenizer

_PROMPT_TOKENS = 16


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,
    new_tokens: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
) -> Tensor:
    """Continue `prompt` (int64 [n], n >= 1) by `new_tokens`, or up to the first of `stop_tokens`;
    returns the new tokens alone.

    Temperature 0 takes the likeliest token; `top_k` 0 samples from the whole vocabulary. The model
    sees at most the last `context` tokens. The draw depends on `seed` alone.
    """
    assert prompt.ndim == 1 and prompt.numel() >= 1
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(new_tokens):
        logits = model(tokens[-context:].unsqueeze(0))[0, -1].float().cpu()
        following = _draw(logits, temperature, top_k, generator)
        tokens = torch.cat([tokens, torch.tensor([following], device=tokens.device)])
        if following in stop_tokens:
            break
    return tokens[prompt.numel() :]


def sample_text(model: nn.Module, dataset: InstanceSource, new_tokens: int, seed: int) -> str:
    """The beginning of the first instance of `dataset`, continued by the model, up to the first of
    `eos_token_ids`. Tokens behind are drawn too: passes may be collectives."""
    device = next(model.parameters()).device
    instance = torch.from_numpy(dataset.read(0, 1))[0].to(device)
    prompt = instance[:_PROMPT_TOKENS]
    new = generate(model, prompt, new_tokens, context=dataset.context, seed=seed).tolist()
    ends = (at for at, token in enumerate(new, 1) if token in model.config.eos_token_ids)
    ids = prompt.tolist() + new[: next(ends, None)]
    return TextTokenizer(dataset.tokenizer_file).decode(ids)


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))
