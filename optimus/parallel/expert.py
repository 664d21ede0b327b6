"""Expert parallelism: the experts of a layer are divided over ep ranks, which read different data.

A dispatcher sends each token to the ranks that have the token's experts, runs the experts and
returns the results to the rank whose data contains the token. In the forward and backward pass of
one layer for one microbatch, a rank receives the following number of bytes from other ranks:

    allgather  (n-1) * T * (4*D*b + 2*K*b + 8*K)
    alltoall   2*(M + R)*D*b + M*(K*b + 8*K) + R*K*b + 8*(n-1)

Symbols: n ep ranks, T tokens in the microbatch of a rank, N tokens for which a rank runs experts,
D hidden, E experts, K experts per token, b bytes per activation element. With alltoall, a rank
receives M tokens from other ranks and sends R tokens to other ranks.
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
from optimus.model.router import CHOICES, Choice, top_k
from optimus.model.transformer import Transformer
from optimus.parallel.exchange import (
    exchange_rows,
    gather_then_scatter_sum,
    scatter_sum_then_gather,
)
from optimus.parallel.placement import Intervals, share

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function (tokens [N, D], weights [N, K], chosen [N, K]) -> [N, D] that computes the outputs of a
rank's experts.

`weights` are routing weights, and `chosen` are int64 expert indices.
"""


class ExpertParallel:
    """`ParallelStyle` that divides the experts of every layer over ep ranks.

    Args:
        group: the ep ranks.
        dispatcher: a key of DISPATCHERS, or "auto". With "auto", the layers use "allgather" until
            `use_dispatcher` is called.
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
    """Yield the slices of a module's parameters on one ep rank.

    Args:
        module: a module of the undivided model.
        index: the rank's index along ep.
        size: the number of ep ranks.

    Yields:
        (name, dim, intervals) for each parameter that ep divides. `name` is relative to `module`.
        `intervals` are the rank's index ranges along `dim`.
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
    """Experts of one ep rank. `forward` exchanges tokens with the other ep ranks."""

    def __init__(self, config: ModelConfig, group: Group, dispatcher: str) -> None:
        super().__init__(config)
        self.first_expert, _ = share(config.experts, group.rank, group.size)
        self._group, self._choose = group, CHOICES[config.router]
        self.use_dispatcher(dispatcher)

    def use_dispatcher(self, name: str) -> None:
        """Use DISPATCHERS[name] from the next forward pass on."""
        self.dispatcher = name
        self._dispatcher = DISPATCHERS[name](self._group, self.num_experts, self._choose)

    def assume_all_tokens(self) -> None:
        """Plan memory for the worst case: all tokens of all ep ranks go to this rank."""
        self._dispatcher.assume_all_tokens()

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        compute = partial(super().forward, save_input_only=save_input_only)
        return self._dispatcher.run(compute, x, weights, chosen)


class Dispatcher(ABC):
    """Base class of the token dispatchers of expert parallelism.

    A dispatcher sends each token to the ranks that have the token's experts, and returns the
    experts' results to the rank whose data contains the token.

    Args:
        group: the ep ranks.
        num_experts: E, the total number of experts on all ranks.
        choose: the function with which the router chooses experts. The dispatcher calls `choose`
            only for meta tensors, to plan memory and traffic.
    """

    def __init__(self, group: Group, num_experts: int, choose: Choice = top_k) -> None:
        self._group, self._num_experts, self._choose = group, num_experts, choose
        self.assumes_all_tokens = False
        """True if plans assume that all tokens of all ranks choose experts of this rank."""

    def assume_all_tokens(self) -> None:
        """See `DispatchedExperts.assume_all_tokens`."""
        self.assumes_all_tokens = True

    @abstractmethod
    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token of this rank.

        All ranks of the group must call this method.

        Args:
            compute: function that runs the experts of this rank.
            x: the tokens of this rank, [T, D].
            weights: routing weights, [T, K].
            chosen: indices of the chosen experts, int64 [T, K]. `weights[t, k]` is for expert
                `chosen[t, k]`.

        Returns:
            [T, D].
        """


class AllGatherDispatcher(Dispatcher):
    """Dispatcher that sends every token to all ranks (Algorithm 1 of the Optimus paper).

    Each rank runs its experts on the tokens of all ranks. A reduce-scatter then sums the results.
    """

    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        all_x = gather_then_scatter_sum(x, self._group)
        all_weights = gather_then_scatter_sum(weights, self._group)
        with torch.no_grad():
            all_chosen = gather_then_scatter_sum(chosen, self._group)
        return scatter_sum_then_gather(compute(all_x, all_weights, all_chosen), self._group)


class AllToAllDispatcher(Dispatcher):
    """Dispatcher that sends a token only to the ranks that have experts of the token.

    The rank whose data contains the token sums the results of these ranks. In `run`, the host waits
    for the device, because the sizes of the exchanges depend on the chosen experts.
    """

    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        group = self._group
        if chosen.is_meta:
            tokens, sent, received = self._planned_destinations(chosen)
        else:
            tokens, counts = self._destinations(chosen)
            # The counts are exchanged first, because the other exchanges need them as sizes.
            # `chosen`, unlike x and the weights, is int64 and has no gradient.
            arriving = torch.empty_like(counts)
            all_to_all(arriving, counts, group)
            sent, received = torch.stack([counts, arriving]).tolist()
        rows = [values.index_select(0, tokens) for values in (x, weights, chosen)]
        dispatched = [exchange_rows(values, sent, received, group) for values in rows]
        back = exchange_rows(compute(*dispatched), received, sent, group)
        return torch.zeros_like(x).index_add(0, tokens, back)

    def _destinations(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indices of the tokens to send, and the number of tokens to send to each rank.

        The indices are ordered by destination rank. If a token is sent to several ranks, its index
        occurs once for each of these ranks.
        """
        size = self._group.size
        rank_of = torch.div(chosen * size, self._num_experts, rounding_mode="floor")
        needed = torch.zeros(size, len(chosen), dtype=torch.bool, device=chosen.device)
        needed[rank_of.t(), torch.arange(len(chosen), device=chosen.device)] = True
        return needed.nonzero()[:, 1], needed.sum(1)

    def _planned_destinations(self, chosen: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Return a meta tensor for the indices of the tokens to send, and two lists: the number of
        tokens to send to each rank, and the number of tokens to receive from each rank.

        Tensors on the meta device have no values. Therefore this method assumes random expert
        probabilities, which balance the loads of the experts. If `assumes_all_tokens` is True, this
        method assumes instead that all tokens choose experts of this rank.
        """
        generator = torch.Generator().manual_seed(0)
        probs = torch.rand(len(chosen), self._num_experts, generator=generator)
        _, assumed = self._choose(probs, chosen.shape[1])
        tokens, counts = self._destinations(assumed)
        if self.assumes_all_tokens:
            tokens, counts = torch.arange(len(chosen)), torch.zeros_like(counts)
            counts[self._group.rank] = len(chosen)
        all_to_all(torch.empty_like(counts, device="meta"), counts.to("meta"), self._group)
        # With balanced loads, this rank receives the same number of tokens from each rank, itself
        # included.
        received = [int(counts[self._group.rank])] * self._group.size
        return tokens.to("meta"), counts.tolist(), received


DISPATCHERS: Mapping[str, type[Dispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}
"""Maps a value of `parallel.ep_dispatch` to the dispatcher class that the value selects."""
