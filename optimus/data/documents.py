"""Which document of its instance each token belongs to.

Dims: B instances, C tokens of an instance.
"""

from __future__ import annotations

import numpy as np


def document_ids(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """int32 [B, C]: how many documents end before each token of `tokens` [B, C].

    A document ends at its EOS, which belongs to it, and EOS occurs nowhere else (CONTRACT.md,
    "Data set"). So the ids come from the tokens alone: 0 for what an instance begins with, though
    that may be the rest of a document whose beginning stands in another instance.
    """
    ids = np.zeros(tokens.shape, np.int32)
    ids[:, 1:] = tokens[:, :-1] == eos_id
    return np.cumsum(ids, axis=1, out=ids)
