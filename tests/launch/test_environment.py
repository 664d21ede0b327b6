from __future__ import annotations

from pathlib import Path

import pytest

from optimus.errors import ConfigError
from optimus.launch.environment import (
    _LAUNCHERS,
    SINGLE,
    JobRank,
    first_of_nodelist,
    is_launched,
    read_job_rank,
    read_launch_env,
    read_local_size,
    read_rank,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
BY_HAND = {k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHELASTIC")}


def test_a_process_without_a_launcher_is_alone():
    assert read_launch_env({}) is SINGLE and not is_launched({})


def test_a_rendezvous_file_needs_no_address():
    environ = {"RANK": "0", "WORLD_SIZE": "2", "OPTIMUS_RENDEZVOUS": "file:///x"}
    assert read_launch_env(environ).init_method == "file:///x"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"RANK": None}, "RANK"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE='four'"),
        ({"RANK": "4"}, "RANK=4 is not a rank"),
        ({"MASTER_ADDR": None}, "needs MASTER_ADDR"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
    ],
)
def test_a_contradictory_environment_is_refused_by_name(change, message):
    environ = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    with pytest.raises(ConfigError, match=message):
        read_launch_env(environ)


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "8"}
ARRAY = {
    "SLURM_ARRAY_TASK_ID": "14",
    "SLURM_ARRAY_TASK_MIN": "10",
    "SLURM_ARRAY_TASK_STEP": "2",
    "SLURM_ARRAY_TASK_COUNT": "4",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (0, 1)),
        (TORCHRUN, (3, 4)),
        ({"PMI_RANK": "2", "PMI_SIZE": "5"}, (2, 5)),
        ({"PALS_RANKID": "2", "PMI_RANK": "2", "WORLD_SIZE": "6"}, (2, 6)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
        (SRUN, (5, 8)),
        (SRUN | {"PMIX_RANK": "5", "SLURM_STEP_NUM_TASKS": "7"}, (5, 7)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1)),  # in a batch script, outside of srun
        (ARRAY, (2, 4)),
        (ARRAY | SRUN, (2 * 8 + 5, 4 * 8)),
        ({"PBS_ARRAY_INDEX": "3", "OPTIMUS_ARRAY_SIZE": "4"}, (3, 4)),
        ({"WORLD_SIZE": "1"}, (0, 1)),
    ],
)
def test_job_ranks(environ, expected):
    assert read_job_rank(environ) == JobRank(*expected)


def test_job_ranks_of_an_array_of_steps_are_unique():
    ranks = [
        read_job_rank(
            SRUN | ARRAY | {"SLURM_PROCID": str(p), "SLURM_ARRAY_TASK_ID": str(10 + 2 * a)}
        )
        for a in range(4)
        for p in range(8)
    ]
    assert ranks == [JobRank(rank, 32) for rank in range(32)]


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PMI_RANK": "1"}, "none of the variables PMI_SIZE, WORLD_SIZE; .*--world"),
        ({"PMI_RANK": "5", "PMI_SIZE": "5"}, "PMI_RANK=5 is not a rank: .*, PMI_SIZE=5;"),
        ({"PMI_RANK": "x", "PMI_SIZE": "5"}, "PMI_RANK='x'"),
        ({"WORLD_SIZE": "4"}, "but RANK is not"),
        ({"PBS_ARRAY_INDEX": "3"}, "OPTIMUS_ARRAY_SIZE"),
        (
            {"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "3"},
            "SLURM_ARRAY_TASK_ID=9 is not a rank",
        ),
    ],
)
def test_an_incomplete_job_rank_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        read_job_rank(environ)


def test_processes_of_a_machine():
    assert read_local_size({}) == 1
    assert read_local_size(TORCHRUN) == 2
    assert read_local_size({"PALS_RANKID": "0", "PALS_LOCAL_SIZE": "12"}) == 12
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    assert read_local_size(SRUN | uneven | {"SLURM_NODEID": "2"}) == 2
    assert read_local_size(SRUN | uneven | {"SLURM_NODEID": "3"}) == 1


STEP = SRUN | {
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "n[2-3]",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_ID": "7",
}
PALS = {
    "PALS_RANKID": "3",
    "PMI_RANK": "3",
    "PALS_LOCAL_RANKID": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "x0",
    "PBS_JOBID": "12.host",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "99",
    "SLURM_JOB_NODELIST": "rack1-[03-07,9]n[1-2],x5",
}


@pytest.mark.parametrize(
    ("environ", "expected", "address"),
    [
        (TORCHRUN, (3, 4, 1, 2), "env://"),
        (BY_HAND, (3, 4, 1, 2), "tcp://node0:29500"),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, (3, 4, 1, 2), "tcp://node0:29500"),
        (STEP, (5, 8, 1, 4), "tcp://n2:"),
        (STEP | ARRAY, (5, 8, 1, 4), "tcp://n2:"),  # each job of an array is a separate run
        (STEP | {"PMIX_RANK": "5"}, (5, 8, 1, 4), "tcp://n2:"),
        (PALS, (3, 4, 1, 2), "tcp://x0:"),
        (MPICH, (1, 2, 1, 2), "tcp://127.0.0.1:29500"),
        (MPICH | {"PMI_SIZE": "4", "MASTER_ADDR": "::1"}, (1, 4, 1, 2), "tcp://[::1]:29500"),
        (MPICH | {"MASTER_PORT": "1234"}, (1, 2, 1, 2), "tcp://127.0.0.1:1234"),
        (OPEN_MPI, (2, 4, 0, 2), "tcp://rack1-03n1:"),
        (OPEN_MPI | TORCHRUN, (3, 4, 1, 2), "env://"),  # torchrun within mpiexec
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0, 1), "env://"),
    ],
)
def test_ranks_of_a_cluster(environ, expected, address):
    launch = read_launch_env(environ)
    assert expected == (launch.rank, launch.world_size, launch.local_rank, launch.local_world_size)
    assert launch.init_method.startswith(address)
    assert read_rank(environ) == launch.rank and launch.is_first == (launch.rank == 0)


def test_ports_differ_between_jobs_not_between_ranks():
    def port(environ: dict[str, str], **more: str) -> str:
        return read_launch_env(environ | more).init_method.rpartition(":")[2]

    for environ, job in ((STEP, "SLURM_JOB_ID"), (PALS, "PBS_JOBID"), (OPEN_MPI, "PMIX_NAMESPACE")):
        first = port(environ)
        assert first != port(environ, **{job: "8"}) and 20000 <= int(first) < 30000
    assert port(STEP) == port(STEP, SLURM_PROCID="0", SLURM_NODEID="0")
    assert port(STEP) != port(STEP, SLURM_STEP_ID="1")
    # Under Slurm, Open MPI's mpiexec starts its daemons on other nodes as a step of Slurm, but
    # starts the daemon on its node directly. The variables of the step must not change the port.
    assert port(OPEN_MPI) == port(OPEN_MPI, SLURM_STEP_ID="1", SLURM_STEP_NODELIST="x5")


def test_the_first_machine_of_pbs(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("x9\nx8\n")
    environ = {k: v for k, v in PALS.items() if k != "MASTER_ADDR"}
    launch = read_launch_env(environ | {"PBS_NODEFILE": str(hosts)})
    assert launch.init_method.startswith("tcp://x9:")
    with pytest.raises(ConfigError, match="needs MASTER_ADDR"):
        read_launch_env(environ | {"PBS_NODEFILE": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "none of the variables MPI_LOCALRANKID"),
        (MPICH | {"MPI_LOCALRANKID": "2"}, "local rank 2 is not among the 2"),
        (MPICH | {"WORLD_SIZE": "3"}, "WORLD_SIZE=3, but the launcher has set PMI_SIZE=2"),
        (MPICH | {"PMI_SIZE": "4"}, "needs MASTER_ADDR"),
        (MPICH | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({"PALS_RANKID": "1"}, "none of the variables PMI_SIZE, WORLD_SIZE; export WORLD_SIZE$"),
    ],
)
def test_an_incomplete_launcher_is_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        read_launch_env(environ)
    assert read_rank(environ) == 1 and is_launched(environ)


@pytest.mark.parametrize(
    ("short", "first"),
    [("n1", "n1"), ("n[08-11,3]", "n08"), ("a[1-2]-b[3,4]c,d", "a1-b3c"), ("x,y[1-2]", "x")],
)
def test_the_first_of_a_nodelist(short, first):
    assert first_of_nodelist(short) == first


def test_documentation_names_all_variables():
    page = (Path(__file__).resolve().parents[2] / "docs" / "launching.md").read_text()
    for launcher in _LAUNCHERS:
        for names in (launcher.worlds, launcher.local_ranks, launcher.local_worlds):
            assert all(f"`{name}`" in page for name in (launcher.rank, *names))
