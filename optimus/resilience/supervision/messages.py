"""Messages between the supervisor and its agents.

Types, ranges and names of fields are checked when a message is received. This module does not
import torch.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from optimus.resilience.supervision.attempt import Progress


class Message(BaseModel):
    """Base class of the messages between the supervisor and its agents, and of records in them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def _check_progress(progress: Progress) -> Progress:
    counts = (progress.step, progress.collectives, progress.updates)
    if min(*counts, progress.phase_s, *progress.seconds.values()) < 0:
        raise ValueError("negative progress: steps, counts and seconds must be at least 0")
    return progress


_Count = Annotated[int, Field(ge=0)]
_Number = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(ge=0)]

# -- From an agent --------------------------------------------------------------------------------


class Hello(Message):
    """The first message that an agent sends to the supervisor. It describes the agent's node."""

    # Additional fields of another version are ignored here: the supervisor then refuses the agent
    # because `code` differs, with a clearer message.
    model_config = ConfigDict(extra="ignore")

    kind: Literal["hello"] = "hello"
    node: str
    """Name of the node in the allocation."""
    host: str
    """Host name of the node's machine. Nodes that are emulated on one machine have the same host
    name."""
    pid: _Number
    code: str
    """Hash of the Python files of Optimus on the node."""
    time: float
    """Unix time in seconds by the clock of the node."""
    open_files: int
    """Number of files that a process on the node can have open at a time; -1 without a limit."""
    attempt: _Count
    """Number of the last attempt (launch of all ranks) whose ranks the agent has started; 0 if
    there is none."""


class RankReport(Message):
    """State of a rank and its process, as the agent of its node has observed them."""

    rank: _Count
    pid: _Count
    status: int | None = None
    """Exit status; -N if signal N ended the process; None if the process still runs."""
    was_ended: bool = False
    """True if the agent has sent a signal to the process, or mpiexec has ended the process."""
    message: str = ""
    """The last error that the rank has printed, one line."""
    progress: Annotated[Progress, AfterValidator(_check_progress)] | None = None


class Report(Message):
    """Report on the ranks of a node. The agent of the node sends reports at regular intervals. If
    the supervisor receives no reports from a node, it regards this node as lost."""

    kind: Literal["report"] = "report"
    attempt: _Count
    ranks: tuple[RankReport, ...]
    lines: tuple[str, ...]
    """Lines of the ranks' output that the agent has not sent before."""
    dropped: _Count = 0
    """Number of lines of output that the agent has dropped and has not reported before."""
    failure: str = ""
    """Reason why the ranks of the launch attempt cannot be started on the node; "" if they can."""


class FreePort(Message):
    """Answer of an agent to FindPort: a port of its node at which no process listens."""

    kind: Literal["free_port"] = "free_port"
    port: Annotated[int, Field(ge=0, lt=1 << 16)]
    """The port; 0 if the node cannot listen at the address."""
    problem: str = ""
    """Reason why the node cannot listen at the address; "" if it can."""


class Staged(Message):
    """Answer of an agent to Stage: the agent has unpacked the Python environment, or has failed to
    unpack it."""

    kind: Literal["staged"] = "staged"
    problem: str
    """Reason why the environment cannot be unpacked; "" if it is unpacked."""


class Killed(Message):
    """Answer of an agent to Kill: all ranks of the launch attempt on its node have ended."""

    kind: Literal["killed"] = "killed"
    attempt: _Count


AgentMessage: TypeAlias = Annotated[
    Hello | Report | FreePort | Staged | Killed, Field(discriminator="kind")
]

# -- From the supervisor --------------------------------------------------------------------------


class Welcome(Message):
    """Answer to Hello: the supervisor accepts the agent and sends settings."""

    kind: Literal["welcome"] = "welcome"
    orphan_s: _Seconds
    """Seconds without a supervisor after which the ranks save a checkpoint and end."""
    beat_s: _Seconds
    """Longest time in seconds between two reports of the agent."""
    variables: dict[str, str]
    """Environment variables for the warm process, from which the agent forks ranks."""
    forks_ranks: bool
    """True if the agent forks ranks from a warm process; False if mpiexec starts the ranks."""


class FindPort(Message):
    """Request to an agent: find a port of its node at which no process listens."""

    kind: Literal["find_port"] = "find_port"
    host: str
    """Address at which the first rank will listen."""


class Stage(Message):
    """Request to an agent: unpack the Python environment of the ranks on a disk of its node."""

    kind: Literal["stage"] = "stage"
    archive: str
    parent: str
    """Folder in which the agent creates the unpacked copy."""
    digest: str
    """Hash of the content of the archive."""


class Start(Message):
    """Request to an agent: start the ranks of a launch attempt on its node."""

    kind: Literal["start"] = "start"
    attempt: _Number
    ranks: tuple[_Count, ...]
    arguments: tuple[str, ...]
    """Command-line arguments of `optimus` for each rank."""
    workspace: str
    job_end: float | None
    """Unix time at which the ranks must have saved and ended; None without a limit."""
    mpiexec_s: _Seconds | None
    """Longest time in seconds to wait for the ranks that mpiexec starts; None if the agent starts
    them."""
    variables: dict[str, str]
    """Environment variables that are the same for all ranks."""


class Signal(Message):
    """Request to an agent: send a signal to all ranks on its node."""

    kind: Literal["signal"] = "signal"
    number: Annotated[int, Field(ge=1, le=64)]


class Kill(Message):
    """Request to an agent: kill the ranks of a launch attempt and of all earlier attempts on its
    node."""

    kind: Literal["kill"] = "kill"
    attempt: _Number


class End(Message):
    """Request to an agent: kill all ranks on its node, then end."""

    kind: Literal["end"] = "end"


SupervisorMessage: TypeAlias = Annotated[
    Welcome | FindPort | Stage | Start | Signal | Kill | End, Field(discriminator="kind")
]
