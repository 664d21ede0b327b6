"""Whether a device computes in fp16 at all: CPUs of older torch lack some operations."""

from __future__ import annotations

import torch

from optimus.config import Config
from optimus.distributed.world import World
from optimus.errors import ConfigError, one_line
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer

_TOKENS = 8


def check_half(config: Config, world: World) -> None:
    """With train.dtype = "fp16", run one small layer of each kind that the model has, forward and
    backward; ConfigError names the operation that the device lacks."""
    if config.train.dtype != "fp16":
        return
    model, device = config.model, world.device
    numbers = tuple(dict.fromkeys(map(bool, model.experts_by_layer)))
    small = model.model_copy(
        update={
            "num_layers": len(numbers),
            "num_experts": tuple(4 * max(1, model.num_experts_per_tok) * has for has in numbers),
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 0,
            "head_dim": 0,
            "intermediate_size": 32,
            "dense_intermediate_size": 0,
            "vocab_size": 32,
            "pad_token_id": -1,
        }
    )
    layers = Transformer(small).to(device, torch.float16)
    initialise_(layers, 0)
    tokens = torch.arange(_TOKENS, device=device).view(1, _TOKENS)
    try:
        terms = layers.losses(tokens)
        (terms.ce_sum + terms.aux + terms.z).backward()
    except (RuntimeError, TypeError) as error:  # a missing op is a NotImplementedError
        raise ConfigError(
            f"train.dtype = 'fp16': torch {torch.__version__} cannot compute in it on "
            f"{device.type} ({one_line(error)[:200]}); use 'bf16'",
            on_every_rank=True,
        ) from None
