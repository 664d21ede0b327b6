"""TensorBoard events of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class TensorBoard:
    """Writes every figure of a record as a scalar under `tb/`, as long as the disk takes them."""

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._writer: SummaryWriter | None = SummaryWriter(
            str(directory), purge_step=first_step + 1
        )

    def show(self, record: Mapping[str, Any], prefix: str) -> None:
        if self._writer is None:
            return
        try:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._writer.add_scalar(f"{prefix}/{name}", value, record["step"])
        except OSError as error:  # of the writer's thread, which has ended
            self._end(error)

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        self._writer = None
        logger.warning(
            "tb/: %s; TensorBoard events end here, metrics.jsonl continues", error.strerror
        )
