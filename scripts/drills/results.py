"""File of a drill's results. A drill is a long test in this folder. A later run of the drill reads
the file and continues after the last result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Results:
    """The records of a drill, in a file with one JSON object per line.

    Args:
        path: The file, which can contain records of earlier runs. With "-", the records are not
            written to a file.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = None if str(path) == "-" else Path(path)
        lines: list[str] = []
        if self._path is not None and self._path.is_file():
            lines = self._path.read_text(encoding="utf-8").splitlines()
        self.records: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def add(self, **record: Any) -> dict[str, Any]:
        """Append a record to `records` and to the file. Return the record."""
        self.records.append(record)
        if self._path is not None:
            with open(self._path, "a", encoding="utf-8") as file:
                print(json.dumps(record), file=file)
        return record
