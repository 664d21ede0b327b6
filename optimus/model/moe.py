"""FastSparseMoE: dropless mixture of experts over merged weights (Optimus paper, section 3.1).

Dims: T tokens, D hidden, F intermediate of an expert, E experts held here, K experts per token.

The paper's stages: token communication wraps `Experts` from outside (`optimus.parallel`), counting
and index generation are the op `route`, expert computation and output reduction the op `experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import optimus_kernels as kernels
from optimus.config import ModelConfig
from optimus.model import late_gradients
from optimus.model.router import Router, Routing


class FastSparseMoE(nn.Module):
    """x [..., D] -> (sum over a token's K experts of weight * expert(x), Routing)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, save_input_only: bool = False) -> tuple[Tensor, Routing]:
        """`save_input_only`: as in `Experts.forward`."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen, routing = self.router(tokens)
        out = self.run_experts(tokens, weights, chosen, save_input_only)
        return out.view_as(x), routing

    def run_experts(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        """Return the experts' result for routed tokens, as `Experts.forward` does."""
        return self.experts(x, weights, chosen, save_input_only)


class Experts(nn.Module):
    """SwiGLU experts with merged weights, laid out as transformers 5 does.

    gate_up [E, 2F, D] holds each expert's gate rows above its up rows; down is [E, D, F]. Expert
    number `first_expert` is the first one held; slots routed to experts outside add nothing.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.experts, config.hidden_size, config.intermediate_size
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))
        self.num_experts = experts
        self.first_expert = 0
        self._weight_grads: Callable[[], kernels.WeightGrads] | None = None

    def write_gradients_to(self, weight_grads: Callable[[], kernels.WeightGrads]) -> None:
        """Write the weights' gradients to the memory that `weight_grads` returns, whenever they are
        computed. Autograd then adds nothing to `.grad`; hooks after accumulation run all the same.
        Compiled code and experts with a frozen weight do not call it and use autograd."""
        self._weight_grads = weight_grads

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        """x [T, D], weights [T, K] of x's dtype, chosen int64 [T, K] -> [T, D].

        `save_input_only`: compute the pre-activation again in backward instead of keeping it.

        Raises ValueError or TypeError naming shapes, dtypes or devices that do not match. With
        OPTIMUS_KERNELS_DEBUG=1 numbers that no expert has are refused; otherwise they add nothing.
        Under autocast products are in its dtype, as for a linear layer, and the result in x's.
        """
        held = self.gate_up.shape[0]
        rows = kernels.route(chosen, self.first_expert, held, of=self.num_experts)
        return kernels.experts(
            x,
            weights,
            self.gate_up,
            self.down,
            rows,
            save_input_only=save_input_only,
            weight_grads=self._destination if self._may_choose() else None,
        )

    def _may_choose(self) -> bool:
        trained = self.gate_up.requires_grad and self.down.requires_grad
        return trained and not torch.compiler.is_compiling()

    def _destination(self) -> kernels.Destination:
        """Of a backward's weight gradients: asked in it, since its schedule decides."""
        late = late_gradients.in_force()
        if late is not None:
            weights = (self.gate_up, self.down)
            return lambda work: late.put_off(partial(self._compute, work), *weights)
        return None if self._weight_grads is None else self._weight_grads()

    def _compute(self, work: kernels.WeightWork) -> None:
        """Weight gradients that were put off."""
        if self._weight_grads is not None:
            work.compute(self._weight_grads())
            for weight in (self.gate_up, self.down):
                late_gradients.run_hooks(weight)
            return
        gate_up, down = (torch.empty_like(weight) for weight in (self.gate_up, self.down))
        work.compute(kernels.WeightGrads(gate_up, down, add=False))
        late_gradients.accumulate(self.gate_up, gate_up)
        late_gradients.accumulate(self.down, down)
