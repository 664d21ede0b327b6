"""Causal self-attention with rotary embedding and grouped-query heads.

Dims: B batch, S sequence, D hidden, H query heads, G key/value heads, C head_dim.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimus.config import ModelConfig
from optimus.model.layers import RMSNorm
from optimus.model.rope import rotate


class Attention(nn.Module):
    """Causal self-attention: x [B, S, D] -> [B, S, D].

    Under tensor parallelism, each rank computes only its share of the heads.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_size
        self.clip = config.clip_qkv
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_kv_heads * self.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)
        # OLMoE normalises q and k over all heads at once.
        normed = config.architecture == "olmoe"
        self.q_norm = RMSNorm(q_size, config.norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(kv_size, config.norm_eps) if normed else nn.Identity()

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], documents: list[int] | None = None
    ) -> Tensor:
        """Return the output [B, S, D] of causal attention within each document.

        Args:
            x: [B, S, D].
            rope: cosines and sines from `Rotary`, each [S, C/2].
            documents: number of tokens of each document, from `document_lengths`; None if each
                sequence is one document.
        """
        q = self.q_norm(self.q_proj(x))
        k = self.k_norm(self.k_proj(x))
        v = self.v_proj(x)
        if self.clip:
            clip = min(self.clip, torch.finfo(v.dtype).max)  # torch refuses larger bounds
            q, k, v = (projected.clamp(-clip, clip) for projected in (q, k, v))
        q, k, v = (projected.unflatten(-1, (-1, self.head_dim)) for projected in (q, k, v))
        q, k = rotate(q, rope), rotate(k, rope)
        return self.o_proj(self.attend(q, k, v, documents).flatten(-2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, documents: list[int] | None) -> Tensor:
        """Return causal attention [B, S, H, C] for q [B, S, H, C] and k, v [B, S, G, C].

        `documents` contains the number of tokens of each document, and tokens attend only within
        their document. If `documents` is None, each sequence is one document.
        """
        if documents is not None:
            return _within_documents(q, k, v, documents)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))  # [B, H or G, S, C]
        return _causal(q, k, v).transpose(1, 2)


def document_lengths(document_ids: Tensor) -> list[int]:
    """Return the number of tokens of each document, for document_ids [B, S].

    A document starts at the start of each sequence, and where a token has another id than the token
    before it. The numbers sum to B*S.
    """
    # If the ids are on the CPU, the host does not wait for the device here.
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    bounds = [*begins.flatten().nonzero().flatten().tolist(), document_ids.numel()]
    return [stop - start for start, stop in itertools.pairwise(bounds)]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention [B, H, S, C] for q [B, H, S, C] and k, v [B, G, S, C]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


def _within_documents(q: Tensor, k: Tensor, v: Tensor, documents: list[int]) -> Tensor:
    """Return causal attention [B, S, H, C] within each document, as described in
    `Attention.attend`."""
    # A fused call for each document avoids an [S, S] mask and the cost of masked scores
    # (docs/benchmarks/document_mask.md).
    by_document = zip(*(heads.flatten(0, 1).split(documents) for heads in (q, k, v)), strict=True)
    outputs = [
        _causal(*(heads.transpose(0, 1).unsqueeze(0) for heads in qkv)).squeeze(0).transpose(0, 1)
        for qkv in by_document
    ]
    return torch.cat(outputs).view_as(q)
