"""MoE experts of other libraries, which moe.py and moe_step.py compare with the experts of Optimus.

All libraries use the same weights. Dimensions: T tokens, D hidden size, F intermediate size of an
expert, E experts, K experts per token. Inputs are x [T, D], the routing weights [T, K] in the dtype
of x, and the indices of the chosen experts [T, K] in int64. The output is [T, D].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType

import common
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.study.moe import LoopExperts
from optimus_kernels.grouped_mm import torch_form_works, torch_grouped_mm


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient of a leaf tensor after a backward pass."""
    assert leaf.grad is not None
    return leaf.grad


class Peer(nn.Module):
    """Experts of another library (a peer) for the weights gate_up [E, 2F, D] and down [E, D, F].

    The parameters share the memory of these weights, unless the library needs another layout.
    `gradients` returns the gradients in the layout of gate_up and down.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, top_k: int) -> None:
        super().__init__()
        self.top_k, self.inner = top_k, down.shape[2]
        self.build(gate_up.detach(), down.detach())

    def build(self, gate_up: Tensor, down: Tensor) -> None:
        self.gate_up, self.down = nn.Parameter(gate_up), nn.Parameter(down)

    def gradients(self) -> tuple[Tensor, Tensor]:
        return gradient_of(self.gate_up), gradient_of(self.down)


class Loop(Peer):
    """Experts that are computed in a Python loop."""

    def build(self, gate_up: Tensor, down: Tensor) -> None:
        self.experts = LoopExperts(gate_up, down)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.experts(x, weights, chosen)

    def gradients(self) -> tuple[Tensor, Tensor]:
        pairs = zip(self.experts.gate, self.experts.up, strict=True)
        gate_up = torch.stack([torch.cat([gate.grad, up.grad]) for gate, up in pairs])
        return gate_up, torch.stack([down.grad for down in self.experts.down])


class ThreeGrouped(Peer):
    """Experts that are computed with three grouped matrix products (gate, up and down) on tokens
    sorted by expert, as in torchtitan."""

    def build(self, gate_up: Tensor, down: Tensor) -> None:
        if not torch_form_works(down.device.type, down.dtype):
            raise common.Absent(
                f"torch {torch.__version__} has no grouped product for {down.device.type}"
            )
        self.gate = nn.Parameter(gate_up[:, : down.shape[2]])
        self.up = nn.Parameter(gate_up[:, down.shape[2] :])
        self.down = nn.Parameter(down)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        assert torch_grouped_mm is not None
        slots = chosen.flatten()
        order = slots.argsort(stable=True)
        ends = torch.bincount(slots, minlength=len(self.down)).cumsum(0, dtype=torch.int32)
        token = order // self.top_k
        copies = x[token]
        gate = torch_grouped_mm(copies, self.gate.mT, offs=ends)
        hidden = F.silu(gate) * torch_grouped_mm(copies, self.up.mT, offs=ends)
        out = torch_grouped_mm(hidden, self.down.mT, offs=ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add_(0, token, out)

    def gradients(self) -> tuple[Tensor, Tensor]:
        gate_up = torch.cat([gradient_of(self.gate), gradient_of(self.up)], 1)
        return gate_up, gradient_of(self.down)


class HuggingFace(Peer):
    """Experts module of the Hugging Face library `transformers`. The module stores the weights of
    all experts in one tensor. `implementation` is transformers' name for the function that computes
    the experts."""

    implementation = "grouped_mm"

    def build(self, gate_up: Tensor, down: Tensor) -> None:
        olmoe = _library("transformers.models.olmoe.modeling_olmoe")
        if not hasattr(olmoe, "OlmoeExperts"):
            raise common.Absent("OlmoeExperts needs transformers 5 or later")
        experts, hidden, inner = down.shape
        config = _library("transformers").OlmoeConfig(
            hidden_size=hidden, intermediate_size=inner, num_experts=experts
        )
        config._experts_implementation = self.implementation
        with torch.device("meta"):
            self.experts = olmoe.OlmoeExperts(config)
        self.experts.gate_up_proj = nn.Parameter(gate_up)
        self.experts.down_proj = nn.Parameter(down)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.experts(x, chosen, weights)

    def gradients(self) -> tuple[Tensor, Tensor]:
        return self.experts.gate_up_proj.grad, self.experts.down_proj.grad


class HuggingFaceEager(HuggingFace):
    implementation = "eager"


class Liger(Peer):
    """Experts that are computed by the fused Triton kernels of liger-kernel 0.8."""

    def build(self, gate_up: Tensor, down: Tensor) -> None:
        if not gate_up.is_cuda:
            raise common.Absent("the Triton kernels of liger-kernel need a GPU")
        self.function = _library("liger_kernel.ops").LigerFusedMoEFunction
        super().build(gate_up, down)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.function.apply(x, self.gate_up, self.down, chosen.int(), weights)


class ScatterMoE(Peer):
    """Experts that are computed by the module GLUMLP of scattermoe. The module has a copy of
    gate_up in which the rows of the up projection precede the rows of the gate projection."""

    def build(self, gate_up: Tensor, down: Tensor) -> None:
        if not gate_up.is_cuda:
            raise common.Absent("the Triton kernels of scattermoe need a GPU")
        experts, hidden, inner = down.shape
        with torch.device("meta"):
            self.mlp = _library("scattermoe.mlp").GLUMLP(hidden, inner, experts, self.top_k)
        swapped = torch.cat([gate_up[:, inner:], gate_up[:, :inner]], 1)
        self.mlp.experts.weight = nn.Parameter(swapped)
        self.mlp.output_experts.weight = nn.Parameter(down)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        return self.mlp(x, weights, chosen)

    def gradients(self) -> tuple[Tensor, Tensor]:
        merged = self.mlp.experts.weight.grad
        gate_up = torch.cat([merged[:, self.inner :], merged[:, : self.inner]], 1)
        return gate_up, self.mlp.output_experts.weight.grad


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise common.Absent(f"{name.partition('.')[0]} cannot be imported: {error}") from None


PEERS: dict[str, Callable[[Tensor, Tensor, int], Peer]] = {
    "hf-grouped": HuggingFace,
    "loop": Loop,
    "three-grouped": ThreeGrouped,
    "liger": Liger,
    "scattermoe": ScatterMoE,
    "hf-eager": HuggingFaceEager,
}
