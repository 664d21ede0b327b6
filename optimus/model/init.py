"""Initial weights that do not depend on how the model is divided among ranks.

The values of each parameter come from a separate random generator, seeded with `train.seed` and the
name of the parameter. If a parameter contains the weights of several experts, the values of each
expert come from a separate generator, and the seed also includes the index of the expert.
"""

from __future__ import annotations

import hashlib
import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.model.layers import Embedding, RMSNorm
from optimus.model.moe import Experts
from optimus.model.router import Router

_CUT = 3.0  # standard deviations
_BLOCK = 1 << 20


class ParamSlice(Protocol):
    """Interface of an object that describes one rank's slice of a parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this rank's slice of a tensor that has the shape of the whole parameter."""

    def of_entry(self) -> ParamSlice:
        """Return the `ParamSlice` of one expert's weight, for a parameter that stacks the weights
        of several experts along its first dim.

        The result is the same for all experts of this rank. The described tensor does not have the
        first dim of the parameter.
        """


def initialise_(model: nn.Module, seed: int) -> None:
    """Set all parameters of an undivided Transformer to their initial values, in place.

    `seed` is the value of the setting `train.seed`.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(model, name, seed))


def initial_value(
    model: nn.Module, name: str, seed: int, rank_slice: ParamSlice | None = None
) -> Tensor:
    """Return the initial value of a parameter, or of this rank's slice, in fp32 on the CPU.

    Norm weights are 1. Biases and the embedding of the padding token are 0. Other weights are drawn
    from a normal distribution that is truncated at three standard deviations, as in OLMoE. The
    settings `model.init_std` and `model.embedding_init_std` are the standard deviations.

    Args:
        model: the Transformer that has the parameter. The current values of its parameters are not
            read.
        name: name of the parameter.
        seed: value of the setting `train.seed`.
        rank_slice: this rank's slice of the parameter; None if the parameter is not divided among
            ranks.
    """
    config = model.config
    assert isinstance(config, ModelConfig)
    module, shape = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name).shape
    rank_slice = rank_slice or _Whole(shape)
    if isinstance(module, RMSNorm):
        return torch.ones(shape)
    if isinstance(module, nn.Linear) and name.endswith(".bias"):
        return torch.zeros(shape)
    if isinstance(module, Experts):
        entry, value = rank_slice.of_entry(), torch.empty(shape)
        for expert, target in enumerate(value, start=module.first_expert):
            target.copy_(entry.slice_of(draw(entry.shape, config.init_std, seed, name, expert)))
        return value
    assert isinstance(module, (nn.Linear, Embedding, Router)), f"no initial value for {name}"
    is_embedding = isinstance(module, Embedding)
    std = (config.embedding_init_std if is_embedding else 0.0) or config.init_std
    whole = draw(rank_slice.shape, std, seed, name)
    if isinstance(module, Embedding) and module.padding >= 0:
        whole[module.padding] = 0
    return rank_slice.slice_of(whole)


class _Whole:
    """`ParamSlice` of a parameter that is not divided among ranks."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = tuple(shape)

    def slice_of(self, whole: Tensor) -> Tensor:
        return whole

    def of_entry(self) -> _Whole:
        return _Whole(torch.Size(self.shape[1:]))


def draw(
    shape: tuple[int, ...], std: float, seed: int, name: str, expert: int | None = None
) -> Tensor:
    """Draw the initial values of a whole parameter, or of the whole weight of one expert.

    The values have a truncated normal distribution with the standard deviation `std`. The result is
    an fp32 tensor of the given shape on the CPU. A rank that needs only a slice of the result also
    draws all values.
    """
    key = f"{seed}/{name}" if expert is None else f"{seed}/{name}/{expert}"
    digest = hashlib.sha256(key.encode()).digest()
    # The key has 128 bits. torch's CPU generator uses only 32 bits of a seed, so that two of 30,000
    # experts could get the same seed.
    source = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    out = torch.empty(math.prod(shape), dtype=torch.float32)
    bound = math.erf(_CUT / math.sqrt(2))
    for block in out.split(_BLOCK):  # inverse transform sampling of the truncated normal
        source.random(dtype=np.float32, out=block.numpy())
        block.mul_(2).sub_(1).mul_(bound).erfinv_().mul_(std * math.sqrt(2))
    return out.clamp_(-_CUT * std, _CUT * std).view(shape)
