"""Check that two model configurations compute the same logits from the same weights."""

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
"""Settings that do not change the logits of a model with given weights. The one exception is
`max_position_embeddings`, which changes them if the rotary embedding has dynamic scaling."""


def first_difference(ours: ModelConfig, theirs: ModelConfig) -> tuple[str, object, object] | None:
    """Return the first setting that gives the two models different logits for the same weights.

    Returns:
        (key, value in `ours`, value in `theirs`); None if there is no such setting.
    """
    for key in ModelConfig.model_fields:
        our_value, their_value = setting(ours, key), setting(theirs, key)
        is_free = key in FREE_IN_LOGITS and not _matters(ours, key)
        if our_value != their_value and not is_free:
            return key, our_value, their_value
    return None


def _matters(config: ModelConfig, key: str) -> bool:
    """Return whether `key` of FREE_IN_LOGITS changes the logits in this configuration."""
    # Dynamic scaling of the rotary embedding depends on max_position_embeddings.
    scaling = config.rope_scaling
    return key == "max_position_embeddings" and scaling is not None and scaling.type == "dynamic"


def setting(config: ModelConfig, key: str) -> object:
    """Return the value of setting `key`. If 0 means a derived value, return the derived value.

    `num_experts` is one number if it is the same in all layers, else a list with one number per
    layer.
    """
    if key == "num_key_value_heads":
        return config.num_kv_heads
    if key == "head_dim":
        return config.head_size
    if key == "num_experts":  # a list only if the layers have different numbers of experts
        uniform = config.uniform_experts
        return list(config.experts_by_layer) if uniform is None else uniform
    return getattr(config, key)
