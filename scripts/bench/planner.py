#!/usr/bin/env python3
"""Compare planned with published step times, and write docs/benchmarks/planner.md.

    python scripts/bench/planner.py --anchors DIR [--fit] [--out FILE]

DIR contains vtrain_single.csv and vtrain_multi.csv, the step times of vTrain (MIT licence). With
--fit, the constants of configs/machine/a100-80.toml are fitted first and written to that file. A
published row is used either to fit constants or to test predictions, but not for both.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import common
import planner_paper
from planner_rows import Row, gpt_step, table_1, table_5, vtrain_rows

from optimus.config import Config
from optimus.config.hardware import MAX_PRODUCT_ERROR
from optimus.config.machine import FOLDER, load_machine
from optimus.distributed.mesh import make_mesh
from optimus.errors import ConfigError, counted
from optimus.io import files
from optimus.model.flops import flops_per_token
from optimus.planner.machine_rates import Rates, rates_of
from optimus.planner.step_time import step_time
from optimus.planner.workload import step_of

ROOT = Path(__file__).resolve().parents[2]
SEED, CALIBRATED = 0, 50
"""Seed and number of the one-node rows on which `launch_s` and `half_size` are fitted."""
MAX_SHARE = 0.95
"""Largest fitted efficiency."""
PRODUCT_ERROR = MAX_PRODUCT_ERROR - 0.001
"""Largest allowed distance of the result of `_product_ratio` from 1. This limit is below
MAX_PRODUCT_ERROR, because the written constants are rounded to four digits."""
SHORT_RUN = 797.51e12
"""FLOP/s of an H100 in a short run for bf16 products of 8192^3
(github.com/zzc0721/torch-performance-test-data issue 79)."""
VTRAIN_RANK_RATE = 800e9 / 8 / 8
"""Peak bytes per second between nodes for each GPU: 800 Gbit/s for 8 GPUs (arXiv 2312.12391)."""


class Constant(NamedTuple):
    """A value of a100-80.toml that is fitted. The fitted value is from `low` to `high`."""

    key: str
    """Key in the file."""
    start: float
    """Value at which the fit starts."""
    low: float
    high: float
    get: Callable[[Rates], float]
    """Function that returns the value of this constant in the rates."""
    put: Callable[[Rates, float], Rates]
    """Function that returns the rates with another value of this constant."""


def _product_ratio(rates: Rates) -> float:
    """Return the geometric mean of the ratios (modelled rate / measured rate) of the matrix
    products that were measured on an A100."""
    device = load_machine("a100-80").device
    assert device is not None
    return statistics.geometric_mean(
        rates.products.rate(p.rows, p.inner, p.columns) / p.flops.value
        for p in device.products["bf16"].measured
    )


def _with_efficiency(rates: Rates, value: float) -> Rates:
    """Return the rates with the efficiency `value`. If `_product_ratio` would then differ from 1 by
    more than PRODUCT_ERROR, the efficiency is instead the nearest value for which the difference is
    PRODUCT_ERROR. If the efficiency would exceed MAX_SHARE, it is MAX_SHARE."""
    changed = dataclasses.replace(rates, products=rates.products._replace(share=value))
    ratio = _product_ratio(changed)
    allowed = min(max(ratio, 1 - PRODUCT_ERROR), 1 + PRODUCT_ERROR)
    share = min(value * allowed / ratio, MAX_SHARE)
    return dataclasses.replace(rates, products=rates.products._replace(share=share))


def _with_half_size(rates: Rates, value: float) -> Rates:
    """Return the rates with the half_size `value`. The efficiency changes, too, so that
    `_product_ratio` does not change. If this efficiency would exceed MAX_SHARE, return `rates`."""
    changed = dataclasses.replace(rates, products=rates.products._replace(half_size=value))
    share = rates.products.share * _product_ratio(rates) / _product_ratio(changed)
    if share > MAX_SHARE:
        return rates
    return dataclasses.replace(changed, products=changed.products._replace(share=share))


ON_TABLE_5 = (
    Constant("efficiency", 0.85, 0.3, MAX_SHARE, lambda r: r.products.share, _with_efficiency),
    # The upper limit is the highest rate of BabelStream on this GPU (Dot), from the source of the
    # products in a100-80.toml.
    Constant(
        "memory_achieved",
        1.5e12,
        0.5e12,
        1.75e12,
        lambda rates: rates.memory,
        lambda rates, x: dataclasses.replace(rates, memory=x),
    ),
)
"""Constants that are fitted on the full-recomputation rows of arXiv 2205.05198, Table 5."""
ON_SINGLE_NODE = (
    Constant(
        "launch_s",
        3e-5,
        1e-6,
        2e-4,
        lambda rates: rates.launch_s,
        lambda rates, x: dataclasses.replace(rates, launch_s=x),
    ),
    Constant(
        "half_size",
        50.0,
        1.0,
        1e4,
        lambda rates: rates.products.half_size,
        _with_half_size,
    ),
)
"""Constants that are fitted on 50 of vTrain's one-node rows."""


def predict(row: Row, rates: Rates) -> float:
    """Return the predicted seconds of a step with the configuration of `row`."""
    return step_time(gpt_step(row), rates).total_s


def errors_of(rows: Sequence[Row], rates: Rates) -> list[float]:
    """Return the relative error (predicted - published) / published of each row's step time."""
    return [predict(row, rates) / row.seconds - 1 for row in rows]


def fit(rates: Rates, constants: Sequence[Constant], rows: Sequence[Row]) -> Rates:
    """Search for the values of `constants` that minimise the sum of the squared errors of
    log(seconds). The search changes one constant at a time. Return the rates with these values."""

    def loss(candidate: Rates) -> float:
        return sum(math.log1p(error) ** 2 for error in errors_of(rows, candidate))

    steps, best = {constant.key: 0.2 for constant in constants}, loss(rates)
    while max(steps.values()) > 1e-4:
        for constant in constants:
            improved = False
            for sign in (1, -1):
                value = constant.get(rates) * math.exp(sign * steps[constant.key])
                candidate = constant.put(rates, min(max(value, constant.low), constant.high))
                if (new := loss(candidate)) < best - 1e-12:
                    best, rates, improved = new, candidate, True
            if not improved:
                steps[constant.key] /= 2
    return rates


def split_single_node(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Divide the rows on a single node. Return (rows on which constants are fitted, other rows)."""
    chosen = set(random.Random(SEED).sample(range(len(rows)), CALIBRATED))
    fitting = [row for index, row in enumerate(rows) if index in chosen]
    return fitting, [row for index, row in enumerate(rows) if index not in chosen]


def fit_a100(rates: Rates, single_node: Sequence[Row], fused_sums: bool = True) -> Rates:
    """Return the rates with fitted constants. `fused_sums` is as for `table_5`.

    There are eight rounds. Each round first fits ON_SINGLE_NODE on the one-node rows, and then fits
    ON_TABLE_5 on the rows of arXiv 2205.05198, Table 5. `half_size` affects both sets of rows. If a
    round used the fitted value of `half_size`, the rounds would not converge. Therefore a round
    uses the geometric mean of the previous value and the fitted value.
    """
    products = rates.products._replace(half_size=50.0)
    rates = dataclasses.replace(rates, products=products)
    for constant in (*ON_TABLE_5, *ON_SINGLE_NODE):
        rates = constant.put(rates, constant.start)
    half_size = ON_SINGLE_NODE[1]
    for _ in range(8):
        before = half_size.get(rates)
        rates = fit(rates, ON_SINGLE_NODE, single_node)
        rates = half_size.put(rates, math.sqrt(before * half_size.get(rates)))
        rates = fit(rates, ON_TABLE_5, table_5("full", fused_sums))
    return rates


def write_constants(rates: Rates, path: Path) -> None:
    """Write the fitted constants to the machine file `path`. Each constant is written to the line
    that begins with the constant's key and contains `fitted_on`. If the file has no such line, the
    constant is not written."""
    lines = path.read_text().splitlines()
    for constant in (*ON_TABLE_5, *ON_SINGLE_NODE):
        value = f"{constant.get(rates):.4g}"
        for index, line in enumerate(lines):
            if line.startswith(f"{constant.key} = ") and "fitted_on" in line:
                lines[index] = re.sub(r"value = [^,]+,", f"value = {value},", line)
    files.write_bytes(path, "\n".join([*lines, ""]).encode())


class Bar(NamedTuple):
    """Required limits of the absolute relative errors in a table of results. None: no limit."""

    mean: float
    p90: float | None = None
    worst: float | None = None


def verdict(errors: Sequence[float], bar: Bar) -> str:
    """Return a line with the mean, the 90th percentile and the maximum of the absolute errors. If
    one of these values has a limit in `bar`, the line also says if the limit is met. The percentile
    is interpolated linearly between rows."""
    sizes = sorted(map(abs, errors))
    p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1]
    figures = [("mean", statistics.mean(sizes), bar.mean), ("90th percentile", p90, bar.p90)]
    figures.append(("worst", sizes[-1], bar.worst))
    texts = []
    for name, figure, limit in figures:
        required = ""
        if limit is not None:
            required = f" (required {limit:.0%}: {'met' if figure <= limit else 'MISSED'})"
        texts.append(f"{name} {figure:.1%}{required}")
    bias = statistics.mean(errors)
    return f"{len(sizes)} rows: {', '.join(texts)}; mean signed error {bias:+.1%}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    rule = ["---"] * len(head)
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def report_table_5(rates: Rates) -> list[str]:
    lines = ["## arXiv 2205.05198, Table 5 (A100)", ""]
    rows = []
    for recompute in ("full", "selective"):
        for row in table_5(recompute):
            seconds = predict(row, rates)
            use = "fitted" if recompute == "full" else "test"
            error = f"{seconds / row.seconds - 1:+.1%}"
            rows.append((row.name, recompute, use, str(row.seconds), f"{seconds:.2f}", error))
    lines += table(("model", "recomputation", "row", "published s", "predicted s", "error"), rows)
    errors = errors_of(table_5("selective"), rates)
    return [*lines, "", "Selective rows. " + verdict(errors, Bar(0.05, worst=0.08)), ""]


def vtrain_rates(rates: Rates) -> Rates:
    """Return the rates with the network of vTrain's nodes. This network reaches the same share of
    its peak rate as the network in `rates`."""
    node, cluster = rates.links
    rate = VTRAIN_RANK_RATE * cluster.rate / load_machine("a100-80").levels[1].peak.value
    return dataclasses.replace(rates, links=(node, cluster._replace(rate=rate)))


def report_vtrain(rates: Rates, single_node: Sequence[Row], many: Sequence[Row]) -> list[str]:
    lines = ["## vTrain's step times (A100)", ""]
    errors = errors_of(many, vtrain_rates(rates))
    nearest = sorted(map(abs, errors))[math.ceil(0.9 * len(errors)) - 1]
    position = "within" if nearest <= 0.20 else "above"
    lines += [
        "The runs used Megatron-DeepSpeed. The rows assume the sums of gradients and the updates "
        "of Megatron-LM in fp16 before February 2022, because the version is not published.",
        "",
        "64 to 512 GPUs; no constant was fitted on these rows. "
        + verdict(errors, Bar(0.10, p90=0.20)),
        "The 90th percentile is interpolated between two rows. Without interpolation (nearest "
        f"rank), it is {nearest:.1%}, {position} the required 20 %.",
        "",
    ]
    rows = []
    for low, high in ((1, 1), (2, 2), (4, 4), (8, 8), (16, 16)):
        of_size = [e for row, e in zip(many, errors, strict=True) if low <= row.tp <= high]
        sizes = list(map(abs, of_size))
        rows.append(
            (
                f"tp {low}",
                str(len(sizes)),
                f"{statistics.mean(sizes):.1%}",
                f"{max(sizes):.1%}",
                f"{statistics.mean(of_size):+.1%}",
            )
        )
    lines += table(("layouts", "rows", "mean", "worst", "signed"), rows)
    ranked = sorted(zip(errors, many, strict=True), key=lambda pair: -abs(pair[0]))
    worst = [(row.label, f"{row.seconds:.2f}", f"{error:+.1%}") for error, row in ranked[:5]]
    lines += ["", "The five largest errors:", ""]
    lines += table(("layout", "published s", "error"), worst)
    fitting, judging = split_single_node(single_node)
    lines += [
        "",
        f"One node: `launch_s` and `half_size` were fitted on {len(fitting)} rows, drawn with seed "
        f"{SEED}. "
        + verdict(errors_of(fitting, rates), Bar(1.0)).replace(" (required 100%: met)", ""),
        "",
        "The other one-node rows. " + verdict(errors_of(judging, rates), Bar(0.12)),
        "",
        single_node_warning(single_node),
        "",
    ]
    return lines


def single_node_warning(rows: Sequence[Row]) -> str:
    """Return a warning with the number of triples of one-node rows whose step times are an exactly
    linear function of the number of microbatches. Such times are computed, not measured."""
    series: dict[tuple, dict[int, float]] = {}
    for row in rows:
        if row.pp == 1:
            key = row.tp, row.dp, row.hidden, row.layers, row.microbatch
            series.setdefault(key, {})[row.batch // (row.dp * row.microbatch)] = row.seconds
    exact = triples = 0
    for points in series.values():
        for m in points:
            if {m, 2 * m, 4 * m} <= set(points):
                triples += 1
                first, second = points[2 * m] - points[m], points[4 * m] - points[2 * m]
                exact += abs(second - 2 * first) < 2e-9
    return (
        f"Caution: the one-node rows without a pipeline have {triples} triples that differ only in "
        f"the number of microbatches (m, 2m, 4m). In {exact} of them, the step times are linear in "
        "m to a nanosecond. vTrain calls the file ground truth, but such times are computed, not "
        "measured. These rows therefore test the agreement with vTrain's profiles and its model of "
        "a step."
    )


def flops_error(row: Row, rates: Rates) -> float:
    """Return the relative error of the predicted FLOP/s of a row."""
    return row.seconds / predict(row, rates) - 1


def table_1_errors(rates: Rates) -> list[float]:
    """Return the relative error of the predicted FLOP/s for each row of Table 1."""
    return [flops_error(row, rates) for row, _ in table_1()]


def report_table_1(rates: Rates) -> list[str]:
    rows, errors = [], table_1_errors(rates)
    last, _ = table_1()[-1]
    interleaved = flops_error(last._replace(virtual_stages=2), rates)
    for (row, flops), error in zip(table_1(), errors, strict=True):
        published = flops / row.seconds / 1e12
        sizes = f"{row.ranks}", f"{row.microbatch}", f"{row.virtual_stages}"
        predicted = f"{published * (1 + error):.0f}", f"{error:+.1%}"
        rows.append((row.name, *sizes, f"{published:.0f}", *predicted))
    return [
        "## arXiv 2104.04473, Table 1 (A100)",
        "",
        "The paper gives neither the size of a microbatch nor the number v of virtual stages. Both "
        "are in the authors' script for this table (github.com/NVIDIA/Megatron-LM "
        "examples/sc21/run_table_1.sh at de7dc40f, of August 2021). By section 5.1 of the paper, "
        "all runs with a pipeline have the interleaved schedule. By the script, the 39.1B and "
        "1008.0B models do not have it (v = 1); with two pipeline stages, Megatron-LM of that time "
        f"refuses it. With v = 2, the error of the {last.name} model is {interleaved:+.1%}. A "
        "transfer sends 1/tp of the activation (section 4.1). Megatron-LM of August 2021 "
        "(de7dc40f) adds the gradients of each microbatch to their sums in separate kernels. Runs "
        "without a pipeline use torch's DistributedDataParallel, whose reductions overlap with "
        "backward.",
        "",
        "No constant was fitted on these rows. However, an earlier version of this page had a "
        "worst error of 13.1 % for them. After it, the model received the layouts of the script, "
        "the sums of gradients, the bytes that are moved outside of forward and backward, the "
        "reduction of the shared embedding, and the overlap.",
        "",
        *table(
            ("model", "GPUs", "microbatch", "v", "published TFLOP/s", "predicted", "error"), rows
        ),
        "",
        verdict(errors, Bar(0.08, worst=0.12)),
        "",
    ]


LLAMA = {
    "architecture": "olmo",
    "num_layers": 126,
    "hidden_size": 16384,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 53248,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
"""Llama-3 405B (arXiv 2407.21783, Table 3) with the sizes of an `olmo` model."""


def llama_tflops(dp: int, rates: Rates) -> float:
    """Return the predicted TFLOP/s per GPU for the training of Llama-3 405B on 128 * dp GPUs.

    The pipeline has 16 ranks of 8 stages with one layer each, except the first stage, which has
    only the embedding, and the last stage, which has only the head (section 3.3.2).
    """
    parallel = {"pp": 16, "dp": dp, "tp": 8, "schedule": "interleaved", "virtual_stages": 8}
    train = {"seq_len": 8192, "global_batch_tokens": 1 << 24}
    config = Config.model_validate(
        {
            "model": LLAMA,
            "parallel": parallel | {"sequence_parallel": True},
            "train": train,
            "optim": {"sharding": "so"},
        }
    )
    mesh = make_mesh(config.parallel)
    stages = (range(0), *(range(layer, layer + 1) for layer in range(126)), range(0))
    seconds = step_time(step_of(config, mesh, stages), rates).total_s
    return flops_per_token(config.model, 8192) * (1 << 24) / mesh.world_size / seconds / 1e12


def llama_variants() -> list[tuple[str, Rates]]:
    """Return two pairs (description, rates of an H100). The first pair has the rate of matrix
    products in h100.toml, which was measured on an H200 between passes of a model. The second pair
    has the rate of a short run on an H100."""
    rates = rates_of(load_machine("h100"), "bf16", "h100")
    products, sizes = rates.products, (8192, 8192, 8192)
    short = products._replace(share=products.share * SHORT_RUN / products.rate(*sizes))
    return [
        ("H200, between passes: 698 TFLOP/s", rates),
        (
            f"H100, short run: {SHORT_RUN / 1e12:.0f} TFLOP/s",
            dataclasses.replace(rates, products=short),
        ),
    ]


def report_llama() -> list[str]:
    rows, texts = [], []
    missing: tuple[str, ...] = ()
    for name, rates in llama_variants():
        ratios, missing = [], rates.missing
        for dp, published in ((64, 430), (128, 400)):
            tflops = llama_tflops(dp, rates)
            error = tflops / published - 1
            ratios.append((published, tflops))
            met = "met, not independent" if name.startswith("H200") else "met"
            text = met if abs(error) <= 0.15 else "MISSED"
            cells = (str(128 * dp), str(published), f"{tflops:.0f}", f"{error:+.1%} ({text})")
            rows.append((name, *cells))
        published, ours = (second / first for first, second in zip(*ratios, strict=True))
        away = 100 * abs(ours - published)
        texts.append(
            f"Ratio of the rows with the products of {name}: published {published:.3f}, predicted "
            f"{ours:.3f}, {away:.1f} points apart (required 3: {'met' if away <= 3 else 'MISSED'})."
        )
    head = ("products", "GPUs", "published TFLOP/s", "predicted", "error (required 15%)")
    return [
        "## arXiv 2407.21783, Table 4 (Llama-3 405B, H100)",
        "",
        "The rates are those of `configs/machine/h100.toml`. Its rate of matrix products (8192^3) "
        "is the fastest of ten products with random values that were measured on an H200 between "
        "passes of an MoE block ([page](nvidia_h200.md)). The H200 has the same processor and the "
        "same power limit as the H100. The last two rows use the rate that a short run on an H100 "
        "reached for the same product (github.com/zzc0721/torch-performance-test-data issue 79). "
        "Rates of H100s under sustained load are published in fp8 only: for products of 8192^3 and "
        "16384^3, those of H100s and H200s differ by less than 1 %, and for other shapes by up to "
        "8 % (github.com/Azure/AI-benchmarking-guide, Azure Results/NDv5 Results.md at 0126c300). "
        "h100.toml had the rates of short runs until 2026-11-29. They were replaced after this "
        "comparison, so the first two rows are not independent of the choice. No constant was "
        f"fitted on a row of this table. h100.toml lacks these values: {', '.join(missing)}. The "
        "prediction uses a peak rate instead of each missing rate, and 0 instead of each missing "
        "latency.",
        "",
        *table(head, rows),
        "",
        *texts,
        "",
    ]


def report_constants(rates: Rates) -> list[str]:
    rows = []
    for source, constants in (
        ("arXiv 2205.05198 Table 5, four full-recomputation rows", ON_TABLE_5),
        (f"{CALIBRATED} of vTrain's one-node rows, seed {SEED}", ON_SINGLE_NODE),
    ):
        for constant in constants:
            limits = f"{constant.low:.3g} to {constant.high:.3g}"
            text = f"{constant.get(rates):.4g}"
            if at_limit(constant, rates):
                text += " (at the limit)"
            rows.append((f"`{constant.key}`", text, limits, source))
    return [
        "## Fitted constants of configs/machine/a100-80.toml",
        "",
        *table(("constant", "value", "limits", "fitted on"), rows),
        "",
        "The file also has measured rates of matrix products. In the geometric mean, `efficiency` "
        f"and `half_size` must give {1 - PRODUCT_ERROR:.3f} to {1 + PRODUCT_ERROR:.3f} times these "
        f"rates, and the fitted values give {_product_ratio(rates):.3f} times. A constant at a "
        "limit shows that the model lacks an effect that the published steps have.",
        "",
    ]


def report_other_sums(rates: Rates, single_node: Sequence[Row], many: Sequence[Row]) -> list[str]:
    """Return a paragraph with the errors if the rows of arXiv 2205.05198, Table 5, have separate
    sums of gradients."""
    other = fit_a100(rates, split_single_node(single_node)[0], fused_sums=False)
    selective = errors_of(table_5("selective", fused_sums=False), other)
    efficiency = ON_TABLE_5[0]
    limit = " (at the limit)" if at_limit(efficiency, other) else ""
    return [
        "Table 5 gives neither the dtype nor the options of Megatron-LM. The constants assume that "
        "the products for the gradients of weights also add them to their sums. Megatron-LM of "
        "that time (cfd2e216, megatron/arguments.py) does this if the sums are in fp32: always "
        "with bf16, and with fp16 only with `--accumulate-allreduce-grads-in-fp32`. Its example "
        "for 175B (examples/pretrain_gpt3_175B.sh) has fp16 without this option. The verdicts "
        "below depend on the assumption. A fit with separate sums in fp16 instead gives an "
        f"`efficiency` of {efficiency.get(other):.4g}{limit}, {_product_ratio(other):.3f} times "
        "the measured rates of products, and these errors:",
        "",
        "- Table 5, selective rows: " + verdict(selective, Bar(0.05, worst=0.08)),
        "- vTrain, 64 to 512 GPUs: "
        + verdict(errors_of(many, vtrain_rates(other)), Bar(0.10, p90=0.20)),
        "- arXiv 2104.04473, Table 1: " + verdict(table_1_errors(other), Bar(0.08, worst=0.12)),
        "",
    ]


def at_limit(constant: Constant, rates: Rates) -> bool:
    """Return True if a constant is at a limit, so that a change by 0.5 % is not possible in one
    direction."""
    value = constant.get(rates)
    for factor in (1.005, 1 / 1.005):
        allowed = min(max(value * factor, constant.low), constant.high)
        if abs(constant.get(constant.put(rates, allowed)) / value - 1) < 0.004:
            return True
    return False


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--anchors", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants of a100-80.toml first"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "planner.md")
    args = parser.parse_args(arguments)
    files.check_output(args.out, "--out")
    report = make_report(args.anchors, args.fit)
    print(report)
    files.write_bytes(args.out, (report + "\n").encode())


def make_report(anchors: Path, fits: bool) -> str:
    """Return the text of docs/benchmarks/planner.md. With `fits`, first fit a100-80.toml."""
    paths = [anchors / f"vtrain_{name}.csv" for name in ("single", "multi")]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"--anchors {anchors}: {path.name} is missing; use vTrain's files")
    single_node, many = (list(vtrain_rows(path)) for path in paths)
    for path, rows, least in zip(paths, (single_node, many), (CALIBRATED + 1, 2), strict=True):
        if len(rows) < least:
            raise ConfigError(
                f"--anchors {anchors}: {path.name} has {counted(len(rows), 'row')} and must have "
                f"at least {least}; use vTrain's files"
            )
    rates = rates_of(load_machine("a100-80"), "bf16", "a100-80")
    if fits:
        fitted = fit_a100(rates, split_single_node(single_node)[0])
        for name in ("a100-80", "h100", "h200"):
            write_constants(fitted, FOLDER / f"{name}.toml")
        rates = rates_of(load_machine("a100-80"), "bf16", "a100-80")
    lines = [
        "# Planned step times against published ones",
        "",
        "`python scripts/bench/planner.py --anchors DIR` writes this page. DIR has vTrain's step "
        "times (github.com/VIA-Research/vTrain, MIT licence). An error is predicted / published - "
        "1. A row on which a constant was fitted does not test the predictions.",
        "",
        *report_constants(rates),
        *report_other_sums(rates, single_node, many),
        *report_table_5(rates),
        *report_vtrain(rates, single_node, many),
        *report_table_1(rates),
        *report_llama(),
        *planner_paper.report(),
    ]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    sys.exit(common.run_script(main))
