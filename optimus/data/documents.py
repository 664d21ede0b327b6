"""Which document of its instance each token belongs to.

Dims: B instances, C tokens of an instance.
"""

from __future__ import annotations

import numpy as np


def document_ids(tokens: np.ndarray, eos_id: int, out: np.ndarray | None = None) -> np.ndarray:
    """int32 [B, C], in `out` or a new array: how many documents end before each of `tokens` [B, C].

    A document ends at its EOS, which belongs to it, and EOS occurs nowhere else (CONTRACT.md,
    "Data set"). So the ids come from the tokens alone: 0 for what an instance begins with, though
    that may be the rest of a document whose beginning stands in another instance.
    """
    batch, context = tokens.shape
    ends = np.flatnonzero(tokens == eos_id) + 1  # counted through all instances
    starts = np.union1d(np.arange(batch) * context, ends[ends < tokens.size])  # of the documents
    first = np.searchsorted(starts, starts // context * context)  # of the instance they are in
    numbers = (np.arange(len(starts)) - first).astype(np.int32)
    ids = np.repeat(numbers, np.diff(starts, append=tokens.size)).reshape(tokens.shape)
    if out is None:
        return ids
    out[...] = ids
    return out
