"""Expert parallelism: experts divided over ep ranks, which see different tokens.

Both dispatchers stand around `Experts`, whose rows may belong to experts that are not held here.

Bytes that reach a rank from others in one layer, forward and backward of one microbatch, with b
bytes an element of activations and 8 an index:

    allgather  (n-1) * T * (4*D*b + 2*K*b + 8*K)
    alltoall   2*(M + R)*D*b + M*(K*b + 8*K) + R*K*b + 8*(n-1)

M rows come from other ranks and R are sent to them, where a token counts once for each rank that
holds some of its experts, however many: with random routing R is near (n-1)*T*(1 - p), where p =
C(E-E/n, K) / C(E, K) is the chance that a rank holds none. So alltoall moves less, the more so the
larger n is beside K, but waits for its counts and sums results token by token.

Dims: T tokens of a rank, D hidden, E experts, K experts a token, n ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from optimus.distributed.collectives import Group, all_to_all
from optimus.model.moe import Experts
from optimus.parallel.exchange import (
    exchange_rows,
    gather_then_scatter_sum,
    scatter_sum_then_gather,
)
from optimus.parallel.placement import Intervals, share

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The held experts' part: x [N, D], weights [N, K], chosen int64 [N, K] -> [N, D]."""

DISPATCHES = ("allgather", "alltoall")


def allgather(compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor, group: Group) -> Tensor:
    """Algorithm 1 of the Optimus paper: every rank gathers all tokens, computes its experts' part
    of each, and the parts are summed where the tokens came from."""
    every_x = gather_then_scatter_sum(x, group)
    every_weight = gather_then_scatter_sum(weights, group)
    with torch.no_grad():
        every_choice = gather_then_scatter_sum(chosen, group)
    return scatter_sum_then_gather(compute(every_x, every_weight, every_choice), group)


def alltoall(
    compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor, group: Group, num_experts: int
) -> Tensor:
    """A token goes once to each rank that holds some of its experts, with all its choices; the
    results come back and are summed. Waits for the counts on the host."""
    tokens, counts = _destinations(chosen, group, num_experts)
    arriving = torch.empty_like(counts)
    all_to_all(arriving, counts, group)
    sent, received = torch.stack([counts, arriving]).tolist()
    rows = [values.index_select(0, tokens) for values in (x, weights, chosen)]
    there = [exchange_rows(values, sent, received, group) for values in rows]
    back = exchange_rows(compute(*there), received, sent, group)
    return torch.zeros_like(x).index_add(0, tokens, back)


def _destinations(chosen: Tensor, group: Group, num_experts: int) -> tuple[Tensor, Tensor]:
    """int64 tokens to send, by rank and then by number, and int64 [n] how many go to each."""
    held_by = torch.div(chosen * group.size, num_experts, rounding_mode="floor")
    needed = torch.zeros(group.size, len(chosen), dtype=torch.bool, device=chosen.device)
    needed[held_by.t(), torch.arange(len(chosen), device=chosen.device)] = True
    return needed.nonzero()[:, 1], needed.sum(1)


def slices(module: nn.Module, index: int, size: int) -> Iterator[tuple[str, int, Intervals]]:
    """As those of tensor parallelism: some experts, whole."""
    if isinstance(module, Experts):
        held = (share(module.gate_up.shape[0], index, size),)
        yield ("gate_up", 0, held)
        yield ("down", 0, held)


def wire_expert_parallel(model: nn.Module, group: Group, dispatch: str) -> None:
    """Put a dispatcher around every layer's experts; `dispatch` is one of DISPATCHES, or "auto"
    until it is measured."""
    dispatch = "allgather" if dispatch == "auto" else dispatch
    for module in model.modules():
        if isinstance(module, Experts):
            ExpertParallel(module, group, dispatch)


def dispatchers(model: nn.Module) -> list[ExpertParallel]:
    """Those of a wired model, by layer."""
    forwards = [module.forward for module in model.modules() if isinstance(module, Experts)]
    return [forward for forward in forwards if isinstance(forward, ExpertParallel)]


class ExpertParallel:
    """Stands in for the forward of one layer's experts. `dispatch` may be set at any time between
    steps."""

    def __init__(self, experts: Experts, group: Group, dispatch: str) -> None:
        assert dispatch in DISPATCHES, dispatch
        self._compute, self._group = experts.forward, group
        self.experts, self.num_experts, self.dispatch = experts, experts.num_experts, dispatch
        module: nn.Module = experts
        module.forward = self

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        if self.dispatch == "alltoall":
            return alltoall(self._compute, x, weights, chosen, self._group, self.num_experts)
        return allgather(self._compute, x, weights, chosen, self._group)
