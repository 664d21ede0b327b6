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
def test_every_parameter_has_one_aligned_place(seed, target):
    parameters = random_parameters(seed)
    layout = lay_out(parameters, target)
    slots = {slot.name: slot for slot in layout.slots}
    assert slots.keys() == {p.name for p in parameters} and len(layout.slots) == len(slots)
    for parameter in parameters:
        slot = slots[parameter.name]
        chunk = layout.chunks[slot.chunk]
        assert slot.shape == parameter.shape and slot.stop - slot.start == parameter.size
        assert slot.start % ALIGNMENT == 0 and slot.stop <= chunk.length
        assert (chunk.key, chunk.adders, chunk.shards) == (
            parameter.key,
            parameter.adders,
            parameter.shards,
        )
    for number, chunk in enumerate(layout.chunks):
        assert chunk.number == number and chunk.length % (chunk.adders * ALIGNMENT) == 0
        assert 2 * chunk.shard_length % 64 == 0  # bytes of bf16
        assert chunk.shard_length * chunk.shards == chunk.length
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
def test_little_is_wasted_on_real_models(model, mesh, target):
    whole = whole_model(load_config(CONFIGS / f"{model}.toml").model)
    parameters = [
        Parameter(
            name,
            one.local_shape,
            "ep" in one.kind.divided,
            mesh.dp if "ep" in one.kind.divided else mesh.dp * mesh.ep,
        )
        for name, one in make_placements(whole, mesh, Coordinate(0, 0, 0, 0)).items()
    ]
    layout = lay_out(parameters, target)
    assert layout.length / sum(chunk.used for chunk in layout.chunks) - 1 <= MAX_WASTE


def test_of_lengths_that_waste_as_little_the_nearest_is_taken():
    """What 32,000 elements waste counts in steps of 80."""
    assert best_length([320] * 100, 16_032, 1) == 16_032  # 32 more than nothing
    assert best_length([320] * 100, 16_096, 1) == 16_000


def test_a_name_given_twice_is_refused():
    with pytest.raises(AssertionError, match="given twice"):
        lay_out([Parameter("a", (4,)), Parameter("a", (4,))], 64)


@pytest.mark.parametrize("seed", range(5))
def test_the_parameters_of_a_stretch(seed):
    draw = random.Random(seed)
    for chunk in lay_out(random_parameters(seed), 1000).chunks:
        ends = [(0, slot.start) for slot in chunk.slots[1:]]  # a stretch ends where a slot begins
        drawn = [sorted(draw.sample(range(chunk.length + 1), 2)) for _ in range(20)]
        for start, stop in (*ends, *drawn):
            met = [slot for slot in chunk.slots if slot.start < stop and slot.stop > start]
            assert list(chunk.slots_in(start, stop)) == met
