"""Router: the experts and weights of each token, and the auxiliary losses of their balance.

A function of the probabilities chooses the experts. To add another function, put it into `CHOICES`,
under the name that selects it in `model.router`.

Dims: T tokens, D hidden, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.config import ModelConfig


class Routing(NamedTuple):
    """Statistics of one layer's router for one microbatch, the input of the auxiliary losses."""

    counts: Tensor
    """int64 [E]: rows sent to each expert; the sum is T*K."""
    mean_prob: Tensor
    """fp32 [E]: the softmax averaged over tokens. Has a gradient."""
    z: Tensor
    """fp32 scalar: mean over tokens of logsumexp(logits)^2. Has a gradient."""

    def balance(self) -> Tensor:
        """Return the load-balancing loss in OLMo's form (CONTRACT.md, "Loss"): E * sum_e f_e * P_e,
        1 when balanced; f_e is the share of rows sent to expert e, P_e its mean probability."""
        shares = self.counts / self.counts.sum().clamp(min=1)
        return len(shares) * (shares * self.mean_prob).sum()


def top_k(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose the k most probable experts of each token, largest first."""
    return probs.topk(k, dim=-1)


def uniform(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose expert (t*k + j) mod E for slot j of token t of the microbatch (forced uniform
    routing). The numbers of rows of any two experts differ by at most one. The choice does not
    depend on the probabilities, but the router still trains (CONTRACT.md, "Loss")."""
    tokens, experts = probs.shape
    slots = torch.arange(tokens * k, device=probs.device).view(tokens, k)
    chosen = slots.remainder_(experts)
    return probs.gather(1, chosen), chosen


Choice = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Probabilities fp32 [T, E] and K -> probabilities [T, K] and numbers, int64 [T, K], of the chosen
experts, none twice for a token."""

CHOICES: Mapping[str, Choice] = {"top-k": top_k, "uniform": uniform}


class Router(nn.Module):
    """A linear layer, softmax in fp32 and the choice of experts: x [T, D] -> weights [T, K] in the
    dtype of x, experts int64 [T, K], Routing. T is the number of tokens of one microbatch of one
    data rank."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden_size))
        self.top_k = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        self.choose = CHOICES[config.router]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Routing]:
        logits = F.linear(x, self.weight)
        probs = logits.softmax(-1, dtype=torch.float32)
        weights, experts = self.choose(probs, self.top_k)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        tokens = max(1, len(x))  # without tokens the means are 0, not NaN
        routing = Routing(
            counts=torch.zeros(len(self.weight), dtype=torch.int64, device=x.device).scatter_add_(
                0, experts.flatten(), torch.ones_like(experts).flatten()
            ),
            mean_prob=probs.sum(0) / tokens,
            z=logits.float().logsumexp(-1).square().sum() / tokens,
        )
        return weights.to(x.dtype), experts, routing


def layer_losses(
    config: ModelConfig, routings: Sequence[Routing]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return load-balancing losses and z-losses, each fp32 [layers], and counts by layer.

    The sum over layers, divided by the number of layers with experts, is the loss of the model; a
    pipeline stage returns only the values of its layers. The Hugging Face form of the
    load-balancing loss is one value for all layers.

    Args:
        config: the configuration of the model.
        routings: one for each layer with experts, in order.
    """
    if not routings:
        return torch.zeros(0), torch.zeros(0), []
    if config.aux_loss_form == "hf":
        pooled = hf_load_balancing_loss(routings, config.num_experts_per_tok)
        aux = (pooled * len(config.sparse_layers)).unsqueeze(0)
    else:
        aux = torch.stack([routing.balance() for routing in routings])
    return aux, torch.stack([routing.z for routing in routings]), [r.counts for r in routings]


def hf_load_balancing_loss(routings: Sequence[Routing], top_k: int) -> Tensor:
    """Return the load-balancing loss in the form of transformers: the statistics of all layers are
    pooled before the product, and f_e is K times larger than in OLMo's form.

    The form couples all layers, so all of them must be on one stage.
    """
    counts = torch.stack([routing.counts for routing in routings]).sum(0).float()
    mean_prob = torch.stack([routing.mean_prob for routing in routings]).mean(0)
    return len(counts) * top_k * (counts / counts.sum().clamp(min=1) * mean_prob).sum()
