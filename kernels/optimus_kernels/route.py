"""route: assign each slot a row in the buffers of the experts.

There are T tokens, K experts per token, N = T*K slots and E local experts. Slot t*K + k is the k-th
expert of token t. Rows are sorted by expert and then by slot, so the result is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optimus_kernels import library
from optimus_kernels.ops import debug, define


class Rows(NamedTuple):
    """Assignment of slots to rows, in int32. Slot t*K + k is the k-th expert of token t."""

    offsets: Tensor
    """[E+1]: expert e has rows offsets[e] to offsets[e+1] - 1. There are R = offsets[E] rows."""
    token: Tensor
    """[N]: the token of each row. It is -1 for unused rows, which begin at row R = offsets[E]."""
    slot: Tensor
    """[N]: the slot of each row. It is -1 for unused rows, which begin at row R = offsets[E]."""
    row: Tensor
    """[T, K]: the row of each slot; -1 if the slot's expert is not local."""


def route(chosen: Tensor, first_expert: int, num_experts: int, *, of: int | None = None) -> Rows:
    """Assign rows to the slots of local experts.

    Args:
        chosen: int64 [T, K], the indices of the experts that each token chose.
        first_expert: index of the first local expert.
        num_experts: number E of local experts. Slots with any other expert index get no row.
        of: total number of experts. With OPTIMUS_KERNELS_DEBUG=1, an index in `chosen` outside [0,
            of) raises ValueError. None disables this check.

    Returns:
        The row of each slot, and the token and slot of each row.

    Raises:
        ValueError: `chosen` is not int64 [T, K], or `num_experts` is negative.
    """
    return Rows(*_route(chosen, first_expert, num_experts, of))


def reference(chosen: Tensor, first_expert: int, num_experts: int) -> Rows:
    """Reference implementation of `route` in plain torch."""
    slots, top_k = chosen.numel(), chosen.shape[1]
    expert = chosen.flatten() - first_expert
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    ends = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    ends.scatter_add_(0, expert, torch.ones_like(expert))
    offsets = torch.cat([ends.new_zeros(1), ends[:num_experts].cumsum(0)])
    slot = expert.argsort(stable=True)
    index = torch.arange(slots, device=chosen.device)
    unused = index >= offsets[num_experts]
    row = torch.empty_like(slot)
    row[slot] = index.masked_fill(unused, -1)
    slot = slot.masked_fill(unused, -1)
    token = slot.div(max(top_k, 1), rounding_mode="floor").masked_fill(unused, -1)
    return Rows(offsets.int(), token.int(), slot.int(), row.int().view_as(chosen))


def _check_chosen(chosen: Tensor, experts: int) -> None:
    wrong = ((chosen < 0) | (chosen >= experts)).nonzero().tolist()
    if wrong:
        token, k = wrong[0]
        raise ValueError(
            f"chosen {list(chosen.shape)} has {len(wrong)} numbers outside 0 to "
            f"{experts - 1}; the first is {int(chosen[token, k])} for token {token}"
        )


def _check(chosen: Tensor, first_expert: int, num_experts: int, of: int | None = None) -> None:
    if chosen.dim() != 2 or chosen.dtype is not torch.int64:
        raise ValueError(
            f"route: chosen is {chosen.dtype} {list(chosen.shape)}; it must be int64 [T, K]"
        )
    if num_experts < 0:
        raise ValueError(f"route: num_experts = {num_experts} must not be negative")


def _run(
    chosen: Tensor, first_expert: int, num_experts: int, of: int | None = None
) -> tuple[Tensor, ...]:
    if of is not None and debug():
        _check_chosen(chosen, of)
    kernels = library.native(chosen, any_dtype=True)
    if kernels is None:
        return tuple(reference(chosen, first_expert, num_experts))
    chosen = chosen.contiguous()
    offsets, token, slot, row = _fake(chosen, first_expert, num_experts)
    words = kernels.route_scratch(*chosen.shape, num_experts)
    scratch = chosen.new_empty(words, dtype=torch.int32)
    pointers = (t.data_ptr() for t in (offsets, token, slot, row, scratch))
    sizes = (*chosen.shape, first_expert, num_experts)
    kernels.call("route", chosen, chosen.data_ptr(), *sizes, *pointers, words)
    return offsets, token, slot, row


def _fake(
    chosen: Tensor, first_expert: int, num_experts: int, of: int | None = None
) -> tuple[Tensor, ...]:
    slots = chosen.shape[0] * chosen.shape[1]
    shapes = ((num_experts + 1,), (slots,), (slots,), tuple(chosen.shape))
    return tuple(chosen.new_empty(shape, dtype=torch.int32) for shape in shapes)


_route = define(
    "route(Tensor chosen, SymInt first_expert, SymInt num_experts, SymInt? of=None)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    _check,
)
