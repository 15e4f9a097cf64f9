"""One timeline of all profiled ranks: tracks of events on one clock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

CATEGORIES = (
    "op", "python", "collective", "kernel", "memory", "step", "loader", "forward", "backward", "optimizer",
    "runtime", "checkpoint", "logging", "wait",
)  # fmt: skip
"""What an event can be; ``Track.category`` holds indices into it."""


class Wait(NamedTuple):
    """A rank waits in a collective: an event of ``from_track`` waits for the last rank, ``to_track``, to enter it."""

    from_track: int
    from_event: int
    to_track: int
    to_event: int


class Step(NamedTuple):
    """One step of one rank, in microseconds from the timeline's origin."""

    rank: int
    start: float
    end: float
    number: int


@dataclass
class Track:
    """The events of one thread, one stream of a device, or the collectives of one rank, in parallel columns.

    The events are in the order of their start; an event contains the deeper events that follow until its end.

    Attributes:
        rank: The rank.
        name: For example "rank 0 · main thread", "rank 0 · gpu stream 7" or "rank 0 · collectives".
        start: Microseconds from the timeline's origin.
        duration: Microseconds.
        names: Index of the event's name in ``Timeline.names``.
        depth: How many events of this track contain it.
        category: Index of its category in ``Timeline.categories``.
    """

    rank: int
    name: str
    start: array[float] = field(default_factory=lambda: array("d"))
    duration: array[float] = field(default_factory=lambda: array("f"))
    names: array[int] = field(default_factory=lambda: array("I"))
    depth: array[int] = field(default_factory=lambda: array("B"))
    category: array[int] = field(default_factory=lambda: array("B"))

    def __len__(self) -> int:
        return len(self.start)


@dataclass
class Timeline:
    """The tracks of all profiled ranks on one clock.

    Attributes:
        tracks: In the order of ranks; a rank's steps and main thread come first.
        names: The names of events; ``Track.names`` holds indices into it.
        categories: The names of categories.
        details: By index of a name, what else is known of it, as the line of a cell.
        waits: Which event waits for which, in collectives joined across ranks.
        steps: The steps of the ranks.
        span: From the origin to the end of the last event, in microseconds.
        origin: The time of the origin, in seconds since the epoch, by the kernel's clock.
    """

    tracks: list[Track] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=lambda: list(CATEGORIES))
    details: dict[int, str] = field(default_factory=dict)
    waits: list[Wait] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    span: float = 0.0
    origin: float = 0.0
