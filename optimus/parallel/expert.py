"""Expert parallelism: the experts of a layer are divided over ep ranks, which have different data.

A dispatcher sends each token to the ranks that have its chosen experts, runs `Experts` on these
ranks and returns the results. On each rank, `Experts` computes only the chosen experts that the
rank has.

Dims: T tokens of a rank, N tokens after dispatch, D hidden, E experts, K experts per token, n
ranks.

The following formulas are the number of bytes that a rank receives from other ranks for one layer
and one microbatch, in forward and backward together. An activation has b bytes per element, and an
index has 8 bytes.

    allgather  (n-1) * T * (4*D*b + 2*K*b + 8*K)
    alltoall   2*(M + R)*D*b + M*(K*b + 8*K) + R*K*b + 8*(n-1)

With alltoall, a rank receives M rows from other ranks before it runs its experts, and sends R rows
to other ranks. It sends a token as a single row to each rank that has at least one of the token's
experts. With random routing, R is about (n-1)*T*(1 - p). Here p is the probability that a given
rank has none of a token's experts: p = C(E-E/n, K) / C(E, K), where C is the binomial coefficient.
Alltoall therefore moves fewer bytes than allgather, and the ratio alltoall/allgather falls as n/K
grows. Alltoall has two other costs: the host waits for the numbers of rows, and each rank adds the
returned rows to their tokens.
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
"""Function that runs a rank's experts on N tokens. Its arguments are the tokens [N, D], the routing
weights [N, K] and the indices of the chosen experts, int64 [N, K]. It returns [N, D]. D is the
hidden size, K the number of experts per token."""


class ExpertParallel:
    """Style that divides the experts of every layer over ep ranks.

    Args:
        group: the ep ranks.
        dispatcher: a key of DISPATCHERS, or "auto", which means "allgather" until `use_dispatcher`
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
    """Return the slices of a module's parameters on one ep rank: the weights of a range of experts.

    Args:
        module: a module of the undivided model.
        index: the rank's index along ep.
        size: the number of ep ranks.

    Returns:
        For each parameter that ep divides: its name in `module`, the divided dim, and the rank's
        intervals of this dim.
    """
    if isinstance(module, Experts):
        experts = (share(module.gate_up.shape[0], index, size),)
        yield ("gate_up", 0, experts)
        yield ("down", 0, experts)


def use_dispatcher(model: nn.Module, name: str) -> None:
    """Make all expert-parallel layers of a model use DISPATCHERS[name]."""
    for experts in dispatched_experts(model):
        experts.use_dispatcher(name)


def dispatched_experts(model: nn.Module) -> list[DispatchedExperts]:
    """Return all `DispatchedExperts` modules of a model, in the order of layers."""
    return [module for module in model.modules() if isinstance(module, DispatchedExperts)]


class DispatchedExperts(Experts):
    """Expert-parallel version of `Experts`. It has only this rank's experts and exchanges tokens
    with the other ep ranks."""

    def __init__(self, config: ModelConfig, group: Group, dispatcher: str) -> None:
        super().__init__(config)
        self.first_expert, _ = share(config.experts, group.rank, group.size)
        self._group = group
        self.use_dispatcher(dispatcher)

    def use_dispatcher(self, name: str) -> None:
        """Use DISPATCHERS[name] from the next forward pass on."""
        self.dispatcher = name
        self._dispatcher = DISPATCHERS[name](self._group, self.num_experts)

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        compute = partial(super().forward, save_input_only=save_input_only)
        return self._dispatcher.run(compute, x, weights, chosen)


class Dispatcher(ABC):
    """Base class of dispatchers. A dispatcher sends each token to the ranks that have the token's
    experts, and returns the results to the token's rank.

    Args:
        group: the ep ranks.
        num_experts: E, the total number of experts on all ranks.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        self._group, self._num_experts = group, num_experts

    @abstractmethod
    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token of this rank.

        All ranks of the group must call this method.

        Args:
            compute: function that runs the experts of this rank.
            x: the tokens of this rank, [T, D].
            weights: routing weights, [T, K].
            chosen: index of the expert of each routing weight, int64 [T, K].

        Returns:
            [T, D].
        """


class AllGatherDispatcher(Dispatcher):
    """Dispatcher that sends every token to all ranks (Algorithm 1 of the Optimus paper).

    Every rank all-gathers the tokens of all ranks and runs its own experts on them. A
    reduce-scatter then sums the results and returns each token's sum to the token's rank.
    """

    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        all_x = gather_then_scatter_sum(x, self._group)
        all_weights = gather_then_scatter_sum(weights, self._group)
        with torch.no_grad():
            all_chosen = gather_then_scatter_sum(chosen, self._group)
        return scatter_sum_then_gather(compute(all_x, all_weights, all_chosen), self._group)


class AllToAllDispatcher(Dispatcher):
    """Dispatcher that sends a token only to the ranks that have at least one of its experts.

    Each of these ranks receives the token once, with the indices and weights of all its chosen
    experts, and returns one result. The token's own rank sums the results. The host waits until it
    knows the number of rows from each rank.
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
        """Return the tokens to send to each rank.

        Returns:
            The indices of the tokens, int64, ordered by destination rank and then by index. A token
            with several destinations occurs several times.
            The number of tokens for each rank, int64 [number of ranks].
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
"""Dispatcher classes by their names in `parallel.ep_dispatch`."""
