from __future__ import annotations

import itertools

import pytest

from optimus.config.axes import AXES, DATA
from optimus.config.sections import ParallelConfig
from optimus.distributed.mesh import ENDS, Coordinate, Mesh, make_mesh
from optimus.errors import ConfigError


def test_data_ranks_count_dp_then_ep_and_skip_tp_and_pp():
    mesh = Mesh(pp=2, dp=2, ep=3, tp=2)
    expected = [
        dp * 3 + ep for _pp in range(2) for dp in range(2) for ep in range(3) for _tp in range(2)
    ]
    assert [mesh.number_of(mesh.coordinate(rank), DATA) for rank in range(24)] == expected


def test_dp_takes_the_ranks_that_are_left():
    assert make_mesh(ParallelConfig(), 12) == Mesh(dp=12)
    assert make_mesh(ParallelConfig(pp=2, dp=6), 12) == Mesh(pp=2, dp=6)


def test_sizes_that_do_not_fill_the_world_are_refused_with_a_remedy():
    with pytest.raises(ConfigError, match=r"parallel.dp = 3 .* set parallel.dp = 2"):
        make_mesh(ParallelConfig(dp=3), 2)
    with pytest.raises(ConfigError, match="of 3,072 ranks, but this run has 1,536; set"):
        make_mesh(ParallelConfig(dp=3072), 1536)
    with pytest.raises(
        ConfigError,
        match=r"world of 6 ranks; use a multiple of 4 ranks, such as 8",
    ):
        make_mesh(ParallelConfig(pp=2, ep=2), 6)


def test_tp_varies_fastest_and_pp_slowest():
    mesh = Mesh(pp=2, dp=3, ep=2, tp=2)
    coordinates = [
        Coordinate(*indices)
        for indices in itertools.product(range(2), range(3), range(2), range(2))
    ]
    assert [mesh.coordinate(rank) for rank in range(mesh.world_size)] == coordinates
    assert [mesh.rank_at(entry) for entry in coordinates] == list(range(mesh.world_size))


@pytest.mark.parametrize(
    "axes", [c for n in range(5) for c in itertools.combinations(AXES, n)], ids="-".join
)
def test_groups_are_those_of_brute_force(axes):
    mesh = Mesh(pp=2, dp=3, ep=2, tp=2)

    def are_together(a, b):
        first, second = mesh.coordinate(a), mesh.coordinate(b)
        return all(getattr(first, x) == getattr(second, x) for x in AXES if x not in axes)

    world = range(mesh.world_size)
    for rank in world:
        assert list(mesh.group_of(rank, axes)) == [b for b in world if are_together(rank, b)]
    groups = {mesh.group_of(rank, axes) for rank in world}
    assert sorted(rank for group in groups for rank in group) == list(world)


APART = {
    ("pp",): ("dp", "ep", "tp"),
    ("dp",): ("pp", "ep", "tp"),
    ("ep",): ("pp", "dp", "tp"),
    ("tp",): ("pp", "dp", "ep"),
    ("dp", "ep"): ("pp", "tp"),
}
"""Maps the axes of a group to the other axes. All ranks of a group have the same index along each
of the other axes."""


def gathered(mesh: Mesh) -> dict[tuple[str, ...], list[tuple[int, ...]]]:
    """Compute groups by brute force. For each key of `APART` and for ENDS, return a list that
    contains the group of each rank."""
    counts = itertools.product(*(range(size) for size in mesh))
    coordinates = [dict(zip(AXES, indices, strict=True)) for indices in counts]
    groups = {}
    for name, axes in APART.items():
        together: dict[tuple[int, ...], list[int]] = {}
        joined = [
            together.setdefault(tuple(indices[axis] for axis in axes), [])
            for indices in coordinates
        ]
        for rank, group in enumerate(joined):
            group.append(rank)
        known = {id(group): tuple(group) for group in together.values()}
        groups[name] = [known[id(group)] for group in joined]
    groups[ENDS] = [
        tuple(sorted({column[0], column[-1]})) if rank in (column[0], column[-1]) else (rank,)
        for rank, column in enumerate(groups["pp",])
    ]
    return groups


@pytest.mark.parametrize("sizes", [(8, 128, 12, 1), (4, 64, 12, 4)], ids=str)
def test_groups_of_12288_ranks_partition_the_world(sizes):
    mesh = Mesh(*sizes)
    expected = gathered(mesh)
    for name, groups in expected.items():
        different = {id(group): group for group in groups}.values()
        if name != ENDS:
            assert sum(map(len, different)) == mesh.world_size, f"{name} does not partition"
    for rank in range(mesh.world_size):
        for name, members in mesh.groups_of(rank).items():
            assert members == expected[name][rank], (rank, name)
