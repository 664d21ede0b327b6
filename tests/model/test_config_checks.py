"""Tests of checks that refuse contradictory settings in the section [model]."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from optimus.config.model import ROPE_FIELDS, ModelConfig
from optimus.errors import ConfigError
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from tests.model.small import small_config, some_tokens

LLAMA3 = {
    "type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SCALINGS = [LLAMA3, YARN, {"type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}]
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
    "rope_scaling.beta_slow": ("olmo", {"rope_scaling": {**YARN, "beta_slow": 5e-324}}),
    "rope_theta": ("olmo", {"rope_theta": 1.0, "rope_scaling": YARN}),
    "init_std": ("olmo", {"init_std": 1e39}),
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


def extreme_fields() -> Iterator[dict[str, Any]]:
    """Yield dicts with fields of a model configuration. In each dict, one number is very large or
    very small."""
    for number in (1e308, 1e39, 5e-324):
        for key, field in ModelConfig.model_fields.items():
            if field.annotation is float:
                yield {key: number}
        for scaling in SCALINGS:
            for key in ROPE_FIELDS[scaling["type"]]:
                yield {"rope_scaling": {**scaling, key: number}}
            yield {"rope_scaling": scaling, "rope_theta": number}


def test_model_with_an_extreme_number_runs_or_is_refused():
    runs = 0
    for fields in extreme_fields():
        with contextlib.suppress(ConfigError):
            model = Transformer(small_config("olmoe", **fields))
            initialise_(model, 0)
            model.losses(some_tokens()).ce_sum.backward()
            runs += 1
    assert runs >= 40
