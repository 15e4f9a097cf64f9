"""The messages between a kernel and a host, a process on another machine that runs ranks there.

They carry the frames and the output of ranks as bytes, which the host does not decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from notebook_accelerate.telemetry import Event


@dataclass(slots=True)
class HelloEvent(Event):
    """The first message of a host.

    Attributes:
        node: Index of the host's machine in the run; -1 if the kernel is to choose it.
        host: Name of that machine.
        facts: Properties of that machine for the kernel: versions, devices.
    """

    node: int
    host: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class WaitingEvent(Event):
    """A line for the user of a host that has joined: who has arrived, and who is missing."""

    text: str


@dataclass(slots=True)
class HostPlanEvent(Event):
    """All hosts of an attempt have joined.

    Attributes:
        text: Who they are, for the user.
        first: Name of the first notebook's machine.
        clock_offset: Seconds to add to this host's time to get the first notebook's.
        payload: The host's ``LaunchPlan``, pickled.
    """

    text: str
    first: str
    clock_offset: float
    payload: bytes


@dataclass(slots=True)
class FunctionEvent(Event):
    """A part of the launched function and its arguments, pickled, for a host without a notebook."""

    payload: bytes


@dataclass(slots=True)
class StartOrder(Event):
    """Start the ranks of an attempt; the payload is the list of their orders, pickled."""

    payload: bytes


@dataclass(slots=True)
class JournalEvent(Event):
    """Records of the run's journal for another notebook, pickled; without results and exception objects."""

    payload: bytes


@dataclass(slots=True)
class StopRequest(Event):
    """The user of the host stops the run, whose ranks have ``grace`` seconds to end."""

    grace: float


@dataclass(slots=True)
class CellsEvent(Event):
    """Cells that a host's notebook has run: by file name, the cell's name in that notebook and its source."""

    cells: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class RunOverEvent(Event):
    """The run is over: ``status``, the error's class and its text, as in the journal's ``RunEnded``.

    Attributes:
        held: Whether its ranks are held for inspection; the same message without it follows when they are released.
    """

    status: str
    error: str = ""
    message: str = ""
    held: bool = False


@dataclass(slots=True)
class ClockEvent(Event):
    """A request for the time; the reply carries the same number, and its stamp is the other end's time."""

    number: int


@dataclass(slots=True)
class StartedEvent(Event):
    """The process of a rank has started."""

    rank: int
    pid: int
    local_rank: int


@dataclass(slots=True)
class OutputEvent(Event):
    """Bytes that a rank wrote to ``stream`` ("stdout" or "stderr")."""

    rank: int
    stream: str
    payload: bytes


@dataclass(slots=True)
class FramesEvent(Event):
    """Bytes of the rank's channel, in either direction."""

    rank: int
    payload: bytes


@dataclass(slots=True)
class HostFramesEvent(Event):
    """Complete frames that the host sends on behalf of a rank, between the frames of the rank itself."""

    rank: int
    payload: bytes


@dataclass(slots=True)
class EndedEvent(Event):
    """A rank's process has ended, and all its output and frames have been sent; see ``launch.state.rank_exit.Exit``."""

    rank: int
    code: int | None
    signal: int | None
    max_rss: int


@dataclass(slots=True)
class SignalOrder(Event):
    """Send a signal to a rank, or to everything in its process group."""

    rank: int
    number: int
    group: bool = False


@dataclass(slots=True)
class DumpOrder(Event):
    """The rank dumps its stacks into this file on the host's machine: keep it open."""

    rank: int
    path: str


@dataclass(slots=True)
class CaptureStacksOrder(Event):
    """Capture the stacks of a rank that cannot answer."""

    rank: int
    number: int


@dataclass(slots=True)
class CapturedStacksEvent(Event):
    """The stacks of a rank; see ``debug.process_inspection.ProcessStacks``."""

    number: int
    dump: str
    native: list[str] = field(default_factory=list)
    suspended: str = ""


@dataclass(slots=True)
class LeaveEvent(Event):
    """The sender leaves.

    Attributes:
        reason: Why; "" when its part of the run is over. From the kernel: why the host cannot take part.
        stopped: Whether its user has stopped the run.
    """

    reason: str = ""
    stopped: bool = False
