"""TensorBoard events of a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from optimus.observe.events import (
    EvalRecord,
    ExpertLoad,
    PipelineTimes,
    Record,
    Recorder,
    StepRecord,
    Traffic,
    Value,
)

logger = logging.getLogger(__name__)


class TensorBoard(Recorder):
    """Writes records as TensorBoard scalars to `tb/`. After a failed write it ignores records."""

    def __init__(self, directory: Path, first_step: int) -> None:
        """Open an event file.

        Args:
            directory: The directory `tb/` of the run.
            first_step: Step at which the run starts. If this is a resume, TensorBoard hides the
                earlier events of all later steps.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._summary = Summary
        self._writer: SummaryWriter | None = SummaryWriter(
            str(directory), purge_step=first_step + 1
        )

    def record(self, record: Record) -> None:
        match record:
            case StepRecord():
                self._write(record.step, _prefixed("train", record.values()))
            case EvalRecord():
                self._write(record.step, _prefixed("eval", record.values()))
            case ExpertLoad():
                scalars: dict[str, float] = {}
                for layer, low, high, idle in record.layers:
                    values = {"max": high, "min": low, "experts_without_rows": idle}
                    scalars |= _prefixed(f"expert_load/layer_{layer}", values)
                self._write(record.step, scalars)
            case Traffic():
                self._write(record.step, _prefixed("traffic_bytes", record.bytes_by_axes))
            case PipelineTimes():
                self._write(record.step, _prefixed("pipeline_s", record.seconds_by_kind))

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError as error:
            self._end(error)

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None or not scalars:
            return
        # One event for all scalars: add_scalar would take 80 us for each, and the expert loads of a
        # model of 48 layers are 144 scalars.
        values = [self._summary.Value(tag=tag, simple_value=x) for tag, x in scalars.items()]
        events = self._writer.file_writer
        assert events is not None, "SummaryWriter opens it"
        try:
            events.add_summary(self._summary(value=values), step)
        except OSError as error:  # raised in the writer's thread, which has ended
            self._end(error)

    def _end(self, error: OSError) -> None:
        self._writer = None
        logger.warning(
            "tb/: %s; TensorBoard events end here, but metrics.jsonl continues", error.strerror
        )


def _prefixed(prefix: str, values: Mapping[str, Value]) -> dict[str, float]:
    """Return TensorBoard tags, such as `train/loss`, and their numbers.

    A tag is made of `prefix` and a key of `values`. The key `step`, and values that are not
    numbers, are left out.
    """
    return {
        f"{prefix}/{name}": value
        for name, value in values.items()
        if isinstance(value, int | float) and name != "step"
    }
