"""Write the results of `scripts/bench/gpu_all.sh` to a Markdown page, with their date and the
versions of the compared packages."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import common
import moe
import moe_step

from optimus.bench import step


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
                text = step.format_result(result)
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
        "| part | seconds | outcome |",
        "|---|---|---|",
        *rows,
        "",
        *bodies,
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
