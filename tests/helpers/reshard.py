"""Layouts of 1, 2, 4 and 8 ranks between which checkpoints must pass to the bit."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

from optimus.distributed.mesh import Mesh
from tests.helpers.held import Holdings, layout_config

_MODEL = {
    "model__num_layers": 8,
    "model__num_attention_heads": 8,
    "model__num_experts": 8,
    "model__tie_embeddings": True,
}
BLOCK_BYTES = 1 << 13
"""Small, so that ranges begin and end within blocks."""


class Layout(NamedTuple):
    """How the ranks divide the model and its states, and by which rule they write."""

    mesh: tuple[int, int, int, int]
    sharding: str
    chunk_length: int
    schedule: str
    scatter: str

    def __str__(self) -> str:
        sizes = "".join(f"{a}{n}" for a, n in zip(("pp", "dp", "ep", "tp"), self.mesh, strict=True))
        return f"{sizes}-{self.sharding}-{self.chunk_length}-{self.schedule}-{self.scatter}"

    def holdings(self) -> Holdings:
        mesh = Mesh(*self.mesh)
        config = layout_config(
            mesh,
            optim__sharding=self.sharding,
            optim__chunk_length=self.chunk_length,
            parallel__schedule=self.schedule,
            parallel__virtual_stages=2 if self.schedule == "interleaved" else 1,
            **_MODEL,
        )
        return Holdings(config, mesh)


Pair = tuple[Layout, Layout]
"""Saved under the first, loaded under the second."""


def all_layouts() -> list[Layout]:
    """Of the schedules only interleaved ones place layers in another way."""
    return list(_layouts())


def _layouts() -> Iterator[Layout]:
    for mesh in itertools.product((1, 2, 4, 8), repeat=4):
        if math.prod(mesh) > 8:
            continue
        schedules = ["1f1b", "interleaved"] if mesh[0] in (2, 4) else ["1f1b"]
        for sharding, length, schedule, scatter in itertools.product(
            ("none", "so", "epso"), (700, 20_000, 1 << 24), schedules, ("balanced", "paper")
        ):
            yield Layout(mesh, sharding, length, schedule, scatter)


def pairwise(seed: int = 0) -> list[Pair]:
    """Few pairs in which every mesh saves and loads, and every two other choices meet, one of the
    layout that saves and one of that which loads."""
    generator, every = random.Random(seed), all_layouts()
    drawn = [(generator.choice(every), generator.choice(every)) for _ in range(2000)]
    features = {pair: set(_features(pair)) for pair in drawn}
    missing, chosen = set().union(*features.values()), []
    while missing:
        best = max(drawn, key=lambda pair: len(features[pair] & missing))
        chosen.append(best)
        missing -= features[best]
    return chosen


def _features(pair: Pair) -> Iterator[tuple]:
    one, other = pair
    yield from (("saves", one.mesh), ("loads", other.mesh))
    yield from itertools.product(enumerate(one[1:]), enumerate(other[1:]))
