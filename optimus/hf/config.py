"""Conversion between Hugging Face's `config.json` and `ModelConfig`.

Each field of config.json that changes logits or loss is either converted, or refused by an error
that names the field.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from optimus.config import ROPE_FIELDS, Count, ModelConfig, explain, make_config
from optimus.errors import CheckpointError, ConfigError, counted, one_line, refuse_if
from optimus.io.files import read_regular
from optimus.io.safetensors import TensorFiles
from optimus.io.tensor_file import INDEX, MODEL

_ARCHITECTURES = {"olmo": "OlmoForCausalLM", "olmoe": "OlmoeForCausalLM"}
_CONFIG_BYTES = 16 << 20
"""Largest accepted size of config.json in bytes. Typical files have a few kilobytes."""
_NUMBERED = re.compile(r"model\.layers\.([0-9]+)\.(?:mlp\.experts\.([0-9]+)\.)?")
_MERGED_EXPERTS = ".mlp.experts.down_proj"
_OLMO_EPS = 1e-5  # a constant in transformers' OlmoLayerNorm, not a field of config.json

# Fields of rope_scaling that transformers computes if they are absent.
_ROPE_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}


class _Fields(BaseModel):
    """Pydantic model of the fields of config.json that Optimus converts or rejects. The fields have
    the same default values as in transformers."""

    model_config = ConfigDict(extra="ignore", strict=True, protected_namespaces=())

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: Count
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int = 50304
    max_position_embeddings: int
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_dropout: float = 0.0
    clip_qkv: float | None = None
    pad_token_id: int | None = 1
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 50279
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    sliding_window: int | None = None
    is_causal: bool = True
    quantization_config: Any = None
    per_layer_config: Any = None


class _Olmo(_Fields):
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: Count = 32
    max_position_embeddings: int = 2048


class _Olmoe(_Fields):
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: Count = 16
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.01


def is_hf_directory(path: str | os.PathLike) -> bool:
    """Return True if `path` is a directory whose config.json contains the key `model_type`."""
    try:
        content = json.loads(read_regular(Path(path) / "config.json", _CONFIG_BYTES))
        return "model_type" in content
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def read_hf_config(path: str | os.PathLike, compare_counts: bool = True) -> ModelConfig:
    """Return the `ModelConfig` for the config.json of a Hugging Face directory.

    Args:
        path: the directory.
        compare_counts: True to check that config.json does not specify more layers or experts than
            the directory's weights have.

    Raises:
        CheckpointError: config.json cannot be read or, with `compare_counts`, has more layers or
            experts than the weights.
        ConfigError: config.json requires a feature that Optimus does not support.
    """
    file = Path(path) / "config.json"
    try:
        content = json.loads(read_regular(file, _CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise CheckpointError(f"{file}: not readable as JSON: {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: the content must be a JSON object")
    if compare_counts:
        _check_counts(content, file)
    return config_from_hf(content, source=str(file))


def _check_counts(content: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError if config.json specifies more layers or experts than the weights in the
    same directory have. Do nothing if the directory has no weights."""
    if not any((file.parent / name).exists() for name in (MODEL, INDEX)):
        return
    weights = TensorFiles(file.parent)  # reads only headers
    try:
        matches = [match for match in map(_NUMBERED.match, weights.names()) if match]
        layers, experts = (len({match[n] for match in matches} - {None}) for n in (1, 2))
        if merged := next((n for n in weights.names() if n.endswith(_MERGED_EXPERTS)), None):
            experts = max(experts, *weights.find(merged)[1].shape[:1])
    finally:
        weights.close()
    for key, stored, noun in (
        ("num_hidden_layers", layers, "layer"),
        ("num_experts", experts, "expert"),
        ("num_local_experts", experts, "expert"),
    ):
        if type(number := content.get(key)) is int and number > stored:
            if noun == "expert" and content.get("model_type") != "olmoe":
                continue
            raise CheckpointError(
                f"{file}: {key} = {number}, but the weights in its directory have "
                f"{counted(stored, noun)}; fix {key} or use complete weights"
            )


def config_from_hf(content: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """Convert the content of config.json to a `ModelConfig`.

    Args:
        content: the JSON object.
        source: name of the file in error messages.

    Returns:
        The `[model]` section of an Optimus configuration.

    Raises:
        ConfigError: a field has a value that Optimus does not support.
    """
    architecture = _architecture(content, source)
    content = dict(content)
    if "num_local_experts" in content:  # transformers' alias of num_experts
        content.setdefault("num_experts", content["num_local_experts"])
    try:
        fields = (_Olmoe if architecture == "olmoe" else _Olmo).model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error)}") from None
    default_head_dim = fields.hidden_size // fields.num_attention_heads
    _refuse(fields, default_head_dim, source)
    model = {
        "architecture": architecture,
        "num_layers": fields.num_hidden_layers,
        "hidden_size": fields.hidden_size,
        "num_attention_heads": fields.num_attention_heads,
        "num_key_value_heads": _derived(fields.num_key_value_heads, fields.num_attention_heads),
        "head_dim": _derived(fields.head_dim, default_head_dim),
        "intermediate_size": fields.intermediate_size,
        "vocab_size": fields.vocab_size,
        "tie_embeddings": fields.tie_word_embeddings,
        "attention_bias": fields.attention_bias,
        "clip_qkv": fields.clip_qkv or 0.0,
        "norm_eps": _OLMO_EPS,
        "max_position_embeddings": fields.max_position_embeddings,
        "pad_token_id": _padding(fields, source),
        "bos_token_id": -1 if fields.bos_token_id is None else fields.bos_token_id,
        "eos_token_ids": _tokens(fields.eos_token_id),
        "init_std": fields.initializer_range,
        **_rope(fields, source),
    }
    if isinstance(fields, _Olmoe):
        model |= _mixture(fields)
    try:
        return make_config({"model": model}, source).model
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if source in message else f"{source}: {message}") from None


def config_to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """Return the content of a config.json that transformers 4 and 5 can read.

    Args:
        config: the configuration of the model.
        dtype: dtype of the weights, as torch names it, such as "bfloat16".

    Raises:
        ConfigError: transformers does not support the model.
    """
    architecture, heads = config.architecture, config.num_attention_heads
    eos, scaling = config.eos_token_ids, config.rope_scaling
    _check_supported(config)
    rope = None
    if scaling is not None:
        rope_fields = {key: getattr(scaling, key) for key in ROPE_FIELDS[scaling.type]}
        needed = {key: v for key, v in rope_fields.items() if v or key not in _ROPE_OPTIONAL}
        rope = {"type": scaling.type, **needed}
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.init_std,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "clip_qkv": config.clip_qkv or None,
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": None if config.pad_token_id < 0 else config.pad_token_id,
        "bos_token_id": None if config.bos_token_id < 0 else config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.head_size * heads != config.hidden_size:
        fields["head_dim"] = config.head_size
    if architecture == "olmoe":
        fields |= {
            "rms_norm_eps": config.norm_eps,
            "num_experts": config.uniform_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "norm_topk_prob": config.norm_topk_prob,
            "router_aux_loss_coef": config.aux_loss_coef,
            "output_router_logits": config.aux_loss_form == "hf",
        }
    return fields


def _architecture(content: Mapping[str, Any], source: str) -> str:
    """Return the `model_type` of config.json, `olmo` or `olmoe`. Raises ConfigError for other
    models."""
    kind, classes = content.get("model_type"), content.get("architectures") or []
    if type(kind) is not str or kind not in _ARCHITECTURES:
        raise ConfigError(
            f"{source}: model_type = {kind!r} is not supported; convert an 'olmo' or 'olmoe' model"
        )
    refuse_if(
        classes and (type(classes) is not list or _ARCHITECTURES[kind] not in classes),
        f"{source}: architectures = {classes} is not supported; use {_ARCHITECTURES[kind]!r}",
    )
    return kind


def _refuse(fields: _Fields, default_head_dim: int, source: str) -> None:
    """Raise ConfigError if a field requires a feature that Optimus does not support."""
    refusals = {
        "hidden_act": fields.hidden_act not in ("silu", "swish"),
        "attention_dropout": fields.attention_dropout != 0,
        "clip_qkv": fields.clip_qkv is not None and fields.clip_qkv <= 0,
        "sliding_window": fields.sliding_window is not None,
        "is_causal": not fields.is_causal,
        "quantization_config": fields.quantization_config is not None,
        "per_layer_config": bool(fields.per_layer_config),
        "bos_token_id": not all(map(_is_token, _tokens(fields.bos_token_id))),
        "eos_token_id": not all(map(_is_token, _tokens(fields.eos_token_id))),
        "partial_rotary_factor": fields.partial_rotary_factor not in (None, 1),
        # OLMoE's q_norm has hidden_size elements.
        "head_dim": isinstance(fields, _Olmoe) and fields.head_dim not in (None, default_head_dim),
    }
    for key, refused in refusals.items():
        refuse_if(
            refused,
            f"{source}: {key} = {getattr(fields, key)!r} is not supported by Optimus; "
            "convert a model without this setting",
        )


def _check_supported(config: ModelConfig) -> None:
    """Raise ConfigError if transformers does not support the model."""
    heads, head_dim = config.num_attention_heads, config.head_size
    refuse_if(
        config.uniform_experts is None,
        f"model.num_experts = {list(config.experts_by_layer)} cannot be exported: all layers "
        "of a Hugging Face OLMoE have the same number of experts; train with one number for all "
        "layers",
    )
    refuse_if(
        config.architecture == "olmo" and config.norm_eps != _OLMO_EPS,
        f"model.norm_eps = {config.norm_eps} cannot be exported: the norms of a Hugging Face "
        f"OLMo use {_OLMO_EPS}; train with model.norm_eps = {_OLMO_EPS}",
    )
    refuse_if(
        config.router != "top-k",
        f"model.router = {config.router!r} cannot be exported: a Hugging Face OLMoE chooses "
        "the top k experts; train with model.router = 'top-k'",
    )
    refuse_if(
        config.architecture == "olmoe" and head_dim * heads != config.hidden_size,
        f"model.head_dim = {head_dim} cannot be exported: q_norm of a Hugging Face OLMoE has "
        f"hidden_size = {config.hidden_size} elements, but {counted(heads, 'head')} of "
        f"{head_dim} elements have {heads * head_dim} elements; train with model.head_dim = 0",
    )


def _mixture(fields: _Olmoe) -> dict[str, Any]:
    """Convert the fields of config.json that exist only in OLMoE models to settings of
    `[model]`."""
    return {
        "num_experts": fields.num_experts,
        "num_experts_per_tok": fields.num_experts_per_tok,
        "norm_eps": fields.rms_norm_eps,
        "norm_topk_prob": fields.norm_topk_prob,
        "aux_loss_coef": fields.router_aux_loss_coef,
        # With output_router_logits, transformers adds its own form of the load-balancing loss.
        "aux_loss_form": "hf" if fields.output_router_logits else "olmo",
    }


def _rope(fields: _Fields, source: str) -> dict[str, Any]:
    # transformers 5 has rope_parameters instead of rope_theta and rope_scaling.
    spelled = fields.rope_scaling or fields.rope_parameters or {}
    rope = {key: value for key, value in spelled.items() if value is not None}
    theta = rope.get("rope_theta", 10000.0 if fields.rope_theta is None else fields.rope_theta)
    kind = rope.get("rope_type", rope.get("type", "default"))
    refuse_if(
        any(isinstance(value, dict) for value in rope.values()),
        f"{source}: rope_parameters = {spelled!r} has values for each layer type, which is not "
        "supported; use the same values for all layers",
    )
    if kind != "default" and (type(kind) is not str or kind not in ROPE_FIELDS):
        known = ", ".join(repr(name) for name in ("default", *ROPE_FIELDS))
        raise ConfigError(
            f"{source}: rope scaling of type {kind!r} is not supported; use one of {known}"
        )
    refuse_if(
        rope.get("partial_rotary_factor", 1) != 1 or rope.get("attention_factor", 1) == 0,
        f"{source}: rope_parameters = {spelled!r} is not supported; partial_rotary_factor must "
        "be 1, and attention_factor must not be 0",
    )
    if kind == "default":
        return {"rope_theta": theta}
    original = fields.original_max_position_embeddings or rope.get(
        "original_max_position_embeddings", fields.max_position_embeddings
    )
    rope["original_max_position_embeddings"] = original
    scaling = {key: rope[key] for key in ROPE_FIELDS[kind] if key in rope}
    return {"rope_theta": theta, "rope_scaling": {"type": kind, **scaling}}


def _tokens(value: int | list[int] | None) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value or ())


def _is_token(value: int) -> bool:
    return value >= 0


def _padding(fields: _Fields, source: str) -> int:
    """Return the id of the padding token, or -1 if the model has no padding token. Raises
    ConfigError if the id is outside the vocabulary."""
    token, size = fields.pad_token_id, fields.vocab_size
    if token is None:
        return -1
    refuse_if(
        not -size <= token < size,
        f"{source}: pad_token_id = {token} is outside the vocabulary of {size} tokens; use an "
        f"id below {size}, or null for a model without padding token",
    )
    return token % size  # a negative id counts from the end, as in torch.nn.Embedding


def _derived(value: int | None, default: int) -> int:
    """Convert a field of config.json to a setting of `[model]` for which 0 selects the default.

    Return 0 if `value` is None or equals `default`, else `value`.
    """
    return 0 if value is None or value == default else value
