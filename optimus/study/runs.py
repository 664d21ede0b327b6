"""Planned runs as a Markdown page: memory, time and node-hours on a machine, and the commands that
submit the runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from optimus.config import Config, load_config
from optimus.config.machine import Machine, Queue, parse_walltime
from optimus.errors import ConfigError, counted
from optimus.planner.allocation import allocate
from optimus.study.scaling import walltime_text

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "run"
MULA = ("mula-1b", "mula-7b-a1b", "mula-20b-a2b", "mula-100b-a7b", "mula-220b-a10b")
"""The runs of the Optimus paper."""
_NODES_FOR_A_BUFFER_NODE = 64
"""Number of nodes for each buffer node. A buffer node replaces a node that fails. If a run needs
several jobs, it gets a buffer node for each full or partial set of this number of nodes. This
number is a choice without a source."""
_GIB = 1 << 30


class PlannedRun(NamedTuple):
    """A planned run on a machine, and its jobs."""

    name: str
    config: Config
    plan: dict[str, Any]
    """Result of `optimus.planner.plan.plan`."""
    queue: str
    """Name of the queue; "" if the machine file has no queues."""
    walltime_s: int
    """Requested time of each job in seconds."""
    jobs: int
    """Number of jobs that run one after the other."""

    @property
    def fits(self) -> bool:
        """True if the states and activations of the fullest rank fit in the memory of its
        device."""
        return bool(self.plan["needed"] <= self.plan["device_bytes"])

    @property
    def job_line(self) -> str:
        """Command that submits the run to PBS. Only a run of several jobs has buffer nodes."""
        words = ["scripts/pbs/train.sh", "--nodes", str(self.plan["nodes"])]
        words += ["--machine", self.plan["machine"], "--account", "PROJECT"]
        words += ["--queue", self.queue] if self.queue else []
        words += ["--walltime", walltime_text(self.walltime_s)]
        if self.jobs > 1:
            spare = math.ceil(self.plan["nodes"] / _NODES_FOR_A_BUFFER_NODE)
            words += ["--buffer-nodes", str(spare), "--chain", str(self.jobs - 1)]
        words += ["--", f"configs/run/{self.name}.toml", "data.path=DATA", "train.run_dir=RUN"]
        return " ".join(words)


def plan_run(path: Path, machine: Machine, machine_name: str, nodes: int) -> PlannedRun:
    """Plan a run.

    Args:
        path: The configuration.
        machine: The machine.
        machine_name: Name of the machine, or the path of its file.
        nodes: Number of nodes. It has an effect only if the configuration has `parallel.dp = 0`.

    Raises:
        ConfigError: The run cannot be planned, the machine file describes no device, or no queue
            takes the number of nodes of the run.
    """
    from optimus.planner.plan import plan

    config = load_config(path, [])
    allocation = allocate(machine_name, None if config.parallel.dp else nodes, None)
    result = plan(config, allocation)
    if result.get("device_bytes") is None or "step" not in result:
        reason = result.get(
            "no_step",
            f"the file of {machine_name} has no [device], or train.seq_len is 0; set both",
        )
        raise ConfigError(f"{path}: the run cannot be planned: {reason}")
    machine.check_nodes(result["nodes"])
    if "run_s" not in result["step"]:
        raise ConfigError(f"{path}: train.max_steps = 0; set it to the number of updates")
    return PlannedRun(path.stem, config, result, *_jobs(machine, result))


def _jobs(machine: Machine, result: dict[str, Any]) -> tuple[str, int, int]:
    """Return the queue, the walltime in seconds and the number of jobs of a run.

    If a queue permits a walltime of 1.2 times the planned time, rounded up to full hours, the run
    gets a single job with this walltime. Otherwise, the run gets several jobs, each with the
    longest walltime that a queue permits.
    """
    nodes, seconds = result["nodes"], math.ceil(1.2 * result["step"]["run_s"] / 3600) * 3600
    entries = [e for e in machine.queues if e.nodes[0] <= nodes <= e.nodes[1]]
    if not entries:
        return "", seconds, 1

    def longest_s(entry: Queue) -> int:
        return parse_walltime(entry.walltime[1])

    for entry in entries:
        if seconds <= longest_s(entry):
            return entry.name, seconds, 1
    entry = max(entries, key=longest_s)
    return entry.name, longest_s(entry), math.ceil(seconds / longest_s(entry))


def format_page(runs: Sequence[PlannedRun], machine: str, command: str) -> str:
    """Return the page of planned runs as Markdown."""
    lines = [
        "# Planned runs",
        "",
        f"`{command}` writes this page. All values are predictions by `optimus plan` with the",
        f"machine file {machine}; no run was measured on this machine. Times assume uniform",
        "routing to experts. Hours and node-hours include the time for checkpoints and failures if",
        "the machine file has the necessary values. If the machine file lacks a value, all",
        "times are lower bounds.",
        "",
        "| run | nodes x ranks | pp dp ep tp | states, GiB | needed, GiB | of the device | step, s "
        "| tokens a day | MFU | hours | node-hours |",
        f"|{'---|' * 11}",
    ]
    for run in runs:
        plan, step = run.plan, run.plan["step"]
        share = f"{plan['needed'] / plan['device_bytes']:.1%}"
        cells = (
            run.name,
            f"{plan['nodes']} x {plan['ranks_per_node']}",
            " ".join(map(str, plan["mesh"].values())),
            f"{plan['memory']['total'] / _GIB:.2f}",
            f"{plan['needed'] / _GIB:.2f}",
            share if run.fits else f"{share}: does not fit",
            f"{step['step_s']:.4g}",
            f"{step['tokens_per_day']:.3g}",
            f"{step['mfu']:.1%}",
            f"{step['run_s'] / 3600:,.4g}",
            f"{step['node_hours']:,.5g}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    steps = [run.plan["step"] for run in runs]
    missing = sorted({key for step in steps for key in step["missing"] + step["missing_of_run"]})
    device = runs[0].plan["device_bytes"]
    misfits = [run.name for run in runs if not run.fits]
    fit = f"do not fit: {', '.join(misfits)}" if misfits else "all runs fit"
    largest = max(run.plan["needed"] for run in runs)
    lines += [
        "",
        "The needed memory is the sum of states, activations and temporary tensors on the rank "
        f"that needs the most memory. A device has {device / 1e9:.4g} GB ({device / _GIB:.4g} "
        f"GiB): {fit}. The largest run needs {largest / 1e9:.4g} GB.",
        "" if not missing else f"\nValues that the machine file lacks: {', '.join(missing)}.\n",
        "The commands that submit the runs:",
        "",
        "```sh",
        *(run.job_line for run in runs),
        "```",
        "",
        "A run that needs more time than the walltime of a job continues in further jobs "
        f"(`--chain`). The longest run takes {counted(max(run.jobs for run in runs), 'job')}. "
        "Replace DATA with the path of a data set, and RUN with the path of the run directory.",
    ]
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"
