from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from optimus.model import moe
from optimus.model.moe import Experts, FastSparseMoE, sort_by_expert
from tests.model.small import relative, small_config

D, INNER, E = 32, 24, 5


def make_experts(dtype=torch.float64, num_experts=E) -> Experts:
    torch.manual_seed(0)
    experts = Experts(small_config(num_experts=num_experts, num_experts_per_tok=1)).to(dtype)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts


def naive(experts: Experts, x, weights, chosen):
    """The definition: every token through each of its experts, one at a time."""
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


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition_forward_and_backward(case, multiple, monkeypatch):
    monkeypatch.setattr(moe, "_row_multiple", lambda x: multiple)
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
    parts = []
    for first, last in ((0, 2), (2, 3), (3, 5)):
        part = make_experts(num_experts=last - first)
        part.load_state_dict({n: p[first:last] for n, p in experts.state_dict().items()})
        part.first_expert = first
        parts.append(run(part, x, weights, chosen, part))
    for index in range(3):  # output, gradients of x and weights: sums over the parts
        torch.testing.assert_close(sum(part[index] for part in parts), whole[index])
    for index in (3, 4):  # gradients of the experts: each part has its own
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), whole[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_agree_to_the_last_bit(dtype):
    chosen, experts = spread(200, 2), make_experts(dtype)
    x, weights = torch.randn(200, D, dtype=dtype), torch.rand(200, 2).to(dtype)
    for first, second in zip(
        *(run(experts, x, weights, chosen, experts) for _ in range(2)), strict=True
    ):
        assert torch.equal(first, second)


def test_bf16_is_as_close_to_the_exact_result_as_its_rounding_allows():
    chosen, exact = spread(300, 2), make_experts()
    x, weights = torch.randn(300, D), torch.rand(300, 2)
    rounded = make_experts(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())
    inputs = (x.bfloat16(), weights.bfloat16())
    ours = run(rounded, *inputs, chosen, rounded)
    reference = run(exact, *(value.double() for value in inputs), chosen, exact)
    for value, expected in zip(ours, reference, strict=True):
        assert relative(value.double(), expected) < 8e-3  # a few roundings of 2^-9


@pytest.mark.parametrize("multiple", [1, 8, 32])
@pytest.mark.parametrize("held", [(0, E), (1, 3), (4, 1)])
def test_sorted_rows_are_by_expert_and_then_by_token(multiple, held):
    first, count = held
    chosen = spread(23, 3)
    rows = sort_by_expert(chosen, first, count, multiple)
    assert all(bound % multiple == 0 for bound in rows.bounds)
    total = rows.bounds[-1]
    for expert in range(count):
        start, stop = rows.bounds[expert], rows.bounds[expert + 1]
        slots = (chosen == first + expert).nonzero()
        assert start + len(slots) <= stop < start + len(slots) + multiple
        assert rows.row[chosen == first + expert].tolist() == list(range(start, start + len(slots)))
        assert rows.token[start : start + len(slots)].tolist() == slots[:, 0].tolist()
    elsewhere = (chosen < first) | (chosen >= first + count)
    assert (rows.row[elsewhere] == total).all()


def test_bf16_products_on_a_cpu_have_few_shapes():
    x = torch.zeros(1, 1)
    assert moe._row_multiple(x.bfloat16()) == 32
    assert moe._row_multiple(x) == 1


def test_backward_keeps_only_input_weights_and_preactivation():
    """No gathered input, activation or expert output: sizes that grow with the rows are counted."""
    experts, tokens, k = make_experts(torch.float32), 64, 2
    saved = []
    x = torch.randn(tokens, D, requires_grad=True)
    weights = torch.rand(tokens, k, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        experts(x, weights, spread(tokens, k))
    parameters = {p.data_ptr() for p in experts.parameters()}
    kept = sum(t.numel() for t in saved if t.data_ptr() not in parameters)
    assert kept == tokens * (D + k + k * 2 * INNER)


def test_nan_in_one_token_stays_with_it():
    experts = make_experts(torch.float32)
    x, weights = torch.randn(6, D), torch.rand(6, 1)
    chosen = torch.arange(6).remainder(E).unsqueeze(1)
    x[2] = torch.nan
    bad = experts(x, weights, chosen).isnan().any(dim=1)
    assert bad.tolist() == [False, False, True, False, False, False]


def test_block_accepts_no_token_at_all():
    block = FastSparseMoE(small_config())
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.zeros(0, 16, D, requires_grad=True)
    out, routing = block(x)
    (out.sum() + routing.z + routing.mean_prob.sum()).backward()
    assert out.shape == x.shape and x.grad.shape == x.shape
    assert routing.counts.tolist() == [0] * E
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in block.parameters())
