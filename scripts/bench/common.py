"""Helpers for the benchmark scripts in this folder, which compare Optimus with other libraries.

Import this module before the packages `optimus` and `optimus_kernels`: this module adds the folders
of this checkout that contain the two packages to sys.path.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Threads without work sleep, as in the command `optimus`. OpenMP reads this variable when torch is
# imported.
os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")

import torch
import torch.multiprocessing as processes

from optimus import platform
from optimus.bench.meters import turns
from optimus.config import Config, make_config
from optimus.distributed.agreement import RunEnded
from optimus.distributed.collectives import all_reduce_max, barrier
from optimus.distributed.world import World, end_run, end_world, start_world
from optimus.errors import OptimusError, counted
from optimus.launch.environment import LaunchEnv

_PACKAGES = ("torch", "transformers", "triton", "liger-kernel", "scattermoe", "deepspeed")
_SEQ_LEN = 128
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class Absent(Exception):
    """Raised if a compared library cannot run on this machine. The message is the reason."""


def run_script(
    main: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None
) -> int:
    """Run the main function of a script. If `main` raises an OptimusError, print the error as one
    line on standard error.

    Args:
        main: Function that parses its arguments and prints the result.
        argv: Arguments of the script; None for the arguments of this process.

    Returns:
        The exit status: 0, or the `exit_code` of the OptimusError.
    """
    try:
        main(argv)
    except OptimusError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run_ranks(
    count: int,
    measure: Callable[..., dict[str, Any]],
    *arguments: Any,
    directory: str | None = None,
) -> dict[str, Any]:
    """Call `measure` on each of `count` local ranks. Each rank is a new process that computes on
    the CPU with one thread.

    Args:
        count: Number of ranks.
        measure: Function at the top level of a module, so that a new process can import it. Each
            rank calls `measure(world, folder, *arguments)`, where `folder` is an empty folder that
            all ranks share.
        arguments: Further arguments of `measure`.
        directory: Parent folder of the shared folder; None for the system's folder of temporary
            files.

    Returns:
        The result of `measure` on rank 0.

    Raises:
        OptimusError: A rank failed. The rank has printed its error message on standard error.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="optimus-bench-", dir=directory) as folder:
        try:
            processes.spawn(_start_rank, (count, folder, measure, arguments), nprocs=count)
        except processes.ProcessExitedException as error:
            raise OptimusError(
                f"the benchmark on {counted(count, 'rank')} failed; see the errors of the ranks "
                "above"
            ) from error
        return json.loads((Path(folder) / "result.json").read_text())


def _start_rank(
    rank: int, count: int, folder: str, measure: Callable[..., dict[str, Any]], arguments: Any
) -> None:
    os.dup2(2, 1)  # libraries print to standard output, which is for the result
    launch = LaunchEnv(rank, count, rank, count, f"file://{folder}/rendezvous")
    status = 0
    try:
        measure_on_rank(launch, Path(folder), measure, arguments)
    except RunEnded as ended:
        if ended.prints:
            print(ended.line, file=sys.stderr)
        ended.leave()
        status = ended.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # FSDP2 keeps threads of gloo, which could abort the interpreter's shutdown


def measure_on_rank(
    launch: LaunchEnv, folder: Path, measure: Callable[..., dict[str, Any]], arguments: Any
) -> None:
    """Join the other ranks, and call `measure(world, scratch, *arguments)` on this rank. `scratch`
    is a new subfolder of `folder` that all ranks share. On rank 0, write the result to
    `folder`/result.json.

    Raises:
        RunEnded: A rank raised an OptimusError. Every rank raises RunEnded.
    """
    world = start_world(launch, device="cpu")
    try:
        platform.set_threads(1, False, launch.local_world_size)
        scratch = folder / "scratch"
        if world.is_first:
            scratch.mkdir()
        barrier(world.everyone)
        result = measure(world, scratch, *arguments)
    except Exception as error:
        raise end_run(error, launch, world.agreement, "benchmark") from error
    end_world()
    if world.is_first:
        (folder / "result.json").write_text(json.dumps(result))


def race(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    world: World,
    clock: Callable[[], float] = time.perf_counter,
    before: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Measure the time of each function in `contestants`. All ranks must call `race`.

    In each round, every function runs once, on all ranks at the same time.

    Args:
        contestants: The functions by name.
        rounds: Number of timed rounds, which follow an untimed round.
        world: All ranks.
        clock: Clock in seconds.
        before: Maps each name to a function that is called before the timed function, and whose
            time is not measured.

    Returns:
        A dict that maps each name to the seconds of the slowest rank in each round.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number, name in turns(contestants, rounds):
        if before is not None:
            before[name]()
        barrier(world.everyone)
        start = clock()
        contestants[name]()
        seconds = torch.tensor([clock() - start], dtype=torch.float64)
        all_reduce_max(seconds, world.everyone)
        if number:
            times[name].append(seconds.item())
    return times


class MemoryMeter:
    """Meter of the resident memory of this process, in bytes.

    The constructor configures malloc to return freed blocks of 64 KiB or more to the system
    immediately. Resident memory then does not include these blocks.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            self._libc.mallopt(threshold, 1 << 16)

    def start(self) -> int:
        """Free unused memory, and reset the recorded peak. Return the resident memory in bytes."""
        gc.collect()
        self._libc.malloc_trim(0)
        self.reset_peak()
        return self._read("VmRSS")

    def reset_peak(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        """Return the peak of resident memory since the last call of `start` or `reset_peak`, in
        bytes."""
        return self._read("VmHWM")

    def _read(self, key: str) -> int:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError as error:
            raise OptimusError(f"cannot read resident memory from /proc: {error}") from error
        return int(next(line.split()[1] for line in lines if line.startswith(f"{key}:"))) * 1024


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Context manager that makes torch compute with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of `device` in bytes. For devices other than cpu and cuda, the free
    memory is unknown, and the result is 2^62."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return 1 << 62
    table = Path("/proc/meminfo")
    if table.exists():
        lines = dict(line.split(":") for line in table.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def versions() -> dict[str, str]:
    """Return the versions of torch and of the compared libraries, by package name. Packages that
    are not installed are left out."""
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def mula_config(hidden: int, ranks: int, ep: int = 1, **optim: Any) -> Config:
    """Return the configuration of a small model with the proportions of Mula-7B-A1B.

    The experts have 13.5 times as many parameters as the rest of the model. With a hidden size of
    256, the model has 27 million parameters.

    Args:
        hidden: Hidden size.
        ranks: Number of ranks. Each rank has a microbatch of one sequence.
        ep: Size of expert parallelism.
        optim: Further settings of the section `optim`.
    """
    return make_config(
        {
            "model": {
                "architecture": "olmoe",
                "num_layers": 4,
                "hidden_size": hidden,
                "num_attention_heads": max(1, hidden // 64),
                "intermediate_size": hidden // 2,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "vocab_size": 23 * hidden // 4,
            },
            "train": {
                "dtype": "fp32",
                "seq_len": _SEQ_LEN,
                "global_batch_tokens": _SEQ_LEN * ranks,
                "threads": 1,
                "device": "cpu",
            },
            "parallel": {"ep": ep, "ep_dispatch": "allgather"},
            "optim": {"chunk_length": hidden**2 * 16, "warmup_steps": 0, "schedule": "constant"}
            | optim,
        }
    )
