"""Refusal of contradictory settings in [model]."""

from __future__ import annotations

import pytest

from optimus.errors import ConfigError
from tests.model.small import small_config

LLAMA3 = {
    "type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
IMPOSSIBLE = {
    "norm_topk_prob": ("olmo", {"norm_topk_prob": True}),
    "aux_loss_form": ("olmo", {"aux_loss_form": "hf"}),
    "aux_loss_coef": ("olmo", {"aux_loss_coef": 0.5}),
    "z_loss_coef": ("olmo", {"z_loss_coef": 0.5}),
    "pad_token_id": ("olmoe", {"pad_token_id": 61}),
    "rope_scaling.beta_fast": ("olmo", {"rope_scaling": {**LLAMA3, "beta_fast": 2.0}}),
    "rope_scaling.truncate": (
        "olmo",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "truncate": False}},
    ),
    "rope_scaling.original_max_position_embeddings": (
        "olmo",
        {"rope_scaling": {"type": "yarn", "factor": 2.0}},
    ),
    "rope_scaling.low_freq_factor": (
        "olmo",
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}},
    ),
    "rope_scaling.type": (
        "olmo",
        {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    ),
}


@pytest.mark.parametrize("key", IMPOSSIBLE)
def test_impossible_setting_is_refused_by_key_in_a_single_line(key):
    architecture, fields = IMPOSSIBLE[key]
    with pytest.raises(ConfigError, match=rf"model\.{key}") as error:
        small_config(architecture, **fields)
    assert "\n" not in str(error.value)


def test_defaults_of_sparse_settings_are_allowed_for_a_dense_model():
    small_config("olmo", norm_topk_prob=False, aux_loss_coef=0.0, z_loss_coef=0.001)
