"""Where the gradients of experts' weights go: to autograd, straight to their memory, or later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import optimus_kernels as kernels
from optimus.model import deferred_gradients
from optimus.model.moe import Experts
from optimus_kernels import experts_loop
from tests.helpers.forms import FORMS, in_form
from tests.model.small import small_config

# 480 rows an expert: from 385 on MKL adds a product to a sum in another order than at its end.
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
    """x, weights and choices of a microbatch; expert 4 gets no row in the first."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(TOKENS, D, generator=generator).to(dtype)
    weights = torch.rand(TOKENS, 2, generator=generator).to(dtype)
    held = E if number else E - 1
    return x, weights, torch.rand(TOKENS, held, generator=generator).topk(2).indices


def one_backward(experts: Experts, number: int, save_input_only: bool = False) -> list[Tensor]:
    """Gradients of x and of the routing weights."""
    x, weights, chosen = inputs(number, experts.down.dtype)
    leaves = [x.requires_grad_(), weights.requires_grad_()]
    out = experts(*leaves, chosen, save_input_only)
    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out).to(out.dtype))
    return [leaf.grad for leaf in leaves]


def by_autograd(dtype, **settings) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of inputs, and of weights made apart in `dtype` and then added up in fp32."""
    experts = make_experts(dtype, **settings)
    sums, of_inputs = [torch.zeros(p.shape) for p in experts.parameters()], []
    for number in range(MICROBATCHES):
        experts.zero_grad()
        of_inputs += one_backward(experts, number)
        for total, parameter in zip(sums, experts.parameters(), strict=True):
            total += parameter.grad
    return of_inputs, sums


def straight(experts: Experts) -> list[Tensor]:
    sums = [torch.zeros(parameter.shape) for parameter in experts.parameters()]
    experts.write_gradients_to(lambda: kernels.WeightGrads(*sums, add=True))
    return sums


@pytest.fixture(params=FORMS)
def form(request):
    with in_form(request.param):
        yield request.param


@pytest.fixture(params=[True, False], ids=["own-products", "torch-products"])
def products(request, monkeypatch):
    """With our bf16 kernel where this machine has it, and as on one that has not."""
    if not request.param:
        for module in ("product", "experts_loop"):
            monkeypatch.setattr(f"optimus_kernels.{module}.amx_kernel", lambda like: None)


def assert_same(ours: list[Tensor], expected: list[Tensor]) -> None:
    for value, other in zip(ours, expected, strict=True):
        assert torch.equal(value, other), f"off by {(value - other).abs().max():.1e}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_have_the_bits_of_gradients_made_apart_and_then_added(dtype, form, products):
    if form == "torch" and dtype is torch.float16:
        pytest.skip("torch has no grouped product for it")
    of_inputs, sums = by_autograd(dtype)
    experts = make_experts(dtype)
    memory = straight(experts)
    for number in range(MICROBATCHES):
        assert_same(one_backward(experts, number), of_inputs[2 * number : 2 * number + 2])
    assert_same(memory, sums)
    assert all(parameter.grad is None for parameter in experts.parameters())


@pytest.mark.parametrize("owned", [True, False], ids=["straight", "to-grad"])
@pytest.mark.parametrize("inner", [24, 20])
@pytest.mark.parametrize("input_only", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_waits_gives_the_same_bits(dtype, input_only, inner, owned, form, products):
    """Of 20 fp32 or 16-bit numbers, rows do not begin on 64 bytes."""
    if form == "torch" and (dtype is torch.float16 or inner * dtype.itemsize % 16):
        pytest.skip("torch has no grouped product for it")
    of_inputs, sums = by_autograd(dtype, inner=inner)
    experts = make_experts(dtype, inner=inner)
    memory = straight(experts) if owned else [torch.zeros_like(total) for total in sums]
    waiting = []
    for number in range(MICROBATCHES):
        with deferred_gradients.DeferredGradients() as late:
            found = one_backward(experts, number, input_only)
        assert_same(found, of_inputs[2 * number : 2 * number + 2])
        waiting.append(late)
    assert not any(total.any() for total in memory)
    for late in waiting:
        assert all(parameter.grad is None for parameter in experts.parameters())
        late.compute()
        if not owned:
            for total, parameter in zip(memory, experts.parameters(), strict=True):
                total += parameter.grad
            experts.zero_grad()
    assert_same(memory, sums)


@pytest.mark.parametrize("late", [True, False])
def test_hooks_behind_accumulation_run_whoever_adds(late):
    experts, ran = make_experts(torch.float32), []
    straight(experts)
    for name, parameter in experts.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: ran.append(name))
    if late:
        with deferred_gradients.DeferredGradients() as work:
            one_backward(experts, 0)
        ran.clear()  # autograd ran them for gradients that were not there yet
        work.compute()
    else:
        one_backward(experts, 0)
    assert sorted(ran) == ["down", "gate_up"]


@pytest.mark.parametrize("frozen", ["gate_up", "down"])
def test_where_a_weight_is_frozen_autograd_does_the_other(frozen):
    experts = make_experts(torch.float32)
    one_backward(experts, 1)
    expected = {name: p.grad for name, p in experts.named_parameters()}
    experts = make_experts(torch.float32)
    memory = straight(experts)
    getattr(experts, frozen).requires_grad_(False)
    with deferred_gradients.DeferredGradients() as late:
        one_backward(experts, 1)
    late.compute()
    for name, parameter in experts.named_parameters():
        assert (
            parameter.grad is None
            if name == frozen
            else torch.equal(parameter.grad, expected[name])
        )
    assert not any(total.any() for total in memory)


def test_no_memory_as_large_as_all_experts_is_taken(monkeypatch):
    """Beside the rows' own: one expert's gradient at most."""
    experts, taken = make_experts(torch.float32), []
    straight(experts)
    plain = experts_loop.memory.empty

    def empty(shape, like):
        taken.append(torch.Size(shape).numel())
        return plain(shape, like)

    monkeypatch.setattr(experts_loop.memory, "empty", empty)
    one_backward(experts, 1)
    with deferred_gradients.DeferredGradients() as late:
        one_backward(experts, 1)
    late.compute()
    assert taken.count(experts.gate_up[0].numel()) == 2
    assert experts.gate_up.numel() not in taken and experts.down.numel() not in taken
