#!/usr/bin/env python3
"""Print a Mermaid graph of the packages and their allowed imports, for docs/design/packages.md.

    python scripts/package_picture.py

The graph is the transitive reduction of ALLOWED, the table of tests/test_imports.py: the graph has
no arrow for an import that is implied by a path of other arrows. One node combines the modules that
all packages may import, and another node combines the entry points.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.test_imports import ALL, ALLOWED, COMMON, ENTRY_POINTS

SHARED = {**dict.fromkeys(COMMON.split(), "common"), **dict.fromkeys(ENTRY_POINTS, "entry")}
"""Maps each package that shares a node of the graph with other packages to the name of this node.
Every other package has a separate node."""
NAMES_PER_LINE = 5


def picture() -> str:
    """Return the graph of the packages and their allowed imports, as the text of a Mermaid
    flowchart."""
    names: dict[str, list[str]] = {}
    imports: dict[str, set[str]] = {}
    for package, allowed in ALLOWED.items():
        node = SHARED.get(package, package)
        names.setdefault(node, []).append(package)
        imported = set(imports) if allowed == ALL else {SHARED.get(n, n) for n in allowed.split()}
        imports[node] = imports.get(node, set()) | imported - {node}

    @cache
    def reach(node: str) -> frozenset[str]:
        return frozenset(imports[node]).union(*map(reach, imports[node]))

    @cache
    def level(node: str) -> int:
        return max((level(target) + 1 for target in imports[node]), default=0)

    nodes = sorted(imports, key=level, reverse=True)
    lines = ["flowchart TB"]
    for node in nodes:
        rows = range(0, len(names[node]), NAMES_PER_LINE)
        label = "<br>".join(", ".join(names[node][row : row + NAMES_PER_LINE]) for row in rows)
        # Mermaid reads __name__ as Markdown for a bold name.
        lines.append(f'    {node}["{label.replace("__", "#95;#95;")}"]')
    for node in nodes:
        implied = frozenset().union(*map(reach, imports[node]))
        for target in nodes:
            if target in imports[node] - implied:
                # If each arrow is as long as the difference of the levels, the nodes of a level are
                # in one row.
                arrow = "-" * (level(node) - level(target) + 1) + ">"
                lines.append(f"    {node} {arrow} {target}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(picture())
