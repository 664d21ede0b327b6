"""Weight gradients of experts: accumulated by autograd, written to given tensors, or deferred."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import optimus_kernels as kernels
from optimus.model import deferred_gradients
from optimus.model.moe import Experts
from optimus_kernels import experts_loop
from tests.kernels.op_checks import FORMS, in_form
from tests.model.small import small_config

# 480 rows per expert: with 385 rows or more, MKL's addmm adds a product to the sum block by block
# instead of adding the complete product.
D, E, TOKENS, MICROBATCHES = 64, 5, 1200, 3
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_experts(dtype, inner: int = 24) -> Experts:
    torch.manual_seed(0)
    sizes = {"hidden_size": D, "intermediate_size": inner, "num_experts": E}
    experts = Experts(small_config(**sizes, num_experts_per_tok=2)).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return experts


def inputs(number: int, dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return x [TOKENS, D], the routing weights and the chosen experts (both [TOKENS, 2]) of
    microbatch `number`. In microbatch 0, no token chooses expert 4."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(TOKENS, D, generator=generator).to(dtype)
    weights = torch.rand(TOKENS, 2, generator=generator).to(dtype)
    used = E if number else E - 1
    return x, weights, torch.rand(TOKENS, used, generator=generator).topk(2).indices


def run_backward(experts: Experts, number: int, save_input_only: bool = False) -> list[Tensor]:
    """Run forward and backward for microbatch `number`. Return the gradients of x and of the
    routing weights. With `save_input_only`, backward computes the pre-activations again."""
    x, weights, chosen = inputs(number, experts.down.dtype)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    out = experts(*leaves, chosen, save_input_only)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype))
    return [leaf.grad for leaf in leaves]


def by_autograd(dtype, **settings) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists of gradients computed by autograd: the input gradients of each microbatch,
    and the weight gradients summed over microbatches."""
    experts = make_experts(dtype, **settings)
    sums, of_inputs = [torch.zeros(p.shape) for p in experts.parameters()], []
    for number in range(MICROBATCHES):
        experts.zero_grad()
        of_inputs += run_backward(experts, number)
        for total, parameter in zip(sums, experts.parameters(), strict=True):
            total += parameter.grad
    return of_inputs, sums


def write_to_sums(experts: Experts) -> list[Tensor]:
    sums = [torch.zeros(parameter.shape) for parameter in experts.parameters()]
    experts.write_gradients_to(lambda: kernels.WeightGrads(*sums, add=True))
    return sums


@pytest.fixture(params=FORMS)
def form(request):
    with in_form(request.param):
        yield request.param


@pytest.fixture(params=[True, False], ids=["own-products", "torch-products"])
def products(request, monkeypatch):
    """Run a test twice: with the AMX kernel of Optimus, which needs a CPU with AMX, and with the
    matrix products of torch."""
    if not request.param:
        for module in ("product", "experts_loop"):
            monkeypatch.setattr(f"optimus_kernels.{module}.amx_kernel", lambda like: None)


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for value, other in zip(ours, expected, strict=True):
        assert torch.equal(value, other), f"off by {(value - other).abs().max():.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_bits_of_separate_gradients(dtype, form, products):
    if form == "torch" and dtype is torch.float16:
        pytest.skip("torch has no grouped product for this dtype or row size")
    of_inputs, sums = by_autograd(dtype)
    experts = make_experts(dtype)
    memory = write_to_sums(experts)
    for number in range(MICROBATCHES):
        assert_same(run_backward(experts, number), of_inputs[2 * number : 2 * number + 2])
    assert_same(memory, sums)
    assert all(parameter.grad is None for parameter in experts.parameters())


@pytest.mark.parametrize("to_sums", [True, False], ids=["to-sums", "to-grad"])
@pytest.mark.parametrize("inner", [24, 20])  # with 20, not all 16-bit rows are 16-byte aligned
@pytest.mark.parametrize("input_only", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_deferred_gradients_have_the_same_bits(dtype, input_only, inner, to_sums, form, products):
    """Deferred gradients are bit-identical to the gradients that autograd computes."""
    if form == "torch" and (dtype is torch.float16 or inner * dtype.itemsize % 16):
        pytest.skip("torch has no grouped product for this dtype or row size")
    of_inputs, sums = by_autograd(dtype, inner=inner)
    experts = make_experts(dtype, inner=inner)
    memory = write_to_sums(experts) if to_sums else [torch.zeros_like(total) for total in sums]
    waiting = []
    for number in range(MICROBATCHES):
        with deferred_gradients.DeferredGradients() as late:
            of_batch = run_backward(experts, number, input_only)
        assert_same(of_batch, of_inputs[2 * number : 2 * number + 2])
        waiting.append(late)
    assert not any(total.any() for total in memory)
    for late in waiting:
        assert all(parameter.grad is None for parameter in experts.parameters())
        late.compute()
        if not to_sums:
            for total, parameter in zip(memory, experts.parameters(), strict=True):
                total += parameter.grad
            experts.zero_grad()
    assert_same(memory, sums)


@pytest.mark.parametrize("deferred", [True, False])
def test_hooks_after_accumulation_run_if_experts_add(deferred):
    experts, ran = make_experts(torch.float32), []
    write_to_sums(experts)
    for name, parameter in experts.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: ran.append(name))
    if deferred:
        with deferred_gradients.DeferredGradients() as work:
            run_backward(experts, 0)
        ran.clear()  # computations that autograd started too early
        work.compute()
    else:
        run_backward(experts, 0)
    assert sorted(ran) == ["down", "gate_up"]


@pytest.mark.parametrize("frozen", ["gate_up", "down"])
def test_autograd_adds_the_gradient_if_the_other_weight_is_frozen(frozen):
    experts = make_experts(torch.float32)
    run_backward(experts, 1)
    expected = {name: p.grad for name, p in experts.named_parameters()}
    experts = make_experts(torch.float32)
    memory = write_to_sums(experts)
    getattr(experts, frozen).requires_grad_(False)
    with deferred_gradients.DeferredGradients() as late:
        run_backward(experts, 1)
    late.compute()
    for name, parameter in experts.named_parameters():
        assert (
            parameter.grad is None
            if name == frozen
            else torch.equal(parameter.grad, expected[name])
        )
    assert not any(total.any() for total in memory)


def test_no_memory_of_the_size_of_all_experts_is_allocated(monkeypatch):
    """A backward that writes weight gradients to given tensors computes the gradients of one expert
    at a time, so its buffers have the size of the weights of a single expert."""
    experts, sizes = make_experts(torch.float32), []
    write_to_sums(experts)
    plain = experts_loop.memory.empty

    def empty(shape, like):
        sizes.append(torch.Size(shape).numel())
        return plain(shape, like)

    monkeypatch.setattr(experts_loop.memory, "empty", empty)
    run_backward(experts, 1)
    with deferred_gradients.DeferredGradients() as late:
        run_backward(experts, 1)
    late.compute()
    assert sizes.count(experts.gate_up[0].numel()) == 2
    assert experts.gate_up.numel() not in sizes and experts.down.numel() not in sizes
