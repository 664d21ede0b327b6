"""Whether two configurations describe the same function of the same weights."""

from __future__ import annotations

from optimus.config import ModelConfig

FREE_IN_LOGITS = {
    "pad_token_id",
    "bos_token_id",
    "eos_token_ids",
    "init_std",
    "embedding_init_std",
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
        one, other = setting(ours, key), setting(theirs, key)
        if one != other and not (key in FREE_IN_LOGITS and not _matters(ours, key)):
            return key, one, other
    return None


def _matters(config: ModelConfig, key: str) -> bool:
    """`dynamic` stretching is the one reader of the longest context."""
    scaling = config.rope_scaling
    return key == "max_position_embeddings" and scaling is not None and scaling.type == "dynamic"


def setting(config: ModelConfig, key: str) -> object:
    """A field's value, in its shortest form and with 0 as what it is derived to."""
    if key == "num_key_value_heads":
        return config.num_kv_heads
    if key == "head_dim":
        return config.head_size
    if key == "num_experts":  # a list only where layers differ
        uniform = config.uniform_experts
        return list(config.experts_by_layer) if uniform is None else uniform
    return getattr(config, key)
