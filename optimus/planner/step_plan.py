"""The time of a run's step on a machine, for `optimus plan`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from optimus.chunks.step_time import Resource
from optimus.config import Config
from optimus.config.machine import Machine
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, counted, reason_of
from optimus.io.files import atomic_writer
from optimus.model.flops import flops_per_token
from optimus.observe.chrome_trace import Traced, TracedAction, TracedWork, write_trace
from optimus.observe.report import load_pyplot
from optimus.parallel.pipeline.actions import Kind
from optimus.parallel.pipeline.plan import schedule_of
from optimus.planner.machine_rates import is_cpu, rates_of
from optimus.planner.offload_time import Placements, time_offloaded
from optimus.planner.run_time import plan_run, run_lines
from optimus.planner.step_time import play_step, played_time
from optimus.planner.topology import Topology
from optimus.planner.workload import Works, step_of


def plan_step(
    config: Config,
    mesh: Mesh,
    machine: Machine,
    name: str,
    works: Works | None = None,
    imbalances: Mapping[int, float] | None = None,
    placements: Placements | None = None,
    topology: Topology | None = None,
) -> dict[str, Any]:
    """Return the time of a step on a machine as a dict for JSON.

    Args:
        config: The run, with `train.seq_len`. If `train.global_batch_tokens` is 0, a step has one
            microbatch on each data rank.
        mesh: Sizes of all axes.
        machine: The machine.
        name: Name of the machine, for messages.
        works, imbalances, topology: As for `step_of`.
        placements: As for `time_offloaded`.

    Returns:
        - `step_s`: seconds of a step without checkpoints. It is the sum of `compute_s`, `bubble_s`,
          `optimizer_s`, all values of `exposed_s` (a dict from axes to seconds) and, with
          offloading, `offload_s`.
        - `offload_s`: only with offloading. The seconds by which copies, updates on the host and
          the disk make the step longer.
        - `resources_s`: only with offloading. The seconds for which each resource (the links, the
          host and the disk) is busy in a step, on the rank where this resource is busy longest.
        - `tokens_per_s`: tokens of a step divided by `step_s`. `tflops_per_device`: model TFLOP/s
          of a device. `peak_flops`: peak FLOP/s of a device. `mfu`: model FLOP/s of a device
          divided by `peak_flops`.
        - `tokens_per_day`: `tokens_per_s` times 86,400, times `work_share` of `plan_run`.
        - `nodes`: number of nodes.
        - All keys of the result of `plan_run`.
        - `fitted_on`: the published measurements to which rates of the machine file were fitted.
        - `missing`: keys of rates that the machine file lacks. If there are any, `step_s` is a
          lower bound.

    Raises:
        ConfigError: The machine file has no rates of products in the run's dtype, of the memory or
            of the network; or the global batch cannot be divided over the data ranks. With
            offloading, also as `time_offloaded`.
    """
    train = config.train
    rates = rates_of(machine, train.dtype, name)
    resources_s: dict[str, float] = {}
    if config.offload.mode != "off":
        run = config, mesh, machine, name
        offloaded = time_offloaded(*run, works, imbalances, placements, topology)
        step, time, resources_s = offloaded.step, offloaded.time, offloaded.seconds
    else:
        on_cpu = is_cpu(machine)
        step = step_of(config, mesh, None, on_cpu, works, imbalances, topology=topology)
        time = played_time(step, rates, schedule_of(config, mesh, step.microbatches))
    tokens = step.microbatches * train.microbatch_size * train.seq_len * mesh.num_data_ranks
    flops = flops_per_token(config.model, train.seq_len) * tokens / mesh.world_size
    nodes = math.ceil(mesh.world_size / machine.ranks_per_node)
    result: dict[str, Any] = {
        "machine": name,
        "nodes": nodes,
        "step_s": time.total_s,
        "compute_s": time.compute_s,
        "exposed_s": {axis: s for axis, s in time.exposed_s.items() if s},
        "bubble_s": time.bubble_s,
        "optimizer_s": time.optimizer_s,
        **({"offload_s": time.offload_s, "resources_s": resources_s} if resources_s else {}),
        "tokens_per_s": tokens / time.total_s,
        "tflops_per_device": flops / time.total_s / 1e12,
        "mfu": flops / time.total_s / rates.products.peak,
        "peak_flops": rates.products.peak,
        "fitted_on": list(rates.fitted_on),
        "missing": list(time.missing),
    }
    result |= plan_run(config, mesh, machine, nodes, time.total_s)
    result["tokens_per_day"] = 86400 * result["work_share"] * result["tokens_per_s"]
    return result


class StepTrace(NamedTuple):
    """The times of a planned step."""

    actions: list[list[TracedAction]]
    """The pipeline actions of each rank, with the names of `optimus bench step --trace`."""
    others: dict[str, Sequence[Sequence[Traced]]]
    """A dict from the name of a resource to its intervals of activity on each rank: transfers,
    launches of the host and, with offloading, the links, the host and the disk."""

    @classmethod
    def of(
        cls,
        config: Config,
        mesh: Mesh,
        machine: Machine,
        name: str,
        topology: Topology | None = None,
    ) -> StepTrace:
        """Simulate a step and return its times. The arguments and the errors are those of
        `plan_step`."""
        others: dict[str, Sequence[Sequence[Traced]]] = {}
        if config.offload.mode != "off":
            offloaded = time_offloaded(config, mesh, machine, name, topology=topology)
            played = offloaded.played
            for resource in get_args(Resource):
                others[resource] = [
                    [TracedWork(*span) for span in spans if span.resource == resource]
                    for spans in offloaded.spans
                ]
        else:
            step = step_of(config, mesh, on_cpu=is_cpu(machine), topology=topology)
            schedule = schedule_of(config, mesh, step.microbatches)
            played = play_step(step, rates_of(machine, config.train.dtype, name), schedule)
        actions, transfers, launches = (
            [[TracedAction.of(*span) for span in spans] for spans in ranks]
            for ranks in (played.ranks, played.transfers, played.hosts)
        )
        return cls(actions, {"transfers": transfers, "launches of the host": launches} | others)

    def write(self, path: Path) -> None:
        """Write the trace in the Chrome Trace Event format. Raises ConfigError if the file cannot
        be written."""
        write_trace(path, self.actions, "planned", self.others)

    def draw(self, path: Path) -> None:
        """Draw a PNG file with a row of actions for each pipeline rank, the first rank at the top.
        Wide actions are labelled with the number of the microbatch. Raises ConfigError if the file
        cannot be written."""
        pyplot = load_pyplot()
        rows = len(self.actions)
        figure, axes = pyplot.subplots(figsize=(14, min(40, 1.5 + 0.35 * rows)))
        end_s = max((action.end_s for rank in self.actions for action in rank), default=0.0)
        present = {action.kind for rank in self.actions for action in rank}
        for kind, color in _COLORS.items():
            if kind.name not in present:
                continue
            axes.barh(0, 0, color=color, label=kind.name)  # an entry of the legend
            for rank, actions in enumerate(self.actions):
                spans = [(a.start_s, a.end_s - a.start_s) for a in actions if a.kind == kind.name]
                axes.broken_barh(spans, (rank - 0.4, 0.8), facecolor=color, ec="white", lw=0.3)
        for rank, actions in enumerate(self.actions):
            for _, _, microbatch, start_s, stop_s in actions:
                if microbatch >= 0 and stop_s - start_s > 0.012 * end_s:
                    axes.text((start_s + stop_s) / 2, rank, str(microbatch), **_NUMBER)
        axes.set_xlim(0, end_s)
        axes.set_ylim(rows - 0.5, -0.5)
        axes.yaxis.set_major_locator(pyplot.MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_xlabel("seconds")
        axes.set_ylabel("pipeline rank")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.tight_layout()
        try:
            with atomic_writer(path) as file:
                figure.savefig(file, format="png", dpi=120)
        except OSError as error:
            raise ConfigError(f"--picture {path}: {reason_of(error)}; use another file") from error
        finally:
            pyplot.close(figure)


_COLORS = {Kind.F: "C0", Kind.B: "C2", Kind.I: "C1", Kind.W: "C4", Kind.OPT_STEP: "C7"}
_NUMBER = {"ha": "center", "va": "center", "fontsize": 7, "color": "white"}
"""Format of the number of a microbatch in a picture."""


def step_lines(result: dict[str, Any], is_one_replica: bool = False) -> list[tuple[str, str]]:
    """Return the result of `plan_step` as pairs (name, value) for a table."""
    step_s = result["step_s"]

    def share(seconds: float) -> str:
        return f"{seconds:,.4g} s, {seconds / step_s:.1%}"

    offloading = []
    if "offload_s" in result:
        work = ", ".join(f"{name} {s:,.4g} s" for name, s in result["resources_s"].items())
        text = f"{share(result['offload_s'])}; busy in a step: {work}"
        offloading.append(("  exposed offloading", text))
    lines = [
        (f"step on {result['machine']}", f"{step_s:,.4g} s on {counted(result['nodes'], 'node')}"),
        ("  compute", share(result["compute_s"])),
        *((f"  exposed {axis}", share(seconds)) for axis, seconds in result["exposed_s"].items()),
        ("  pipeline bubble", share(result["bubble_s"])),
        ("  optimizer", share(result["optimizer_s"])),
        *offloading,
        *(
            [("  checkpoints, in addition", share(result["checkpoint_s"]))]
            if result["checkpoint_s"] is not None
            else []
        ),
        (
            "throughput",
            f"{result['tokens_per_s']:,.0f} tokens/s, {result['tokens_per_day']:.3g} tokens a day",
        ),
        (
            "MFU",
            f"{result['mfu']:.1%}: {result['tflops_per_device']:,.4g} of "
            f"{result['peak_flops'] / 1e12:,.4g} TFLOP/s",
        ),
    ]
    lines += run_lines(result, is_one_replica)
    if result["fitted_on"]:
        lines.append(("rates fitted on", "; ".join(result["fitted_on"])))
    if result["missing"]:
        lines.append(("rates not in the file", ", ".join(result["missing"])))
    return lines
