"""Document numbers of tokens, for attention within documents.

Dims: B instances, C tokens per instance.
"""

from __future__ import annotations

import numpy as np


def document_ids(tokens: np.ndarray, eos_id: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the document number of each token.

    The number counts the documents of the instance that end before the token. The first document of
    an instance has number 0, even if it starts in an earlier instance. Each document ends with EOS,
    which occurs nowhere else.

    Args:
        tokens: Token ids, integers [B, C].
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
