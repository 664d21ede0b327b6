"""Tests of the import and export of weights in Hugging Face directories."""

from __future__ import annotations

import itertools
import json
import os
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from optimus.checkpoint.convert import from_hf
from optimus.checkpoint.weights import load_weights, open_weights
from optimus.errors import CheckpointError, ConfigError, OptimusError
from optimus.evaluate.checkpoint import load_model, load_resolved
from optimus.hf import is_hf_directory, read_hf_config
from optimus.hf import write_hf as write_slices
from optimus.hf.weights import pieces
from optimus.io.tensor_file import INDEX, MODEL, TensorFile
from optimus.model.transformer import Transformer
from tests.model.small import small_model, some_tokens

transformers = pytest.importorskip("transformers")

LIMIT = 20_000


def save_with_transformers(path, kind="olmoe", dtype=torch.float32, limit="5GB", **fields):
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "eos_token_id": 0,
        **fields,
    }
    if kind == "olmoe":
        config = transformers.OlmoeConfig(num_experts=5, num_experts_per_tok=2, **sizes)
    else:
        config = transformers.OlmoConfig(**sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(path, max_shard_size=limit)
    return model


def write_hf(path, config, state, dtype, file_bytes=1 << 40) -> None:
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    names = Transformer(config).state_dict()
    weights = ((name, 0, tensor.reshape(-1)) for name, tensor in state.items())
    write_slices(path, config, weights, dict.fromkeys(names, torch_dtype), file_bytes)


def load_hf_model(path, dtype=None) -> Transformer:
    """Load the model of a Hugging Face directory. The weights of the model have the dtype `dtype`,
    or their stored dtypes if `dtype` is None."""
    config = read_hf_config(path)
    model = Transformer(config)
    with open_weights(config, path) as weights:
        for name, stored in weights.dtypes().items():
            parameter = model.get_parameter(name)
            parameter.data = parameter.data.to(dtype or stored)
    load_weights(model, path)
    return model


def on_disk(path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_tensors(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, value in tensors.items():
        assert value.dtype == expected[name].dtype and torch.equal(value, expected[name]), name


@pytest.mark.parametrize("limit", ["5GB", "20KB"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "fields"),
    [("olmo", {}), ("olmo", {"tie_word_embeddings": True}), ("olmoe", {"attention_bias": True})],
)
def test_round_trip_is_bit_identical(kind, fields, dtype, limit, tmp_path):
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    hf_model = save_with_transformers(tmp_path / "theirs", kind, torch_dtype, limit, **fields)
    assert (len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1) == (limit == "20KB")
    ours = load_hf_model(tmp_path / "theirs")
    assert {p.dtype for p in ours.parameters()} == {torch_dtype}
    shard_bytes = LIMIT if limit == "20KB" else 1 << 40
    write_hf(tmp_path / "ours", ours.config, ours.state_dict(), dtype, shard_bytes)

    assert_same_tensors(on_disk(tmp_path / "ours"), on_disk(tmp_path / "theirs"))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_same_tensors(loaded.state_dict(), hf_model.state_dict())
    assert loaded.config.eos_token_id == 0 and loaded.dtype == torch_dtype
    torch.testing.assert_close(
        ours(some_tokens()),
        loaded(some_tokens()).logits,
        rtol=0.02 if dtype == "bf16" else 1e-5,
        atol=0.02 if dtype == "bf16" else 1e-5,
    )


def test_files_are_within_the_limit_and_indexed(tmp_path):
    model = small_model()
    write_hf(tmp_path / "out", model.config, model.state_dict(), "fp32", LIMIT)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    for file in files:
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= LIMIT or len(tensors) == 1
        assert {index["weight_map"][name] for name in tensors} == {file.name}
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    total = sum(p.numel() for p in model.parameters()) * 4
    assert index["metadata"]["total_size"] == total


def test_experts_may_be_merged_on_disk(tmp_path):
    hf_model = save_with_transformers(tmp_path)
    separate = load_hf_model(tmp_path).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in hf_model.state_dict()
    save_file(hf_model.state_dict(), tmp_path / "model.safetensors")
    assert_same_tensors(load_hf_model(tmp_path).state_dict(), separate)


def test_files_are_those_of_safetensors_for_any_order_of_slices(tmp_path):
    """`write_slices` gets the slices in reverse order. The written file must have the same bytes as
    the file that the safetensors library writes for the same tensors."""
    model = small_model()
    state, generator = model.state_dict(), random.Random(0)
    file_dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    dtypes = {name: file_dtypes[number % 4] for number, name in enumerate(state)}
    dtypes |= {name: torch.bfloat16 for name in state if "experts" in name}
    slices = []
    for name, tensor in state.items():
        flat = tensor.reshape(-1)
        bounds = sorted(generator.sample(range(1, len(flat)), 3))
        for low, high in itertools.pairwise([0, *bounds, len(flat)]):
            slices.append((name, low, flat[low:high]))
    slices.reverse()
    write_slices(tmp_path / "out", model.config, iter(slices), dtypes)
    named = {}
    for name, tensor in state.items():
        for hf_name, view in pieces(name, tensor.to(dtypes[name])):
            named[hf_name] = view.contiguous()
    save_file(named, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()


def corrupt(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
DAMAGE = {
    "missing": (lambda t: t.pop(GATE), GATE),
    "shape": (lambda t: t.update({GATE: torch.zeros(3, 3)}), r"\[3, 3\]"),
    "type": (lambda t: t.update({GATE: t[GATE].to(torch.int8)}), "I8"),
    "superfluous": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
        r"q_proj\.bias",
    ),
    "another head": (lambda t: t.update({"x.lm_head.weight": t[GATE].clone()}), r"x\.lm_head"),
    "extra layer": (lambda t: t.update({"model.layers.2.x": torch.zeros(1)}), r"layers\.2\.x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_tensor_is_named(damage, tmp_path):
    save_with_transformers(tmp_path)
    change, mentioned = DAMAGE[damage]
    corrupt(tmp_path, change)
    with pytest.raises(CheckpointError, match=mentioned) as error:
        load_hf_model(tmp_path)
    assert "\n" not in str(error.value)


def test_unused_tensors_are_ignored(tmp_path):
    """The file contains two kinds of unused tensors: rotary angles, and a head although the
    embeddings are tied."""
    hf_model = save_with_transformers(tmp_path, "olmo", tie_word_embeddings=True)
    angles = "model.layers.0.self_attn.rotary_emb.inv_freq"
    head = {"lm_head.weight": hf_model.state_dict()["lm_head.weight"].clone()}
    corrupt(tmp_path, lambda t: t.update({angles: torch.zeros(4), **head}))
    load_hf_model(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers = 1000000000, but .* have 2 layers"),
        ("num_experts", 2**40, "num_experts = 1099511627776, but .* have 5 experts"),
        ("vocab_size", 2**50, r"shape \[61, 32\], but this model needs \[1125899906842624, 32\]"),
        ("vocab_size", 2**70, "more elements than torch can count"),
        ("hidden_size", 2**50, "more elements than torch can count"),
        ("intermediate_size", 2**60, "more elements than torch can count"),
        ("model_type", [], "model_type = "),
        ("architectures", 5, "architectures = 5"),
        ("rope_scaling", {"type": []}, "rope scaling of type"),
    ],
)
def test_config_that_contradicts_the_weights_allocates_no_memory(tmp_path, field, value, message):
    """Each changed config.json is refused before memory for the described model is allocated."""
    model = small_model()
    write_hf(tmp_path / "m", model.config, model.state_dict(), "fp32")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(OptimusError, match=message) as error:
        load_model(tmp_path / "m")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("layers", [3, 4096, 10**9])
def test_checkpoint_with_more_layers_than_weights_is_refused(tmp_path, layers):
    model = small_model()
    write_hf(tmp_path / "m", model.config, model.state_dict(), "fp32")
    from_hf(tmp_path / "m", tmp_path / "c")
    file = tmp_path / "c" / "config.toml"
    file.write_text(file.read_text().replace("num_layers = 2", f"num_layers = {layers}"))
    with pytest.raises(OptimusError, match=f"num_layers = {layers}(, but its .* 2 layers|: )"):
        load_resolved(tmp_path / "c")


def test_config_that_is_a_fifo_or_deeply_nested_is_refused(tmp_path):
    file = tmp_path / "config.json"
    file.write_bytes(b'{"model_type": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        read_hf_config(tmp_path)
    assert not is_hf_directory(tmp_path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"config\.json: .*not a regular file"):
        read_hf_config(tmp_path)
    assert not is_hf_directory(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "weights.safetensors"])
def test_weights_that_are_a_fifo_are_refused(tmp_path, name):
    model = small_model()
    write_hf(tmp_path / "m", model.config, model.state_dict(), "fp32")
    tensors = dict.fromkeys(TensorFile(tmp_path / "m" / MODEL).tensors, "weights.safetensors")
    (tmp_path / "m" / MODEL).rename(tmp_path / "m" / "weights.safetensors")
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": tensors}))
    (tmp_path / "m" / name).unlink()
    os.mkfifo(tmp_path / "m" / name)
    with pytest.raises(CheckpointError, match=f"{name}: .*not a regular file"):
        load_model(tmp_path / "m")


def test_damaged_and_missing_files(tmp_path):
    save_with_transformers(tmp_path, limit="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=shard.name):
        load_hf_model(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        load_hf_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_hf_model(tmp_path)


def test_weights_of_another_model_are_refused_with_the_field(tmp_path):
    model = small_model()
    write_hf(tmp_path / "out", model.config, model.state_dict(), "fp32")
    for key, value in (("rope_theta", 5.0), ("norm_topk_prob", True), ("clip_qkv", 1.0)):
        with pytest.raises(CheckpointError, match=f"model.{key} = {value}"):
            load_weights(small_model(**{key: value}), tmp_path / "out")
    # Fields can differ if they do not change logits, or if they express the same value differently.
    load_weights(small_model(num_key_value_heads=4, aux_loss_coef=0.5), tmp_path / "out")


def test_refused_export_overwrites_and_leaves_no_file(tmp_path):
    model = small_model()
    state = model.state_dict()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("precious")
    with pytest.raises(ConfigError, match="exists already"):
        write_hf(tmp_path / "full", model.config, state, "fp32")
    missing = {name: value for name, value in state.items() if name != "head.weight"}
    with pytest.raises(CheckpointError, match=r"head\.weight has 1,952 elements too few"):
        write_hf(tmp_path / "out", model.config, missing, "fp32")
    wrong = {**state, "head.weight": torch.zeros(1, 32)}
    with pytest.raises(CheckpointError, match=r"head\.weight has 1,920 elements too few"):
        write_hf(tmp_path / "out", model.config, wrong, "fp32", LIMIT)
    with pytest.raises(CheckpointError, match="extra, which is not a parameter"):
        write_hf(tmp_path / "out", model.config, {**state, "extra": torch.zeros(1)}, "fp32")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_training_dtype_may_differ_from_the_stored_dtype(tmp_path):
    model = small_model()
    write_hf(tmp_path / "out", model.config, model.state_dict(), "bf16")
    wide = Transformer(model.config)
    load_weights(wide, tmp_path / "out")
    for name, value in model.state_dict().items():
        assert torch.equal(wide.state_dict()[name], value.bfloat16().float()), name
