"""Router: choice of experts, routing weights and auxiliary losses.

`CHOICES` contains the functions that choose experts from the router's probabilities. The setting
`model.router` selects one of them. To add a function, add it to `CHOICES`, and add its name to the
allowed values of `model.router`.

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
    """Router statistics of one layer for one microbatch, from which the auxiliary losses are
    computed."""

    counts: Tensor
    """int64 [E]: number of tokens routed to each expert; the sum is T*K."""
    mean_prob: Tensor
    """fp32 [E]: softmax probability of each expert, averaged over tokens. Differentiable."""
    z: Tensor
    """fp32 scalar: mean over tokens of logsumexp(logits)^2. Differentiable."""

    def balance(self) -> Tensor:
        """Return the load-balancing loss in OLMo's form, E * sum_e f_e * P_e.

        E is the number of experts, f_e is counts[e] / sum(counts), and P_e is mean_prob[e]. A
        balanced load gives 1.
        """
        shares = self.counts / self.counts.sum().clamp(min=1)
        return len(shares) * (shares * self.mean_prob).sum()


def top_k(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose the k most probable experts of each token. Return the probabilities and the indices of
    the chosen experts, each [T, k], in descending order of probability."""
    return probs.topk(k, dim=-1)


def uniform(probs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Choose experts in a fixed order (forced uniform routing). Return the probabilities and the
    indices of the chosen experts, each [T, k].

    Choice j of token t is expert (t*k + j) mod E, where E is the number of experts. All experts
    thus get about the same number of tokens. The router still receives gradients, because its
    probabilities are the routing weights.
    """
    tokens, experts = probs.shape
    slots = torch.arange(tokens * k, device=probs.device).view(tokens, k)
    chosen = slots.remainder_(experts)
    return probs.gather(1, chosen), chosen


Choice = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""Function that chooses K distinct experts for each token. The function maps the probabilities fp32
[T, E] and K to (probabilities of the chosen experts [T, K], expert indices int64 [T, K])."""

CHOICES: Mapping[str, Choice] = {"top-k": top_k, "uniform": uniform}


class Router(nn.Module):
    """Router: x [T, D] -> (routing weights [T, K], expert indices int64 [T, K], Routing).

    T is the number of tokens of one microbatch on one data-parallel rank. The softmax is computed
    in fp32, and the routing weights have the dtype of x.
    """

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
    config: ModelConfig, routings: Sequence[Routing], device: torch.device
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return the auxiliary losses and the token counts of the layers with experts.

    To get the load-balancing loss or the z-loss of the model, sum the losses over the layers of all
    pipeline stages and divide by the number of layers with experts.

    Args:
        config: the configuration of the model.
        routings: router statistics of each layer with experts, in order.
        device: the device of the results if no layer has experts.

    Returns:
        The load-balancing losses and z-losses, fp32 [layers], and the `Routing.counts` of each
        layer. With `aux_loss_form = "hf"`, there is only one load-balancing loss, fp32 [1]:
        `hf_load_balancing_loss` times the number of layers with experts, because the caller
        divides by this number.
    """
    if not routings:
        none = torch.zeros(0, device=device)
        return none, none, []
    if config.aux_loss_form == "hf":
        pooled = hf_load_balancing_loss(routings, config.num_experts_per_tok)
        aux = (pooled * len(config.sparse_layers)).unsqueeze(0)
    else:
        aux = torch.stack([routing.balance() for routing in routings])
    return aux, torch.stack([routing.z for routing in routings]), [r.counts for r in routings]


def hf_load_balancing_loss(routings: Sequence[Routing], top_k: int) -> Tensor:
    """Return the load-balancing loss in the Hugging Face form, E * sum_e f_e * P_e.

    E is the number of experts. f_e is the fraction of the tokens that choose expert e (the sum of
    all f_e is `top_k`), and P_e is the mean probability of expert e. f_e and P_e are means over
    all layers, so all layers must be on one pipeline stage.
    """
    counts = torch.stack([routing.counts for routing in routings]).sum(0).float()
    mean_prob = torch.stack([routing.mean_prob for routing in routings]).mean(0)
    return len(counts) * top_k * (counts / counts.sum().clamp(min=1) * mean_prob).sum()
