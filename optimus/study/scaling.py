"""The points and jobs of a scaling study. No function of this module runs a point or submits a job.

A point is a short run of a configuration on a number of nodes. With weak scaling, each data rank
has the same number of tokens in every point; with strong scaling, the global batch is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from optimus.config import Config, make_config
from optimus.config.axes import MODEL
from optimus.config.machine import Machine, Queue, parse_walltime
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Mesh, make_mesh
from optimus.errors import ConfigError, counted, refuse_if

Scaling = Literal["weak", "strong"]
ROUTINGS = ("top-k", "uniform")
_START_S = 600
"""Seconds of the walltime that are reserved for the start of a point: rendezvous, process groups,
compilation of kernels. This number is a choice; the start has not been measured on many nodes."""
_MARGIN = 3.0
"""Requested time of the updates divided by their predicted time. If the machine file lacks values,
the predicted time is a lower bound."""
_ROUND_S = 300
"""Walltimes of jobs are rounded up to a multiple of this number of seconds."""


@dataclass(frozen=True)
class Settings:
    """Settings that all points of a study share."""

    machine: str
    """Name of the machine, or the absolute path of its file."""
    scaling: Scaling
    steps: int
    """Number of updates of a point."""
    warmup: int
    """Number of updates at the start of a point that are not measured."""
    tokens_per_data_rank: int
    """With weak scaling, the number of tokens of a data rank in an update; 0 for one microbatch."""

    def global_batch_tokens(self, config: Config, mesh: Mesh) -> int:
        """Return `train.global_batch_tokens` of a point with this mesh."""
        if self.scaling == "strong":
            return config.train.global_batch_tokens
        return self.tokens_per_data_rank * mesh.num_data_ranks


@dataclass(frozen=True)
class Point:
    """A run of the study: the configuration on `nodes` nodes, with the routing `routing`."""

    name: str
    nodes: int
    routing: str
    """Value of `model.router`; "" for a dense model."""
    config: Config
    mesh: Mesh
    tokens: int
    """Tokens of an update."""
    planned: dict[str, Any] | None
    """Result of `plan_step`, with uniform routing; None if the time of a step is not planned."""
    not_planned: str = ""
    """Reason why `planned` is None."""

    @property
    def expected_s(self) -> float | None:
        """Predicted seconds of all updates of the point; None if `planned` is None."""
        if self.planned is None:
            return None
        return self.config.train.stop_at_step * self.planned["step_s"]

    @property
    def walltime_s(self) -> int:
        """Seconds to request for the point. Raises ConfigError if `planned` is None."""
        if self.expected_s is None:
            raise ConfigError(
                f"the time of a step on {counted(self.nodes, 'node')} is not planned "
                f"({self.not_planned}); add --walltime H:MM:SS, the time of a point"
            )
        return _START_S + math.ceil(_MARGIN * self.expected_s)


@dataclass(frozen=True)
class Job:
    """A job of the scheduler, which runs points one after the other."""

    name: str
    queue: str
    """Name of the queue; "" if the machine's file has no queues."""
    points: tuple[Point, ...]
    walltime_s: int

    @property
    def nodes(self) -> int:
        """Number of nodes of the job: the number of nodes of its largest point. While a smaller
        point runs, the other nodes are idle."""
        return max(point.nodes for point in self.points)

    @property
    def node_hours(self) -> float:
        """Node-hours of the whole walltime. A job that ends earlier uses fewer node-hours."""
        return self.nodes * self.walltime_s / 3600


def parse_nodes(text: str) -> tuple[int, ...]:
    """Return the numbers of nodes in a list such as `32,64,128`, in ascending order. Raises
    ConfigError if an element is not a number of nodes or occurs twice."""
    numbers = []
    for word in text.split(","):
        refuse_if(
            not word.strip().isdecimal() or int(word) < 1,
            f"--nodes {text}: {word!r} is not a number of nodes; give numbers such as 32,64,128",
        )
        numbers.append(int(word))
    for number in numbers:
        refuse_if(
            numbers.count(number) > 1,
            f"--nodes {text}: {number} occurs twice; give each number once",
        )
    return tuple(sorted(numbers))


def parse_limit(text: str | None) -> int | None:
    """Return the time limit of a point in seconds from the value of `--walltime`, which is
    hours:minutes:seconds; None if the option is not set. Raises ConfigError if the text is not a
    time or if the time is 0."""
    if text is None:
        return None
    try:
        seconds = parse_walltime(text)
    except ValueError as error:
        raise ConfigError(f"--walltime {error}") from None
    refuse_if(not seconds, f"--walltime {text} leaves no time for a point; use a longer time")
    return seconds


def parse_routings(text: str | None, config: Config) -> tuple[str, ...]:
    """Return the routings in the value of `--routing`. If `text` is None, return `model.router` of
    the configuration, or "" for a dense model. Raises ConfigError if a routing is unknown or has no
    effect."""
    if text is None:
        return (config.model.router if config.model.sparse_layers else "",)
    refuse_if(
        not config.model.sparse_layers,
        f"--routing {text} has no effect on a dense model; remove it",
    )
    routings = tuple(dict.fromkeys(text.split(",")))
    for routing in routings:
        refuse_if(
            routing not in ROUTINGS,
            f"--routing {text}: {routing!r} is not a routing; use {' or '.join(ROUTINGS)}",
        )
    return routings


def _mesh_on(config: Config, machine: Machine, name: str, nodes: int) -> Mesh:
    """Return the mesh of a run on `nodes` nodes: pp, ep and tp are those of the configuration, and
    dp is the number of ranks divided by pp * ep * tp. Raises ConfigError if pp * ep * tp does not
    divide the number of ranks."""
    free = config.parallel.model_copy(update={"dp": 0})
    model_ranks, ranks = make_mesh(free).world_size, nodes * machine.ranks_per_node
    least = math.lcm(model_ranks, machine.ranks_per_node) // machine.ranks_per_node
    refuse_if(
        ranks % model_ranks,
        f"on {counted(nodes, 'node')} of {name}: parallel.{' * '.join(MODEL)} = {model_ranks} does "
        f"not divide the {counted(ranks, 'rank')}; use a multiple of {counted(least, 'node')}, "
        f"such as --nodes {max(1, round(nodes / least)) * least}, or change the sizes",
    )
    return make_mesh(free, ranks)


def tokens_per_data_rank(config: Config, machine: Machine, name: str, nodes: Iterable[int]) -> int:
    """Return `train.global_batch_tokens` divided by the number of data ranks of the configuration.

    With `parallel.dp = 0`, the number of data ranks is that of a run on the smallest number in
    `nodes`. `name` is the name of the machine, for messages.

    Raises:
        ConfigError: The mesh does not fit this number of nodes, or the global batch is not a
            multiple of the tokens of a microbatch on all data ranks.
    """
    if config.parallel.dp:
        mesh = make_mesh(config.parallel)
    else:
        mesh = _mesh_on(config, machine, name, min(nodes))
    plan_batch(config.train, mesh.num_data_ranks)
    return config.train.global_batch_tokens // mesh.num_data_ranks


def make_point(
    config: Config,
    settings: Settings,
    machine: Machine,
    nodes: int,
    routing: str,
    folder: Path,
) -> Point:
    """Return a point of a study.

    Args:
        config: The configuration of the study.
        settings: Settings of the study.
        machine: The definition of `settings.machine`.
        nodes: Number of nodes.
        routing: Value of `model.router`; "" for a dense model.
        folder: Directory of all points.

    Raises:
        ConfigError: pp * ep * tp does not divide the number of ranks, or the batch cannot be
            divided among the data ranks.
    """
    from optimus.planner.step_plan import plan_step

    mesh = _mesh_on(config, machine, settings.machine, nodes)
    name = f"{nodes:05}-{routing or 'dense'}"
    tree = config.model_dump(exclude_none=True)
    train, steps = tree["train"], settings.steps
    train["max_steps"] = max(train["max_steps"], steps)
    train |= {
        "run_dir": str(folder / name / "run"),
        "stop_at_step": steps,
        "global_batch_tokens": settings.global_batch_tokens(config, mesh),
        **dict.fromkeys(("eval_interval", "sample_interval"), 0),
        # If the data set has held-out data, a run always evaluates after its last update.
        "eval_instances": 1,
        "deadline_s": 0.0,
    }
    if machine.device is not None:
        train["machine"] = train["machine"] or settings.machine
    tree["parallel"]["dp"] = mesh.dp
    tree["checkpoint"] |= {"at_end": False, "interval": 0, "model_interval": 0}
    tree["checkpoint"] |= {"keep_models": 0, "keep_models_every": 0}
    tree["observe"]["step_components"] = True
    if routing:
        tree["model"]["router"] = routing
    where = f"{counted(nodes, 'node')} of {settings.machine}"
    try:
        of_point = make_config(tree)
        batch = plan_batch(of_point.train, mesh.num_data_ranks)
    except ConfigError as error:
        raise ConfigError(f"on {where}: {error}") from None
    planned, reason = None, ""
    try:
        planned = plan_step(of_point, mesh, machine, settings.machine)
    except ConfigError as error:
        reason = str(error)
    return Point(name, nodes, routing, of_point, mesh, batch.tokens, planned, reason)


def check_point_fit(point: Point, machine: Machine) -> None:
    """Check with `check_fit` that a point fits in the memory of the machine's devices. If the
    machine file has no device, check nothing. Log a warning if the predicted memory exceeds the
    memory of a device but the lower bound does not.

    Raises:
        ConfigError: The lower bound exceeds the memory, and `train.fit_check` is "refuse".
    """
    from optimus.planner.fit import capacity_of, check_fit

    if machine.device is not None:
        batch = plan_batch(point.config.train, point.mesh.num_data_ranks)
        capacity = capacity_of(machine, machine.ranks_per_node)
        num_microbatches = batch.microbatches_per_rank
        check_fit(point.config, point.mesh, num_microbatches, capacity, f"point {point.name}")


def local_limits(
    points: Iterable[Point], limit_s: int | None, is_required: bool
) -> dict[str, int | None]:
    """Return a dict from the name of each point to its time limit: the seconds after which a point
    that runs on this machine is killed, or None for no limit.

    Args:
        points: The points.
        limit_s: Limit of each point in seconds; None for `Point.walltime_s`.
        is_required: This argument has an effect only if `limit_s` is None and the time of a point
            is not planned. True to raise ConfigError, False to run the point without a limit.
    """
    return {
        point.name: limit_s
        if limit_s is not None or (point.planned is None and not is_required)
        else point.walltime_s
        for point in points
    }


def pack_jobs(
    points: Sequence[Point],
    machine: Machine,
    queue: str = "",
    limit_s: int | None = None,
    share: bool = False,
) -> list[Job]:
    """Return the jobs that run the points.

    By default, each point has a separate job. If a queue limits the number of jobs of a user
    (`Queue.max_jobs`) and has more points than this limit, each job in the queue runs as many
    points, one after the other, as the longest walltime of the queue permits.

    Args:
        points: The points.
        machine: The machine, with its queues.
        queue: Name of the queue; "" for the first queue in the file that takes a point.
        limit_s: Walltime of each point in seconds; None for `Point.walltime_s`.
        share: True to run several points in a job in all queues, even if a queue does not limit the
            number of jobs of a user.

    Raises:
        ConfigError: No queue takes a point, the machine has no queue of this name, or the time of a
            point is neither given nor planned.
    """
    names = list(dict.fromkeys(entry.name for entry in machine.queues))
    refuse_if(
        queue and names and queue not in names,
        f"--queue {queue}: the machine has no such queue; use one of {', '.join(names)}",
    )
    by_queue: dict[str, list[tuple[Point, int]]] = {}
    for point in points:
        seconds = point.walltime_s if limit_s is None else limit_s
        entry = _queue_of(machine, queue, point.nodes, seconds)
        by_queue.setdefault(entry.name if entry else queue, []).append((point, seconds))
    jobs = []
    for name, timed in by_queue.items():
        entries = [entry for entry in machine.queues if entry.name == name]
        limit = max((entry.max_jobs for entry in entries), default=0)
        shares = share or (limit and len(timed) > limit)
        timed.sort(key=lambda pair: -pair[0].nodes)
        groups: list[list[tuple[Point, int]]] = []
        for pair in timed:
            together = [*groups[-1], pair] if groups and shares else []
            if together and _fits(entries, together):
                groups[-1] = together
            else:
                groups.append([pair])
        jobs += [_job(name, group, entries) for group in groups]
    return jobs


def _queue_of(machine: Machine, name: str, nodes: int, seconds: int) -> Queue | None:
    """Return the first queue that takes a job of `nodes` nodes for `seconds` seconds. If `name` is
    not "", consider only the queue with this name. Return None if the machine file has no queue to
    consider. Raises ConfigError if none of the considered queues takes the job."""
    entries = [entry for entry in machine.queues if name in ("", entry.name)]
    if not entries:
        return None
    for entry in entries:
        if _takes(entry, nodes, seconds):
            return entry
    hours = seconds / 3600
    raise ConfigError(
        f"{f'--queue {name}' if name else 'the machine'} has no queue that takes "
        f"{counted(nodes, 'node')} for {hours:.2g} h; use fewer --steps, another --queue, or a "
        "shorter --walltime"
    )


def _takes(entry: Queue, nodes: int, seconds: int) -> bool:
    least, most = entry.nodes
    return least <= nodes <= most and seconds <= parse_walltime(entry.walltime[1])


def _fits(entries: Sequence[Queue], group: Sequence[tuple[Point, int]]) -> bool:
    nodes, seconds = max(point.nodes for point, _ in group), sum(s for _, s in group)
    return not entries or any(_takes(entry, nodes, seconds) for entry in entries)


def _job(queue: str, group: Sequence[tuple[Point, int]], entries: Sequence[Queue]) -> Job:
    points, seconds = tuple(point for point, _ in group), sum(s for _, s in group)
    nodes = max(point.nodes for point in points)
    fitting = [entry for entry in entries if _takes(entry, nodes, seconds)]
    rounded = _ROUND_S * math.ceil(seconds / _ROUND_S)
    if fitting:
        least, most = map(parse_walltime, fitting[0].walltime)
        rounded = max(least, min(most, rounded))
    first = points[0].name
    name = first if len(points) == 1 else f"{first}-and-{len(points) - 1}-more"
    return Job(name, queue, points, rounded)


def walltime_text(seconds: int) -> str:
    """Return a number of seconds as the text hours:minutes:seconds, such as 1:05:00."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
