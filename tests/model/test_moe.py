from __future__ import annotations

import importlib
import os

import pytest
import torch
import torch.nn.functional as F

import optimus_kernels as kernels
from optimus.model.moe import Experts, FastSparseMoE
from tests.kernels.op_checks import FORMS, in_form
from tests.model.small import relative, small_config

D, INNER, E = 32, 24, 5


def make_experts(dtype=torch.float64, num_experts=E) -> Experts:
    torch.manual_seed(0)
    experts = Experts(small_config(num_experts=num_experts, num_experts_per_tok=1)).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def naive(experts: Experts, x, weights, chosen):
    """Return the output of `experts` [tokens, D], computed for one token and one chosen expert at a
    time: the sum of weight * down(silu(gate(x)) * up(x))."""
    out = []
    for token in range(len(x)):
        total = torch.zeros_like(x[token])
        for slot in range(chosen.shape[1]):
            expert = int(chosen[token, slot])
            gate, up = (experts.gate_up[expert] @ x[token]).chunk(2)
            total = total + weights[token, slot] * (experts.down[expert] @ (F.silu(gate) * up))
        out.append(total)
    return torch.stack(out) if out else x * 0


def spread(tokens: int, k: int, num_experts: int = E) -> torch.Tensor:
    generator = torch.Generator().manual_seed(k)
    return torch.rand(tokens, num_experts, generator=generator).topk(k).indices


CASES = {
    **{f"top-{k} of {E}": spread(17, k) for k in range(1, E + 1)},
    "one expert gets all": torch.full((9, 1), 3),
    "same expert twice": torch.full((4, 2), 1),
    "most are empty": torch.tensor([[0, 4], [4, 0], [0, 4]]),
    "one token": torch.tensor([[2, 0]]),
    "no token": torch.zeros(0, 2, dtype=torch.int64),
}


def run(experts, x, weights, chosen, function):
    leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
    experts.zero_grad()
    out = function(leaves[0], leaves[1], chosen)
    probe = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    out.backward(probe)
    return [out.detach(), *(leaf.grad for leaf in (*leaves, experts.gate_up, experts.down))]


@pytest.fixture(params=FORMS)
def form(request):
    """Run a test with each implementation of grouped matrix products that this torch supports."""
    with in_form(request.param):
        yield request.param


@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition_forward_and_backward(case):
    chosen, experts = CASES[case], make_experts()
    x = torch.randn(len(chosen), D, dtype=torch.float64)
    weights = torch.rand(chosen.shape, dtype=torch.float64)
    ours = run(experts, x, weights, chosen, experts)
    theirs = run(experts, x, weights, chosen, lambda *inputs: naive(experts, *inputs))
    for value, reference in zip(ours, theirs, strict=True):
        reference = torch.zeros_like(value) if reference is None else reference
        torch.testing.assert_close(value, reference, rtol=1e-10, atol=1e-12)


def test_experts_divided_into_ranges_add_up_to_the_whole():
    chosen, experts = CASES["top-3 of 5"], make_experts()
    x = torch.randn(len(chosen), D, dtype=torch.float64)
    weights = torch.rand(chosen.shape, dtype=torch.float64)
    whole = run(experts, x, weights, chosen, experts)
    results = []
    for first, last in ((0, 2), (2, 3), (3, 5)):
        share = make_experts(num_experts=last - first)
        share.load_state_dict({n: p[first:last] for n, p in experts.state_dict().items()})
        share.first_expert = first
        results.append(run(share, x, weights, chosen, share))
    for index in range(3):  # the output and the gradients of x and weights add up
        torch.testing.assert_close(sum(result[index] for result in results), whole[index])
    for index in (3, 4):  # the experts' gradients are concatenated
        torch.testing.assert_close(torch.cat([result[index] for result in results]), whole[index])


def test_bf16_is_as_close_to_the_exact_result_as_its_rounding_allows():
    chosen, exact = spread(300, 2), make_experts()
    x, weights = torch.randn(300, D), torch.rand(300, 2)
    rounded = make_experts(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    inputs = (x.bfloat16(), weights.bfloat16())
    ours = run(rounded, *inputs, chosen, rounded)
    reference = run(exact, *(value.double() for value in inputs), chosen, exact)
    for value, expected in zip(ours, reference, strict=True):
        assert relative(value.double(), expected) < 8e-3  # a few roundings of 2^-9 each


def kept_for_backward(block, *inputs) -> int:
    """Return the number of bytes that a forward pass saves for backward, without parameters. A
    storage that autograd saves twice counts once."""
    saved = {}
    hold = lambda t: (saved.setdefault(t.untyped_storage().data_ptr(), t), t)[1]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
        block(*inputs)
    parameters = {p.untyped_storage().data_ptr() for p in block.parameters()}
    return sum(t.nbytes for address, t in saved.items() if address not in parameters)


@pytest.mark.parametrize("input_only", [False, True])
def test_backward_keeps_only_input_weights_indices_and_preactivation(input_only):
    experts, tokens, k = make_experts(torch.float32), 64, 2
    x = torch.randn(tokens, D, requires_grad=True)
    weights = torch.rand(tokens, k, requires_grad=True)
    hidden = 0 if input_only else k * 2 * INNER
    indices = 3 * k * tokens + E + 1
    kept = kept_for_backward(experts, x, weights, spread(tokens, k), input_only)
    assert kept == 4 * (tokens * (D + k + hidden) + indices)


def test_at_most_40_kb_a_token_are_kept_at_olmoe_sizes_in_bf16():
    tokens, sizes = 128, {"num_experts": 64, "num_experts_per_tok": 8}
    config = small_config(hidden_size=2048, intermediate_size=1024, **sizes)
    with torch.device("meta"):
        block = FastSparseMoE(config).bfloat16()
    block.experts.gate_up = torch.nn.Parameter(
        torch.zeros(1, dtype=torch.bfloat16).expand(block.experts.gate_up.shape)
    )
    block.experts.down = torch.nn.Parameter(
        torch.zeros(1, dtype=torch.bfloat16).expand(block.experts.down.shape)
    )
    block.router.weight = torch.nn.Parameter(torch.randn(64, 2048).bfloat16())
    x = torch.randn(tokens, 2048, dtype=torch.bfloat16, requires_grad=True)
    assert kept_for_backward(block, x) / tokens <= 40_000
    assert kept_for_backward(block, x, True) / tokens <= 6_000


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_written_to_buffers(kind):
    """With `add` = False, backward overwrites the buffers. With `add` = True, backward adds the
    gradients to the buffers. In both cases, `.grad` of the weights stays None."""
    chosen, experts = CASES["most are empty"], make_experts(torch.bfloat16)
    x, weights = torch.randn(3, D).bfloat16(), torch.rand(3, 2).bfloat16()
    expected = run(experts, x, weights, chosen, experts)
    buffers = [torch.full(p.shape, 7.0, dtype=kind) for p in (experts.gate_up, experts.down)]
    for add in (False, True):
        experts.write_gradients_to(lambda add=add: kernels.WeightGrads(*buffers, add))
        out = run(experts, x, weights, chosen, experts)
        assert out[3] is None
        assert out[4] is None
        for value, same in zip(out[:3], expected[:3], strict=True):
            assert torch.equal(value, same)
        for buffer, grad in zip(buffers, expected[3:], strict=True):
            torch.testing.assert_close(buffer, grad.to(kind) * (2 if add else 1))


def test_frozen_experts_get_no_gradient_and_inputs_the_same():
    chosen, experts = spread(30, 2), make_experts(torch.float32)
    x, weights = torch.randn(30, D), torch.rand(30, 2)
    expected = run(experts, x, weights, chosen, experts)
    experts.requires_grad_(False)
    out = run(experts, x, weights, chosen, experts)
    assert out[3] is None
    assert all(torch.equal(a, b) for a, b in zip(out[:3], expected[:3], strict=True))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_blocks_take_another_number_of_tokens(dynamic):
    torch.compiler.reset()
    block = FastSparseMoE(small_config())
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (8, 12, 20):
        x = torch.randn(1, tokens, D)
        torch.testing.assert_close(compiled(x)[0], block(x)[0])


def test_debug_mode_works_in_compiled_code(monkeypatch):
    monkeypatch.setenv("OPTIMUS_KERNELS_DEBUG", "1")
    torch.compiler.reset()
    experts, chosen = make_experts(torch.float32), spread(12, 2)
    x, weights = torch.randn(12, D), torch.rand(12, 2)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, weights, chosen), experts(x, weights, chosen))
    chosen[3, 1] = E
    with pytest.raises(ValueError, match=f"outside 0 to {E - 1}; the first is {E} for token 3"):
        compiled(x, weights, chosen)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_experts_compile_in_16_bit_in_both_forms(backend, form):
    """With bf16 and each form of grouped products, the results of compiled experts differ only by
    rounding from the results of experts that are not compiled."""
    if backend == "inductor" and os.environ.get("OPTIMUS_TEST_COMPILE") != "1":
        pytest.skip("OPTIMUS_TEST_COMPILE=1 runs the C++ compiler of torch.compile")
    # Both forms share a cache of compiled code on disk, so an op must have the same output sizes.
    torch.compiler.reset()
    experts, chosen = make_experts(torch.bfloat16), spread(12, 2)
    x, weights = torch.randn(12, D).bfloat16(), torch.rand(12, 2).bfloat16()
    compiled = torch.compile(experts, fullgraph=True, backend=backend)
    ours = run(experts, x, weights, chosen, compiled)
    for value, expected in zip(ours, run(experts, x, weights, chosen, experts), strict=True):
        assert relative(value.float(), expected.float()) < 1e-2


def test_second_derivatives_are_refused():
    experts = make_experts(torch.float32)
    x = torch.randn(6, D, requires_grad=True)
    out = experts(x, torch.rand(6, 2), spread(6, 2)).sum()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(out, x, create_graph=True)
    assert torch.autograd.grad(out, x)[0].abs().max() > 0


def test_block_accepts_no_token_at_all():
    block = FastSparseMoE(small_config())
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.zeros(0, 16, D, requires_grad=True)
    out, routing = block(x)
    (out.sum() + routing.z + routing.mean_prob.sum()).backward()
    assert out.shape == x.shape and x.grad.shape == x.shape
    assert routing.counts.tolist() == [0] * E
    assert routing.mean_prob.tolist() == [0] * E and routing.z == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in block.parameters())


BAD = {
    "dtype": (lambda x, w, c: (x.double(), w, c), TypeError, "torch.float64"),
    "weights": (lambda x, w, c: (x, w.double(), c), TypeError, "weights torch.float64"),
    "width": (lambda x, w, c: (x[:, 1:], w, c), ValueError, "x [6, 31]"),
    "tokens": (lambda x, w, c: (x[1:], w, c), ValueError, "x [5, 32]"),
    "slots": (lambda x, w, c: (x, w, c[:, :1]), ValueError, "rows.row [6, 1]"),
    "chosen": (lambda x, w, c: (x, w, c.int()), ValueError, "torch.int32 [6, 2]"),
    "device": (lambda x, w, c: (x.to("meta"), w, c), TypeError, "x on meta"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_inputs_are_refused_by_shape_dtype_and_device(bad):
    change, kind, text = BAD[bad]
    experts = make_experts(torch.float32)
    inputs = change(torch.randn(6, D), torch.rand(6, 2), spread(6, 2))
    with pytest.raises(kind) as failure:
        experts(*inputs)
    assert text in str(failure.value)
    assert "\n" not in str(failure.value)


def test_weights_of_another_number_of_experts_are_refused():
    experts = make_experts(torch.float32)
    experts.down = torch.nn.Parameter(experts.down[:3].clone())
    with pytest.raises(ValueError, match=r"down \[3, 32, 24\]"):
        experts(torch.randn(6, D), torch.rand(6, 2), spread(6, 2))


def test_numbers_that_no_expert_has_add_nothing_and_are_refused_in_debug_mode(monkeypatch):
    experts = make_experts(torch.float32)
    x, weights = torch.randn(3, D), torch.rand(3, 1)
    wild = torch.tensor([[2**62], [-(2**63)], [1]])
    out = experts(x, weights, wild)
    assert out[:2].abs().max() == 0
    assert out[2].abs().max() > 0
    monkeypatch.setenv("OPTIMUS_KERNELS_DEBUG", "1")
    with pytest.raises(ValueError, match="2 expert indices in chosen are outside 0 to 4;"):
        experts(x, weights, wild)


def test_autocast_is_that_of_a_linear_layer():
    """Under autocast, the matrix products of experts use the autocast dtype, and the result has the
    dtype of x. As in a linear layer, fp64 inputs are not cast."""
    experts, chosen = make_experts(torch.float32), spread(12, 2)
    x, weights = torch.randn(12, D), torch.rand(12, 2)
    low = make_experts(torch.bfloat16)
    low.load_state_dict(experts.state_dict())  # torch 2.8 draws other numbers in bf16
    expected = run(low, x.bfloat16(), weights.bfloat16(), chosen, low)
    with torch.autocast("cpu", torch.bfloat16):
        ours = run(experts, x, weights, chosen, experts)
        exact = make_experts()(x.double(), weights.double(), chosen)
    for value, same in zip(ours, expected, strict=True):
        assert value.dtype is torch.float32
        assert relative(value, same.float()) < 8e-3
    assert torch.equal(ours[0], expected[0].float())
    assert torch.equal(exact, make_experts()(x.double(), weights.double(), chosen))


def test_nan_in_the_logits_reaches_the_output_and_nothing_else():
    block = FastSparseMoE(small_config())
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(4, D)
    x[1] = torch.nan
    x.requires_grad_()
    out, routing = block(x)
    assert out.isnan().any(dim=1).tolist() == [False, True, False, False]
    assert int(routing.counts.sum()) == 8
    out.sum().backward()
    assert x.grad.isnan().any(dim=1).tolist() == [False, True, False, False]


def test_experts_of_other_ranks_cost_no_memory(monkeypatch):
    """Under expert parallelism, a rank saves activations only for the experts on this rank. This
    does not change the results."""
    experts, tokens, k, local = make_experts(torch.float32), 64, 2, 2
    with torch.no_grad():
        experts.gate_up = torch.nn.Parameter(experts.gate_up[:local].clone())
        experts.down = torch.nn.Parameter(experts.down[:local].clone())
    chosen = spread(tokens, k)
    rows = int((chosen < local).sum())
    assert 0 < rows < tokens * k
    x = torch.randn(tokens, D, requires_grad=True)
    weights = torch.rand(tokens, k, requires_grad=True)
    kept = kept_for_backward(experts, x, weights, chosen)
    indices = tokens * k + 2 * rows + local + 1
    assert kept == 4 * (tokens * (D + k) + rows * 2 * INNER + indices)
    x, weights = x.detach(), weights.detach()
    everything = run(experts, x, weights, chosen, experts)
    module = importlib.import_module("optimus_kernels.experts")
    monkeypatch.setattr(module, "_without_absent_rows", lambda rows: rows)
    for value, same in zip(run(experts, x, weights, chosen, experts), everything, strict=True):
        assert torch.equal(value, same)
