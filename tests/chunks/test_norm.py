"""Tests of the norm of gradients."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.chunks.norm import _BLOCK, _block_norms


class CountedOps(TorchDispatchMode):
    """Counts the calls of torch ops. On a GPU, each op launches at least one kernel."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 1, _BLOCK - 1, _BLOCK, 3 * _BLOCK + 5])
def test_norms_of_blocks_are_those_of_the_slices(size: int, dtype: torch.dtype):
    flat = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
    expected = [float(block.double().norm()) for block in flat.split(_BLOCK)]
    norms = _block_norms(flat)
    assert norms.dtype is torch.float32
    torch.testing.assert_close(norms.tolist(), expected[: len(norms)], rtol=1e-5, atol=0)
    assert all(value == 0 for value in expected[len(norms) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_number_of_launches_does_not_grow_with_the_size(dtype: torch.dtype):
    """The norm calls the same ops on the device "meta" as on a GPU, where the launch of a kernel
    takes about 10 us."""
    counts = []
    for blocks in (2, 1000):
        with CountedOps() as ops:
            assert _block_norms(torch.empty(blocks * _BLOCK + 1, dtype=dtype, device="meta")).shape
        counts.append(ops.calls)
    assert counts[0] == counts[1] < 12
