"""Computation of the document number of each token, for attention within documents."""

from __future__ import annotations

import numpy as np


def document_ids(tokens: np.ndarray, eos_id: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the document number of each token: int32, with the shape of `tokens`. In each
    instance, the documents are counted from 0.

    Args:
        tokens: Token ids, integers [number of instances, tokens per instance].
        eos_id: Id of the token that ends each document and occurs nowhere else.
        out: Array int32 for the result, with the shape of `tokens`; None to create a new array.
    """
    batch, context = tokens.shape
    # `ends` and `starts` are indices into the flattened `tokens`. ends[i] is the index after an
    # EOS. starts[i] is the index of the first token of document i, counted over all instances.
    # first[i] is the number of the first document in the instance of document i.
    ends = np.flatnonzero(tokens == eos_id) + 1
    starts = np.union1d(np.arange(batch) * context, ends[ends < tokens.size])
    first = np.searchsorted(starts, starts // context * context)
    numbers = (np.arange(len(starts)) - first).astype(np.int32)
    ids = np.repeat(numbers, np.diff(starts, append=tokens.size)).reshape(tokens.shape)
    if out is None:
        return ids
    out[...] = ids
    return out
