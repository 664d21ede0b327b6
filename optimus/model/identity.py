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
"""Settings that do not change the logits of given weights, with the exception in `_matters`."""


def first_difference(ours: ModelConfig, theirs: ModelConfig) -> tuple[str, object, object] | None:
    """Return the first setting for which two models with the same weights have different logits:
    its key and its values in `ours` and in `theirs`. Return None if all logits are the same.

    A setting of 0 that means "derived" is compared by its derived value.
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
    """Return the value of setting `key`. The derived value replaces a 0 that means "derived", and a
    single number replaces a list of equal numbers of experts."""
    if key == "num_key_value_heads":
        return config.num_kv_heads
    if key == "head_dim":
        return config.head_size
    if key == "num_experts":  # a list only if the layers have different numbers of experts
        uniform = config.uniform_experts
        return list(config.experts_by_layer) if uniform is None else uniform
    return getattr(config, key)
