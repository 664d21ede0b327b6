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
"""Settings that do not change the logits of a model with given weights. The exception is
`max_position_embeddings` with dynamic scaling of the rotary embedding; see `_matters`."""


def first_difference(ours: ModelConfig, theirs: ModelConfig) -> tuple[str, object, object] | None:
    """Return the first setting whose difference changes the logits, as (key, value in `ours`, value
    in `theirs`). Return None if models with the same weights have the same logits.

    If a setting is 0 because Optimus derives its value, the derived values are compared.
    """
    for key in ModelConfig.model_fields:
        our_value, their_value = setting(ours, key), setting(theirs, key)
        is_free = key in FREE_IN_LOGITS and not _matters(ours, key)
        if our_value != their_value and not is_free:
            return key, our_value, their_value
    return None


def _matters(config: ModelConfig, key: str) -> bool:
    """Return whether `key` of FREE_IN_LOGITS changes logits in this configuration. Only
    `max_position_embeddings` does, with dynamic scaling of the rotary embedding."""
    scaling = config.rope_scaling
    return key == "max_position_embeddings" and scaling is not None and scaling.type == "dynamic"


def setting(config: ModelConfig, key: str) -> object:
    """Return the value of setting `key`. If the setting is 0 because Optimus derives its value,
    return the derived value. If all layers have the same number of experts, return this number."""
    if key == "num_key_value_heads":
        return config.num_kv_heads
    if key == "head_dim":
        return config.head_size
    if key == "num_experts":  # a list only if the layers have different numbers of experts
        uniform = config.uniform_experts
        return list(config.experts_by_layer) if uniform is None else uniform
    return getattr(config, key)
