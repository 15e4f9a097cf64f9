"""The messages between a kernel and a host, which runs ranks on another machine for the kernel.

Messages contain the frames and the output of ranks as bytes, which the host does not decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from notebook_accelerate.telemetry import Event

NOTEBOOK, COMMAND = "notebook", "command"
"""The kinds of hosts. A notebook has the function in a cell, while a command receives it from the kernel."""
CHANNEL, SAMPLES = "channel", "samples"
"""The sources of pieces in a `RelayEvent`, in addition to the streams "stdout" and "stderr"."""


@dataclass(slots=True)
class HelloEvent(Event):
    """The first message of a host, which describes the host.

    Attributes:
        node: Index of the host's machine in the run, or -1 if the kernel should choose the index.
        host: Name of the host's machine.
        versions: The versions of Python and packages by name: python, torch, notebook_accelerate.
        kind: `NOTEBOOK` or `COMMAND`.
        pid: The id of the host's process.
        processes: The number of ranks to start on the host, or 0 for as many as in the first notebook.
        accelerator: Device type of the host's ranks.
        num_nodes: The number of nodes that the host was launched with, or 0 if unknown.
        rdzv_id: The name of the run to join, or "" for any run.
        port: A port that the host has reserved for the store of the process group, or 0.
    """

    node: int = -1
    host: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    kind: str = COMMAND
    pid: int = 0
    processes: int = 0
    accelerator: str = "cpu"
    num_nodes: int = 0
    rdzv_id: str = ""
    port: int = 0

    @property
    def title(self) -> str:
        """The machine and the process of the host, as shown in messages."""
        return f"{self.host} ({'kernel' if self.kind == NOTEBOOK else 'process'} {self.pid})"


def node_name(node: int, host: str) -> str:
    """Return the name of a node in messages, such as "node 1 (c3-n07)"."""
    return f"node {node} ({host})" if host else f"node {node}"


@dataclass(slots=True)
class WaitingEvent(Event):
    """A line for the user of a host, about which hosts have joined and which are missing."""

    text: str


@dataclass(slots=True)
class HostPlanEvent(Event):
    """All hosts of an attempt have joined.

    Attributes:
        first: Name of the first notebook's machine.
        clock_offset: Seconds to add to the receiving host's time to get the first notebook's time.
        payload: The pickled ``LaunchPlan`` of the receiving host.
    """

    first: str
    clock_offset: float
    payload: bytes


@dataclass(slots=True)
class FunctionEvent(Event):
    """A part of the pickled function and arguments, for a host without a notebook."""

    payload: bytes


@dataclass(slots=True)
class StartOrder(Event):
    """A request to start the ranks of an attempt.

    Attributes:
        payload: The pickled list of the ranks' orders.
        spawn: Whether a host without a notebook must start a fresh interpreter for each rank.
        trains: Whether a host without a notebook should import what an optimizer needs before it forks the ranks.
    """

    payload: bytes
    spawn: bool = False
    trains: bool = False


@dataclass(slots=True)
class JournalEvent(Event):
    """Records of the journal for another notebook, pickled, without results and exception objects."""

    payload: bytes


@dataclass(slots=True)
class StopRequest(Event):
    """The host's user has stopped the run. The ranks have ``grace`` seconds to end."""

    grace: float


@dataclass(slots=True)
class CellsEvent(Event):
    """The cells that a host's notebook has run. Each file name is mapped to the cell's name and source."""

    cells: dict[str, list[str]] = field(default_factory=dict)


@dataclass(slots=True)
class RunOverEvent(Event):
    """The run is over, with the same status, error and message as in the journal's ``RunEnded``.

    Attributes:
        held: Whether the ranks are held for inspection. When they are released, the same event follows with False.
    """

    status: str
    error: str = ""
    message: str = ""
    held: bool = False


@dataclass(slots=True)
class ClockEvent(Event):
    """A request for the time. The reply has the same number, and its timestamp is the other end's time."""

    number: int


@dataclass(slots=True)
class RelayEvent(Event):
    """Frames and output of a host's ranks. One event contains everything that the host has read in one turn.

    Attributes:
        pieces: The rank, the source and the length of each piece, in order. Pieces from `CHANNEL` are bytes of the
            rank's channel, pieces from `SAMPLES` are complete frames that the host sends on the rank's behalf, and the
            others are bytes that the rank wrote to a stream, with no bytes at its end.
        payload: The pieces, one after the other.
    """

    pieces: list[tuple[int, str, int]]
    payload: bytes


@dataclass(slots=True)
class RankEvent(Event):
    """The base class of messages about one rank."""

    rank: int


@dataclass(slots=True)
class StartedEvent(RankEvent):
    """The process of a rank has started."""

    pid: int


@dataclass(slots=True)
class FramesEvent(RankEvent):
    """Encoded frames to write to the rank's channel."""

    payload: bytes


@dataclass(slots=True)
class EndedEvent(RankEvent):
    """A rank's process has exited. It has the fields of ``launch.state.rank_result.Exit``.

    All of the rank's output and frames have been sent before this event.
    """

    code: int | None
    signal: int | None
    max_rss: int


@dataclass(slots=True)
class SignalOrder(RankEvent):
    """A request to send a signal to a rank, or to its whole process group."""

    number: int
    group: bool = False


@dataclass(slots=True)
class DumpOrder(RankEvent):
    """A request to open the file on the host's machine to which the rank writes its stacks."""

    path: str


@dataclass(slots=True)
class CaptureStacksOrder(RankEvent):
    """A request to capture the stacks of a rank that cannot reply."""

    number: int


@dataclass(slots=True)
class CapturedStacksEvent(Event):
    """The stacks of a rank; see ``debugging.process_stacks.ProcessStacks``."""

    number: int
    dump: str
    native: list[str] = field(default_factory=list)
    suspended: str = ""


@dataclass(slots=True)
class LeaveEvent(Event):
    """The sender leaves.

    Attributes:
        reason: Why the sender leaves, or "" if its part of the run is over. If the sender is the kernel, this says why
            the host cannot take part.
        stopped: Whether the sender's user has stopped the run.
    """

    reason: str = ""
    stopped: bool = False
