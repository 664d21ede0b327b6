from __future__ import annotations

import pytest

from optimus.dist.mesh import Mesh, make_mesh
from optimus.errors import ConfigError


def test_data_ranks_count_dp_then_ep_and_skip_tp_and_pp():
    mesh = Mesh(pp=2, dp=2, ep=3, tp=2)
    expected = [
        dp * 3 + ep for _pp in range(2) for dp in range(2) for ep in range(3) for _tp in range(2)
    ]
    assert [mesh.data_rank(rank) for rank in range(mesh.world_size)] == expected


def test_dp_takes_what_is_left():
    assert make_mesh(12, pp=1, dp=0, ep=1, tp=1) == Mesh(dp=12)


def test_sizes_that_do_not_fill_the_world_are_refused_with_a_remedy():
    with pytest.raises(ConfigError, match=r"parallel.dp = 3 .* set parallel.dp = 2"):
        make_mesh(2, pp=1, dp=3, ep=1, tp=1)
    with pytest.raises(ConfigError, match=r"does not divide the world of 6 ranks; start 8"):
        make_mesh(6, pp=2, dp=0, ep=2, tp=1)
