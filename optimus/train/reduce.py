"""Adding up the gradients of all data ranks: fast, or in an order that no layout changes.

The loss carries the global scale (CONTRACT.md, "Ranks"), so both are pure sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from optimus.dist.collectives import Group, all_gather, all_reduce_sum, all_to_all
from optimus.train.states import ModelStates

_BLOCK = 1 << 24

Check = Callable[[], None]
"""Called before gradients leave the rank: raises if any rank holds a non-finite one."""


class FastReduction:
    """Microbatches accumulate locally; one all-reduce at the end of the step."""

    def __init__(self, states: ModelStates, group: Group, dtype: torch.dtype, check: Check) -> None:
        self._states, self._group, self._dtype, self._check = states, group, dtype, check

    def start(self) -> None:
        self._states.grads.zero_()

    def after_microbatch(self) -> None:
        pass

    def finish(self) -> None:
        self._states.check_gradients_in_place()
        self._check()
        if self._group.size == 1:
            return
        for block in self._states.grads.split(_BLOCK):
            travelling = block.to(self._dtype)
            all_reduce_sum(travelling, self._group)
            if travelling is not block:
                block.copy_(travelling)


class OrderedReduction:
    """Every microbatch's gradient is added in the order of microbatch numbers.

    Microbatch i of data rank d is number i * w + d: after each backward the ranks exchange shards,
    and each adds its shard of ranks 0, 1, ..., w-1 in that order. The sums are gathered at the end.
    Peak extra memory: two buffers of G elements.
    """

    def __init__(self, states: ModelStates, group: Group, check: Check) -> None:
        assert states.grads.numel() % group.size == 0
        self._states, self._group, self._check = states, group, check
        self._microbatch = torch.zeros_like(states.grads)
        self._received = torch.empty_like(states.grads)
        self._sum = torch.zeros_like(states.grads[: states.grads.numel() // group.size])
        states.accumulate_into(self._microbatch)

    def start(self) -> None:
        self._sum.zero_()
        self._microbatch.zero_()

    def after_microbatch(self) -> None:
        self._states.check_gradients_in_place()
        self._check()
        all_to_all(self._received, self._microbatch, self._group)
        for contribution in self._received.chunk(self._group.size):
            self._sum.add_(contribution)
        self._microbatch.zero_()

    def finish(self) -> None:
        all_gather(self._states.grads, self._sum, self._group)


def make_reduction(
    states: ModelStates, group: Group, deterministic: bool, dtype: torch.dtype, check: Check
) -> FastReduction | OrderedReduction:
    """The reduction that the mode asks for; on one rank both are plain accumulation."""
    if deterministic and group.size > 1:
        return OrderedReduction(states, group, check)
    return FastReduction(states, group, dtype, check)
