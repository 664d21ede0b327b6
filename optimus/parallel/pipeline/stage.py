"""Pipeline stage: a range of the model's blocks.

The first stage also has the embedding. The last stage also has the final norm, the output head and
the loss.

Dims: B batch, S sequence, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from optimus.model.router import Routing, layer_losses
from optimus.model.transformer import Transformer


@dataclass(frozen=True)
class Objective:
    """Divisors and coefficients of the loss terms of a stage.

    Each loss term is divided by its divisors and multiplied by its coefficient. The training
    objective is the sum of the results over all stages and all microbatches of the global batch.
    """

    num_targets: int
    """The number of targets of the global batch."""
    num_microbatches: int
    """The number of microbatches of the global batch, over all data-parallel ranks."""
    num_layers: int
    """The number of MoE layers in the whole model."""
    aux_coef: float
    z_coef: float


class Terms(NamedTuple):
    """A stage's loss terms for one microbatch, detached from autograd."""

    ce_sum: Tensor | None
    """Cross-entropy in nats, summed over all targets of the microbatch, as an fp32 scalar; None on
    all stages except the last."""
    aux: Tensor
    """Load-balancing losses, fp32 [MoE layers of the stage]."""
    z: Tensor
    """Router z-losses, fp32 [MoE layers of the stage]."""
    counts: list[Tensor]
    """Number of tokens routed to each expert, int64 [E], for each MoE layer of the stage."""


class Output(NamedTuple):
    """Result of a stage's forward pass."""

    x: Tensor | None
    """Input of the next stage, [B, S, D]; None on the last stage."""
    objective: Tensor | None
    """Scalar that the stage adds to the training objective; None if the stage has no loss terms."""
    terms: Terms


class Stage:
    """One stage of the pipeline: a range of blocks of this rank's model."""

    def __init__(
        self,
        model: Transformer,
        layers: Collection[int],
        is_first: bool,
        is_last: bool,
        objective: Objective,
    ) -> None:
        self.model, self.layers = model, layers
        self.is_first, self.is_last = is_first, is_last
        self._objective = objective

    def forward(
        self, x: Tensor | None, tokens: Tensor, document_ids: Tensor | None = None
    ) -> Output:
        """Run the stage's forward pass for one microbatch. Return the output and the loss terms.

        Args:
            x: [B, S, D], the output of the previous stage; None on the first stage.
            tokens: int64 [B, S] on the device.
            document_ids: [B, S] on the host, or None.
        """
        x, routings = self._run_blocks(x, tokens, document_ids)
        aux, z, counts = layer_losses(self.model.config, routings, tokens.device)
        objective = None
        if routings:
            scale = self._objective
            layers, shared = scale.num_layers, scale.num_microbatches
            objective = (scale.aux_coef / shared) * (aux.sum() / layers)
            objective = objective + (scale.z_coef / shared) * (z.sum() / layers)
        ce_sum = None
        if self.is_last:
            ce_sum, _ = self.model.token_loss(x, tokens)
            ce = ce_sum / self._objective.num_targets
            objective = ce if objective is None else ce + objective
            ce_sum, x = ce_sum.detach(), None
        return Output(x, objective, Terms(ce_sum, aux.detach(), z.detach(), counts))

    def infer(self, x: Tensor | None, tokens: Tensor, position: int) -> Tensor:
        """Run the stage's forward pass for inference, without losses.

        Returns:
            On the last stage, the logits [B, V] at `position`, where V is the size of this rank's
            share of the vocabulary. On other stages, the next stage's input [B, S, D].
        """
        x, _ = self._run_blocks(x, tokens, None)
        return self.model.logits_at(x, position) if self.is_last else x

    def _run_blocks(
        self, x: Tensor | None, tokens: Tensor, document_ids: Tensor | None
    ) -> tuple[Tensor, list[Routing]]:
        if self.is_first:
            x = self.model.embed(tokens)
        assert x is not None, "no input from the previous stage"
        return self.model.run_blocks(x, document_ids, self.layers)


def backward(output: Output, grad: Tensor | None, loss_scale: float = 1.0) -> None:
    """Run a stage's backward pass. Accumulate the gradients of the stage's parameters and input.

    Args:
        output: the result of the stage's forward pass.
        grad: gradient of `output.x`, multiplied by `loss_scale`; None on the last stage.
        loss_scale: factor by which to multiply the stage's objective, `output.objective`.
    """
    objective, scale = output.objective, None
    if objective is not None and loss_scale != 1.0:
        scale = torch.full_like(objective, loss_scale)
    roots = [
        (root, root_grad)
        for root, root_grad in ((output.x, grad), (objective, scale))
        if root is not None and root.requires_grad
    ]
    if roots:  # a first stage may have only frozen parameters
        torch.autograd.backward([root for root, _ in roots], [grad for _, grad in roots])
