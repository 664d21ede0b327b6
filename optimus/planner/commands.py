"""Options of `optimus plan` for the nodes of a machine and for the search over layouts, and the
functions that execute these options."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimus.config import Config
from optimus.config.machine import Machine
from optimus.config.sizes import parse_bytes
from optimus.errors import ConfigError, counted, reason_of, refuse_if
from optimus.io.files import check_output, check_output_dir, write_bytes
from optimus.planner.allocation import Allocation

if TYPE_CHECKING:
    from optimus.planner.expert_loads import RunLoads
    from optimus.planner.layouts import Layout
    from optimus.planner.search import Ranking

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser of `optimus plan`."""
    parser.add_argument(
        "--machine",
        metavar="NAME",
        help="a name in configs/machine, or the path of a TOML file (default: train.machine)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="plan the run on N nodes (default: as many nodes as the configuration needs)",
    )
    parser.add_argument(
        "--hosts",
        metavar="FILE",
        help="names of the nodes in the order of their ranks, such as PBS_NODEFILE",
    )
    parser.add_argument(
        "--write-hosts",
        metavar="FILE",
        help="write the hosts of --hosts to this file, in an order in which fewer bytes cross "
        "groups of nodes",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write the planned pipeline actions of a step to this file, for ui.perfetto.dev",
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="draw the planned pipeline of a step to this PNG file: a row of actions for each rank",
    )
    parser.add_argument(
        "--against",
        metavar="RUN_DIR",
        help="instead of planning, compare the predicted memory and step time with the values that "
        "a run of this configuration measured",
    )
    parser.add_argument(
        "--load",
        metavar="RUN_DIR",
        help="also predict memory and step time with the expert loads that a run of this model "
        "measured",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="instead of planning, search for the fastest layouts of the run that fit on the nodes",
    )
    for name, kind, metavar, text in (
        ("top", int, "N", "number of layouts to print (default: 10)"),
        ("memory", float, "GIB", "memory of a rank (default: the memory of the machine's device)"),
        ("out", str, "DIR", "write layouts.csv and pareto.png to this directory"),
        ("write", str, "FILE", "write the configuration of the first layout"),
    ):
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=f"with --search: {text}")


def check_options(args: argparse.Namespace) -> None:
    """Check the options of `add_options`. Raises ConfigError if an option has no effect or a wrong
    value."""
    refuse_if(args.write_hosts and not args.hosts, "--write-hosts needs --hosts FILE; add it")
    for name in ("trace", "picture", "load"):
        needs_machine = getattr(args, name) and not args.machine
        refuse_if(needs_machine, f"--{name} needs --machine NAME; add it")
    for name in ("top", "memory", "out", "write"):
        value = getattr(args, name)
        refuse_if(
            value is not None and not args.search, f"--{name} {value} has no effect; add --search"
        )
    outputs: dict[str, str] = {}  # from the absolute path to the option
    for option, path in (
        ("--trace", args.trace),
        ("--picture", args.picture),
        ("--write-hosts", args.write_hosts),
        ("--write", args.write),
    ):
        if path is not None:
            check_output(path, option)
            other = outputs.setdefault(os.path.realpath(path), option)
            refuse_if(other != option, f"{other} and {option} name the same file; use two files")
    if args.out is not None:
        check_output_dir(args.out, "--out")
    for name in ("top", "memory"):
        value = getattr(args, name)
        is_wrong = value is not None and not 0 < value < math.inf
        refuse_if(is_wrong, f"--{name} {value} must be a number above 0")
    chosen = [
        option
        for option, value in (
            ("--search", args.search),
            ("--resolved", args.resolved),
            ("--against", args.against),
            ("--write-hosts", args.write_hosts),
        )
        if value
    ]
    if args.search or args.resolved or args.against:
        chosen += [f"--{name}" for name in ("trace", "picture") if getattr(args, name)]
    if args.load and (args.resolved or args.against):
        chosen.append("--load")
    refuse_if(len(chosen) > 1, f"{' and '.join(chosen)} exclude each other; leave one out")
    for option in ("nodes", "hosts", "load"):
        refuse_if(
            args.against and getattr(args, option),
            f"--{option} has no effect with --against, which takes the ranks from the run; remove "
            f"--{option}",
        )


def write_hosts(config: Config, mesh: dict[str, int], allocation: Allocation, path: str) -> None:
    """Write the hosts of an allocation to the file `path`: in the order that `better_order` returns
    or, if it returns None, in the given order. Raises ConfigError if a host name does not contain
    its group."""
    from optimus.distributed.mesh import Mesh
    from optimus.planner.topology import first_without_group
    from optimus.planner.traffic import better_order, topology_of

    topology = topology_of(allocation)
    if topology.groups is None:
        host = first_without_group(allocation.hosts, allocation.host_group)
        raise ConfigError(
            f"--write-hosts: host names, such as {host}, do not contain the group; correct the "
            "list, set host_group in the file of the machine, or leave --write-hosts out"
        )
    order = better_order(config, Mesh(**mesh), allocation, topology)
    hosts = allocation.hosts if order is None else order[0]
    with _output("--write-hosts", path):
        write_bytes(path, "".join(f"{host}\n" for host in hosts).encode())


@contextlib.contextmanager
def _output(option: str, path: str) -> Iterator[None]:
    """Convert an OSError in the `with` block to a ConfigError. `path` is the value of `option`: the
    file or directory that the block writes."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {reason_of(error)}; use another path") from error


def write_planned_step(
    config: Config, mesh: dict[str, int], allocation: Allocation, trace: str, picture: str
) -> None:
    """Write the planned pipeline actions of a step on the nodes of a machine to the file `trace`,
    and draw these actions to the file `picture`. A file is not written if its path is "" or
    None."""
    from optimus.config.machine import load_machine
    from optimus.distributed.mesh import Mesh
    from optimus.planner.step_plan import StepTrace
    from optimus.planner.traffic import topology_of

    name, topology = allocation.machine, topology_of(allocation)
    step = StepTrace.of(config, Mesh(**mesh), load_machine(name), name, topology)
    if trace:
        step.write(Path(trace))
    if picture:
        step.draw(Path(picture))


def find_misfit(
    config: Config, result: dict[str, Any], arguments: Sequence[str]
) -> ConfigError | None:
    """Return the error of a plan whose fullest rank needs more than the memory of the device; None
    if the plan fits or the memory is unknown.

    If the plan does not fit, two keys are added to `result`. `missing` is a dict with the missing
    bytes of `device`. `nearest` is a list of the nearest layouts that fit. Each entry has the keys

    - `changes`: the settings that differ from the configuration;
    - `nodes`: the number of nodes if the command needs the option --nodes; otherwise None;
    - `bytes`: the predicted bytes of the fullest rank. With offloading, they are the bytes of a
      placement that fits;
    - `command`: the command that plans the layout, quoted for a shell.

    Args:
        config: The configuration.
        result: The result of `plan`.
        arguments: The words of the command after `optimus`.
    """
    from optimus.config.machine import load_machine

    machine = load_machine(result["machine"]) if "machine" in result else None
    if machine is None or machine.device is None:
        return None
    memory = result.get("device_bytes") or int(machine.device.memory_bytes.value)
    states = result["memory"]["total"]
    needed, quality = states, "the model states of a rank need"
    if states <= memory:
        needed, quality = result.get("needed", 0), "a rank is predicted to need"
    if needed <= memory:
        return None
    nodes = counted(result["nodes"], "node")
    result["missing"] = {"device": needed - memory}
    result["nearest"] = _nearest_layouts(config, machine, result)
    remedy = f"use more than {nodes}, or another layout (--search)"
    if result["nearest"]:
        for layout in result["nearest"]:
            layout["command"] = _command(arguments, layout)
        commands = (layout["command"] for layout in result["nearest"])
        remedy = f"the nearest layouts that fit on {nodes}: {', or '.join(commands)}"
    return ConfigError(
        f"--machine {result['machine']}: {quality} {counted(needed, 'byte')}, "
        f"{counted(needed - memory, 'byte')} more than its device has; {remedy}"
    )


_MOST_LAYOUTS = 3
"""Number of layouts that `find_misfit` names."""


def _nearest_layouts(
    config: Config, machine: Machine, result: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the value of the key `nearest` without `command`: layouts that use all ranks of the
    nodes of a plan.

    A plan can have fewer ranks than its nodes provide, for example the plan of one replica. If the
    unchanged layout fits on all ranks of the nodes, this layout is the only result.
    """
    from optimus.data.batch import plan_batch
    from optimus.planner.layouts import layout_changes, layout_of
    from optimus.planner.machine_plan import needed_bytes
    from optimus.planner.offload_time import bytes_of_placement
    from optimus.planner.search import nearest_fitting
    from optimus.rank.profile import Profiled

    assert machine.device is not None
    train, nodes = config.train, result["nodes"]
    if not (train.seq_len and train.global_batch_tokens):
        return []  # a search compares steps with the same number of tokens
    memory, world_size = int(machine.device.memory_bytes.value), nodes * machine.ranks_per_node
    profiled = Profiled()

    def fitting(layout: Layout) -> list[dict[str, Any]]:
        if layout.mesh.world_size != world_size:
            return []
        applied, changes = layout.apply(config), layout_changes(present, layout)
        if config.parallel.dp and config.parallel.dp != layout.dp:
            changes["parallel.dp"] = layout.dp
        elif not config.parallel.dp:  # dp follows from the number of ranks
            changes.pop("parallel.dp", None)
        # `Layout.apply` sets settings that have no effect with the layout to their defaults.
        if applied.optim.cache_chunks != config.optim.cache_chunks:
            changes["optim.cache_chunks"] = applied.optim.cache_chunks
        if config.parallel.stage_layers:
            changes["parallel.stage_layers"] = ()
        with contextlib.suppress(ConfigError):
            batch = plan_batch(applied.train, layout.mesh.num_data_ranks)
            if layout.offload == "auto":
                size = bytes_of_placement(applied, layout.mesh, machine, result["machine"])
            else:
                size = needed_bytes(
                    applied, layout.mesh, batch.microbatches_per_rank, machine, profiled
                )
            if size <= memory:
                # Without --nodes, the plan of one replica has dp = 1.
                needs_option = result["is_one_replica"] and layout.dp > 1
                option = nodes if needs_option else None
                return [{"changes": changes, "nodes": option, "bytes": size}]
        return []

    present = layout_of(config, world_size)
    free = config.parallel.model_copy(update={"dp": 0})
    whole = layout_of(config.model_copy(update={"parallel": free}), world_size)
    if result["world"] < world_size and (unchanged := fitting(whole)):
        return unchanged
    nearest = nearest_fitting(config, machine, nodes, 2 * _MOST_LAYOUTS, profiled)
    on_device = (fitting(near.evaluation.layout) for near in nearest)
    # A placement takes seconds, and offloading is slower than a layout that fits without it.
    can_offload = config.offload.mode == "off" and machine.links is not None
    offloaded = (fitting(whole._replace(offload="auto")) for _ in range(can_offload))
    layouts = itertools.chain(on_device, offloaded)
    return list(itertools.islice(itertools.chain.from_iterable(layouts), _MOST_LAYOUTS))


def _command(arguments: Sequence[str], layout: dict[str, Any]) -> str:
    """Return the command that plans an entry of `nearest`, quoted for a shell. `arguments` are the
    words of the present command after `optimus`."""
    from optimus.planner.layouts import override

    changes = {key: override(value) for key, value in layout["changes"].items()}
    kept = [word for word in arguments if word.partition("=")[0] not in changes]
    overrides = [f"{key}={value}" for key, value in changes.items()]
    nodes = ["--nodes", str(layout["nodes"])] if layout["nodes"] else []
    return shlex.join(["optimus", *kept, *overrides, *nodes])


def run_comparison(args: argparse.Namespace, config: Config) -> int:
    """Compare a plan with a run, and print the result. Return the exit status."""
    from optimus.planner.against import compare, format_comparison

    result = compare(config, args.against, args.machine)
    print(json.dumps(result) if args.json else format_comparison(result))
    return 0


def run_search(args: argparse.Namespace, config: Config, allocation: Allocation | None) -> int:
    """Rank the layouts of a run, print the ranking, and write the files of --out and --write.
    Return the exit status.

    If no layout fits without offloading and the file of the machine has a device and links, rank
    the layouts with offload.mode = "auto".
    """
    from optimus.config.machine import load_machine
    from optimus.planner.expert_loads import loads_for_plan

    world_size = allocation.world_size if allocation else None
    if world_size is None:
        raise ConfigError("--search needs a number of ranks; add --machine NAME --nodes N")
    if args.hosts:
        logger.info(
            "the order of --hosts has no effect on the search, because the best order depends on "
            "the layout. The search assumes that consecutive hosts fill one group of nodes after "
            "the other. For the step time on these hosts, plan a layout with --hosts"
        )
    machine = load_machine(args.machine)
    refuse_if(
        args.load and machine.device is None,
        f"--load {args.load} has no effect: the file of {args.machine} has no device, so the "
        "search sorts the layouts by FLOPs; remove --load, or use another machine",
    )
    loads = loads_for_plan(args.load, config) if args.load else None
    # Only these modules import torch, which takes seconds.
    from optimus.planner.placement_search import with_offload
    from optimus.planner.search import TOO_LARGE
    from optimus.planner.search_report import (
        PFLOP,
        SECONDS,
        format_report,
        report,
        write_config,
        write_report,
    )

    unit = PFLOP if machine.device is None else SECONDS
    config = _with_memory(config, args.memory)
    ranking = _rank_layouts(args, config, machine, world_size, loads)
    has_rates = machine.device is not None and machine.links is not None
    can_offload = has_rates and config.offload.mode == "off" and not args.load
    if not ranking.evaluations and can_offload and ranking.rejected[TOO_LARGE]:
        logger.info('no layout fits without offloading; evaluating offload.mode = "auto"')
        config = _with_memory(with_offload(config, mode="auto"), args.memory)
        ranking = _rank_layouts(args, config, machine, world_size, loads)
    if not ranking.evaluations:
        reasons = "; ".join(f"{n:,}: {why}" for why, n in ranking.rejected.most_common(3))
        raise ConfigError(
            f"none of {counted(ranking.rejected.total(), 'layout')} is possible ({reasons}); use "
            "another number of nodes, more memory or another global batch"
        )
    best = ranking.evaluations[0].layout
    if args.out is not None:
        with _output("--out", args.out):
            write_report(ranking, unit, Path(args.out))
    if args.write is not None:
        with _output("--write", args.write):
            write_config(best.apply(config), args.write)
    top = args.top or 10
    if args.json:
        result: dict[str, Any] = {"world": world_size} | report(ranking, top, unit)
        print(json.dumps(result))
    else:
        print(format_report(ranking, top, unit))
        print(f"the first layout: {best.describe()}")
    return 0


def _with_memory(config: Config, memory: float | None) -> Config:
    """Return the configuration with the value of --memory (in GiB) as offload.device_memory.
    Without --memory, or if offload.mode is not "auto", return it unchanged."""
    from optimus.planner.placement_search import with_offload

    if memory is None or config.offload.mode != "auto":
        return config
    return with_offload(config, device_memory=str(int(memory * _GIB)))


def _rank_layouts(
    args: argparse.Namespace,
    config: Config,
    machine: Machine,
    world_size: int,
    loads: RunLoads | None,
) -> Ranking:
    """Return the ranking of the layouts of a run on a number of ranks of a machine."""
    from optimus.planner.layouts import LayoutChecks, space_of
    from optimus.planner.machine_rates import rates_of
    from optimus.planner.search import search
    from optimus.planner.search_memory import LayoutMemory
    from optimus.planner.search_offload import OffloadedLayouts
    from optimus.planner.search_report import SearchProgress
    from optimus.planner.search_time import ComputeBound, StepSeconds
    from optimus.rank.profile import Profiled

    offloads = config.offload.mode == "auto"
    limit = None if args.memory is None else int(args.memory * _GIB)
    checks, profiled = LayoutChecks(config), Profiled()
    time: Callable[[Layout], float] = ComputeBound(config, checks)
    offloaded = None
    if machine.device is not None:
        rates = rates_of(machine, config.train.dtype, args.machine)
        time = seconds = StepSeconds(config, checks, rates, profiled, loads)
        asked = parse_bytes(config.offload.device_memory) if offloads else 0
        limit = limit or asked or int(machine.device.memory_bytes.value)
        if offloads:
            memory = LayoutMemory(config, checks, limit, profiled)
            offloaded = OffloadedLayouts(config, machine, args.machine, seconds, memory, checks)
    refuse_if(
        offloads and offloaded is None,
        f"offload.mode = 'auto': the file of {args.machine} has no device, so the time of a step "
        "with offloading is unknown; use another machine, or set offload.mode = 'off'",
    )
    memory = LayoutMemory(config, checks, limit, profiled, loads)
    processes = len(os.sched_getaffinity(0))
    settings = memory, time, checks, limit, processes, SearchProgress(), offloaded
    return search(config, world_size, space_of(config, world_size), *settings)
