"""Memory of chunks: freed buffers."""

from __future__ import annotations

import pytest
import torch

from optimus.chunks.memory import Memory, Tier


@pytest.mark.parametrize("poison", [False, True])
def test_freed_buffer_has_no_memory_or_contains_nan(poison):
    """With `poison`, a read of a freed buffer causes NaN in the results of tests."""
    memory = Memory(torch.device("cpu"), poison)
    flat = memory.new(8, torch.float32)
    memory.free(flat)
    assert not memory.has(flat) and memory.num_bytes[Tier.DEVICE] == 0
    assert flat.untyped_storage().nbytes() == (32 if poison else 0)
    assert not poison or flat.isnan().all()
    memory.allocate(flat)
    assert memory.has(flat) and flat.untyped_storage().nbytes() == 32
