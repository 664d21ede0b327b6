"""Add scripts/bench to the module path, since the scripts import each other by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))
