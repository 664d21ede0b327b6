"""FastSparseMoE: dropless mixture of experts over merged weights (Optimus paper, section 3.1).

Dims: T tokens, D hidden, F intermediate of an expert, E experts held here, K experts per token,
R rows of the expert buffers: a row for each of the T*K slots whose expert is held here, ordered by
expert and then by token, each expert's part rounded up to a multiple (see `_row_multiple`).

The paper's stages: token communication wraps `Experts` from outside (`optimus.parallel`), counting
and index generation are `sort_by_expert`, expert computation and output reduction `_Experts`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optimus.config import ModelConfig
from optimus.model.router import Router, Routing


class FastSparseMoE(nn.Module):
    """x [..., D] -> (sum over a token's K experts of weight * expert(x), Routing)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen, routing = self.router(tokens)
        return self.experts(tokens, weights, chosen).view_as(x), routing


class Experts(nn.Module):
    """SwiGLU experts with merged weights, laid out as transformers 5 does.

    gate_up [E, 2F, D] holds each expert's gate rows above its up rows; down is [E, D, F]. Expert
    number `first_expert` is the first one held; slots routed to experts outside add nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))
        self.first_expert = 0

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, D], weights [T, K] of x's dtype, chosen int64 [T, K] -> [T, D]."""
        held = len(self.gate_up)
        rows = sort_by_expert(chosen, self.first_expert, held, _row_multiple(x))
        return _Experts.apply(x, weights, self.gate_up, self.down, rows)


class Rows(NamedTuple):
    """Where the slots of [T, K] lie in the expert buffers."""

    bounds: list[int]
    """E+1 numbers: expert e has rows bounds[e] to bounds[e+1]."""
    token: Tensor
    """int64 [R+1]: the token a row is a copy of; any token for rows that only round up."""
    row: Tensor
    """int64 [T, K]: the row of a slot; R where its expert is not held here."""


def sort_by_expert(chosen: Tensor, first_expert: int, num_experts: int, multiple: int = 1) -> Rows:
    """Count the slots of each held expert and give every slot its row.

    chosen int64 [T, K] holds numbers of experts. The sort is stable: an expert's rows are in order
    of token, the same on every run and machine.
    """
    expert = chosen.flatten() - first_expert
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    counts = torch.bincount(expert, minlength=num_experts + 1)[:num_experts]
    rounded = (counts + multiple - 1) // multiple * multiple
    bounds = [0, *rounded.cumsum(0).tolist()]
    total = bounds[-1]
    # From place in sorted order to row: experts before this one have been rounded up by this much.
    shift = torch.cat(
        [(rounded - counts).cumsum(0) - (rounded - counts), counts.new_tensor([total])]
    )
    order = expert.argsort(stable=True)
    place = torch.arange(len(order), device=order.device)
    row = torch.empty_like(order)
    row[order] = (place + shift[expert[order]]).clamp_(max=total)
    token = torch.zeros(total + 1, dtype=torch.int64, device=order.device)
    token[row] = place // chosen.shape[1]
    return Rows(bounds, token, row.view_as(chosen))


def _row_multiple(x: Tensor) -> int:
    """What an expert's number of rows is rounded up to.

    oneDNN compiles a bf16 matrix product for every new shape: 1.5-2.5 ms against 0.08 for 256 rows
    of 256 x 512, and routing makes new shapes all the time. Multiples of 32 are few enough to stay
    in its cache of 1024. fp32 on a CPU and accelerators have no such cost.
    """
    return 32 if x.is_cpu and x.dtype in (torch.bfloat16, torch.float16) else 1


class _Experts(torch.autograd.Function):
    """One pass over the experts each way; x, the weights, h = gate_up x and indices are saved.

    Each expert's matrix products write into slices of one buffer: indexing the merged parameter
    under autograd would build a full-size gradient per expert. The routing weight w scales the
    activation a = silu(g) * u instead of the output, so that its gradient needs only what backward
    has at hand: with da = dy down, dw = <da, a>. Rows that round up have w = 0, hence add nothing.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, rows: Rows
    ) -> Tensor:
        inner, total = down.shape[2], rows.bounds[-1]
        scale = _by_row(weights, rows)
        hidden = x.new_empty(total, 2 * inner)
        y = x.new_empty(total + 1, x.shape[1])
        y[total] = 0  # what a slot without a row here adds
        for expert, part in _parts(rows):
            copies = x.index_select(0, rows.token[part])
            h = torch.mm(copies, gate_up[expert].t(), out=hidden[part])
            activation = F.silu(h[:, :inner]).mul_(h[:, inner:]).mul_(scale[part])
            torch.mm(activation, down[expert].t(), out=y[part])
        ctx.rows = rows
        ctx.save_for_backward(x, weights, gate_up, down, hidden)
        return _sum_slots(y, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, gate_up, down, hidden = ctx.saved_tensors
        rows, total = ctx.rows, ctx.rows.bounds[-1]
        scale = _by_row(weights, rows)
        grad_gate_up, grad_down = torch.empty_like(gate_up), torch.empty_like(down)
        grad_scale = scale.new_zeros(total + 1)
        grad_x = x.new_empty(total + 1, x.shape[1])
        grad_x[total] = 0
        for expert in range(len(gate_up)):
            if rows.bounds[expert] == rows.bounds[expert + 1]:
                grad_gate_up[expert] = 0
                grad_down[expert] = 0
        for expert, part in _parts(rows):
            dy = grad.index_select(0, rows.token[part])
            dh, activation, grad_scale[part] = _swiglu_backward(
                hidden[part], dy @ down[expert], scale[part]
            )
            torch.mm(dy.t(), activation, out=grad_down[expert])
            torch.mm(dh.t(), x.index_select(0, rows.token[part]), out=grad_gate_up[expert])
            torch.mm(dh, gate_up[expert], out=grad_x[part])
        return _sum_slots(grad_x, rows), grad_scale[rows.row], grad_gate_up, grad_down, None


def _swiglu_backward(hidden: Tensor, da: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Through w * silu(g) * u with [g, u] = hidden: dhidden, the scaled activation, dw by row.

    `da` is the gradient of the scaled activation and is used up.
    """
    inner = da.shape[1]
    g, u = hidden[:, :inner], hidden[:, inner:]
    gate = F.silu(g)
    activation = gate * u
    grad_scale = (da * activation).sum(1)
    da.mul_(scale)
    dh = torch.empty_like(hidden)
    dh[:, :inner] = torch.ops.aten.silu_backward(da * u, g)
    torch.mul(da, gate, out=dh[:, inner:])
    return dh, activation.mul_(scale), grad_scale


def _by_row(weights: Tensor, rows: Rows) -> Tensor:
    """Routing weights [T, K] in order of row, [R+1, 1]; zero for rows that only round up."""
    scale = weights.new_zeros(len(rows.token), 1)
    scale[rows.row.flatten(), 0] = weights.flatten()
    return scale


def _parts(rows: Rows) -> list[tuple[int, slice]]:
    """The experts that have rows, and their rows."""
    ends = zip(rows.bounds, rows.bounds[1:], strict=False)
    return [
        (expert, slice(start, stop)) for expert, (start, stop) in enumerate(ends) if start < stop
    ]


def _sum_slots(values: Tensor, rows: Rows) -> Tensor:
    """out[t] = sum over k of values[row[t, k]], k in order, in fp32: [R+1, D] -> [T, D]."""
    return F.embedding_bag(rows.row, values, mode="sum")
