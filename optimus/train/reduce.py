"""Adding up the gradients of all data ranks: fast, or in an order that no layout changes.

The loss carries the global scale (CONTRACT.md, "Ranks"), so both are pure sums. The pipeline calls
`after(stage, microbatch)` where its schedule says REDUCE_GRAD, and `finish` before the update.
"""

from __future__ import annotations

import torch

from optimus.dist.collectives import all_gather, all_reduce_sum, all_to_all
from optimus.train.states import ModelStates, Section

_BLOCK = 1 << 24


class FastReduction:
    """Microbatches accumulate locally; one all-reduce of a stage's gradients after its last."""

    each_microbatch = False
    """Whether REDUCE_GRAD stands behind every microbatch or only behind a stage's last."""

    def __init__(self, states: ModelStates, dtype: torch.dtype) -> None:
        self._states, self._dtype = states, dtype

    def start(self) -> None:
        self._states.grads.zero_()

    def after(self, stage: int) -> None:
        self._states.check_gradients_in_place()
        for section in _of_stage(self._states, stage):
            if section.group.size == 1:
                continue
            for block in self._states.grads[section.start : section.end].split(_BLOCK):
                travelling = block.to(self._dtype)
                all_reduce_sum(travelling, section.group)
                if travelling is not block:
                    block.copy_(travelling)

    def finish(self) -> None:
        _add_partial(self._states)


class OrderedReduction:
    """Every microbatch's gradient is added in the order of microbatch numbers.

    Microbatch i of data rank d is number i * w + d: after each backward the ranks exchange shards,
    and each adds its shard of ranks 0, 1, ..., w-1 in that order. The sums are gathered at the end.
    Peak extra memory: two buffers of G elements.
    """

    each_microbatch = True

    def __init__(self, states: ModelStates) -> None:
        self._states = states
        self._microbatch = torch.zeros_like(states.grads)
        self._received = torch.empty_like(states.grads)
        self._sums = {
            section: torch.zeros_like(self._own(section, states.grads))
            for section in states.sections
        }
        states.accumulate_into(self._microbatch)

    def start(self) -> None:
        self._microbatch.zero_()
        for total in self._sums.values():
            total.zero_()

    def after(self, stage: int) -> None:
        self._states.check_gradients_in_place()
        for section in _of_stage(self._states, stage):
            sent = self._microbatch[section.start : section.end]
            received = self._received[section.start : section.end]
            all_to_all(received, sent, section.group)
            for contribution in received.chunk(section.group.size):
                self._sums[section].add_(contribution)
            sent.zero_()

    def finish(self) -> None:
        for section, total in self._sums.items():
            all_gather(self._states.grads[section.start : section.end], total, section.group)
        _add_partial(self._states)

    @staticmethod
    def _own(section: Section, flat: torch.Tensor) -> torch.Tensor:
        """As much of `flat` as one rank adds up of a section."""
        size = (section.end - section.start) // section.group.size
        return flat[section.start : section.start + size]


def make_reduction(
    states: ModelStates, deterministic: bool, dtype: torch.dtype
) -> FastReduction | OrderedReduction:
    """The reduction that the mode asks for; where nobody else adds, both are plain accumulation."""
    alone = all(section.group.size == 1 for section in states.sections)
    if deterministic and not alone:
        return OrderedReduction(states)
    return FastReduction(states, dtype)


def _add_partial(states: ModelStates) -> None:
    """Complete gradients of which each tensor-parallel rank has a part."""
    for section in states.sections:
        all_reduce_sum(states.grads[section.start : section.end], section.partial_over)


def _of_stage(states: ModelStates, stage: int) -> list[Section]:
    return [section for section in states.sections if section.stage == stage]
