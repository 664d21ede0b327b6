"""FastSparseMoE: dropless mixture of experts over merged weights (Optimus paper, section 3.1).

Dims: T tokens, D hidden, F intermediate of an expert, E experts of this module, K experts per
token.

Implementations of the stages that the paper describes:
- token communication: a subclass of `Experts` in `optimus.parallel.expert`;
- counting and index generation: the op `route`;
- expert computation and output reduction: the op `experts`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import optimus_kernels as kernels
from optimus.config import ModelConfig
from optimus.model import deferred_gradients
from optimus.model.router import Router, Routing


class FastSparseMoE(nn.Module):
    """Mixture of experts: x [..., D] -> (output [..., D], Routing). The output is the sum of
    weight * expert(x) over the K experts that the router chooses for a token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, save_input_only: bool = False) -> tuple[Tensor, Routing]:
        """Return the output [..., D] and the router's statistics. With `save_input_only`, backward
        recomputes the pre-activation of the experts, so that the forward pass need not save it."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen, routing = self.router(tokens)
        out = self.run_experts(tokens, weights, chosen, save_input_only)
        return out.view_as(x), routing

    def run_experts(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        """Return the output of `Experts.forward`. Tensor parallelism overrides this method to add
        communication."""
        return self.experts(x, weights, chosen, save_input_only)


class Experts(nn.Module):
    """SwiGLU experts with merged weights, laid out as in transformers 5.

    gate_up [E, 2F, D] contains each expert's gate rows, followed by its up rows; down is [E, D, F].
    Under expert parallelism, the module has only E consecutive experts of the layer, and the first
    of them has the number `first_expert`. If a token chooses an expert that the module does not
    have, this expert contributes nothing to the output.
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
        """Make each backward write the weight gradients to the tensors that `weight_grads()`
        returns.

        `.grad` does not change, but post-accumulate-grad hooks still run. There are two exceptions:
        compiled code, and experts with a frozen weight. They never call `weight_grads`, and
        accumulate into `.grad`.
        """
        self._weight_grads = weight_grads

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        """Return the weighted sum of each token's chosen experts, [T, D] in the dtype of x.

        Under autocast, matrix products use the autocast dtype, as in a linear layer.

        Args:
            x: [T, D].
            weights: [T, K], routing weights in the dtype of x.
            chosen: int64 [T, K], numbers of the chosen experts. A number that no expert of the
                layer has contributes nothing to the output.
            save_input_only: recompute the pre-activation in backward instead of saving it.

        Raises:
            ValueError, TypeError: shapes, dtypes or devices do not match. With
                OPTIMUS_KERNELS_DEBUG=1, ValueError also if `chosen` has a number that no expert of
                the layer has.
        """
        rows = kernels.route(chosen, self.first_expert, self.gate_up.shape[0], of=self.num_experts)
        return kernels.experts(
            x,
            weights,
            self.gate_up,
            self.down,
            rows,
            save_input_only=save_input_only,
            weight_grads=self._destination if self._may_write() else None,
        )

    def _may_write(self) -> bool:
        trained = self.gate_up.requires_grad and self.down.requires_grad
        return trained and not torch.compiler.is_compiling()

    def _destination(self) -> kernels.Destination:
        """Return the destination of the weight gradients of the current backward pass: a function
        that defers them, the tensors of `write_gradients_to`, or None for autograd.

        The op calls this method in backward, because the forward pass cannot know if a
        `DeferredGradients` context will be active.
        """
        deferred = deferred_gradients.active_deferral()
        if deferred is not None:
            weights = (self.gate_up, self.down)
            return lambda work: deferred.defer(partial(self._compute, work), *weights)
        return None if self._weight_grads is None else self._weight_grads()

    def _compute(self, work: kernels.WeightWork) -> None:
        """Compute deferred weight gradients, accumulate them and run the hooks of the weights."""
        if self._weight_grads is not None:
            work.compute(self._weight_grads())
            for weight in (self.gate_up, self.down):
                deferred_gradients.run_hooks(weight)
            return
        gate_up, down = (torch.empty_like(weight) for weight in (self.gate_up, self.down))
        work.compute(kernels.WeightGrads(gate_up, down, add=False))
        deferred_gradients.accumulate(self.gate_up, gate_up)
        deferred_gradients.accumulate(self.down, down)
