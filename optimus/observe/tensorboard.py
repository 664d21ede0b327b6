"""TensorBoard events of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes every figure of a record as a scalar under `tb/`."""

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer = SummaryWriter(str(directory), purge_step=first_step + 1)

    def show(self, record: Mapping[str, Any], prefix: str) -> None:
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self._writer.add_scalar(f"{prefix}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()
