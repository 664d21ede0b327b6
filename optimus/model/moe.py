"""FastSparseMoE: dropless mixture of experts (Optimus paper, section 3.1).

Dims: T tokens, D hidden, F intermediate of an expert, E experts of this module, K experts per
token.

The stages of the algorithm in the paper are implemented in:
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
    """Mixture of experts: x [..., D] -> (output [..., D], Routing). The output of a token is the
    weighted sum of the outputs of its K experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor, save_input_only: bool = False) -> tuple[Tensor, Routing]:
        """Return the output [..., D] and the statistics of the router.

        Args:
            x: [..., D].
            save_input_only: True to recompute the pre-activation of the experts in backward instead
                of saving it.
        """
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen, routing = self.router(tokens)
        out = self.run_experts(tokens, weights, chosen, save_input_only)
        return out.view_as(x), routing

    def run_experts(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        """Call `self.experts` and return its output [T, D].

        `Experts.forward` documents the arguments. Tensor parallelism overrides this method to add
        communication.
        """
        return self.experts(x, weights, chosen, save_input_only)


class Experts(nn.Module):
    """SwiGLU experts with the weights gate_up [E, 2F, D] and down [E, D, F], as in transformers 5.

    In gate_up, each expert's gate rows precede its up rows. Under expert parallelism, the module
    has only E consecutive experts of the layer, starting with index `first_expert`, and its output
    contains only the contributions of these experts.
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
        """Make backward write the weight gradients to the tensors that `weight_grads()` returns.

        Backward then leaves the `.grad` of both weights unchanged, but still runs their
        post-accumulate-grad hooks. In compiled code, or if one of the weights is frozen, this
        method has no effect: backward accumulates into `.grad` as usual.
        """
        self._weight_grads = weight_grads

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        """Return [T, D] in the dtype of x: for each token, the weighted sum of the outputs of its
        chosen experts.

        Under autocast, matrix products use the autocast dtype, as in a linear layer.

        Args:
            x: [T, D].
            weights: [T, K], routing weights in the dtype of x.
            chosen: int64 [T, K], indices of the chosen experts. An index outside
                [0, num_experts) contributes nothing to the output.
            save_input_only: True to recompute the pre-activation in backward instead of saving it.

        Raises:
            ValueError, TypeError: shapes, dtypes or devices do not match.
            ValueError: with OPTIMUS_KERNELS_DEBUG=1, `chosen` has an index outside
                [0, num_experts).
        """
        rows = kernels.route(chosen, self.first_expert, self.gate_up.shape[0], of=self.num_experts)
        trained = self.gate_up.requires_grad and self.down.requires_grad
        may_write = trained and not torch.compiler.is_compiling()
        return kernels.experts(
            x,
            weights,
            self.gate_up,
            self.down,
            rows,
            save_input_only=save_input_only,
            weight_grads=self._destination if may_write else None,
        )

    def _destination(self) -> kernels.Destination:
        """Return the destination for the weight gradients of the current backward pass.

        Inside a `DeferredGradients` context, the destination is a function that defers the
        computation. Outside such a context, the destination is a `WeightGrads` with the tensors to
        which backward must write, or None if autograd must accumulate the gradients into `.grad`.
        """
        # The op calls this method in backward, because the forward pass cannot know if a
        # `DeferredGradients` context will be active in backward.
        deferred = deferred_gradients.active_deferral()
        if deferred is not None:
            weights = (self.gate_up, self.down)
            return lambda work: deferred.defer(partial(self._compute, work), *weights)
        return None if self._weight_grads is None else self._weight_grads()

    def _compute(self, work: kernels.WeightWork) -> None:
        """Run the deferred computation of the weight gradients, accumulate the gradients, and run
        the post-accumulate-grad hooks of `gate_up` and `down`."""
        if self._weight_grads is not None:
            work.compute(self._weight_grads())
            for weight in (self.gate_up, self.down):
                deferred_gradients.run_hooks(weight)
            return
        gate_up, down = (torch.empty_like(weight) for weight in (self.gate_up, self.down))
        work.compute(kernels.WeightGrads(gate_up, down, add=False))
        deferred_gradients.accumulate(self.gate_up, gate_up)
        deferred_gradients.accumulate(self.down, down)
