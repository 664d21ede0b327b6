"""Comparison of our decoder with the decoder of transformers, on randomly initialised models."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from optimus.checkpoint.weights import load_weights
from optimus.hf import config_from_hf
from optimus.model.transformer import Transformer
from tests.model.small import relative, some_tokens

transformers = pytest.importorskip("transformers")

VOCAB = 61
LOGITS_ABSOLUTE = 1e-5
GRADIENT_RELATIVE = 1e-5

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "eos_token_id": 0,
}


def rope(kind: str, **fields) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, "factor": 3.0, **fields}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
FEATURES = {
    "plain": {},
    "grouped heads": {"num_key_value_heads": 2},
    "one kv head": {"num_key_value_heads": 1},
    "clip": {"clip_qkv": 0.3},
    "bias": {"attention_bias": True},
    "tied": {"tie_word_embeddings": True},
    "padding": {"pad_token_id": 5},
    "padding, tied": {"pad_token_id": 5, "tie_word_embeddings": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": rope("linear"),
    "llama3": rope("llama3", **LLAMA3),
    "dynamic, short": rope("dynamic"),
    "dynamic, long": {**rope("dynamic"), "max_position_embeddings": 16},
    "yarn": rope("yarn", original_max_position_embeddings=16),
    "yarn, all fields": rope(
        "yarn",
        original_max_position_embeddings=16,
        beta_fast=8.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=1.3,
        truncate=False,
    ),
    "yarn, factor": rope("yarn", original_max_position_embeddings=16, attention_factor=1.4),
    "all at once": {
        "num_key_value_heads": 2,
        "clip_qkv": 0.3,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "pad_token_id": 5,
        **rope("llama3", **LLAMA3),
    },
}
CASES = [(kind, name) for kind in ("olmo", "olmoe") for name in FEATURES]
SPARSE = {
    "normalised": {"norm_topk_prob": True},
    "eps": {"rms_norm_eps": 0.1},
    "top-1": {"num_experts_per_tok": 1},
    "every expert": {"num_experts_per_tok": 6},
    "normalised, all at once": {"norm_topk_prob": True, **FEATURES["all at once"]},
}


def make_pair(kind: str, fields: dict):
    """Return a random transformers model, and our model with the same weights."""
    torch.manual_seed(0)
    if kind == "olmo":
        theirs = transformers.OlmoForCausalLM(transformers.OlmoConfig(**{**SIZES, **fields}))
    else:
        sparse = {"num_experts": 6, "num_experts_per_tok": 2}
        config = transformers.OlmoeConfig(**{**SIZES, **sparse, **fields})
        theirs = transformers.OlmoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            # With the initial values 0 and 1, a missing bias or norm weight would not be detected.
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return theirs.train(), adopt(theirs, theirs.state_dict())


def adopt(theirs, state) -> Transformer:
    """Return our model with the tensors in `state`. The keys of `state` are parameter names of
    transformers."""
    ours = Transformer(config_from_hf(theirs.config.to_dict()))
    with tempfile.TemporaryDirectory() as folder:
        theirs.config.save_pretrained(folder)
        apart = {name: tensor.clone() for name, tensor in state.items()}  # tied: shared memory
        save_file(apart, Path(folder, "model.safetensors"))
        load_weights(ours, Path(folder))
    return ours


def assert_same_gradients(theirs, ours: Transformer) -> None:
    gradients = {name: p.grad for name, p in theirs.named_parameters()}
    expected = dict(adopt(theirs, gradients).named_parameters())
    for name, parameter in ours.named_parameters():
        assert relative(parameter.grad, expected[name]) < GRADIENT_RELATIVE, name


@pytest.mark.parametrize(("kind", "feature"), CASES)
def test_logits_loss_and_gradients(kind, feature):
    theirs, ours = make_pair(kind, FEATURES[feature])
    check(theirs, ours)


@pytest.mark.parametrize("feature", SPARSE)
def test_fields_of_the_mixture(feature):
    check(*make_pair("olmoe", SPARSE[feature]))


def check(theirs, ours) -> None:
    tokens = some_tokens(3, 40, VOCAB)
    tokens[0, :4] = 5  # the padding token, if any
    expected = theirs(tokens, labels=tokens)
    assert float((ours(tokens) - expected.logits).abs().max()) < LOGITS_ABSOLUTE
    terms = ours.losses(tokens)
    loss = terms.ce_sum / terms.num_targets
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-6)
    expected.loss.backward()
    loss.backward()
    assert_same_gradients(theirs, ours)


@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_auxiliary_loss_in_transformers_form(top_k):
    """If the configuration of transformers sets `output_router_logits`, Optimus uses the auxiliary
    loss of transformers: the losses agree within a relative error of 1e-6, and the gradients agree,
    too."""
    theirs, ours = make_pair(
        "olmoe",
        {
            "output_router_logits": True,
            "router_aux_loss_coef": 0.3,
            "num_experts_per_tok": top_k,
        },
    )
    assert ours.config.aux_loss_form == "hf" and ours.config.aux_loss_coef == 0.3
    tokens = some_tokens(3, 40, VOCAB)
    expected = theirs(tokens, labels=tokens)
    terms = ours.losses(tokens)
    assert float(terms.aux) == pytest.approx(float(expected.aux_loss), rel=1e-6)
    loss = terms.ce_sum / terms.num_targets + ours.config.aux_loss_coef * terms.aux
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-6)
    expected.loss.backward()
    loss.backward()
    assert_same_gradients(theirs, ours)


@pytest.mark.parametrize("kind", ["olmo", "olmoe"])
def test_bf16_is_as_far_from_fp32_as_theirs(kind):
    theirs, ours = make_pair(kind, {"num_key_value_heads": 2})
    tokens = some_tokens(3, 40, VOCAB)
    exact = theirs(tokens).logits
    their_error = relative(theirs.bfloat16()(tokens).logits.float(), exact)
    our_error = relative(ours.bfloat16()(tokens).float(), exact)
    assert our_error < 1.2 * their_error
