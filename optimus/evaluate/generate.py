"""Sampling of tokens that continue a prompt."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from optimus.data.dataset import InstanceSource
from optimus.data.tokenizer import TextTokenizer
from optimus.distributed.collectives import ALONE, Group, broadcast

_PROMPT_TOKENS = 16
_LARGEST = 1e30

NextLogits = Callable[[Tensor], Tensor | None]
"""Function that maps tokens, int64 [1, tokens], to logits [1, positions, vocabulary]. The last
position predicts the next token. On ranks without the last pipeline stage, the function returns
None."""


@torch.no_grad()
def generate(
    model: NextLogits,
    prompt: Tensor,
    new_tokens: int,
    *,
    context: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    stop_tokens: Collection[int] = (),
    group: Group = ALONE,
    source: int = 0,
) -> Tensor:
    """Sample tokens that continue `prompt`. All ranks of `group` must call this function.

    Args:
        model: Function that computes logits. Each rank of `group` calls `model` for each new token.
        prompt: Tokens to continue, int64 [length]. The length is at least 1.
        new_tokens: Maximum number of tokens to sample.
        context: Maximum number of tokens that the model receives. Earlier tokens are cut off.
        temperature: Sampling temperature; 0 selects the most likely token.
        top_k: Number of most likely tokens to sample from; 0 for all tokens.
        seed: Seed of the random draws.
        stop_tokens: Tokens after which sampling ends.
        group: Ranks that compute the model together.
        source: Index in `group` of the rank to which `model` returns logits. This rank draws the
            tokens.

    Returns:
        The new tokens without the prompt, int64 [at most `new_tokens`]. A stop token is included.
        All ranks get the same tokens.
    """
    assert prompt.ndim == 1 and prompt.numel() >= 1
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt
    for _ in range(new_tokens):
        seen = tokens[max(tokens.numel() - context, 0) :]
        logits = model(seen.unsqueeze(0))
        drawn = tokens.new_zeros(1)
        if group.rank == source:
            assert logits is not None
            drawn[0] = _draw(logits[0, -1].float().cpu(), temperature, top_k, generator)
        broadcast(drawn, group, source)
        tokens = torch.cat([tokens, drawn])
        if int(drawn) in stop_tokens:
            break
    return tokens[prompt.numel() :]


def sample_text(
    model: NextLogits,
    dataset: InstanceSource,
    new_tokens: int,
    device: torch.device,
    stop_tokens: Collection[int] = (),
    **options: Any,
) -> str:
    """Sample a continuation of the first 16 tokens of `dataset`. Return these tokens and the
    continuation as text.

    Args:
        model: Function that computes logits.
        dataset: Data set whose first instance begins with the prompt. The tokenizer of the data set
            decodes the text.
        new_tokens: Maximum number of tokens to sample.
        device: Device of the prompt.
        stop_tokens: Tokens that end the sampling, in addition to the end-of-document token.
        options: Further arguments of `generate`.

    Returns:
        The text, the same on all ranks.
    """
    prompt = torch.from_numpy(dataset.read(0, 1))[0, :_PROMPT_TOKENS].to(device)
    options |= {"stop_tokens": {dataset.eos_id, *stop_tokens}, "context": dataset.context}
    new = generate(model, prompt, new_tokens, **options)
    # The tokenizer file is not checked here, because the run has checked the file at its start. The
    # check forks a process, which is not safe while a model is in use.
    tokenizer = TextTokenizer(dataset.tokenizer_file, check=False)
    return tokenizer.decode(prompt.tolist() + new.tolist())


def _draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    # A non-finite logit must not raise an error here: this rank would fail while all other ranks
    # wait. The checks of the training loop report the non-finite value.
    logits = logits.nan_to_num(-_LARGEST, _LARGEST, -_LARGEST)
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        logits[logits < logits.topk(top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(0), 1, generator=generator))
