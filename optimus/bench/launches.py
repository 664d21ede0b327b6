"""Launches of tiny runs on emulated nodes, for `optimus bench supervision`.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil

from optimus.bench.probe import PLAN, SITE, Plan
from optimus.config import Config, dump_toml, make_config
from optimus.errors import OptimusError
from optimus.launch.spawn import prepare_rank
from optimus.resilience.supervision.ledger import History, read_history

_CONTEXT, _VOCABULARY = 32, 320
_DOCUMENTS = 120
_LIMIT_S = 180.0
"""Time limit in seconds of each wait for an event, such as the first update."""
_END_S = 10.0
"""Longest time in seconds to wait until killed processes have ended."""
_LOOK_S = 0.02
_TAIL_CHARS = 2000


def make_data(folder: Path) -> Path:
    """Create a data set of a few hundred instances (token sequences) in `folder`. Return the path
    of the data set. Raises OptimusError if a command of `optimus-data` fails."""
    chance = random.Random(7)
    words = [
        "".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 7))) for _ in range(150)
    ]
    texts = (" ".join(chance.choices(words, k=chance.randint(20, 90))) for _ in range(_DOCUMENTS))
    (folder / "text.jsonl").write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    source, tokenizer = ["--input", str(folder / "text.jsonl")], str(folder / "tokenizer.json")
    train = ["train-tokenizer", *source, "--vocab-size", str(_VOCABULARY), "--out", tokenizer]
    run = ["run", *source, "--tokenizer", tokenizer, "--context", str(_CONTEXT), "--workers", "1"]
    run += ["--out", str(folder / "data"), "--eval-fraction", "0.1"]
    for arguments in (train, run):
        command = [sys.executable, "-P", "-m", "data_prep.cli", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        if done.returncode:
            raise OptimusError(f"cannot make the benchmark's data set: {done.stderr[-500:]}")
    return folder / "data"


def tiny_config(data: Path, run_dir: Path, ranks: int, save_interval: int, evals: int) -> Config:
    """Return the configuration of a run that trains a tiny model for 1,000,000 steps. The run is
    killed before its last step.

    Args:
        data: Path of the data set.
        run_dir: The run directory.
        ranks: Number of ranks.
        save_interval: Number of steps between two checkpoints.
        evals: Number of steps between two evaluations. 0 turns evaluations off.
    """
    return make_config(
        {
            "model": {
                "architecture": "olmoe",
                "num_layers": 2,
                "hidden_size": 32,
                "num_attention_heads": 2,
                "intermediate_size": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "vocab_size": _VOCABULARY,
            },
            "data": {"path": str(data)},
            "train": {
                "run_dir": str(run_dir),
                "max_steps": 1_000_000,
                "seq_len": _CONTEXT,
                "global_batch_tokens": ranks * _CONTEXT,
                "microbatch_size": 1,
                "dtype": "fp32",
                "device": "cpu",
                "deterministic": True,
                "eval_interval": evals,
                "eval_instances": ranks,
            },
            "optim": {"lr": 1e-4, "min_lr": 1e-4, "warmup_steps": 3},
            "checkpoint": {"interval": save_interval},
            "parallel": {"timeout_s": 60.0},
            "resilience": {"supervisor_timeout_s": 20.0},
        }
    )


@dataclasses.dataclass(frozen=True)
class Shape:
    """Size of a launch: numbers of nodes with ranks, buffer nodes, and ranks per node. Buffer nodes
    replace nodes that fail."""

    nodes: int
    buffer_nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


class Launch:
    """A running command `optimus launch` with emulated nodes on this machine.

    A `Launch` is a context manager. At the end of the context, all processes of the launch are
    killed.
    """

    def __init__(self, config: Config, shape: Shape, plan: Plan) -> None:
        """Start the launch.

        Args:
            config: Configuration of the run.
            shape: Number of nodes, buffer nodes and ranks per node.
            plan: Measurements and faults that optimus.bench.probe adds to the processes.
        """
        self.shape, self.plan, self._run_dir = shape, plan, Path(plan.run_dir)
        folder = Path(plan.folder)
        folder.mkdir(parents=True)
        (folder / "sitecustomize.py").write_text(SITE)
        (folder / "run.toml").write_text(dump_toml(config))
        self._out = folder / "output"
        command = [sys.executable, "-P", "-m", "optimus.cli", "launch", str(folder / "run.toml")]
        command += ["--launcher", "local", "--nodes", str(shape.nodes)]
        command += ["--buffer-nodes", str(shape.buffer_nodes)]
        command += ["--ranks-per-node", str(shape.ranks_per_node)]
        with open(self._out, "wb") as out:
            self._process = subprocess.Popen(
                command,
                env=_environment(plan, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=partial(prepare_rank, os.getpid()),
            )
        self._seen: dict[int, psutil.Process] = {
            self._process.pid: psutil.Process(self._process.pid)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Kill all processes of the launch, and wait until they have ended. Raises OptimusError if
        a process still runs after _END_S seconds."""
        self.remember()
        end = time.monotonic() + _END_S
        while (alive := self.alive()) and time.monotonic() < end:
            kill(alive)  # SIGKILL also ends suspended processes
            self._process.poll()
            time.sleep(_LOOK_S)
        self._process.wait()
        if alive:
            raise OptimusError(
                "processes of the benchmark still run after SIGKILL; end them: "
                f"{', '.join(map(str, alive))}"
            )

    def remember(self) -> None:
        """Record the running processes of the launch, for `alive`. Call this method before killing
        a process, because the children of a process cannot be found after the process has ended."""
        for process in list(self._seen.values()):
            with contextlib.suppress(psutil.NoSuchProcess):
                self._seen.update({p.pid: p for p in process.children(recursive=True)})

    def alive(self) -> list[psutil.Process]:
        """Return the processes that `remember` has recorded and that have not ended."""
        alive = []
        for process in self._seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    alive.append(process)
        return alive

    def agent(self, node: str) -> psutil.Process:
        """Return the agent of a node, the process that starts and observes the node's ranks. Raises
        OptimusError if the agent does not run."""
        self.remember()
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if "optimus.resilience.supervision.agent" in words and words[-1] == node:
                    return process
        raise OptimusError(f"the agent of {node} does not run{self._tail()}")

    def warm(self, node: str) -> psutil.Process:
        """Return the warm process of a node, which forks the node's ranks. Raises OptimusError if
        the warm process does not run."""
        for child in self.agent(node).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "optimus.warm" in child.cmdline():
                    return child
        raise OptimusError(f"the warm process of {node} does not run{self._tail()}")

    def ranks(self, node: str) -> list[psutil.Process]:
        """Return the processes of a node's ranks, in ascending order of process ids."""
        ranks: list[psutil.Process] = []
        for child in self.agent(node).children():
            is_warm = "optimus.warm" in child.cmdline()
            ranks += child.children() if is_warm else [child]
        return sorted(ranks, key=lambda rank: rank.pid)

    def history(self) -> History:
        """Return the state of the run, read from its ledger (the supervisor's log of events)."""
        return read_history(self._run_dir)

    def wait_until(self, condition: Callable[[], Any], event: str) -> Any:
        """Wait until `condition` returns a true value, and return this value.

        Args:
            condition: Function that is called until its value is true.
            event: Description of the condition, such as "a checkpoint", for error messages.

        Raises:
            OptimusError: The launch has ended, or the time limit is reached.
        """
        end = time.monotonic() + _LIMIT_S
        while not (value := condition()):
            self.check_running(event)
            if time.monotonic() > end:
                raise OptimusError(
                    f"timeout after {_LIMIT_S:.0f} s while waiting for {event}{self._tail()}"
                )
            time.sleep(_LOOK_S)
        return value

    def check_running(self, event: str) -> None:
        """Raise OptimusError if the launch has ended. `event` is the event for which the caller
        waits, for the message."""
        if self._process.poll() is not None:
            raise OptimusError(
                f"the launch ended while the benchmark waited for {event}{self._tail()}"
            )

    def wait_for_checkpoint(self) -> History:
        """Wait until the ranks of the running attempt (launch of all ranks) have committed a
        checkpoint. Then return the state of the run, as `history` does."""

        def committed() -> History | None:
            history = self.history()
            running = history.running
            return history if running and running.attempt in history.checkpoints else None

        history: History = self.wait_until(committed, "a checkpoint")
        return history

    def _tail(self) -> str:
        output = self._out.read_text(errors="replace")
        return f"; the end of the launch's output:\n{output[-_TAIL_CHARS:]}"


def kill(processes: Iterable[psutil.Process], number: int = signal.SIGKILL) -> None:
    """Send the signal `number` to processes, and ignore processes that have ended."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _environment(plan: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a launch: the variables in `environ` except those of a
    scheduler's job, and additional variables that make each interpreter import optimus.bench.probe
    and read `plan`."""
    # From the variables of a scheduler's job, the launch would read the job's name and end time.
    kept = {k: v for k, v in environ.items() if not k.startswith(("SLURM_", "PBS_"))}
    paths = [plan.folder, *filter(None, [environ.get("PYTHONPATH")])]
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        PLAN: json.dumps(dataclasses.asdict(plan)),
    }
