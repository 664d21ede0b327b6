"""Write the results of `scripts/bench/gpu_all.sh` to a Markdown page, with the date of the results
and the versions of the compared packages."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import common
import moe
import moe_step

from optimus.bench import step

_EXPLANATION = """\
The script runs a fixed list of steps on one GPU in less than ten minutes. In the table of steps,
`done` means that a step exited with status 0; the last line of the step's output follows. A step
without a section below has no result.

The steps `moe_*` run `scripts/bench/moe.py`, which measures an MoE block with its router. D is the
hidden size, F the intermediate size of an expert, E the number of experts, K the number of experts
per token, and T the number of tokens. The blocks have the same weights and run in turn:

- `ours`: the block of Optimus;
- `hf-grouped`: the experts of transformers with grouped matrix products;
- `hf-eager`: the experts of transformers with a loop over the experts;
- `loop`: a plain loop over the experts in torch;
- `three-grouped`: three grouped matrix products (gate, up, down) of torch, as in torchtitan.

| column | meaning |
|---|---|
| forward ms, backward ms | shortest time of a forward and of a backward |
| both, best; median | shortest and median time of forward and backward together, in ms |
| TFLOP/s, of peak | FLOP/s in the shortest time, absolute and relative to a large product |
| not GEMM | share of the time that is not spent in matrix products |
| saved B/token | bytes per token that autograd keeps for the backward |
| error | largest relative error of output and gradients, compared with `loop` |
| ours is faster | shortest time of the block divided by the shortest time of `ours` (in \
parentheses: least, median and greatest ratio of a round) |

The steps `pass_*` run `scripts/bench/moe_step.py`, which measures a pass (forward, loss and
backward of a microbatch) of a whole model with the experts of Optimus or of another library. Times
are medians. `ours is faster` is the time with the experts of the row divided by the time with
`ours`, for a block and for a pass (in parentheses: the least and the greatest ratio of a round).
`predicted` is the ratio for a pass that the times of a block predict.

The other steps with a result run `optimus bench step`, which compares an update in Optimus with an
update in a plain torch loop, by wall-clock time (`wall`) and by processor time (`cpu`).
"""
"""Text of the page that defines the blocks, columns and ratios of the results."""


def page(folder: Path) -> tuple[str, str]:
    """Return (name of the device, Markdown page with the benchmark results in `folder`)."""
    benchmarks = [line.split("\t") for line in (folder / "parts.tsv").read_text().splitlines()]
    rows: list[str] = []
    bodies: list[str] = []
    header: dict[str, str] = {}
    for name, seconds, outcome in benchmarks:
        path, log = folder / f"{name}.json", folder / f"{name}.log"
        if outcome == "done" and path.exists():
            result = json.loads(path.read_text().splitlines()[-1])
            header.setdefault("device", result["device"])
            header.setdefault("date", result.get("date"))
            if "cases" in result:
                text = moe.format_result(result)
            elif "blocks" in result:
                text = moe_step.table(result)
            else:
                text = f"```text\n{step.format_result(result)}\n```"
            bodies.append(f"## {name}\n\n{text}")
        # The last line of the log, such as pytest's summary.
        log_lines = log.read_text().split("\n") if log.exists() else []
        last = next((line.strip() for line in reversed(log_lines) if line.strip()), "")
        summary = f": {last[:120].replace('|', '/')}" if last else ""
        rows.append(f"| {name} | {seconds} | {outcome}{summary} |")
    device = header.get("device", "unknown device")
    versions = ", ".join(f"{name} {version}" for name, version in common.versions().items())
    lines = [
        f"# All GPU benchmarks on {device}",
        "",
        f"`scripts/bench/gpu_all.sh`; {header.get('date') or 'no date'}; {versions}.",
        "",
        "| step | seconds | outcome |",
        "|---|---|---|",
        *rows,
        "",
        _EXPLANATION,
        "\n\n".join(bodies),
    ]
    return device, "\n".join(lines) + "\n"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", type=Path, help="also write DEVICE.md to this directory")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    device, text = page(args.folder)
    (args.folder / "table.md").write_text(text)
    print(text)
    if args.docs:
        name = re.sub(r"\W+", "_", device.lower()).strip("_")
        (args.docs / f"{name}.md").write_text(text)


if __name__ == "__main__":
    main()
