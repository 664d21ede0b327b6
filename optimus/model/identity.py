"""Comparison of model configurations: do two compute the same logits from the same weights?"""

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
    """Return the first field that makes the logits differ, with its value in `ours` and in
    `theirs`; None if there is no such field.

    Derived values replace 0, so that an explicit `num_key_value_heads` equals a derived one.
    """
    for key in ModelConfig.model_fields:
        our_value, their_value = setting(ours, key), setting(theirs, key)
        is_free = key in FREE_IN_LOGITS and not _matters(ours, key)
        if our_value != their_value and not is_free:
            return key, our_value, their_value
    return None


def _matters(config: ModelConfig, key: str) -> bool:
    """Return whether a field of FREE_IN_LOGITS changes logits in this configuration: dynamic
    scaling of the rotary embedding depends on the longest context."""
    scaling = config.rope_scaling
    return key == "max_position_embeddings" and scaling is not None and scaling.type == "dynamic"


def setting(config: ModelConfig, key: str) -> object:
    """Return a field's value in its shortest form, with the derived value in place of 0."""
    if key == "num_key_value_heads":
        return config.num_kv_heads
    if key == "head_dim":
        return config.head_size
    if key == "num_experts":  # a list only if the numbers of the layers differ
        uniform = config.uniform_experts
        return list(config.experts_by_layer) if uniform is None else uniform
    return getattr(config, key)
