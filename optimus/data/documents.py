"""Document numbers of tokens, for attention within documents.

Dims: B instances, C tokens of an instance.
"""

from __future__ import annotations

import numpy as np


def document_ids(tokens: np.ndarray, eos_id: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return, for each token, the number of documents of the token's instance that end before it.

    A document ends with its EOS, and EOS occurs nowhere else (CONTRACT.md, "Data set"), so the
    tokens alone determine the result. The first document of an instance has number 0, even if it
    starts in an earlier instance.

    Args:
        tokens: Integers [B, C].
        eos_id: The token that ends a document.
        out: Array [B, C] for the result; None: a new int32 array.
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
