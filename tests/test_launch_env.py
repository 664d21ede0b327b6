from __future__ import annotations

import pytest

from optimus.errors import ConfigError
from optimus.launch_env import SINGLE, Place, read_launch_env, read_local_size, read_place

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


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "14",
    "SLURM_ARRAY_TASK_MIN": "10",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "4",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, (0, 1)),
        (TORCHRUN, (3, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "5"}, (2, 5)),
        ({"PALS_RANKID": "2", "PMI_RANK": "2", "WORLD_SIZE": "6"}, (2, 6)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        (SRUN, (5, 8)),
        (SRUN | {"PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "7"}, (5, 7)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # a batch script, not a step
        (ARRAY, (2, 4)),
        (ARRAY | SRUN, (2 * 8 + 5, 4 * 8)),
        ({"PBS_ARRAY_INDEX": "3", "OPTIMUS_ARRAY_SIZE": "4"}, (3, 4)),
        ({"WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_places(environ, place):
    assert read_place(environ) == Place(*place)


def test_all_places_of_an_array_of_steps_are_taken_once():
    found = [
        read_place(SRUN | ARRAY | {"SLURM_PROCID": str(p), "SLURM_ARRAY_TASK_ID": str(10 + 2 * a)})
        for a in range(4)
        for p in range(8)
    ]
    assert found == [Place(rank, 32) for rank in range(32)]


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"PMI_RANK": "1"}, "none of PMI_SIZE, WORLD_SIZE"),
        ({"PMI_RANK": "5", "PMI_SIZE": "5"}, "rank 5"),
        ({"PMI_RANK": "x", "PMI_SIZE": "5"}, "PMI_RANK='x'"),
        ({"WORLD_SIZE": "4"}, "no rank"),
        ({"PBS_ARRAY_INDEX": "3"}, "OPTIMUS_ARRAY_SIZE"),
        ({"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "3"}, "rank 9"),
    ],
)
def test_a_half_set_place_is_refused(environ, told):
    with pytest.raises(ConfigError, match=told):
        read_place(environ)


def test_processes_of_a_machine():
    assert read_local_size({}) == 1
    assert read_local_size({"LOCAL_WORLD_SIZE": "4"}) == 4
    assert read_local_size({"PALS_LOCAL_SIZE": "12"}) == 12
    assert read_local_size({"SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}) == 2
