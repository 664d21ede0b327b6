"""Whether two configurations describe the same function of the same weights."""

from __future__ import annotations

from optimus.config import ModelConfig

FREE_IN_LOGITS = {
    "pad_token_id",
    "bos_token_id",
    "eos_token_ids",
    "init_std",
    "aux_loss_coef",
    "z_loss_coef",
    "aux_loss_form",
    "max_position_embeddings",
}
"""Settings of a model that change no logit for the same weights (see `_matters`)."""


def first_difference(ours: ModelConfig, theirs: ModelConfig) -> tuple[str, object, object] | None:
    """The first field in which the two compute other logits, and both its values; None if none.

    Derived values stand in for 0, so that an explicit `num_key_value_heads` equals a derived one.
    """
    for key in ModelConfig.model_fields:
        one, other = _value(ours, key), _value(theirs, key)
        if one != other and not (key in FREE_IN_LOGITS and not _matters(ours, key)):
            return key, one, other
    return None


def _matters(config: ModelConfig, key: str) -> bool:
    """`dynamic` stretching is the one reader of the longest context."""
    scaling = config.rope_scaling
    return key == "max_position_embeddings" and scaling is not None and scaling.type == "dynamic"


def _value(config: ModelConfig, key: str) -> object:
    if key == "num_key_value_heads":
        return config.num_key_value_heads or config.num_attention_heads
    if key == "head_dim":
        return config.head_dim or config.hidden_size // config.num_attention_heads
    if key == "num_experts":
        return experts_setting(config)
    return getattr(config, key)


def experts_setting(config: ModelConfig) -> int | list[int]:
    """`model.num_experts` in its shortest form: a list only where layers differ."""
    uniform = config.uniform_experts
    return list(config.experts_by_layer) if uniform is None else uniform
