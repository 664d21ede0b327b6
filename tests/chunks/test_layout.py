"""Tests of the layout of parameters in chunks: alignment, order of first use, padding."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest

from optimus.chunks.layout import ALIGNMENT, MAX_WASTE, Parameter, best_length, lay_out
from optimus.config import load_config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.parallel.apply import make_placements
from optimus.parallel.placement import whole_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "model"


def random_parameters(seed: int) -> list[Parameter]:
    draw = random.Random(seed)
    groups = {
        "expert": (draw.choice([1, 2, 3]), 1),
        "other": (draw.choice([4, 6]), 2),
        "tied": (1, 1),
    }
    parameters = []
    for number in range(draw.randint(1, 40)):
        key = draw.choice(list(groups))
        shape = tuple(draw.choice([1, 3, 7, 16, 33, 100]) for _ in range(draw.randint(1, 3)))
        parameters.append(Parameter(f"p{number}", shape, key, *groups[key]))
    return parameters


@pytest.mark.parametrize("target", [1, 1000, 10**6])
@pytest.mark.parametrize("seed", range(20))
def test_each_parameter_has_an_aligned_slot(seed, target):
    """Make the layout of random parameters with up to three keys. Each parameter has one slot, in a
    chunk whose parameters all have the key of this parameter. Slots and shards are aligned, and
    slots do not overlap. All chunks of a key except the last have the same length, and the slots of
    a key are in order of first use."""
    parameters = random_parameters(seed)
    layout = lay_out(parameters, target)
    slots = {slot.name: slot for slot in layout.slots}
    assert slots.keys() == {p.name for p in parameters} and len(layout.slots) == len(slots)
    for parameter in parameters:
        slot = slots[parameter.name]
        chunk = layout.chunks[slot.chunk]
        assert slot.shape == parameter.shape and slot.stop - slot.start == parameter.size
        assert slot.start % ALIGNMENT == 0 and slot.stop <= chunk.length
        assert (chunk.key, chunk.reduce_size, chunk.shard_size) == (
            parameter.key,
            parameter.reduce_size,
            parameter.shard_size,
        )
    for number, chunk in enumerate(layout.chunks):
        assert chunk.number == number and chunk.length % (chunk.reduce_size * ALIGNMENT) == 0
        assert 2 * chunk.shard_length % 64 == 0  # bytes of a bf16 shard
        assert chunk.shard_length * chunk.shard_size == chunk.length
        assert chunk.used == sum(math.prod(slot.shape) for slot in chunk.slots)
        for before, after in itertools.pairwise(chunk.slots):
            assert before.stop <= after.start
    for key in {p.key for p in parameters}:
        of_key = [chunk for chunk in layout.chunks if chunk.key == key]
        assert len({chunk.length for chunk in of_key[:-1]}) <= 1
        order = [slot.name for chunk in of_key for slot in chunk.slots]
        assert order == [p.name for p in parameters if p.key == key]  # order of first use


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("mula-1b", Mesh(dp=8)),
        ("mula-7b-a1b", Mesh(dp=8)),
        ("mula-7b-a1b", Mesh(dp=4, ep=8, tp=2)),
        ("mula-20b-a2b", Mesh(dp=32, ep=12)),
        ("mula-100b-a7b", Mesh(dp=16, ep=12)),
        ("mula-220b-a10b", Mesh(dp=8, ep=12)),
        ("olmo-1b", Mesh(dp=4, tp=4)),
    ],
)
@pytest.mark.parametrize("target", [1 << 24, 1 << 27])
def test_padding_of_real_models_is_at_most_max_waste(model, mesh, target):
    """Make the layout of a rank's parameters for several models and meshes. The number of padding
    elements is at most MAX_WASTE times the number of elements."""
    whole = whole_model(load_config(CONFIGS / f"{model}.toml").model)
    parameters = [
        Parameter(
            name,
            placement.local_shape,
            "ep" in placement.kind.divided,
            mesh.dp if "ep" in placement.kind.divided else mesh.dp * mesh.ep,
        )
        for name, placement in make_placements(whole, mesh, Coordinate(0, 0, 0, 0)).items()
    ]
    layout = lay_out(parameters, target)
    assert layout.length / sum(chunk.used for chunk in layout.chunks) - 1 <= MAX_WASTE


def test_best_length_with_little_padding_is_the_nearest_to_the_target():
    """For 32,000 elements, `best_length` treats less than 80 elements of padding as no padding. For
    the target 16,032 it therefore returns 16,032, which causes 32 elements of padding, although the
    length 16,000 causes none."""
    assert best_length([320] * 100, 16_032, 1) == 16_032  # 32 elements of padding
    assert best_length([320] * 100, 16_096, 1) == 16_000


def test_a_duplicate_name_is_an_error():
    """Two parameters have the same name. The layout is refused."""
    with pytest.raises(AssertionError, match="given twice"):
        lay_out([Parameter("a", (4,)), Parameter("a", (4,))], 64)


@pytest.mark.parametrize("seed", range(5))
def test_slots_of_a_range_are_those_that_overlap_it(seed):
    """Draw random ranges of random chunks, and ranges that end where a slot begins. `slots_in`
    returns the slots that have elements in the range."""
    draw = random.Random(seed)
    for chunk in lay_out(random_parameters(seed), 1000).chunks:
        before = [(0, slot.start) for slot in chunk.slots[1:]]
        drawn = [sorted(draw.sample(range(chunk.length + 1), 2)) for _ in range(20)]
        for start, stop in (*before, *drawn):
            expected = [slot for slot in chunk.slots if slot.start < stop and slot.stop > start]
            assert list(chunk.slots_in(start, stop)) == expected
