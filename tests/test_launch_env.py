from __future__ import annotations

import pytest

from optimus.errors import ConfigError
from optimus.launch_env import SINGLE, read_launch_env

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_no_launcher_is_one_process():
    assert read_launch_env({}) is SINGLE


def test_torchrun():
    launch = read_launch_env(TORCHRUN)
    assert (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size) == (
        3,
        4,
        1,
        2,
    )
    assert launch.init_method == "env://" and not launch.is_first


def test_a_rendezvous_file_needs_no_address():
    own = {"RANK": "0", "WORLD_SIZE": "2", "OPTIMUS_RENDEZVOUS": "file:///x"}
    assert read_launch_env(own).init_method == "file:///x"


@pytest.mark.parametrize(
    "change, told",
    [
        ({"RANK": None}, "RANK"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four'"),
        ({"RANK": "4"}, "RANK=4 does not lie"),
        ({"MASTER_ADDR": None}, "needs MASTER_ADDR"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
    ],
)
def test_a_contradictory_environment_is_refused_by_name(change, told):
    environ = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(ConfigError, match=told):
        read_launch_env(environ)
