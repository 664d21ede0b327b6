"""`optimus.hf.use_fast_moe` on models of the installed version of transformers.

Tests that need the other major version, 4 or 5, are skipped.
"""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import optimus
from optimus.errors import ConfigError
from optimus.hf import FastExperts, use_fast_moe
from tests.model.small import relative

transformers = pytest.importorskip("transformers")
V5 = int(transformers.__version__.split(".")[0]) >= 5
needs_v5 = pytest.mark.skipif(not V5, reason="transformers 4 has no merged experts")
needs_v4 = pytest.mark.skipif(V5, reason="transformers 5 has no module per expert")

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 1,
    "eos_token_id": None,
}


def olmoe(dtype: torch.dtype = torch.float32, **fields) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.OlmoeConfig(**{**SIZES, **fields})
    return transformers.OlmoeForCausalLM(config).to(dtype)


def make_pair(*args, **fields) -> tuple[nn.Module, nn.Module]:
    model = olmoe(*args, **fields)
    return model, use_fast_moe(copy.deepcopy(model))


def batch(padded: bool = False) -> dict[str, Tensor]:
    tokens = torch.randint(2, 61, (3, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, 10:], mask[2, 5:] = 0, 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def named_grads(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict that maps names in the state dict of the model to gradients. `use_fast_moe`
    does not change these names."""
    shadow = copy.deepcopy(model)
    with torch.no_grad():
        for target, parameter in zip(shadow.parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None
            target.copy_(parameter.grad)
    return shadow.state_dict()


def assert_close_models(theirs: nn.Module, ours: nn.Module, limit: float, **inputs) -> None:
    a, b = theirs(**inputs), ours(**inputs)
    assert relative(b.logits, a.logits) < limit
    assert relative(b.loss, a.loss) < limit
    a.loss.backward()
    b.loss.backward()
    expected, grads = named_grads(theirs), named_grads(ours)
    assert list(expected) == list(grads)
    for name, gradient in expected.items():
        assert gradient.norm() > 0, name
        assert relative(grads[name], gradient) < limit, name


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_outputs_and_gradients_equal_those_of_transformers(norm_topk_prob, padded, tied):
    theirs, ours = make_pair(norm_topk_prob=norm_topk_prob, tie_word_embeddings=tied)
    replaced = [module for module in ours.modules() if isinstance(module, FastExperts)]
    assert len(replaced) == 2 and not any(isinstance(m, FastExperts) for m in theirs.modules())
    assert_close_models(theirs, ours, 1e-5, **batch(padded), output_router_logits=True)


def test_bf16_blocks_equal_those_of_transformers():
    """The test compares single blocks, because rounding in a whole model could change the selected
    experts."""
    theirs, ours = make_pair(torch.bfloat16)
    x = torch.randn(2, 24, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    for layer in range(2):
        results = []
        for model in (theirs, ours):
            block, inputs = model.model.layers[layer].mlp, x.clone().requires_grad_()
            out = block(inputs)
            out = out[0] if isinstance(out, tuple) else out
            out.square().sum().backward()
            results.append({"out": out, "x": inputs.grad, **named_grads(block)})
        expected, results_of_ours = results
        assert list(expected) == list(results_of_ours)
        for name, value in expected.items():
            assert relative(results_of_ours[name].float(), value.float()) < 1e-2, name


def test_state_dicts_are_interchangeable(tmp_path):
    theirs = olmoe()
    before = copy.deepcopy(theirs.state_dict())
    ours = use_fast_moe(theirs)
    after = ours.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    fresh = olmoe()
    changed = {name: value + 1 for name, value in after.items()}
    assert not any(fresh.load_state_dict(changed))
    assert not any(ours.load_state_dict(changed))
    for name, value in ours.state_dict().items():
        assert torch.equal(value, changed[name]), name
    assert not any(ours.load_state_dict(before, assign=True))
    assert torch.equal(ours(**batch()).logits, use_fast_moe(olmoe())(**batch()).logits)


def test_assigned_weights_keep_their_dtype():
    """`load_state_dict` with `assign=True` replaces frozen parameters by the loaded tensors, with
    the dtype of these tensors. The parameters stay frozen."""
    theirs, ours = make_pair()
    for parameter in ours.parameters():
        parameter.requires_grad_(False)
    low = {name: value.bfloat16() for name, value in theirs.state_dict().items()}
    ours.load_state_dict(low, assign=True)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert all(torch.equal(value, low[name]) for name, value in ours.state_dict().items())
    assert ours(input_ids=batch()["input_ids"]).logits.dtype is torch.bfloat16


def test_incomplete_state_dict_is_refused():
    ours = use_fast_moe(olmoe())
    state = ours.state_dict()
    expert = next(name for name in state if "experts" in name)
    value = state.pop(expert)
    with pytest.raises(RuntimeError, match="Missing key.*experts"):
        ours.load_state_dict(state)
    assert ours.load_state_dict(state, strict=False).missing_keys == [expert]
    with pytest.raises(RuntimeError, match="size mismatch.*experts"):
        ours.load_state_dict({**state, expert: value[..., :3]})
    with pytest.raises(RuntimeError, match="Unexpected key.*experts"):
        superfluous = expert.replace("experts", "experts.x")
        ours.load_state_dict({**state, expert: value, superfluous: value})


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(use_reentrant):
    theirs, ours = make_pair()
    for model in (theirs, ours):
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.enable_input_require_grads()
    assert_close_models(theirs, ours, 1e-5, **batch())


def test_generate_with_cache():
    theirs, ours = make_pair()
    prompt = batch()["input_ids"][:, :5]
    options = {"max_new_tokens": 12, "do_sample": False, "use_cache": True}
    mask = torch.ones_like(prompt)
    expected = theirs.eval().generate(prompt, attention_mask=mask, **options)
    generated = ours.eval().generate(prompt, attention_mask=mask, **options)
    assert expected.shape[1] == 17 and torch.equal(generated, expected)


def test_autocast_computes_in_bf16():
    theirs, ours = make_pair()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a, b = theirs(**batch()), ours(**batch())
    assert relative(b.logits.float(), a.logits.float()) < 1e-2
    b.loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in ours.parameters())
    fast = ours.model.layers[0].mlp.experts
    x = torch.randn(4, 32)
    chosen, weights = torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fast(x, chosen, weights)
    assert out.dtype == torch.float32
    assert torch.equal(out, fast.bfloat16()(x.bfloat16(), chosen, weights.bfloat16()).float())


def test_output_has_the_dtype_of_the_hidden_states():
    fast = next(
        m for m in use_fast_moe(olmoe(torch.bfloat16)).modules() if isinstance(m, FastExperts)
    )
    x, chosen = torch.randn(4, 32), torch.tensor([[0, 1]] * 4)
    weights = torch.full((4, 2), 0.5)
    out = fast(x, chosen, weights)
    assert out.dtype is torch.float32
    assert torch.equal(out, fast(x.bfloat16(), chosen, weights.bfloat16()).float())


def test_expert_numbers_out_of_range_are_refused_in_debug_mode(monkeypatch):
    fast = next(m for m in use_fast_moe(olmoe()).modules() if isinstance(m, FastExperts))
    out_of_range = (torch.randn(2, 32), torch.tensor([[0, 99], [-1, 0]]), torch.rand(2, 2))
    assert fast(*out_of_range).isfinite().all()
    monkeypatch.setenv("OPTIMUS_KERNELS_DEBUG", "1")
    with pytest.raises(ValueError, match="2 expert indices .* outside 0 to 5; the first is 99"):
        fast(*out_of_range)


def test_hooks_on_replaced_modules_are_refused():
    model = olmoe()
    block = model.model.layers[1].mlp
    handle = block.experts.register_forward_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="experts of OlmoeSparseMoeBlock have hooks"):
        use_fast_moe(model)
    assert not any(isinstance(module, FastExperts) for module in model.modules())
    handle.remove()
    block.gate.register_forward_hook(lambda *_: None)
    use_fast_moe(model)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(8, 4, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(4, 8, bias=False), nn.SiLU()


class OlmoeSparseMoeBlock(nn.Module):
    """MoE block in the layout of transformers 4, for tests with any version of transformers."""

    num_experts, top_k, norm_topk_prob = 3, 2, False

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(3))


def test_block_with_separate_experts_is_refused_as_the_model():
    block = OlmoeSparseMoeBlock()
    with pytest.raises(ConfigError, match="OlmoeSparseMoeBlock is itself the block"):
        use_fast_moe(block)
    assert isinstance(block.experts, nn.ModuleList)
    assert isinstance(use_fast_moe(nn.Sequential(block))[0].experts, FastExperts)


def test_hooks_on_copied_experts_are_refused():
    model = nn.Sequential(OlmoeSparseMoeBlock())
    model[0].experts[1].down_proj.weight.register_hook(lambda grad: None)
    with pytest.raises(ConfigError, match="have hooks"):
        use_fast_moe(model)


def test_trainer_gives_the_same_losses(tmp_path):
    pytest.importorskip("accelerate")
    theirs, ours = make_pair()
    rows = [{key: value[0] for key, value in batch().items()} for _ in range(8)]
    losses = []
    for model in (theirs, ours):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / str(len(losses))),
            max_steps=4,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0]
    saved = transformers.OlmoeForCausalLM.from_pretrained(tmp_path / "1" / "checkpoint-4")
    assert relative(saved(**batch()).logits, ours(**batch()).logits) < 1e-5


def test_block_compiles_without_a_graph_break():
    theirs, ours = make_pair()
    x, outs, grads = torch.randn(2, 8, 32), [], []
    block = torch.compile(ours.model.layers[0].mlp, fullgraph=True, backend="aot_eager")
    for module in (theirs.model.layers[0].mlp, block):
        inputs = x.clone().requires_grad_()
        out = module(inputs)
        outs.append(out if V5 else out[0])
        outs[-1].square().sum().backward()
        grads.append(inputs.grad)
    assert relative(outs[1], outs[0]) < 1e-5 and relative(grads[1], grads[0]) < 1e-5


def test_second_call_changes_nothing_and_the_model_pickles(tmp_path):
    ours = use_fast_moe(olmoe())
    experts = [module for module in ours.modules() if isinstance(module, FastExperts)]
    assert use_fast_moe(ours) is ours
    assert experts == [module for module in ours.modules() if isinstance(module, FastExperts)]
    torch.save(ours, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(again(**batch()).logits, ours(**batch()).logits)


def test_modes_and_frozen_experts_are_kept():
    model = olmoe().eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    ours = use_fast_moe(model)
    fast = [module for module in ours.modules() if isinstance(module, FastExperts)]
    assert not any(module.training for module in fast)
    assert not any(p.requires_grad for module in fast for p in module.parameters())
    ours(**batch()).loss.backward()
    assert ours.model.layers[0].mlp.gate.weight.grad is not None


@needs_v5
def test_merged_parameters_are_used_without_a_copy():
    model = olmoe()
    before = dict(model.named_parameters())
    after = dict(use_fast_moe(model).named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)


FAMILIES = {
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {"num_local_experts": 6}),
    "Qwen2Moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    ),
    "Qwen3Moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {"moe_intermediate_size": 24}),
    "FlexOlmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", {}),
}


@needs_v5
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_with_merged_experts(family):
    model_name, config_name, fields = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **fields})
    theirs = getattr(transformers, model_name)(config)
    ours = use_fast_moe(copy.deepcopy(theirs))
    assert sum(isinstance(module, FastExperts) for module in ours.modules()) == 2
    assert_close_models(theirs, ours, 1e-5, **batch(padded=True), output_router_logits=True)


def test_unsupported_model_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="Linear has no MoE block"):
        use_fast_moe(nn.Linear(2, 2))
    model = olmoe(hidden_act="gelu")
    with pytest.raises(ConfigError, match="OlmoeSparseMoeBlock has the activation GELU"):
        use_fast_moe(model)
    mixed = olmoe()
    next(mixed.model.layers[1].mlp.experts.parameters()).requires_grad_(False)
    with pytest.raises(ConfigError, match="OlmoeSparseMoeBlock.*requires_grad"):
        use_fast_moe(mixed)
    assert not any(isinstance(module, FastExperts) for module in mixed.modules())
    with torch.device("meta"), pytest.raises(ConfigError, match="a device other than meta"):
        use_fast_moe(olmoe())


@needs_v5
def test_unknown_family_is_named():
    config = transformers.GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_local_experts=4, head_dim=8
    )
    config.vocab_size = 61
    model = transformers.GptOssForCausalLM(config)
    with pytest.raises(ConfigError, match="does not support the experts GptOssExperts"):
        use_fast_moe(model)


@needs_v4
def test_unknown_block_with_separate_experts_is_named():
    config = transformers.MixtralConfig(**{**SIZES, "num_local_experts": 4})
    model = transformers.MixtralForCausalLM(config)
    with pytest.raises(ConfigError, match="does not support MixtralSparseMoeBlock"):
        use_fast_moe(model)


@needs_v4
def test_changed_linear_layer_is_named():
    model = olmoe()
    model.model.layers[1].mlp.experts[3].up_proj = nn.Linear(32, 24)
    with pytest.raises(ConfigError, match="without bias"):
        use_fast_moe(model)
    assert not any(isinstance(module, FastExperts) for module in model.modules())


def test_import_of_optimus_hf_does_not_import_transformers():
    assert optimus.hf.use_fast_moe is use_fast_moe
    code = "import sys, optimus; optimus.hf.use_fast_moe; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
