"""Computation of the document number of each token, for attention within documents."""

from __future__ import annotations

import numpy as np


def document_ids(tokens: np.ndarray, eos_id: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the document number of each token. The documents of an instance are counted from 0.

    Args:
        tokens: Token ids, integers [number of instances, tokens per instance].
        eos_id: Id of the token that ends each document and occurs nowhere else.
        out: Array for the result, with the shape of `tokens`; None to create a new int32 array.
    """
    batch, context = tokens.shape
    ends = np.flatnonzero(tokens == eos_id) + 1  # as indices into all tokens
    starts = np.union1d(np.arange(batch) * context, ends[ends < tokens.size])  # of all documents
    first = np.searchsorted(starts, starts // context * context)  # each instance's first document
    numbers = (np.arange(len(starts)) - first).astype(np.int32)
    ids = np.repeat(numbers, np.diff(starts, append=tokens.size)).reshape(tokens.shape)
    if out is None:
        return ids
    out[...] = ids
    return out
