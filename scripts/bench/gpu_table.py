"""Write a Markdown page with the results of `scripts/bench/gpu_all.sh`, the versions and the
date."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import common
import moe
import moe_step

from optimus.bench import step


def page(folder: Path) -> tuple[str, str]:
    """Return the device name, and a Markdown page with the results in `folder`."""
    benchmarks = [line.split("\t") for line in (folder / "parts.tsv").read_text().splitlines()]
    bodies: list[str] = []
    header: dict[str, str] = {}
    for name, _, outcome in benchmarks:
        path = folder / f"{name}.json"
        if outcome == "done" and path.exists():
            result = json.loads(path.read_text().splitlines()[-1])
            header.setdefault("device", result["device"])
            header.setdefault("date", result.get("date"))
            bodies.append(f"## {name}\n\n{_body(result)}")
    device = header.get("device", "unknown device")
    versions = ", ".join(f"{name} {version}" for name, version in common.versions().items())
    lines = [
        f"# All GPU benchmarks on {device}",
        "",
        f"`scripts/bench/gpu_all.sh`; {header.get('date') or 'no date'}; {versions}.",
        "",
        "| part | seconds | outcome |",
        "|---|---|---|",
        *(
            f"| {name} | {seconds} | {outcome}{_last(folder, name)} |"
            for name, seconds, outcome in benchmarks
        ),
        "",
        *bodies,
    ]
    return device, "\n".join(lines) + "\n"


def _body(result: dict[str, Any]) -> str:
    if "cases" in result:
        return moe.format_result(result)
    return moe_step.table(result) if "blocks" in result else step.format_result(result)


def _last(folder: Path, name: str) -> str:
    """Return the last line of a benchmark's log, such as pytest's summary; "" without a log."""
    path = folder / f"{name}.log"
    lines = path.read_text().split("\n") if path.exists() else []
    text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {text[:120].replace('|', '/')}" if text else ""


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
