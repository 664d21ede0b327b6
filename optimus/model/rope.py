"""Rotary position embedding (RoFormer, arXiv 2104.09864) with the scaling types of transformers.

Dims: B batch, S sequence, H heads, C head_dim. As in transformers, a rotated pair consists of
elements i and i + C/2 of a head. Angles are fp32 for every dtype of the model.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from optimus.config import ModelConfig, RopeScaling


class Rotary(nn.Module):
    """Module that returns the cosines and sines for a sequence length S: two fp32 tensors [S, C/2].

    The tensors are not buffers of the module, so casting the model does not round them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def forward(self, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
        key = (seq_len, device)
        if key in self._tables:
            return self._tables[key]
        # The CPU computes the table, so that the table has the same bits on every device. Inference
        # mode is disabled, because an evaluation may compute a table that training uses later, and
        # backward cannot use inference tensors.
        with torch.device("cpu"), torch.inference_mode(False):
            frequencies, factor = inverse_frequencies(self.config, seq_len)
            angles = torch.arange(seq_len, dtype=torch.float32).unsqueeze(1) * frequencies
            table = (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)
        self._tables = {key: table}
        return table


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary position embedding to the heads x [B, S, H, C].

    Elements i and i + C/2 of a head are rotated by an angle that depends on i and on the position
    of the token. `table` contains the cosines and sines from `Rotary`, each [S, C/2]. The
    computation is in fp32, and the result has the dtype of x.
    """
    return _Rotate.apply(x, *table)


class _Rotate(torch.autograd.Function):
    """Autograd function of `rotate`. Backward rotates the gradient by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x[..., :half].float(), x[..., half:].float()
    out = torch.empty_like(x)
    out[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
    out[..., half:] = (second * cos).addcmul_(first, sin)
    return out


def inverse_frequencies(config: ModelConfig, seq_len: int) -> tuple[Tensor, float]:
    """Return the frequency of each rotated pair, and the factor by which to multiply all cosines
    and sines.

    Args:
        config: configuration of the model.
        seq_len: length of the sequence. The result depends on this length only with dynamic
            scaling.

    Returns:
        Frequencies in radians per token, fp32 [C/2], and the factor, which is 1 except with YaRN
        scaling.
    """
    dim, scaling, theta = config.head_size, config.rope_scaling, config.rope_theta
    if scaling is None:
        return _plain(theta, dim), 1.0
    if scaling.type == "linear":
        return _plain(theta, dim) / scaling.factor, 1.0
    if scaling.type == "dynamic":
        longest = config.max_position_embeddings
        stretch = scaling.factor * max(seq_len, longest) / longest - (scaling.factor - 1)
        return _plain(theta * stretch ** (dim / (dim - 2)), dim), 1.0
    if scaling.type == "llama3":
        # `turns` counts the rotations of each pair within the original context length. Llama 3
        # divides the frequencies of pairs with at most `low` turns by `scaling.factor`, keeps the
        # frequencies of pairs with at least `high` turns, and interpolates linearly in between.
        frequencies = _plain(theta, dim)
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - kept) * frequencies / scaling.factor + kept * frequencies, 1.0
    return _yarn(theta, dim, scaling)


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _yarn(theta: float, dim: int, scaling: RopeScaling) -> tuple[Tensor, float]:
    """Return the frequencies [dim/2] and the factor of cosines and sines for YaRN scaling
    (arXiv 2309.00071). See `inverse_frequencies`."""
    # Pairs up to index `low` keep their frequencies. The frequencies of pairs from index `high` are
    # divided by the factor. In between, the frequencies are interpolated.
    low = _pair_turning(scaling.beta_fast or 32, theta, dim, scaling)
    high = _pair_turning(scaling.beta_slow or 1, theta, dim, scaling)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low or 0.001)).clamp(0, 1)
    frequencies = _plain(theta, dim)
    frequencies = frequencies / scaling.factor * stretched + frequencies * (1 - stretched)
    if scaling.attention_factor:
        return frequencies, scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        numerator = _mscale(scaling.factor, scaling.mscale)
        return frequencies, numerator / _mscale(scaling.factor, scaling.mscale_all_dim)
    return frequencies, _mscale(scaling.factor, 1.0)


def _pair_turning(turns: float, theta: float, dim: int, scaling: RopeScaling) -> float:
    """Return the index of the pair of elements that would rotate `turns` times within the original
    context length. The index is usually a fraction."""
    wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(theta))


def _mscale(factor: float, slope: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * slope * math.log(factor) + 1.0
