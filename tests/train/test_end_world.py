"""End of a rank: no thread of its world remains, it waits for no other rank, and its exit status is
kept."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from optimus.bench.layout import bench_layout
from optimus.config import make_config
from optimus.distributed.collectives import begin_all_gather
from optimus.distributed.groups import join_groups
from optimus.distributed.mesh import Mesh
from optimus.distributed.world import start_world
from optimus.launch.environment import read_launch_env
from optimus.train.loop import Run, train
from tests.helpers.tiny import tiny_tree


def threads_of_gloo() -> list[str]:
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if "gloo" in name]


def gloo_threads_of(tree: dict, command: str) -> tuple[int, list[str]]:
    """Return the number of gloo threads during a rank's last update, and the names of the gloo
    threads after the command. References to the run, and garbage collection switched off, must not
    keep threads alive."""
    gc.disable()
    most, kept = [], []
    plain = Run.update

    def update(run: Run, step: int) -> None:
        kept.append(run)
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
    """Raise an error on rank 1 during a collective that rank 0 never joins."""
    import optimus.cli

    def trouble(*args) -> None:
        world = start_world(timeout_s=600.0, device="cpu")
        groups = join_groups(Mesh(dp=2), world)
        if world.rank == 0:
            time.sleep(600.0)
        started = [begin_all_gather(torch.ones(2), torch.ones(1), groups.over("dp"))]
        time.sleep(0.3)
        raise RuntimeError(f"error of rank 1, {len(started)} in progress")

    optimus.cli.main = trouble
    optimus.cli.process()


def test_rank_that_fails_alone_does_not_wait(tmp_path):
    environ = os.environ | {
        "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "OPTIMUS_RENDEZVOUS": f"file://{tmp_path}/rendezvous",
    }  # fmt: skip
    code = "from tests.train.test_end_world import fail_during_a_collective as f; f()"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, stderr = processes[1].communicate(timeout=120)
    finally:
        for process in processes:
            process.kill()
        processes[0].communicate()
    assert processes[1].returncode == 1 and "error of rank 1, 1 in progress" in stderr
