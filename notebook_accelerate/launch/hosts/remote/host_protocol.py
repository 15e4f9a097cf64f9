"""The messages between a kernel and a host, which runs ranks on another machine for it.

They carry the frames and the output of ranks as bytes, which the host does not decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from notebook_accelerate.telemetry import Event

NOTEBOOK, COMMAND = "notebook", "command"
"""The kinds of hosts: one has a cell with the function, the other receives the function from the kernel."""
CHANNEL, SAMPLES = "channel", "samples"
"""Sources of the pieces of a `RelayEvent`, besides the streams "stdout" and "stderr"."""


@dataclass(slots=True)
class HelloEvent(Event):
    """The first message of a host, about itself.

    Attributes:
        node: Index of its machine in the run; -1 if the kernel is to choose it.
        host: Name of its machine.
        versions: Its versions by name: python, torch, notebook_accelerate.
        kind: `NOTEBOOK` or `COMMAND`.
        pid: Its process.
        processes: Ranks it starts; 0: as many as the first notebook.
        accelerator: Device type of its ranks.
        num_nodes: The number of nodes that it was launched with; 0: it does not know.
        rdzv_id: The name of the run that it wants to join; "" joins any.
        port: A port that it holds for the store of the process group; 0: none.
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
        """Its machine and process in messages."""
        return f"{self.host} ({'kernel' if self.kind == NOTEBOOK else 'process'} {self.pid})"


def node_name(node: int, host: str) -> str:
    """Return the name of a node in messages."""
    return f"node {node} ({host})" if host else f"node {node}"


@dataclass(slots=True)
class WaitingEvent(Event):
    """A line for the user of a host that has joined: who has arrived or joined, and who is missing."""

    text: str


@dataclass(slots=True)
class HostPlanEvent(Event):
    """All hosts of an attempt have joined.

    Attributes:
        first: Name of the first notebook's machine.
        clock_offset: Seconds to add to this host's time to get the first notebook's.
        payload: The host's ``LaunchPlan``, pickled.
    """

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
class RelayEvent(Event):
    """What the ranks of a host have sent and written: one event for all that the host reads at a time.

    Attributes:
        pieces: Of each piece, in order: its rank, its source, and its length. Pieces of `CHANNEL` are bytes of the
            rank's channel, those of `SAMPLES` are complete frames that the host sends on the rank's behalf, and the
            others are bytes that the rank wrote to a stream, none at its end.
        payload: The pieces, one after the other.
    """

    pieces: list[tuple[int, str, int]]
    payload: bytes


@dataclass(slots=True)
class RankEvent(Event):
    """Base of the messages about one rank."""

    rank: int


@dataclass(slots=True)
class StartedEvent(RankEvent):
    """The process of a rank has started."""

    pid: int


@dataclass(slots=True)
class FramesEvent(RankEvent):
    """Bytes for the rank's channel."""

    payload: bytes


@dataclass(slots=True)
class EndedEvent(RankEvent):
    """A rank's process has ended, as in ``launch.state.rank_result.Exit``; all its output and frames were sent."""

    code: int | None
    signal: int | None
    max_rss: int


@dataclass(slots=True)
class SignalOrder(RankEvent):
    """Send a signal to a rank, or to everything in its process group."""

    number: int
    group: bool = False


@dataclass(slots=True)
class DumpOrder(RankEvent):
    """The rank dumps its stacks into this file on the host's machine: keep it open."""

    path: str


@dataclass(slots=True)
class CaptureStacksOrder(RankEvent):
    """Capture the stacks of a rank that cannot answer."""

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
        reason: Why; "" when its part of the run is over. From the kernel: why the host cannot take part.
        stopped: Whether its user has stopped the run.
    """

    reason: str = ""
    stopped: bool = False
