"""Explain why a run is stuck, given the positions of all ranks, which the caller has collected."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape

from notebook_accelerate.telemetry import FrameInfo, steady_time
from notebook_accelerate.telemetry.debug_protocol import Collective
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.tracebacks import is_user_code

MOVING_SECONDS = 2.0
"""A rank that has moved or entered a collective within this many seconds does not count as stuck."""


@dataclass(frozen=True)
class RankPosition:
    """The state of one rank, the code it is running, and the collectives it is waiting in.

    Attributes:
        rank: The rank's global index.
        state: "running", "succeeded", "failed", "stopped", ...
        frames: The main thread's frames, outermost first. Empty if the rank has exited or its frames could not be read.
        moved: When the rank last moved, in seconds since the epoch, or None if unknown.
        waiting: The collectives that the rank has entered and not left.
        last: The number of the last collective that the rank entered, by process group. Empty if unknown.
        note: Additional information, such as "it holds the GIL in native code".
        answered: Whether the rank's interpreter replied. If not, its collectives are unknown.
        paused: Whether the rank is waiting for ``run.unpause()``.
        native: The main thread's frames including native ones, if py-spy could read them.
    """

    rank: int
    state: str
    frames: tuple[FrameInfo, ...] = ()
    moved: float | None = None
    waiting: tuple[Collective, ...] = ()
    last: dict[str, int] = field(default_factory=dict)
    note: str = ""
    answered: bool = True
    native: tuple[str, ...] = ()
    paused: bool = False

    @property
    def user_frame(self) -> FrameInfo | None:
        """The innermost frame in the user's code: in a cell, or in a file outside the installed libraries."""
        for frame in reversed(self.frames):
            if is_user_code(frame.filename):
                return frame
        return self.frames[-1] if self.frames else None

    def shifted(self, seconds: float) -> RankPosition:
        waiting = tuple(each._replace(since=each.since + seconds) for each in self.waiting)
        return replace(self, moved=None if self.moved is None else self.moved + seconds, waiting=waiting)


@dataclass(frozen=True)
class Diagnosis:
    """The result of ``run.diagnose()``.

    Attributes:
        verdict: One sentence that explains why the run is stuck.
        places: The positions of all ranks, ordered by rank.
        groups: The groups of ranks at the same position, largest group first.
        time: The time of the diagnosis, in seconds since the epoch.
        name_place: Returns the location of a frame as text.
        mistake: The common mistake that made the run get stuck, and its fix, in one line, or "" if unknown.
        cause: The verdict without waiting times, for a view that shows the elapsed time itself.
    """

    verdict: str
    places: tuple[RankPosition, ...]
    groups: tuple[tuple[int, ...], ...]
    time: float
    name_place: Callable[[FrameInfo], str] = field(
        repr=False, compare=False, default=lambda f: f"{f.filename}:{f.lineno}"
    )
    mistake: str = ""
    cause: str = ""

    @property
    def text(self) -> str:
        """The verdict, followed by the position of each group of ranks."""
        by_rank = {place.rank: place for place in self.places}
        return "\n".join(
            [self.verdict, *(f"{rank_names(group)}: {self._line(by_rank[group[0]])}" for group in self.groups)]
        )

    def line_of(self, rank: int) -> str:
        """Return the position of one rank as one line.

        Args:
            rank: The rank's global index.
        """
        return next(self._line(place) for place in self.places if place.rank == rank)

    def shifted(self, seconds: float) -> Diagnosis:
        """Return a copy with ``seconds`` added to all times, to convert them from another machine's clock."""
        return replace(self, time=self.time + seconds, places=tuple(place.shifted(seconds) for place in self.places))

    def _line(self, place: RankPosition) -> str:
        if place.state not in ("running", "starting", "stopping"):
            return place.state
        parts = []
        frame = place.user_frame
        if frame is not None:
            source = f": {frame.source}" if frame.source else ""
            parts.append(f"{self.name_place(frame)}, in {frame.function}{source}")
        if place.waiting:
            oldest = min(place.waiting, key=lambda collective: collective.since)
            parts.append(f"has waited {_seconds(self.time - oldest.since)} in {oldest.text()}")
        elif not place.paused and place.moved is not None and self.time - place.moved > 1:
            parts.append(f"has not moved for {_seconds(self.time - place.moved)}")
        if place.note:
            parts.append(place.note)
        return "; ".join(parts) or place.state

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        head, _, rest = self.text.partition("\n")
        return f"<p><strong>{escape(head)}</strong></p><pre>{escape(rest)}</pre>"


def diagnose(
    places: Sequence[RankPosition], name_place: Callable[[FrameInfo], str], now: float | None = None
) -> Diagnosis:
    """Explain why a run is stuck.

    Args:
        places: The position of every rank.
        name_place: Returns the location of a frame, such as "Cell In[7], line 12".
        now: The time in seconds since the epoch, or None for the current time.
    """
    moment = steady_time.now() if now is None else now
    verdict = _Verdict(places, name_place, moment)
    cause = _Verdict(places, name_place, moment, timed=False).sentence()
    return Diagnosis(verdict.sentence(), tuple(places), _groups(places), moment, name_place, verdict.mistake, cause)


def _groups(places: Sequence[RankPosition]) -> tuple[tuple[int, ...], ...]:
    found: dict[object, list[int]] = {}
    for place in places:
        frame = place.user_frame
        key = (
            place.state,
            None if frame is None else (frame.filename, frame.lineno),
            place.waiting[0].call() if place.waiting else None,
            place.note,
        )
        found.setdefault(key, []).append(place.rank)
    return tuple(tuple(group) for group in sorted(found.values(), key=lambda group: (-len(group), group)))


class _Verdict:
    def __init__(
        self,
        places: Sequence[RankPosition],
        name_place: Callable[[FrameInfo], str],
        now: float,
        *,
        timed: bool = True,
    ) -> None:
        self._places, self._name_place, self._now, self._timed = places, name_place, now, timed
        self._running = [place for place in places if place.state in ("running", "starting", "stopping")]
        self.mistake = ""

    def sentence(self) -> str:
        if not self._running:
            return "no rank is running"
        if paused := [place for place in self._running if place.paused]:
            return self._paused(paused)
        waiting = [place for place in self._running if place.waiting]
        if not waiting:
            return self._without_collectives()
        first = min((c for place in waiting for c in place.waiting), key=lambda c: (c.number, c.since))
        here = [place for place in waiting if any(_same_collective(c, first) for c in place.waiting)]
        if mismatch := self._mismatch(first, here):
            return mismatch
        return "no rank is stuck: all are moving" if self._all_move() else self._absent(first, here)

    def _paused(self, paused: Sequence[RankPosition]) -> str:
        """Describe where the user has paused ranks, because other ranks may be waiting for the paused ones."""
        lines: dict[str, list[int]] = {}
        for place in paused:
            frame = place.user_frame
            lines.setdefault(self._name_place(frame) if frame is not None else "an unknown line", []).append(place.rank)
        if len(paused) == len(self._running) and len(lines) == 1:
            return f"paused by you at {next(iter(lines))}; run.unpause() continues"
        sides = [f"{rank_names(ranks)} at {line}" for line, ranks in lines.items()]
        return f"paused by you: {', '.join(sides)}; run.unpause() continues"

    def _all_move(self) -> bool:
        """Return whether every rank is running, and has moved or entered its collective within `MOVING_SECONDS`."""
        return len(self._running) == len(self._places) and all(self._moves(place) for place in self._places)

    def _moves(self, place: RankPosition) -> bool:
        if not place.answered or place.note:
            return False
        last = max([place.moved or 0.0, *(collective.since for collective in place.waiting)])
        return self._now - last < MOVING_SECONDS and not any(
            self._now - collective.since >= MOVING_SECONDS for collective in place.waiting
        )

    def _without_collectives(self) -> str:
        stuck = [
            p for p in self._running if (p.moved is not None and self._now - p.moved > MOVING_SECONDS) or not p.answered
        ]
        if not stuck:
            return "no rank waits in a collective, and all are moving"
        return "no rank waits in a collective; " + "; ".join(self._position(place) for place in stuck)

    def _mismatch(self, first: Collective, here: Sequence[RankPosition]) -> str:
        """Describe ranks whose collectives have the same number, but differ in operation, shape or type."""
        calls: dict[object, list[int]] = {}
        texts: dict[object, str] = {}
        for place in here:
            collective = next(c for c in place.waiting if _same_collective(c, first))
            calls.setdefault(collective.call(), []).append(place.rank)
            texts[collective.call()] = f"{collective.operation}{collective.inputs()}"
        if len(calls) < 2:
            return ""
        sides = [f"{rank_names(ranks)} called {texts[call]}" for call, ranks in calls.items()]
        return f"the ranks disagree at {first.place}: " + ", ".join(sides) + self._guard(first, here)

    def _absent(self, first: Collective, here: Sequence[RankPosition]) -> str:
        present = {place.rank for place in here}
        absent = [
            place
            for place in self._places
            if place.rank not in present and place.last.get(first.group, 0) < first.number
        ]
        waited = _seconds(self._now - min(c.since for place in here for c in place.waiting))
        one = len(present) == 1
        waits = f"{'has' if one else 'have'} waited {waited}" if self._timed else "waits" if one else "wait"
        who = f"{rank_names(sorted(present))} {waits}"
        if not absent:
            passed = sorted(place.rank for place in self._places if place.rank not in present)
            if passed:
                return f"{who} in {first.text()}, which {rank_names(passed)} already left"
            so_long = f", for {waited}" if self._timed else ""
            return f"all ranks wait in {first.text()}{so_long}: the network or a device is the likely cause"
        ranks = rank_names([place.rank for place in absent])
        guard = self._guard(first, here)
        rest = "; ".join(self._position(place, subject="it" if len(absent) == 1 else "") for place in absent)
        return f"{ranks} never reached {first.text()}; {rest}; {who}{guard}"

    def _guard(self, first: Collective, here: Sequence[RankPosition]) -> str:
        """Describe the fix if the waiting ranks have called the collective under a condition on the rank."""
        for place in here:
            frame = place.user_frame
            guard = rank_condition(linecache.getlines(frame.filename), frame.lineno) if frame is not None else ""
            if guard and frame is not None:
                fix = f"under {guard!r}: every rank must make it, so move it out of that block"
                self.mistake = f"the call of {first.operation} at {self._name_place(frame)} is {fix}"
                return f". The call is {fix}"
        return ""

    def _position(self, place: RankPosition, subject: str = "") -> str:
        name = subject or rank_names([place.rank])
        if place.state not in ("running", "starting", "stopping"):
            return f"{name} has already ended ({place.state})"
        frame = place.user_frame
        where = f"{name} is at {self._name_place(frame)}" if frame is not None else f"{name} cannot be seen"
        if frame is not None and frame.source:
            where += f": {frame.source}"
        if place.waiting:
            where += f", in {place.waiting[0].text()}"
        return f"{where} ({place.note})" if place.note else where


_GUARD = re.compile(
    r"^\s*(?:el)?if\b.*(?:is_(?:local_)?main_process|is_last_process|\brank\b|process_index|get_rank\(\))"
)


def rank_condition(lines: Sequence[str], number: int) -> str:
    """Return the condition on the rank that surrounds a line within its function, or "" if there is none.

    Args:
        lines: The lines of the file.
        number: The number of the line, from 1.
    """
    if not 1 <= number <= len(lines):
        return ""
    indent = _indent(lines[number - 1])
    for line in reversed(lines[: number - 1]):
        if line.strip() and _indent(line) < indent:
            indent = _indent(line)
            if _GUARD.match(line):
                return line.strip()
            if line.lstrip().startswith(("def ", "async def ", "class ")):
                return ""
    return ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _same_collective(one: Collective, other: Collective) -> bool:
    return one.group == other.group and one.number == other.number


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{max(value, 0.0):.1f} s"
