"""Tests of the expert-parallel dispatchers against a single process that has all experts."""

from __future__ import annotations

import pytest
import torch

from optimus.distributed.collectives import Group
from optimus.distributed.world import start_world
from optimus.model.moe import Experts
from optimus.model.transformer import Transformer
from optimus.parallel import exchange
from optimus.parallel.dispatch_timing import time_dispatchers
from optimus.parallel.expert import DISPATCHERS, DispatchedExperts, ExpertParallel
from tests.model.small import small_config

D, E, K = 32, 12, 3
CONFIG = {"num_experts": E, "num_experts_per_tok": K, "intermediate_size": 16}
ROUTINGS = ("random", "one-rank", "empty-rank", "no-token")


def whole_experts(dtype: torch.dtype) -> Experts:
    torch.manual_seed(3)
    experts = Experts(small_config(**CONFIG))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype)


def microbatch_of(rank: int, routing: str, tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return x, routing weights, chosen experts and output gradient of one data-parallel rank."""
    tokens = 0 if routing == "no-token" and rank == 0 else tokens
    generator = torch.Generator().manual_seed(10 + rank)
    chance = torch.rand(tokens, E, generator=generator)
    if routing == "one-rank":  # all tokens choose experts of the first rank (of up to 4 ranks)
        chance[:, :K] += 1
    if routing == "empty-rank":  # no token chooses an expert of the first rank
        chance[:, : E // 2] -= 1
    chosen = chance.topk(K, dim=1).indices
    x, grad = (torch.randn(tokens, D, generator=generator).to(dtype) for _ in range(2))
    weights = torch.rand(tokens, K, generator=generator).to(dtype)
    return [x, weights, chosen, grad]


def run(experts: Experts, x, weights, chosen, grad) -> dict[str, torch.Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = experts(x, weights, chosen)
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad, "weights": weights.grad}


def divided_experts(dtype: torch.dtype, group: Group, dispatcher: str) -> DispatchedExperts:
    experts, share = DispatchedExperts(small_config(**CONFIG), group, dispatcher), E // group.size
    whole = dict(whole_experts(dtype).named_parameters())
    for name, parameter in experts.named_parameters():
        parameter.data = whole[name].data[group.rank * share : (group.rank + 1) * share].clone()
    return experts


class Traffic:
    """Counter of the bytes that this rank receives from other ranks by collectives of
    `exchange`."""

    def __init__(self) -> None:
        self.arrived = 0
        originals = (exchange.all_gather, exchange.reduce_scatter_sum, exchange.all_to_all_rows)
        gather, scatter, rows_of = originals

        def all_gather(out, shard, group):
            self.arrived += out.nbytes - shard.nbytes
            gather(out, shard, group)

        def reduce_scatter_sum(out, whole, group):
            self.arrived += whole.nbytes - out.nbytes
            scatter(out, whole, group)

        def all_to_all_rows(rows, sent, received, group):
            out = rows_of(rows, sent, received, group)
            others = sum(received) - received[group.rank]
            self.arrived += out.nbytes // max(1, len(out)) * others
            return out

        exchange.all_gather, exchange.reduce_scatter_sum = all_gather, reduce_scatter_sum
        exchange.all_to_all_rows = all_to_all_rows


def dispatched(dispatch: str, dtype: torch.dtype) -> dict[str, dict]:
    """Run experts with the dispatcher `dispatch` on this rank, once for each routing.

    Returns:
        For each routing: the output, the gradients, the number of tokens that this rank's experts
        process, and the number of bytes that this rank receives from other ranks.
    """
    torch.set_num_threads(1)
    world = start_world(device="cpu")
    group = Group(world.size, world.rank, world.everyone.handle, "ep")
    experts, rows, forward = divided_experts(dtype, group, dispatch), [], Experts.forward

    def counted(self, x, *rest, **options):
        rows.append(len(x))
        return forward(self, x, *rest, **options)

    Experts.forward = counted
    traffic, results = Traffic(), {}
    # With "no-token" the ranks have different numbers of tokens, which only alltoall supports.
    for routing in ROUTINGS[: 4 if dispatch == "alltoall" else 3]:
        uneven = dispatch == "alltoall"
        batch = microbatch_of(group.rank, routing, 20 + (group.rank if uneven else 0), dtype)
        experts.zero_grad()
        traffic.arrived = 0
        result = run(experts, *batch)
        result |= {name: p.grad for name, p in experts.named_parameters()}
        results[routing] = result | {"rows": rows[-1], "arrived": traffic.arrived}
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dispatch", DISPATCHERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_outputs_gradients_rows_and_bytes(ranks, size, dispatch, dtype):
    results = ranks(size, dispatched, dispatch, dtype, start_world=False)
    uneven = dispatch == "alltoall"
    # In bf16 each rank rounds its summand of a token's output, and the sum is rounded again.
    tolerance = 1e-6 if dtype is torch.float32 else size * 2**-8
    for routing in results[0]:
        whole = whole_experts(dtype)
        inputs = [
            microbatch_of(rank, routing, 20 + (rank if uneven else 0), dtype)
            for rank in range(size)
        ]
        expected = run(whole, *(torch.cat(tensors) for tensors in zip(*inputs, strict=True)))
        many = [result[routing] for result in results]
        for name in ("out", "x", "weights"):
            close(torch.cat([r[name] for r in many]), expected[name], tolerance, name)
        for name, parameter in whole.named_parameters():
            close(torch.cat([r[name] for r in many]), parameter.grad, tolerance, name)
        chosen = [choices for _, _, choices, _ in inputs]
        sent = [[needed(choices, rank, size) for rank in range(size)] for choices in chosen]
        for rank, result in enumerate(many):
            tokens = len(chosen[rank])
            arriving = sum(sent[source][rank] for source in range(size))
            away = sum(sent[rank]) - sent[rank][rank]
            arriving_from_others = arriving - sent[rank][rank]
            b = dtype.itemsize
            if uneven:
                assert result["rows"] == arriving, "a token is missing or arrives twice"
                # Another collective exchanges the counts of rows, 8 * (n - 1) bytes. `Traffic` does
                # not count this collective.
                assert result["arrived"] == (
                    2 * (arriving_from_others + away) * D * b
                    + arriving_from_others * (K * b + 8 * K)
                    + away * K * b
                )
            else:
                assert result["rows"] == size * tokens
                assert result["arrived"] == (size - 1) * tokens * (4 * D * b + 2 * K * b + 8 * K)


def needed(chosen: torch.Tensor, rank: int, size: int) -> int:
    """Return the number of tokens for which at least one chosen expert is on `rank`."""
    share = E // size
    return int(((chosen >= rank * share) & (chosen < (rank + 1) * share)).any(1).sum())


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float, name: str) -> None:
    error = (got.double() - expected.double()).norm()
    assert got.shape == expected.shape and error <= tolerance * expected.double().norm(), name


def time_on_rank() -> tuple[dict[str, float], list]:
    world = start_world(device="cpu")
    group = Group(world.size, world.rank, world.everyone.handle, "ep")
    model = Transformer(small_config(**CONFIG, num_layers=1))
    ExpertParallel(group, "alltoall").apply(model)
    experts = model.blocks["0"].mlp.experts
    for parameter in experts.parameters():
        parameter.data = torch.randn(E // group.size, *parameter.shape[1:])
    times = time_dispatchers(model, (64, D), K, torch.float32, world.everyone, world.rank)
    return times, [experts.dispatcher, [p.grad for p in experts.parameters()]]


def test_timing_is_the_same_on_all_ranks_and_changes_nothing(ranks):
    (times, left), other = ranks(2, time_on_rank, start_world=False)
    assert other == (times, left)
    assert set(times) == set(DISPATCHERS) and min(times.values()) > 0
    assert left == ["alltoall", [None, None]]
