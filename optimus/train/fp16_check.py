"""Check that the device can compute in fp16: older torch lacks some fp16 operations on CPUs."""

from __future__ import annotations

import torch

from optimus.config import ModelConfig
from optimus.errors import ConfigError, one_line
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer

_TOKENS = 8


def check_fp16(model: ModelConfig, device: torch.device) -> None:
    """Run forward and backward of a small model in fp16.

    The small model has the same kinds of layers as `model`: dense, MoE or both.

    Raises:
        ConfigError: The device lacks an operation, which the message names.
    """
    sparse = tuple(dict.fromkeys(map(bool, model.experts_by_layer)))
    experts = 4 * max(1, model.num_experts_per_tok)
    small = model.model_copy(
        update={
            "num_layers": len(sparse),
            "num_experts": tuple(experts * is_sparse for is_sparse in sparse),
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
    except (RuntimeError, TypeError) as error:  # a missing op: NotImplementedError, a RuntimeError
        raise ConfigError(
            f"train.dtype = 'fp16': torch {torch.__version__} cannot compute in fp16 on "
            f"{device.type} ({one_line(error)[:200]}); use 'bf16'",
        ) from None
