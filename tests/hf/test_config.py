"""Tests of the conversion of config.json to and from `ModelConfig`."""

from __future__ import annotations

import json

import pytest

from optimus.errors import CheckpointError, ConfigError
from optimus.hf import config_from_hf, config_to_hf, is_hf_directory, read_hf_config
from tests.model.small import small_config

transformers = pytest.importorskip("transformers")

ROPE = {
    "linear": {"type": "linear", "factor": 2.0},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, truncate": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
        "beta_fast": 16.0,
        "attention_factor": 1.2,
    },
}
OURS = {
    "dense": small_config("olmo"),
    "sparse": small_config("olmoe"),
    "fields": small_config(
        "olmoe",
        num_key_value_heads=2,
        tie_embeddings=True,
        attention_bias=True,
        clip_qkv=7.5,
        norm_eps=1e-6,
        norm_topk_prob=True,
        rope_theta=5e5,
        pad_token_id=3,
        bos_token_id=4,
        eos_token_ids=[5, 6],
        aux_loss_coef=0.02,
        aux_loss_form="hf",
    ),
    "wide heads": small_config("olmo", head_dim=16, eos_token_ids=[7]),
    **{name: small_config("olmo", rope_scaling=scaling) for name, scaling in ROPE.items()},
}


@pytest.mark.parametrize("name", OURS)
def test_round_trip_through_transformers_keeps_the_config(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(OURS[name], "bfloat16")))
    hf_config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert str(hf_config.dtype) == "torch.bfloat16"
    hf_config.save_pretrained(tmp_path / "again")  # writes the field names of version 5
    assert "rope_parameters" in json.loads((tmp_path / "again" / "config.json").read_text())
    assert read_hf_config(tmp_path / "again") == OURS[name]
    assert is_hf_directory(tmp_path) and not is_hf_directory(tmp_path / "nowhere")


@pytest.mark.parametrize("kind", ["olmo", "olmoe"])
def test_absent_fields_have_transformers_defaults(kind):
    sparse = {"OlmoConfig": "olmo", "OlmoeConfig": "olmoe"}
    name = next(key for key, value in sparse.items() if value == kind)
    hf_config = getattr(transformers, name)()
    assert config_from_hf({"model_type": kind}) == config_from_hf(hf_config.to_dict())
    assert config_from_hf({"model_type": kind}).pad_token_id == 1
    assert config_from_hf({"model_type": kind, "pad_token_id": None}).pad_token_id == -1


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_version_4_spelling_of_scaling(spelling):
    old = {"rope_theta": 5e5, "rope_scaling": {spelling: "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}}
    olmo = {"model_type": "olmo"}
    assert config_from_hf({**olmo, **old}) == config_from_hf({**olmo, **new})
    both = {**olmo, **old, "rope_parameters": {"rope_type": "default", "rope_theta": 1.5}}
    assert config_from_hf(both).rope_scaling.factor == 2.0  # rope_scaling is used, as in version 5


def test_absent_original_context_is_the_longest_context():
    llama3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1, "high_freq_factor": 4}
    fields = {"model_type": "olmo", "max_position_embeddings": 777, "rope_scaling": llama3}
    assert config_from_hf(fields).rope_scaling.original_max_position_embeddings == 777
    fields["original_max_position_embeddings"] = 99
    assert config_from_hf(fields).rope_scaling.original_max_position_embeddings == 99


def test_negative_padding_counts_from_the_end_as_in_torch():
    fields = {"model_type": "olmo", "vocab_size": 100, "pad_token_id": -2}
    assert config_from_hf(fields).pad_token_id == 98


def test_alias_of_num_experts():
    assert config_from_hf({"model_type": "olmoe", "num_local_experts": 12}).num_experts == 12


REFUSED = {
    "model_type": ("olmo2", "olmo2"),
    "architectures": (["OlmoForSequenceClassification"], "OlmoForSequenceClassification"),
    "hidden_act": ("gelu", "gelu"),
    "attention_dropout": (0.1, "0.1"),
    "clip_qkv": (0.0, "0.0"),
    "sliding_window": (128, "128"),
    "is_causal": (False, "False"),
    "quantization_config": ({"bits": 4}, "bits"),
    "per_layer_config": ({"0": {"head_dim": 4}}, "head_dim"),
    "partial_rotary_factor": (0.5, "0.5"),
    "eos_token_id": ([3, -5], "[3, -5]"),
    "bos_token_id": (-5, "-5"),
    "head_dim": (48, "48"),
    "rope_theta": (0.0, "greater than 0"),
    "num_attention_heads": (0, "0"),
    "pad_token_id": (99999, "99999"),
    "rope_scaling": ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
    "rope_parameters": ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    "hidden_size": ("wide", "wide"),
    "num_key_value_heads": (3, "num_key_value_heads"),
    "num_experts_per_tok": (65, "65"),
    "vocab_size": (None, "None"),
    "tie_word_embeddings": ("yes", "yes"),
}
FIELDS_OF_OTHER_MODELS = list(REFUSED)[2:13]


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_field_is_refused_by_name_in_a_single_line(key):
    value, mentioned = REFUSED[key]
    with pytest.raises(ConfigError) as error:
        config_from_hf({"model_type": "olmoe", key: value}, source="DIR/config.json")
    message = str(error.value)
    assert message.startswith("DIR/config.json: ") and "\n" not in message
    assert key.removeprefix("rope_") in message and mentioned in message
    if key in FIELDS_OF_OTHER_MODELS:  # all values of the field are refused
        assert message.endswith("convert a model without this setting")


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_type": "linear"},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0},
        {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
    ],
)
def test_impossible_scaling_is_refused(fields):
    with pytest.raises(ConfigError):
        config_from_hf({"model_type": "olmo", "rope_scaling": fields})


def test_model_that_transformers_does_not_support_is_refused():
    with pytest.raises(ConfigError, match="norm_eps"):
        config_to_hf(small_config("olmo", norm_eps=1e-6), "float32")
    with pytest.raises(ConfigError, match="head_dim"):
        config_to_hf(small_config("olmoe", head_dim=16), "float32")
    with pytest.raises(ConfigError, match="model.router = 'uniform' cannot be exported"):
        config_to_hf(small_config("olmoe", router="uniform"), "float32")


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_broken_config_file(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    assert not is_hf_directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_hf_config(tmp_path)
