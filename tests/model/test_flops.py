from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from optimus.config import load_config
from optimus.model.flops import count_parameters, flops_per_token
from tests.model.small import small_model, some_tokens

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"

COUNTS = {
    "olmo-1b": (1_176_764_416, 1_176_764_416),
    "olmoe-1b-7b": (6_919_161_856, 1_282_017_280),
    "mula-1b": (1_279_787_008, 1_279_787_008),
    "mula-7b-a1b": (6_919_161_856, 1_282_017_280),
    "mula-20b-a2b": (20_076_824_576, 2_360_084_480),
    "mula-100b-a7b": (99_987_557_376, 7_578_651_648),
    "mula-220b-a10b": (220_205_681_664, 10_020_719_616),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_known_models(name):
    assert count_parameters(load_config(CONFIGS / f"{name}.toml").model) == COUNTS[name]


def test_all_known_models_are_counted():
    assert {path.stem for path in CONFIGS.glob("*.toml")} - {"demo"} == set(COUNTS)


FEATURES = {
    "sparse": {},
    "dense": {"architecture": "olmo"},
    "mixed": {"num_experts": [0, 5, 5], "num_layers": 3, "dense_intermediate_size": 40},
    "tied": {"architecture": "olmo", "tie_embeddings": True},
    "grouped heads": {"num_key_value_heads": 2, "attention_bias": True},
    "odd heads": {"architecture": "olmo", "num_attention_heads": 3, "head_dim": 6},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_counted_without_building_equals_built(feature):
    model = small_model(**{"num_layers": 3, **FEATURES[feature]})
    total, active = count_parameters(model.config)
    assert total == sum(p.numel() for p in model.parameters())
    idle = 0
    if model.config.num_experts:
        sparse = [b.mlp.experts for b in model.blocks.values() if hasattr(b.mlp, "experts")]
        idle = sum(e.gate_up[:3].numel() + e.down[:3].numel() for e in sparse)
    assert active == total - idle


@pytest.mark.parametrize("feature", FEATURES)
def test_flops_equal_those_that_torch_counts(feature):
    if "intel_extension_for_pytorch" in sys.modules:
        pytest.skip("IPEX's operators hide products from torch's counter (docs/intel.md)")
    model, tokens = small_model(**FEATURES[feature]), some_tokens(2, 16)
    # torch does not count the products of fused attention.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    # torch also counts the gradient of RMSNorm weights, because a matrix product computes it.
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    counted = counter.get_total_flops() - 2 * norms * tokens.numel()
    assert counted == flops_per_token(model.config, 16) * tokens.numel()
