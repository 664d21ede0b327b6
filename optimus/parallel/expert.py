"""Expert parallelism: experts divided over ep ranks, which see different tokens.

A dispatcher exchanges tokens around `Experts`, which skip rows of experts that other ranks have.

Bytes that reach a rank from others in one layer, forward and backward of one microbatch, with b
bytes an element of activations and 8 an index:

    allgather  (n-1) * T * (4*D*b + 2*K*b + 8*K)
    alltoall   2*(M + R)*D*b + M*(K*b + 8*K) + R*K*b + 8*(n-1)

M rows come from other ranks and R are sent to them, where a token counts once for each rank that
has some of its experts, however many: with random routing R is near (n-1)*T*(1 - p), where p =
C(E-E/n, K) / C(E, K) is the chance that a rank has none. So alltoall moves less, the more so the
larger n is compared with K, but waits for its counts and sums results token by token.

Dims: T tokens of a rank, N tokens after dispatch, D hidden, E experts, K experts a token, n ranks.
"""

from __future__ import annotations

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
"""The results of this rank's experts: x [N, D], weights [N, K], chosen int64 [N, K] -> [N, D]."""


class ExpertParallel:
    """Style that divides the experts of every layer over ep ranks.

    Args:
        group: the ep ranks.
        dispatcher: a name in DISPATCHERS, or "auto": "allgather" until `use_dispatcher` is called.
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
    """Return how ep divides the parameters of a module, as `tensor.slices` does: some experts,
    whole."""
    if isinstance(module, Experts):
        experts = (share(module.gate_up.shape[0], index, size),)
        yield ("gate_up", 0, experts)
        yield ("down", 0, experts)


def use_dispatcher(model: nn.Module, name: str) -> None:
    """Let all experts of a divided model use this dispatcher of DISPATCHERS from now on."""
    for experts in dispatched_experts(model):
        experts.use_dispatcher(name)


def dispatched_experts(model: nn.Module) -> list[DispatchedExperts]:
    """Return the divided experts of a model, by layer."""
    return [module for module in model.modules() if isinstance(module, DispatchedExperts)]


class DispatchedExperts(Experts):
    """Some experts of a layer: tokens of all ep ranks come to them through a dispatcher."""

    def __init__(self, config: ModelConfig, group: Group, dispatcher: str) -> None:
        super().__init__(config)
        self.first_expert, _ = share(config.experts, group.rank, group.size)
        self._group = group
        self.use_dispatcher(dispatcher)

    def use_dispatcher(self, name: str) -> None:
        """Use this dispatcher of DISPATCHERS from the next forward pass on."""
        self.dispatcher = name
        self._dispatcher = DISPATCHERS[name](self._group, self.num_experts)

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        compute = partial(super().forward, save_input_only=save_input_only)
        return self._dispatcher.run(compute, x, weights, chosen)


class Dispatcher:
    """A way to bring tokens to the ranks that have their experts, and the results back.

    Args:
        group: the ep ranks.
        num_experts: E, of all ranks.
    """

    def __init__(self, group: Group, num_experts: int) -> None:
        self._group, self._num_experts = group, num_experts

    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum of all experts' results for this rank's tokens. A collective of the ranks.

        Args:
            compute: the experts of this rank.
            x: [T, D].
            weights: routing weights [T, K].
            chosen: number of the expert for each of them, int64 [T, K].

        Returns:
            [T, D].
        """
        raise NotImplementedError


class AllGatherDispatcher(Dispatcher):
    """Algorithm 1 of the Optimus paper: every rank gathers all tokens and computes the results of
    its experts for each; the results are summed on the rank of the token."""

    def run(self, compute: Compute, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        all_x = gather_then_scatter_sum(x, self._group)
        all_weights = gather_then_scatter_sum(weights, self._group)
        with torch.no_grad():
            all_chosen = gather_then_scatter_sum(chosen, self._group)
        return scatter_sum_then_gather(compute(all_x, all_weights, all_chosen), self._group)


class AllToAllDispatcher(Dispatcher):
    """A token goes once to each rank that has some of its experts, with all its choices; the
    results come back and are summed. Waits for the counts on the host."""

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
        """Return the tokens to send, int64, by rank and then by number, and how many go to each
        rank, int64 [n]."""
        size = self._group.size
        rank_of = torch.div(chosen * size, self._num_experts, rounding_mode="floor")
        needed = torch.zeros(size, len(chosen), dtype=torch.bool, device=chosen.device)
        needed[rank_of.t(), torch.arange(len(chosen), device=chosen.device)] = True
        return needed.nonzero()[:, 1], needed.sum(1)


DISPATCHERS: Mapping[str, type[Dispatcher]] = {
    "allgather": AllGatherDispatcher,
    "alltoall": AllToAllDispatcher,
}
"""By the names of `parallel.ep_dispatch`."""
