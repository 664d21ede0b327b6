"""Attention within documents, three ways: a call a document, a boolean mask, and no mask at all.

Forward and backward of one attention of [B, S, H, C], in turn, seconds of wall clock as medians and
the spread of the paired ratios. Any device: python scripts/bench/document_mask.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from optimus.model.attention import _causal, _within_documents, document_lengths

B, S, H, C = 2, 2048, 8, 64


def some_documents(mean: int) -> Tensor:
    """int32 [B, S]: ids of documents of geometric lengths around `mean`."""
    ends = torch.rand(B, S, generator=torch.Generator().manual_seed(mean)) < 1 / mean
    return ends.cumsum(1).int()


def ways(ids: Tensor, device: str) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    lengths = document_lengths(ids)
    same = ids.unsqueeze(-1) == ids.unsqueeze(-2)
    mask = (same & torch.ones(S, S, dtype=torch.bool).tril()).unsqueeze(1).to(device)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _causal(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

    return {
        "by document": lambda q, k, v: _within_documents(q, k, v, lengths),
        "boolean mask": masked,
        "no mask": plain,
    }


def measure(mean: int, args: argparse.Namespace) -> dict[str, object]:
    """Seconds of each way and its ratios to the boolean mask, over documents of `mean` tokens."""
    ids = some_documents(mean)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    q, k, v = (torch.randn(B, S, H, C, device=args.device, dtype=dtype) for _ in range(3))
    for x in (q, k, v):
        x.requires_grad_()
    seconds: dict[str, list[float]] = {}
    for round_number in range(args.rounds + 1):
        for name, way in ways(ids, args.device).items():
            start = time.perf_counter()
            way(q, k, v).square().sum().backward()
            if args.device != "cpu":
                torch.accelerator.synchronize()
            if round_number:  # the first warms up
                seconds.setdefault(name, []).append(time.perf_counter() - start)
    base = seconds["boolean mask"]
    ratios = {
        name: [b / a for a, b in zip(one, base, strict=True)] for name, one in seconds.items()
    }
    return {
        "mean_document": mean,
        "documents": len(document_lengths(ids)),
        "seconds": {name: statistics.median(one) for name, one in seconds.items()},
        "times_faster_than_mask": {
            name: [min(one), statistics.median(one), max(one)] for name, one in ratios.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    print(json.dumps({"torch": torch.__version__, "shape": [B, S, H, C], **vars(args)}))
    for mean in (2000, 500, 100, 20):
        print(json.dumps(measure(mean, args)))


if __name__ == "__main__":
    main()
