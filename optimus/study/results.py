"""The results of a scaling study: medians of the points, tables and pictures."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from optimus.errors import DataError, counted
from optimus.io.files import atomic_writer, make_dirs, write_bytes
from optimus.observe.events import StepComponents
from optimus.observe.report import StepLine, load_pyplot
from optimus.study.directory import (
    PlannedStep,
    State,
    StudyDirectory,
    read_components,
    read_metrics,
)

_MARKERS = ("o", "s")
_COLORS = ("tab:blue", "tab:orange")
_COMPONENTS = {
    "compute": "tab:blue",
    "exposed": "tab:orange",
    "bubble": "tab:gray",
    "optimizer": "tab:green",
    "other": "tab:purple",
}
"""Colors of the components of a step. A planned step has no component `other`."""


class Measured(NamedTuple):
    """Step times of a point, without the updates of the warm-up."""

    updates: int
    """Number of measured updates."""
    step_s: float
    """Median of the step times in seconds."""
    low_s: float
    """First quartile of the step times in seconds."""
    high_s: float
    """Third quartile of the step times in seconds."""
    tokens_per_s: float
    """Tokens of an update divided by `step_s`."""
    components: StepComponents | None
    """Components of the step time on the first rank, from `_middle_components`; None if they are
    not measured."""
    no_components: str
    """Reason why `components` is None."""


@dataclass(frozen=True)
class Result:
    """The plan of a point and its measurement."""

    name: str
    nodes: int
    routing: str
    ranks: int
    state: State
    planned: PlannedStep | None
    measured: Measured | None
    lines: tuple[StepLine, ...]
    """Metrics of all updates, including those of the warm-up."""

    @property
    def planned_tokens_per_s(self) -> float | None:
        return None if self.planned is None else self.planned.tokens_per_s

    @property
    def components_s(self) -> dict[str, dict[str, float]]:
        """Two dicts, with the keys "measured" and "simulated". Each of them is a dict from the name
        of a component to its seconds in a step. `exposed` is a sum over all mesh axes; the exposed
        communication of each axis has its own key, such as `exposed_dp`."""
        measured = self.measured and self.measured.components
        return {"measured": _seconds(measured), "simulated": _seconds(self.planned)}


def _seconds(step: PlannedStep | StepComponents | None) -> dict[str, float]:
    """Return a dict from the names of the components of a step to seconds; {} if `step` is None."""
    if step is None:
        return {}
    seconds = {
        "compute": step.compute_s,
        "exposed": sum(step.exposed_s.values()),
        "bubble": step.bubble_s,
        "optimizer": step.optimizer_s,
    }
    if isinstance(step, StepComponents):
        seconds["other"] = step.other_s
    by_axis = {f"exposed_{axis.replace(' ', '_')}": s for axis, s in step.exposed_s.items()}
    return seconds | by_axis


def collect(directory: StudyDirectory) -> list[Result]:
    """Return the results of all points, sorted by routing and then by number of nodes.

    Raises:
        DataError: The directory has no study, or one of its files is damaged.
    """
    settings = directory.settings()
    if settings is None:
        raise DataError(
            f"{directory.path} has no study; use the --out directory of optimus study scaling"
        )
    results = []
    for name, plan in directory.plans().items():
        state = directory.state(name, settings.steps, must_ask=False)
        lines = read_metrics(directory.points / name / "run")
        measured = None
        if state.name == "done":
            of_steps = lines[settings.warmup : settings.steps]
            components = read_components(directory.points / name / "run", of_steps)
            measured = _measure(of_steps, plan.tokens, *components)
        sizes = plan.nodes, plan.routing, plan.ranks
        results.append(Result(name, *sizes, state, plan.planned, measured, lines))
    return sorted(results, key=lambda result: (result.routing, result.nodes))


def _measure(
    lines: Sequence[StepLine],
    tokens: int,
    components: Sequence[StepComponents],
    no_components: str,
) -> Measured:
    """Return the median and the quartiles of the step times in `lines`, and the components of the
    step. `tokens` is the number of tokens of an update, and the other arguments are the
    result of `read_components`."""
    seconds = [line.step_time_s for line in lines]
    middle = statistics.median(seconds)
    low, high = middle, middle
    if len(seconds) > 1:
        low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    step = _middle_components(components) if components else None
    return Measured(len(seconds), middle, low, high, tokens / middle, step, no_components)


def _middle_components(updates: Sequence[StepComponents]) -> StepComponents:
    """Sort the updates by step time. Return the mean of each component over the middle half.

    The sum of these means is between the quartiles of the step times. In contrast, the sum of the
    medians of all components can be far from the median of the step times.
    """
    ordered, quarter = sorted(updates, key=lambda update: update.total_s), len(updates) // 4
    middle, mean = ordered[quarter : len(ordered) - quarter], statistics.fmean
    axes = dict.fromkeys(axis for update in middle for axis in update.exposed_s)
    return StepComponents(
        mean(update.compute_s for update in middle),
        {axis: mean(update.exposed_s.get(axis, 0.0) for update in middle) for axis in axes},
        mean(update.bubble_s for update in middle),
        mean(update.optimizer_s for update in middle),
        mean(update.other_s for update in middle),
    )


def reference_points(results: Sequence[Result]) -> dict[str, Result]:
    """Return a dict from each routing to its reference point, whose efficiency is 1.

    The reference point is the smallest point with a measured and a planned rate, so that measured
    and planned efficiencies have the same reference. If no point has both rates, the reference is
    the smallest point with a planned rate. If no point has a planned rate, the reference is the
    smallest point with a measured rate. A rate is in tokens per second.

    Args:
        results: Points sorted as by `collect`.
    """

    def rates(result: Result) -> tuple[bool, bool]:
        return planned_rate(result) is not None, measured_rate(result) is not None

    references = {}
    for routing in _routings(results):
        # If several points have the largest key, max returns the first, which is the smallest
        # point.
        point = max((result for result in results if result.routing == routing), key=rates)
        if any(rates(point)):
            references[routing] = point
    return references


def efficiencies(
    results: Sequence[Result], rate: Callable[[Result], float | None]
) -> dict[str, float]:
    """Return a dict from the names of points to their scaling efficiency.

    The efficiency of a point is the tokens per second of a rank in this point, divided by the
    tokens per second of a rank in the reference point of the same routing. This definition applies
    to weak and to strong scaling. A point without a rate has no efficiency. If the reference point
    has no rate, no point of its routing has an efficiency.

    Args:
        results: Points sorted as by `collect`.
        rate: `measured_rate` or `planned_rate`.
    """
    references, values = reference_points(results), {}
    for result in results:
        if (tokens_per_s := rate(result)) is not None:
            reference = references[result.routing]
            if (base := rate(reference)) is not None:
                values[result.name] = tokens_per_s / result.ranks / (base / reference.ranks)
    return values


def measured_rate(result: Result) -> float | None:
    """Return the measured tokens per second of all ranks of a point; None if the point is not
    measured."""
    return None if result.measured is None else result.measured.tokens_per_s


def planned_rate(result: Result) -> float | None:
    """Return the planned tokens per second of all ranks of a point; None if the time of its step is
    not planned."""
    return result.planned_tokens_per_s


def rows(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the row of points.csv for each point, as a dict from the name of a column to a value.
    The value is None if the point has no such value."""
    measured, planned = (efficiencies(results, rate) for rate in (measured_rate, planned_rate))
    references = reference_points(results)
    components = {
        f"{evidence}_{name}_s": (evidence, name)
        for evidence in ("measured", "simulated")
        for name in dict.fromkeys(n for result in results for n in result.components_s[evidence])
    }
    table = []
    for result in results:
        figures: dict[str, Any] = {
            "point": result.name,
            "routing": result.routing or "dense",
            "nodes": result.nodes,
            "tiles": result.ranks,
            "state": result.state.name,
            "reason": result.state.reason,
        }
        m = result.measured
        figures |= {
            "measured_updates": m and m.updates,
            "measured_step_s": m and m.step_s,
            "measured_step_s_quartile_1": m and m.low_s,
            "measured_step_s_quartile_3": m and m.high_s,
            "measured_tokens_per_s": m and m.tokens_per_s,
            "measured_efficiency": measured.get(result.name),
            "simulated_step_s": result.planned and result.planned.step_s,
            "simulated_tokens_per_s": result.planned_tokens_per_s,
            "simulated_efficiency": planned.get(result.name),
            "efficiency_relative_to": None,
        }
        if result.routing in references:
            figures["efficiency_relative_to"] = references[result.routing].name
        for column, (evidence, name) in components.items():
            figures[column] = result.components_s[evidence].get(name)
        table.append(figures)
    return table


def write_results(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write `points.csv`, `loss.csv`, `figure4.png` and `throughput.png` to `folder`, and return
    the paths of these files."""
    make_dirs(folder)
    losses = [
        {
            "point": result.name,
            "routing": result.routing or "dense",
            "tiles": result.ranks,
            "step": line.step,
            "tokens": line.tokens,
            "loss": line.loss,
        }
        for result in results
        if result.measured is not None
        for line in result.lines
    ]
    names = ("point", "routing", "tiles", "step", "tokens", "loss")
    table = rows(results)
    _write_csv(folder / "points.csv", table, tuple(table[0]) if table else ("point",))
    _write_csv(folder / "loss.csv", losses, names)
    _draw_figure_4(results, folder / "figure4.png")
    _draw_throughput(results, folder / "throughput.png")
    return [folder / f for f in ("figure4.png", "throughput.png", "points.csv", "loss.csv")]


def format_results(results: Sequence[Result]) -> str:
    """Return the results as text: a table of the points, a line for each failed or submitted point,
    and the lines of `_component_lines`."""
    header = ("point", "tiles", "measured step, s (quartiles)", "tokens/s", "efficiency")
    cells = [(*header, "simulated step, s", "simulated efficiency", "state")]
    for result, row in zip(results, rows(results), strict=True):
        spread = ""
        if (m := result.measured) is not None:
            spread = f"{m.step_s:.4g} ({m.low_s:.4g} to {m.high_s:.4g})"
        cells.append(
            (
                result.name,
                f"{result.ranks:,}",
                spread,
                _number(row["measured_tokens_per_s"], ",.0f"),
                _number(row["measured_efficiency"], ".1%"),
                _number(row["simulated_step_s"], ".4g"),
                _number(row["simulated_efficiency"], ".1%"),
                result.state.name,
            )
        )
    lines = _aligned(cells)
    if references := reference_points(results):
        names = " and ".join(reference.name for reference in references.values())
        lines.append(f"efficiency: tokens per second of a rank, relative to {names}")
    for result in results:
        if result.state.name in ("failed", "submitted"):
            lines.append(f"{result.name} {result.state.name}: {result.state.reason}")
    return "\n".join([*lines, *_component_lines(results)])


def _component_lines(results: Sequence[Result]) -> list[str]:
    """Return the lines of a table of the measured and simulated components of a step, followed by a
    line for each measured point without measured components."""
    cells = [("point", "evidence", *(f"{name}, s" for name in _COMPONENTS))]
    for result in results:
        for evidence, seconds in result.components_s.items():
            if seconds:
                values = (_number(seconds.get(name), ".4g") for name in _COMPONENTS)
                cells.append((result.name, evidence, *values))
    lines = _aligned(cells) if len(cells) > 1 else []
    for result in results:
        if result.measured is not None and result.measured.components is None:
            reason = result.measured.no_components
            lines.append(f"{result.name}: components of a step are not measured: {reason}")
    return lines


def _aligned(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the lines of a table with aligned columns. `cells` has a tuple of cells for each
    line."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _write_csv(path: Path, table: Iterable[dict[str, Any]], names: Sequence[str]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    write_bytes(path, text.getvalue().encode())


def _routings(results: Iterable[Result]) -> list[str]:
    return list(dict.fromkeys(result.routing for result in results))


def _draw_figure_4(results: Sequence[Result], path: Path) -> None:
    """Draw two diagrams as in Figure 4 of the Optimus paper: the loss against the number of tokens,
    and the efficiency against the number of tiles (ranks)."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
    routings = _routings(results)
    for result in results:
        if result.measured is not None:
            style = "-" if result.routing == routings[0] else ":"
            tokens, losses = [line.tokens for line in result.lines], [x.loss for x in result.lines]
            left.plot(tokens, losses, style, lw=1, label=_label(result.routing, result.ranks))
    if not any(result.measured for result in results):
        left.text(0.5, 0.5, "no point is measured", ha="center", transform=left.transAxes)
    left.set_xlabel("training tokens")
    left.set_ylabel("cross-entropy, nats per token")
    relative_to = {
        routing: f", relative to {reference.name}"
        for routing, reference in reference_points(results).items()
    }
    _draw_points(right, results, routings, efficiencies, relative_to)
    right.axhline(1.0, lw=0.8, color="tab:gray")
    right.set_ylabel("efficiency (tokens/s of a rank, relative)")
    low, high = right.get_ylim()
    right.set_ylim(0.5 if low > 0.5 else 0.0, high + 0.05)
    _finish(pyplot, figure, (left, right), path)


def _draw_throughput(results: Sequence[Result], path: Path) -> None:
    """Draw the tokens per second and the components of a step against the number of tiles
    (ranks)."""
    pyplot = load_pyplot()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5))
    routings = _routings(results)

    def rates(of: Sequence[Result], rate: Callable[[Result], float | None]) -> dict[str, float]:
        values = ((result.name, rate(result)) for result in of)
        return {name: value for name, value in values if value is not None}

    _draw_points(left, results, routings, rates, {})
    left.set_yscale("log")
    left.set_ylabel("tokens/s")
    _draw_components(right, results, routings)
    _finish(pyplot, figure, (left, right), path)


_Values = Callable[[Sequence[Result], Callable[[Result], float | None]], dict[str, float]]


def _draw_points(
    axes: Any,
    results: Sequence[Result],
    routings: Sequence[str],
    values_of: _Values,
    suffixes: Mapping[str, str],
) -> None:
    """Draw a quantity of all points against the number of tiles (ranks).

    Measured values are drawn as filled markers with quartiles, planned values as open markers.

    Args:
        axes: Axes of matplotlib.
        results: The points.
        routings: All routings. Each has a color and a marker.
        values_of: Function that returns a dict from the name of each point to the quantity. Its
            arguments are the points and `measured_rate` or `planned_rate`.
        suffixes: A dict from a routing to the text at the end of its labels.
    """
    measured, planned = (values_of(results, rate) for rate in (measured_rate, planned_rate))
    for number, routing in enumerate(routings):
        of_routing = [result for result in results if result.routing == routing]
        style = {"marker": _MARKERS[number % 2], "color": _COLORS[number % 2]}
        name = routing or "dense"
        points = [(r.ranks, planned[r.name]) for r in of_routing if r.name in planned]
        suffix = suffixes.get(routing, "")
        label = f"{name}, simulated{suffix}"
        if points:
            axes.plot(*zip(*points, strict=True), "--", mfc="none", label=label, **style)
        timed = [
            (r, r.measured, measured[r.name])
            for r in of_routing
            if r.measured is not None and r.name in measured
        ]
        if timed:
            spreads = [
                (value * (1 - m.step_s / m.high_s), value * (m.step_s / m.low_s - 1))
                for _, m, value in timed
            ]
            axes.errorbar(
                [r.ranks for r, _, _ in timed],
                [value for _, _, value in timed],
                yerr=list(zip(*spreads, strict=True)),
                capsize=3,
                label=f"{name}, measured (quartiles){suffix}",
                **style,
            )
    tiles = sorted({result.ranks for result in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tiles, [f"{ranks:,}" for ranks in tiles])
    axes.minorticks_off()
    axes.set_xlabel("tiles (ranks)")


def _draw_components(axes: Any, results: Sequence[Result], routings: Sequence[str]) -> None:
    """Draw the simulated components of a step as open bars. To the right of these bars, draw the
    measured components of each routing as filled bars, and the measured step times as filled
    points."""
    positions = {ranks: n for n, ranks in enumerate(sorted({r.ranks for r in results}))}
    width = 0.8 / (1 + len(routings))
    for result in results:
        for evidence, seconds in result.components_s.items():
            number = 1 + routings.index(result.routing) if evidence == "measured" else 0
            x = positions[result.ranks] + (number - len(routings) / 2) * width
            bottom = 0.0
            for name, color in _COMPONENTS.items():
                if name not in seconds:
                    continue
                fill = color if evidence == "measured" else "none"
                axes.bar(x, seconds[name], 0.9 * width, bottom=bottom, color=fill, edgecolor=color)
                bottom += seconds[name]
    for name, color in _COMPONENTS.items():
        for evidence, fill in (("simulated", "none"), ("measured", color)):
            if any(name in result.components_s[evidence] for result in results):
                axes.bar(0, 0, color=fill, edgecolor=color, label=f"{name}, {evidence}")
    for number, routing in enumerate(routings):
        timed = [r for r in results if r.routing == routing and r.measured is not None]
        if timed:
            steps = [r.measured for r in timed if r.measured is not None]
            axes.errorbar(
                [positions[r.ranks] + (1 + number - len(routings) / 2) * width for r in timed],
                [m.step_s for m in steps],
                yerr=[[m.step_s - m.low_s for m in steps], [m.high_s - m.step_s for m in steps]],
                fmt=_MARKERS[number % 2],
                color="black",
                capsize=3,
                label=f"step, {routing or 'dense'}, measured (quartiles)",
            )
    axes.set_xticks(list(positions.values()), [f"{ranks:,}" for ranks in positions])
    axes.set_xlabel("tiles (ranks)")
    axes.set_ylabel("step time, s")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # with space for the legend


def _label(routing: str, ranks: int) -> str:
    return counted(ranks, "tile") + (f", {routing}" if routing else "")


def _finish(pyplot: Any, figure: Any, panels: Iterable[Any], path: Path) -> None:
    for axes in panels:
        axes.grid(alpha=0.3)
        if handles := axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", ncols=1 if len(handles) < 6 else 2)
    figure.tight_layout()
    with atomic_writer(path) as file:
        figure.savefig(file, format="png", dpi=120)
    pyplot.close(figure)
