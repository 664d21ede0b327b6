"""The directory of a scaling study: its files, the states of its points, and the start of its jobs.

study.json, config.toml      settings and configuration of the study
points/NAME/config.toml      configuration of a point, for `optimus train`
points/NAME/plan.json        nodes, ranks, tokens and planned step time of the point
points/NAME/job.json         scheduler and identifier of the job that runs the point
points/NAME/status           exit status of the point, written when it ends
points/NAME/log.txt, run/    output and run directory of the point
jobs/NAME.sh                 a job, for scripts/pbs/study.sh and scripts/slurm/study.sh
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optimus.config import Config, dump_toml
from optimus.config.load import explain, load_saved_config
from optimus.config.machine import Machine
from optimus.errors import (
    ConfigError,
    DataError,
    OptimusError,
    OutcomeKind,
    counted,
    one_line,
    reason_of,
    refuse_if,
)
from optimus.io.files import make_dirs, read_regular, write_bytes, xxh3_bytes
from optimus.launch.environment import available_cores
from optimus.launch.spawn import prepare_rank
from optimus.observe.events import StepComponents
from optimus.observe.report import ComponentsLine, StepLine, read_valid
from optimus.study.scaling import Job, Point, Settings, walltime_text

logger = logging.getLogger(__name__)

System = Literal["pbs", "slurm"]
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
_VERSION = 1
_MAX_BYTES = 1 << 24
_ANSWER_S = 60.0
"""Time limit of qstat and squeue, in seconds."""
_SUBMIT_S = 600.0
"""Time limit of the command that submits a job, in seconds."""
_GONE = {"pbs": (35, 153), "slurm": (1,)}
"""Exit statuses of qstat and squeue for a job that has ended. qstat: 35 for a finished job, 153 for
an unknown job. squeue: 1 for an invalid job."""
_IN_QUEUE = {
    "pbs": ("qstat", "{job}"),
    "slurm": ("squeue", "--noheader", "--jobs={job}"),
}
"""Commands that print a job if it waits or runs."""
_JOB = """\
#!/bin/bash
# {title}
# Submit this file with:
#   {command}
study={study}
scripts={scripts}
system=$([[ -n ${{SLURM_JOB_ID:-}} ]] && echo slurm || echo pbs)
machine=({machine})
[[ $system == pbs ]] || machine=()
failed=0

point() {{ # NAME NODES: run a point on the first nodes of the job
    local folder=$study/points/$1 status=0
    rm -f "$folder/status"
    "$scripts/$system/train.sh" --inside --nodes "$2" --ranks {ranks} "${{machine[@]}}" \\
        -- "$folder/config.toml" >"$folder/log.txt" 2>&1 || status=$?
    echo "$status" >"$folder/status.new"
    mv "$folder/status.new" "$folder/status"
    [[ $status == 0 ]] || failed=1
}}

{points}
exit "$failed"
"""


class _File(BaseModel):
    """Base class for the contents of the study's JSON files. Unknown keys are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)


class StudyFile(_File):
    """Contents of study.json: the fields of `Settings`, and a hash of the machine file."""

    version: int
    machine: str
    scaling: str
    steps: Annotated[int, Field(ge=1)]
    warmup: Annotated[int, Field(ge=0)]
    tokens_per_data_rank: int
    machine_hash: str


class PlannedStep(_File):
    """Those values of `optimus.planner.step_plan.plan_step` that `optimus study show` reads."""

    step_s: Annotated[float, Field(gt=0)]
    compute_s: float
    exposed_s: dict[str, float]
    bubble_s: float
    optimizer_s: float
    tokens_per_s: Annotated[float, Field(gt=0)]


class PlannedPoint(_File):
    """Contents of plan.json: the sizes of a point and its planned step."""

    nodes: Annotated[int, Field(ge=1)]
    routing: str
    """Value of `model.router`; "" for a dense model."""
    ranks: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    """Tokens of an update."""
    planned: PlannedStep | None
    not_planned: str
    """Reason why `planned` is None."""


class _JobFile(_File):
    """Contents of job.json: the job that runs the point, and its scheduler."""

    name: str
    """Identifier of the job, which the scheduler has assigned."""
    system: System


_AnyFile = TypeVar("_AnyFile", bound=_File)


class State(NamedTuple):
    """State of a point."""

    name: Literal["done", "failed", "submitted", "missing"]
    reason: str = ""
    """Cause of a failure, or the job of a submitted point."""


class StudyDirectory:
    """The directory of a study."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    @property
    def points(self) -> Path:
        """Directory of the points."""
        return self.path / "points"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Return a context manager that locks the study. Raises ConfigError if another command has
        locked the study."""
        make_dirs(self.path)
        with open(self.path / ".lock", "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"--out {self.path}: another command uses this study; wait until it ends"
                ) from None
            yield

    def settings(self) -> StudyFile | None:
        """Return the contents of study.json; None if the directory has no study.

        Raises:
            DataError: study.json is damaged, or the directory has files and no study.json.
        """
        path = self.path / "study.json"
        if not path.exists():
            others = sorted(entry.name for entry in self.path.glob("[!.]*"))
            if others:
                raise DataError(
                    f"{self.path} has no study, but has other files, such as {others[0]}; use "
                    "another --out"
                )
            return None
        return _read_json(path, StudyFile)

    def check_same(self, config: Config, settings: Settings, machine: Machine) -> None:
        """Check that the study in the directory, if there is one, has this configuration and these
        settings.

        Raises:
            ConfigError: The configuration or a setting differs.
            DataError: A file is damaged, or the directory has files and no study.json.
        """
        stored = self.settings()
        if stored is None:
            return
        for key, value in _settings_values(settings, machine).items():
            self._refuse_change(key, getattr(stored, key), value)
        saved = load_saved_config(self.path / "config.toml").model_dump(mode="json")
        for section, values in config.model_dump(mode="json").items():
            for key, value in values.items():
                self._refuse_change(f"{section}.{key}", saved[section].get(key), value)

    def _refuse_change(self, key: str, before: object, now: object) -> None:
        refuse_if(
            before != now,
            f"--out {self.path}: {key} is {now!r}, but {before!r} in the study of this directory; "
            "use another --out or the settings of the study",
        )

    def write(self, config: Config, settings: Settings, machine: Machine) -> None:
        """Write the configuration and the settings of the study."""
        make_dirs(self.path)
        write_bytes(self.path / "config.toml", dump_toml(config).encode())
        values = _settings_values(settings, machine)
        write_bytes(self.path / "study.json", json.dumps(values, indent=1).encode())

    def write_point(self, point: Point) -> None:
        """Write the files of a point that has not run."""
        folder = self.points / point.name
        make_dirs(folder)
        write_bytes(folder / "config.toml", dump_toml(point.config).encode())
        values = {
            "nodes": point.nodes,
            "routing": point.routing,
            "ranks": point.mesh.world_size,
            "tokens": point.tokens,
            "planned": point.planned,
            "not_planned": point.not_planned,
        }
        write_bytes(folder / "plan.json", json.dumps(values, indent=1).encode())

    def write_job(
        self, job: Job, machine: str, ranks_per_node: int, submission: Sequence[str]
    ) -> Path:
        """Write the script of a job and return its path.

        Args:
            job: The job.
            machine: `Settings.machine`.
            ranks_per_node: Number of ranks on each node.
            submission: Command that submits the job, for a comment in the script.
        """
        path = self.job_path(job)
        make_dirs(path.parent)
        text = _JOB.format(
            title=f"{counted(len(job.points), 'point')} of the scaling study in {self.path}",
            command=shlex.join(submission),
            study=shlex.quote(str(self.path)),
            scripts=shlex.quote(str(SCRIPTS)),
            machine=shlex.join(["--machine", machine]),
            ranks=ranks_per_node,
            points="\n".join(f"point {point.name} {point.nodes}" for point in job.points),
        )
        write_bytes(path, text.encode())
        return path

    def job_path(self, job: Job) -> Path:
        """Return the path of the script of a job."""
        return self.path / "jobs" / f"{job.name}.sh"

    def plans(self) -> dict[str, PlannedPoint]:
        """Return a dict from the name of each point to the contents of its plan.json, sorted by
        name. Since a name begins with the number of nodes, the dict is also sorted by the number of
        nodes. Raises DataError if a file is damaged."""
        plans = {}
        for folder in sorted(entry for entry in self.points.glob("*") if entry.is_dir()):
            if (folder / "plan.json").exists():
                plans[folder.name] = _read_json(folder / "plan.json", PlannedPoint)
            else:
                logger.warning(
                    "%s has no plan.json, so it is not a point of the study and is ignored; remove "
                    "this folder",
                    folder,
                )
        return plans

    def state(self, name: str, steps: int, must_ask: bool = True) -> State:
        """Return the state of a point.

        Args:
            name: Name of the point.
            steps: Number of updates of a point.
            must_ask: What to do if the scheduler does not answer: True to raise OptimusError, False
                to return the state "submitted".

        Raises:
            DataError: The metrics, `status` or `job.json` of the point are damaged.
            OptimusError: The scheduler does not answer, and `must_ask` is True.
        """
        folder = self.points / name
        path = folder / "status"
        if path.exists():
            try:
                status = read_regular(path, _MAX_BYTES).decode().strip()
            except (OSError, ValueError) as error:
                raise DataError(f"{path}: {one_line(error)}; remove this file") from None
            lines = len(read_metrics(folder / "run"))
            if status == "0" and lines >= steps:
                return State("done")
            if status == "0":
                return State("failed", f"metrics.jsonl has {lines} of {counted(steps, 'step')}")
            if status == str(OutcomeKind.INTERRUPTED.exit_status):
                return State("failed", f"interrupted after {lines} of {counted(steps, 'step')}")
            log = folder / "log.txt"
            return State("failed", f"exit status {status}: {_last_error(log)} ({log})")
        if (folder / "job.json").exists():
            job = _read_json(folder / "job.json", _JobFile)
            try:
                is_in_queue = _is_in_queue(job.system, job.name)
            except OptimusError as error:
                if must_ask:
                    raise
                return State("submitted", str(error))
            if is_in_queue:
                return State("submitted", f"job {job.name}")
            return State("failed", f"job {job.name} ended before this point was complete")
        return State("missing")

    def submit(self, job: Job, system: System, command: Sequence[str]) -> str:
        """Submit a job, and return the identifier that the scheduler assigns to the job. Write the
        identifier to job.json of each point of the job.

        Args:
            job: The job.
            system: The scheduler.
            command: The command that submits the job, from `submission_of`.

        Raises:
            OptimusError: The scheduler refuses the job or does not answer.
        """
        # Remove the old statuses first: a job that starts immediately writes new ones.
        for point in job.points:
            (self.points / point.name / "status").unlink(missing_ok=True)
        try:
            done = subprocess.run(
                command,
                cwd=self.path,  # Slurm writes the output of the job to this directory
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SUBMIT_S,
            )
        except subprocess.TimeoutExpired:
            raise OptimusError(
                f"{command[0]} did not end within {_SUBMIT_S:.0f} s; check if the job is in the "
                "queue; if not, run the same command again"
            ) from None
        words = done.stdout.split()
        if not words:
            raise OptimusError(
                f"{command[0]} ended with exit status {done.returncode}: {one_line(done.stderr)}; "
                "fix the cause and run the same command again"
            )
        job_id = words[-1].partition(";")[0]  # sbatch prints JOB;CLUSTER
        for point in job.points:
            path = self.points / point.name / "job.json"
            write_bytes(path, _JobFile(name=job_id, system=system).model_dump_json().encode())
        return job_id

    def run_local(self, point: Point, limit_s: float | None, threads: int) -> int:
        """Run a point on ranks of this machine and return its exit status.

        Args:
            point: The point.
            limit_s: Seconds after which the point is killed, with exit status 5; None for no limit.
            threads: Number of threads of a rank.

        Raises:
            KeyboardInterrupt: Ctrl-C. The point is killed, and its exit status is 130.
        """
        folder = self.points / point.name
        (folder / "status").unlink(missing_ok=True)
        ranks = point.mesh.world_size
        command = [sys.executable, "-P", "-m", "optimus.cli", "train"]
        command += [str(folder / "config.toml"), "--nproc", str(ranks)]
        with open(folder / "log.txt", "wb") as log:
            try:
                status = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=limit_s,
                    env={"OMP_NUM_THREADS": str(threads), **os.environ},
                    preexec_fn=partial(prepare_rank, os.getpid()),  # killed with this process
                ).returncode
            except subprocess.TimeoutExpired:
                log.write(
                    f"error: killed after {limit_s:.0f} s, the time limit of the point\n".encode()
                )
                status = OutcomeKind.LOST_PEER.exit_status
            except KeyboardInterrupt:
                self._write_status(point, OutcomeKind.INTERRUPTED.exit_status)
                raise
        self._write_status(point, status)
        return status

    def _write_status(self, point: Point, status: int) -> None:
        write_bytes(self.points / point.name / "status", f"{status}\n".encode())


def submission_of(
    directory: StudyDirectory, job: Job, system: System, machine: Machine, account: str
) -> list[str]:
    """Return the command that submits a job, as a list of words. `account` is "" for no account."""
    time = walltime_text(job.walltime_s)
    options = ["--nodes", str(job.nodes)]
    if system == "pbs":
        options += ["--walltime", time]
        options += ["--filesystems", machine.filesystems] if machine.filesystems else []
    else:
        options += ["--ranks", str(machine.ranks_per_node), "--time", time]
        is_cpu = machine.device is None or machine.device.threads > 0
        options += [] if is_cpu else ["--gpus", str(machine.ranks_per_node)]
    options += [{"pbs": "--queue", "slurm": "--partition"}[system], job.queue] if job.queue else []
    options += ["--account", account] if account else []
    return [str(SCRIPTS / system / "study.sh"), *options, "--", str(directory.job_path(job))]


def scheduler(machine: Machine) -> System:
    """Return the scheduler for the commands that a dry run prints: "pbs" if the machine file sets
    `filesystems` (an option that only PBS has) or if this computer has no command sbatch; otherwise
    "slurm"."""
    return "slurm" if shutil.which("sbatch") and not machine.filesystems else "pbs"


def _settings_values(settings: Settings, machine: Machine) -> dict[str, Any]:
    definition = json.dumps(machine.model_dump(mode="json"), sort_keys=True)
    values = dataclasses.asdict(settings)
    return {"version": _VERSION, **values, "machine_hash": xxh3_bytes(definition.encode())}


def _is_in_queue(system: str, job: str) -> bool:
    """Return True if a job waits in the queue or runs. Raises OptimusError if the scheduler does
    not answer."""
    command = [word.format(job=job) for word in _IN_QUEUE[system]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise OptimusError(
            f"cannot query job {job}: {one_line(error)}; run this command on a machine on which "
            f"{command[0]} works"
        ) from None
    if done.returncode == 0:
        return bool(done.stdout.strip())
    if done.returncode in _GONE[system]:
        return False
    raise OptimusError(
        f"cannot query job {job}: {shlex.join(command)} ended with exit status "
        f"{done.returncode}: {one_line(done.stderr)}; run the same command again later"
    )


def read_metrics(run_dir: Path) -> tuple[StepLine, ...]:
    """Return the metrics of a run, sorted by step; () if the run has none.

    Raises:
        DataError: A line is damaged.
    """
    path = run_dir / "metrics.jsonl"
    lines, damaged = read_valid(path, StepLine)
    damaged += sum(line.step_time_s == 0 for line in lines)
    if damaged:
        raise DataError(
            f"{path}: {counted(damaged, 'line')} cannot be read, so the file is damaged; remove "
            f"{run_dir.parent} and run the same `optimus study scaling` command again to measure "
            "this point"
        )
    return tuple(line for _, line in sorted({line.step: line for line in lines}.items()))


def read_components(
    run_dir: Path, lines: Sequence[StepLine]
) -> tuple[tuple[StepComponents, ...], str]:
    """Read how the time of each update of a run is divided into components.

    Args:
        run_dir: The run directory.
        lines: Lines of the run's metrics, one for each update.

    Returns:
        A pair: the components of each update in `lines`, in seconds, and "". If an update has no
        valid components, the pair is () and a text with the reason.
    """
    valid, _ = read_valid(run_dir / "metrics.jsonl", ComponentsLine)
    of_steps = {line.step: line.components for line in valid}
    if missing := sum(line.step not in of_steps for line in lines):
        return (), (
            f"{missing} of {counted(len(lines), 'update')} have no valid components in "
            f"{run_dir / 'metrics.jsonl'}; remove {run_dir.parent} and run the same `optimus study "
            "scaling` command again to measure the components"
        )
    return tuple(of_steps[line.step] for line in lines), ""


def _read_json(path: Path, kind: type[_AnyFile]) -> _AnyFile:
    """Return the contents of a file of the study. Raises DataError if the file is damaged."""
    try:
        return kind.model_validate_json(read_regular(path, _MAX_BYTES))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        problem = explain(error, kind) if first["loc"] else one_line(first["msg"])
    except OSError as error:
        problem = reason_of(error)
    remedy = "use another directory"
    if path.name == "plan.json":
        remedy = (
            f"remove {path.parent} and run the same `optimus study scaling` command again to "
            "measure this point"
        )
    raise DataError(f"{path}: {problem}, so this file of the study is damaged; {remedy}")


def _last_error(log: Path) -> str:
    """Return the last line of a log that contains `error:`. If the log has no such line, return a
    text that reports this."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return "no log"
    errors = [line for line in lines if "error:" in line.lower()]  # also matches "ValueError:"
    return one_line(errors[-1])[:300] if errors else "the log has no line with 'error:'"


def local_threads(points: Sequence[Point]) -> int:
    """Return the number of threads of a rank for points that run on this machine. It is the number
    of cores divided by the number of ranks of the largest point, and is the same for all points.

    Raises:
        ConfigError: A point has more ranks than this machine has cores.
    """
    cores = available_cores()
    for point in points:
        if (ranks := point.mesh.world_size) > cores:
            raise ConfigError(
                f"--local: {counted(point.nodes, 'node')} need {counted(ranks, 'rank')}, more than "
                f"the {counted(cores, 'core')} of this machine; use fewer --nodes"
            )
    return max(1, cores // max(point.mesh.world_size for point in points))
