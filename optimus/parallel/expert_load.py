"""Imbalance of the ranks of expert parallelism, computed without communication.

The imbalance of a rank in a layer is the number of rows that its experts compute, relative to an
equal share of the rows of all ep ranks. A row is a pair of a token and one of its experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def rank_imbalances(rows: Sequence[int], ep: int) -> list[float]:
    """Return the imbalance of each ep rank in a layer.

    Args:
        rows: Number of tokens of each expert of the layer. At least one number is not 0.
        ep: Number of ep ranks, which divides the number of experts.
    """
    experts = len(rows) // ep
    total = sum(rows)
    return [ep * sum(rows[r * experts : (r + 1) * experts]) / total for r in range(ep)]


def largest_imbalance(experts: int, experts_per_token: int, ep: int) -> float:
    """Return the largest possible imbalance of a rank. A rank has this imbalance if, for every
    token, as many of the token's experts as possible are on the rank."""
    return ep * min(experts // ep, experts_per_token) / experts_per_token


def arrivals(experts: int, experts_per_token: int, ep: int, imbalance: float = 1.0) -> float:
    """Return the expected share of tokens that have at least one expert on an ep rank.

    The experts of a token form a set. The assumed probability of each set is proportional to x^j,
    where j is the number of experts in the set that are on the rank (Fisher's noncentral
    hypergeometric distribution). The imbalance determines x. If the imbalance is 1, all sets are
    equally likely.

    Args:
        experts: Number of experts of the layer.
        experts_per_token: Number of experts to which each token is routed.
        ep: Number of ep ranks.
        imbalance: Imbalance of the rank.
    """
    k, local = experts_per_token, experts // ep
    fewest, most = max(0, k - experts + local), min(k, local)
    if fewest > 0 or imbalance >= largest_imbalance(experts, k, ep):
        return 1.0
    if imbalance <= 0:
        return 0.0
    sets = [math.comb(local, j) * math.comb(experts - local, k - j) for j in range(most + 1)]

    def shares(log_x: float) -> list[float]:
        logs = [math.log(count) + j * log_x for j, count in enumerate(sets)]
        weights = [math.exp(log - max(logs)) for log in logs]
        return [weight / sum(weights) for weight in weights]

    if imbalance == 1.0:
        return 1.0 - shares(0.0)[0]
    low, high = -_LARGEST_LOG, _LARGEST_LOG
    for _ in range(60):
        middle = (low + high) / 2
        mean = sum(j * share for j, share in enumerate(shares(middle)))
        low, high = (middle, high) if mean < imbalance * k / ep else (low, middle)
    return 1.0 - shares((low + high) / 2)[0]


_LARGEST_LOG = 50.0
"""Largest logarithm of x."""
