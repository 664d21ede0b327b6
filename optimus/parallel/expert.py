"""Expert parallelism: the experts are divided over ep ranks, each of which has other tokens.

A dispatcher brings tokens to the ranks that have their experts, runs `Experts` there and brings the
results back. `Experts` skips rows of experts that are on other ranks.

Bytes that a rank receives from other ranks in one layer, in forward and backward of one microbatch;
an element of activations has b bytes, an index 8:

    allgather  (n-1) * T * (4*D*b + 2*K*b + 8*K)
    alltoall   2*(M + R)*D*b + M*(K*b + 8*K) + R*K*b + 8*(n-1)

The rank receives M rows from other ranks and sends R rows to them. A token is one row for each rank
that has some of its experts, however many. With random routing R is about (n-1)*T*(1 - p), where p
= C(E-E/n, K) / C(E, K) is the probability that a rank has none of a token's experts. So alltoall
moves fewer bytes than allgather, and the ratio falls as n/K grows. But alltoall waits for the
numbers of rows on the host and adds the results token by token.

Dims: T tokens of a rank, N tokens after dispatch, D hidden, E experts, K experts a token, n ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.distributed.collectives import Group, all_to_all
from optimus.model.moe import Experts, FastSparseMoE
from optimus.model.transformer import Transformer
from optimus.parallel.exchange import (
    exchange_rows,
    gather_then_scatter_sum,
    scatter_sum_then_gather,
)
from optimus.parallel.placement import Intervals, share

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function that runs a rank's experts: x [N, D], weights [N, K], chosen int64 [N, K] -> [N, D]."""


class ExpertParallel:
    """Style that divides the experts of every layer over ep ranks.

    Args:
        group: the ep ranks.
        dispatcher: a name in DISPATCHERS; or "auto", which uses "allgather" until `use_dispatcher`
            is called.
    """

    def __init__(self, group: Group, dispatcher: str) -> None:
        self._group = group
        self._dispatcher = "allgather" if dispatcher == "auto" else dispatcher

    def apply(self, model: Transformer) -> None:
        for block in model.each_block():
            if isinstance(block.mlp, FastSparseMoE):
                experts = DispatchedExperts(block.config, self._group, self._dispatcher)
                block.mlp.register_module("experts", experts)


def slices(module: nn.Module, index: int, size: int) -> Iterator[tuple[str, int, Intervals]]:
    """Return a rank's slices of the parameters of a module, in the form of `tensor.slices`: some of
    the experts, each of them whole."""
    if isinstance(module, Experts):
        experts = (share(module.gate_up.shape[0], index, size),)
        yield ("gate_up", 0, experts)
        yield ("down", 0, experts)


def use_dispatcher(model: nn.Module, name: str) -> None:
    """Set the dispatcher of all divided experts of a model, by its name in DISPATCHERS."""
    for experts in dispatched_experts(model):
        experts.use_dispatcher(name)


def dispatched_experts(model: nn.Module) -> list[DispatchedExperts]:
    """Return the divided experts of a model, in the order of layers."""
    return [module for module in model.modules() if isinstance(module, DispatchedExperts)]


class DispatchedExperts(Experts):
    """Experts of a layer that are on this rank. A dispatcher brings them tokens of all ep ranks."""

    def __init__(self, config: ModelConfig, group: Group, dispatcher: str) -> None:
        super().__init__(config)
        self.first_expert, _ = share(config.experts, group.rank, group.size)
        self._group = group
        self.use_dispatcher(dispatcher)

    def use_dispatcher(self, name: str) -> None:
        """Set the dispatcher, by its name in DISPATCHERS, from the next forward pass on."""
        self.dispatcher = name
        self._dispatcher = DISPATCHERS[name](self._group, self.num_experts)

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        compute = partial(super().forward, save_input_only=save_input_only)
        return self._dispatcher.run(compute, x, weights, chosen)


class Dispatcher(ABC):
    """A way to bring tokens to the ranks that have their experts, and the results back.

    Args:
        group: the ep ranks.
        num_experts: E, the number of experts on all ranks together.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        self._group, self._num_experts = group, num_experts

    @abstractmethod
    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of each token's expert results, for the tokens of this rank.

        All ranks of the group must call this.

        Args:
            compute: runs the experts of this rank.
            x: [T, D].
            weights: routing weights [T, K].
            chosen: the number of the expert of each routing weight, int64 [T, K].

        Returns:
            [T, D].
        """


class AllGatherDispatcher(Dispatcher):
    """Dispatcher by Algorithm 1 of the Optimus paper: every rank gathers the tokens of all ranks
    and computes the results of its experts for them; a reduce-scatter then sums a token's results
    on the rank of the token."""

    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        all_x = gather_then_scatter_sum(x, self._group)
        all_weights = gather_then_scatter_sum(weights, self._group)
        with torch.no_grad():
            all_chosen = gather_then_scatter_sum(chosen, self._group)
        return scatter_sum_then_gather(compute(all_x, all_weights, all_chosen), self._group)


class AllToAllDispatcher(Dispatcher):
    """Dispatcher that sends a token, with all its K choices, once to each rank that has some of its
    experts; the results come back and are summed.

    The host waits for the number of rows that each rank sends.
    """

    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        group = self._group
        tokens, counts = self._destinations(chosen)
        arriving = torch.empty_like(counts)
        all_to_all(arriving, counts, group)
        sent, received = torch.stack([counts, arriving]).tolist()
        rows = [values.index_select(0, tokens) for values in (x, weights, chosen)]
        dispatched = [exchange_rows(values, sent, received, group) for values in rows]
        back = exchange_rows(compute(*dispatched), received, sent, group)
        return torch.zeros_like(x).index_add(0, tokens, back)

    def _destinations(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of the tokens to send, int64, and the number of tokens for each rank,
        int64 [n].

        The tokens are ordered by destination rank, then by number.
        """
        size = self._group.size
        rank_of = torch.div(chosen * size, self._num_experts, rounding_mode="floor")
        needed = torch.zeros(size, len(chosen), dtype=torch.bool, device=chosen.device)
        needed[rank_of.t(), torch.arange(len(chosen), device=chosen.device)] = True
        return needed.nonzero()[:, 1], needed.sum(1)


DISPATCHERS: Mapping[str, type[Dispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}
"""Dispatchers by the names that `parallel.ep_dispatch` takes."""
