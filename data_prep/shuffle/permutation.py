"""The global shuffle: an exactly specified bijection on [0, N), keyed with (seed, epoch).

A Feistel network on b bits, 2^b < 2N, walked until it lands below N (cycle walking), so that it
needs O(1) memory at any N and any stretch of it can be computed on any machine. All arithmetic is
modulo 2^64. Specification and test vectors: docs/formats/dataset.md, "Permutation".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERMUTATION_ALGORITHM = "feistel8-splitmix64"
"""Recorded in every manifest; a change of anything below needs another name."""

MAX_SEED = (1 << 64) - 1
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 15  # indices at a time: temporaries stay in the second-level cache


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    """The round keys of (seed, epoch), uint64 [8]."""
    state = _mix64(np.array([seed], np.uint64) + _GOLDEN)
    state = _mix64((state ^ np.uint64(epoch)) + _GOLDEN)
    return _mix64(state + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * _GOLDEN)


class Permutation:
    """A bijection of [0, n). `apply(i)` is what stands at place i."""

    def __init__(self, n: int, seed: int, epoch: int = 0):
        assert n >= 0 and 0 <= seed <= MAX_SEED and 0 <= epoch <= MAX_SEED, (n, seed, epoch)
        self.n = n
        bits = max(2, (n - 1).bit_length())
        self._left_bits = bits // 2
        self._right_bits = bits - bits // 2
        self._rounds = list(enumerate(_round_keys(seed, epoch)))

    def apply(self, places: np.ndarray) -> np.ndarray:
        """Images of `places` (any integer dtype, every one in [0, n)) as int64."""
        return self._walk(places, self._rounds)

    def inverse(self, images: np.ndarray) -> np.ndarray:
        """The places whose images these are: inverse(apply(i)) == i."""
        return self._walk(images, self._rounds[::-1])

    def _walk(self, places: np.ndarray, rounds: Sequence[tuple[int, np.uint64]]) -> np.ndarray:
        places = np.asarray(places)
        out = np.empty(places.shape, np.int64)
        for begin in range(0, len(places), _CHUNK):
            chunk = self._feistel(places[begin : begin + _CHUNK].astype(np.uint64), rounds)
            outside = np.flatnonzero(chunk >= self.n)
            while outside.size:
                again = self._feistel(chunk[outside], rounds)
                chunk[outside] = again
                outside = outside[again >= self.n]
            out[begin : begin + _CHUNK] = chunk
        return out

    def _feistel(self, value: np.ndarray, rounds: Sequence[tuple[int, np.uint64]]) -> np.ndarray:
        """The network; with its rounds in reverse, which undo themselves, its inverse."""
        right_bits = np.uint64(self._right_bits)
        left_drop = np.uint64(64 - self._left_bits)
        right_drop = np.uint64(64 - self._right_bits)
        left = value >> right_bits
        right = value & np.uint64((1 << self._right_bits) - 1)
        for r, key in rounds:
            if r % 2 == 0:
                left ^= _mix64(right + key) >> left_drop
            else:
                right ^= _mix64(left + key) >> right_drop
        return (left << right_bits) | right


def _mix64(value: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, a bijection, of a uint64 array, in place."""
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    return value
