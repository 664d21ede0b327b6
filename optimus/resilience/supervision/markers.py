"""Markers: files that describe non-finite values. The rank that computed a value writes its marker.

The supervisor reads markers to find the node that failed, and users read markers to find the cause.
This module does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from optimus.errors import one_line
from optimus.io import files
from optimus.io.workspace import Workspace
from optimus.resilience.supervision.attempt import read_attempt

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 24
"""Maximum size of a marker in bytes. The marker takes about 120 bytes for each transformer block,
and about 60 bytes for each instance (sequence of tokens)."""
_Count = Annotated[int, Field(ge=0)]
_Text = Annotated[str, AfterValidator(one_line)]


class _Record(BaseModel):
    # A later version may write more keys.
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class Instance(_Record):
    """An instance (a sequence of tokens) of a data set."""

    data: _Text
    """Directory of the data set."""
    instance: _Count


class LayerOutput(_Record):
    """Statistics of the output of a transformer block."""

    min: float | None
    """Least finite value. `min`, `max` and `mean` are statistics of the finite values, and None if
    no value is finite."""
    max: float | None
    mean: float | None
    nonfinite: float
    """Fraction of the values that are not finite, from 0 to 1."""


class Marker(_Record):
    """Description of a non-finite value. The rank that computed the value writes the description
    to a JSON file."""

    rank: _Count
    step: _Count
    text: _Text = Field(alias="what")
    """Description of the non-finite value."""
    host: _Text = ""
    device: _Text = ""
    attempt: _Count = 0
    """Number of the attempt (launch of all ranks); 0 without a supervisor."""
    node: str = ""
    """Name of the node in the allocation; "" without a supervisor."""
    microbatch: _Count | None = None
    """Index of the microbatch among the rank's microbatches, from 0; None if it is unknown."""
    layer: _Text = ""
    """Name of the module that computed the value, or of the parameter; "" if it is unknown."""
    direction: Literal["forward", "backward"] | None = None
    """The pass that computed the value; None if no pass computed the value, as in an optimizer
    state."""
    was_repeated: bool = False
    """True if a second computation on the same node also gave a non-finite value."""
    instances: tuple[Instance, ...] = ()
    """The instances of the microbatch."""
    data_xxh3: str = ""
    """Hash of the data of the rank in this step; "" if data cannot be the cause."""
    layers: dict[_Text, LayerOutput] = {}
    """Statistics of the outputs of the rank's transformer blocks for the microbatch, in order."""
    state: _Text = ""
    """Name of the optimizer state that contains the value; "" if the value is not in an optimizer
    state."""
    parameter: _Text = ""
    """Name of the parameter to which the state belongs."""
    element: tuple[int, ...] = ()
    """Index of the value along each dim of the rank's slice of the parameter."""
    value: _Text = ""
    """The non-finite value as text, such as "nan"."""
    path: str = Field(default="", exclude=True)
    """Path of the marker's file. The file does not contain this attribute."""


def marker_dir(run_dir: str | os.PathLike, workspace: str) -> Path:
    """Return the marker directory of a launch attempt.

    Args:
        run_dir: The run directory.
        workspace: `AttemptStarted.workspace`.
    """
    return Path(run_dir) / "log" / workspace


def write_marker(
    workspace: Workspace, run_dir: str | os.PathLike, rank: int, step: int, **figures: Any
) -> None:
    """Write the marker of a rank, a JSON file that describes a non-finite value. If the write
    fails, log a warning.

    The file is `log/nonfinite-rank{rank}.json` in the run directory. In a supervised run, the file
    is in the directory of `marker_dir`. The file contains only attributes that have been set.

    Args:
        workspace: The workspace of the run.
        run_dir: The run directory.
        rank: The rank that computed the value.
        step: Number of the update.
        figures: Other attributes of Marker.
    """
    folder = Path(run_dir) / "log"
    if (attempt := read_attempt()) is not None:
        folder = marker_dir(run_dir, attempt.workspace.name.removeprefix(".work-"))
        figures |= {"attempt": attempt.number, "node": attempt.node}
    marker = Marker(rank=rank, step=step, **figures)
    path = folder / f"nonfinite-rank{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = marker.model_dump_json(indent=1, exclude_unset=True, by_alias=True)
        workspace.write_bytes(path, f"{content}\n".encode())
    except OSError as error:
        logger.warning("could not write %s: %s", path, error.strerror)


def read_markers(run_dir: str | os.PathLike, workspace: str) -> list[Marker]:
    """Return the markers of a launch attempt, in the order of their file names.

    Files that are damaged or cannot be read are ignored.

    Args:
        run_dir: The run directory.
        workspace: `AttemptStarted.workspace`.
    """
    markers = []
    for path in sorted(marker_dir(run_dir, workspace).glob("nonfinite-*")):
        with contextlib.suppress(OSError, ValidationError):
            marker = Marker.model_validate_json(files.read_regular(path, _MOST_BYTES))
            markers.append(marker.model_copy(update={"path": os.fspath(path)}))
    return markers
