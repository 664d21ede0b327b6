"""Tests of the end of a rank: the gloo threads of the rank end, the rank waits for no other rank,
and the process exits with the status of the run."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from optimus.bench.layout import bench_layout
from optimus.config import make_config
from optimus.distributed.collectives import all_gather, barrier
from optimus.distributed.groups import join_groups
from optimus.distributed.mesh import Mesh
from optimus.distributed.world import end_run, start_world
from optimus.errors import DataError, OptimusError
from optimus.launch.environment import read_launch_env
from optimus.train.loop import Run, train
from tests.kit.runs.tiny import tiny_tree


def threads_of_gloo() -> list[str]:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def gloo_threads_of(tree: dict, command: str) -> tuple[int, list[str]]:
    """Run `train` or `bench`. Return the number of gloo threads during the last update of `train`
    (1 for `bench`), and the names of the gloo threads that exist after the command."""
    gc.disable()
    most, kept = [], []
    plain = Run.update

    def update(run: Run, step: int) -> None:
        kept.append(run)  # references must not keep the threads alive
        plain(run, step)
        most.append(len(threads_of_gloo()))

    Run.update = update
    config, launch = make_config(tree), read_launch_env()
    if command == "train":
        train(config, launch)
        assert kept[-1].groups.mesh.world_size == 2
    else:
        bench_layout(config, 1, launch)
        most.append(1)
    return most[-1], threads_of_gloo()


@pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="gloo of torch 2.8 gives its threads no names"
)
@pytest.mark.parametrize("command", ["train", "bench"])
@pytest.mark.parametrize("axis", ["pp", "dp", "ep", "tp"])
def test_no_thread_outlives_the_world(ranks, tiny_data, tmp_path, axis, command):
    tree = tiny_tree(tiny_data, tmp_path, **{f"parallel__{axis}": 2}, train__stop_at_step=2)
    for during, after in ranks(2, gloo_threads_of, tree, command, start_world=False):
        assert during > 0 and after == []


@pytest.mark.parametrize(
    ("stdout", "status", "ends_with"), [(">&-", 0, 0), (">/dev/full", 0, 1), (">/dev/full", 5, 5)]
)
def test_rank_keeps_its_status_without_a_usable_stdout(stdout, status, ends_with):
    code = (
        "import optimus.cli as cli; cli._leaves_at_once = lambda: True; "
        f"cli.main = lambda: print(1, file=cli.sys.stdout) or {status}; cli.process()"
    )
    shell = ["sh", "-c", f'exec "$0" -c "{code}" {stdout}', sys.executable]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run(shell, env=environ, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (ends_with, "")


def test_rank_keeps_its_status_with_a_full_stderr():
    code = (
        "import optimus.cli as cli; from optimus.errors import Stopped as S; "
        "cli._leaves_at_once = lambda: True; "
        "stop = lambda *a: (_ for _ in ()).throw(S('so')); "
        "cli._parse = lambda a: type('A', (), {'run': stop})(); "
        "cli.process()"
    )
    shell = ["sh", "-c", f'exec "$0" -c "{code}" 2>/dev/full', sys.executable]
    assert subprocess.run(shell, timeout=60).returncode == 3


def fail_during_a_collective() -> None:
    """Raise an error on rank 1 while a collective that rank 0 never joins is in progress. Rank 0
    sleeps for 600 s."""
    import optimus.cli

    def trouble(*args) -> None:
        world = start_world(timeout_s=600.0, device="cpu")
        groups = join_groups(Mesh(dp=2), world)
        if world.rank == 0:
            time.sleep(600.0)
        started = [all_gather(torch.ones(2), torch.ones(1), groups.over("dp"), async_op=True)]
        time.sleep(0.3)
        raise RuntimeError(f"error of rank 1, {len(started)} in progress")

    optimus.cli.main = trouble
    optimus.cli.process()


def ranks_of(function: str, environ: Mapping[str, str]) -> list[subprocess.Popen[str]]:
    """Start two ranks, each a process that calls the function `function` of this module. Return the
    processes."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", f"from tests.train.test_end_world import {function} as f; f()"],
            env=dict(environ, RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def test_rank_that_fails_alone_does_not_wait(tmp_path):
    environ = os.environ | {
        "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "OPTIMUS_RENDEZVOUS": f"file://{tmp_path}/rendezvous",
    }  # fmt: skip
    processes = ranks_of("fail_during_a_collective", environ)
    try:
        _, stderr = processes[1].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
        processes[0].communicate()
    assert processes[1].returncode == 1 and "error of rank 1, 1 in progress" in stderr


def fail_alone(rank: int) -> None:
    """Raise a DataError on rank `rank` while the other rank waits for this rank in a barrier."""
    import optimus.cli

    def trouble(*args) -> None:
        launch = read_launch_env()
        world = start_world(launch, timeout_s=60.0, device="cpu")
        try:
            if world.rank == rank:
                raise DataError("metrics.jsonl: No space left on device")
            barrier(world.everyone)
        except OptimusError as error:
            raise end_run(error, launch, world.agreement, "training", 7) from error

    optimus.cli._parse = lambda arguments: SimpleNamespace(run=trouble)
    optimus.cli.process()


def fail_on_rank_0() -> None:
    fail_alone(0)


def fail_on_rank_1() -> None:
    """Raise an error on rank 1 as `fail_alone` does. A rank that fails waits at most 120 s for the
    other ranks. The ranks must end sooner, because the test waits at most 60 s."""
    from optimus.distributed import agreement

    agreement._OTHERS_S = 120.0
    fail_alone(1)


def run_ranks(function: str) -> tuple[list[int], list[str]]:
    """Run two ranks that call `function`. The process of rank 0 contains the store of the process
    group. Return the exit statuses of the ranks, and their outputs on stderr."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environ = os.environ | {
        "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "TORCH_CPP_LOG_LEVEL": "FATAL",
    }  # fmt: skip
    processes = ranks_of(function, environ)
    try:
        outputs = [process.communicate(timeout=60)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def test_ranks_adopt_the_error_of_rank_0_whose_process_has_the_store():
    statuses, outputs = run_ranks("fail_on_rank_0")
    assert statuses == [2, 2], outputs
    assert outputs == ["optimus: error: metrics.jsonl: No space left on device\n", ""]


def test_rank_that_waits_adopts_the_error_of_another_rank_at_once():
    statuses, outputs = run_ranks("fail_on_rank_1")
    assert statuses == [2, 2], outputs
    assert outputs == ["", "optimus: [rank 1] error: metrics.jsonl: No space left on device\n"]
