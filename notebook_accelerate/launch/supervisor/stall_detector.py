"""Detect when no rank of a run makes progress, and start a diagnosis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from notebook_accelerate.debugging.session import Session
from notebook_accelerate.launch.state.run_events import DiagnosisAdded, RunMoved, RunStalled, WarningAdded
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.debug_protocol import HEARTBEAT_SECONDS, HeartbeatEvent

if TYPE_CHECKING:
    from notebook_accelerate.debugging.diagnosis import Diagnosis
    from notebook_accelerate.launch.supervisor.supervisor import Supervisor


STALL_SECONDS = 10.0
"""The run is diagnosed if, for this many seconds, no rank makes progress while some wait in a collective."""
STALL_CHECK_SECONDS = 0.5
"""Minimum seconds between two checks of all ranks."""


class StallDetector:
    """Detects stalls of one attempt. Its methods run on the run's thread, and the diagnosis on a separate one.

    All times are measured with the run's clock, so a pause or a sleeping machine does not count as a stall.

    Attributes:
        busy: Whether a diagnosis is in progress.
        group_timeout: The process group's time limit for a collective in seconds, or None if there is no limit.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor, self._clock = supervisor, supervisor.clock
        self._beats: dict[int, HeartbeatEvent] = {}
        self._moved: dict[int, float] = {}
        self._waiting_since: dict[int, tuple[tuple[str, int], float]] = {}
        self._first: float | None = None
        self._check_due = 0.0
        self._stall = self._printed = False
        self.busy = False
        self.group_timeout: float | None = None

    def note(self, rank: int, beat: HeartbeatEvent) -> bool:
        """Record a heartbeat. Return whether the rank has made progress since the previous one."""
        before, now = self._beats.get(rank), self._clock.now()
        moves = before is None or before.moved != beat.moved
        self._beats[rank] = beat
        if moves:
            self._moved[rank] = now
            self._end_stall()
        self._note_waiting(rank, beat, now)
        settled = self._clock.suspended or self._stall or self.busy
        if not (moves or settled) and self._is_check_due() and self._stalled(now):
            self._stall = True
            self.diagnose_then(self._report)
        return moves

    def _note_waiting(self, rank: int, beat: HeartbeatEvent, now: float) -> None:
        collective = beat.waiting
        if collective is None:
            changed = self._waiting_since.pop(rank, None) is not None
        elif changed := self._waiting_since.get(rank, (None, 0.0))[0] != (collective.group, collective.number):
            self._waiting_since[rank] = ((collective.group, collective.number), now)
        self._first = None if changed else self._first

    def limits(self) -> list[tuple[float, str]]:
        """Return when the oldest waiting collective times out, by the run's clock, and the reason for the stop."""
        if self.group_timeout is None:
            return []
        text = f"a collective reached the process group's timeout of {self.group_timeout:g} s"
        # Wait for one more heartbeat, because the rank may have left the collective since the last heartbeat.
        patience = self.group_timeout + 1.5 * HEARTBEAT_SECONDS
        if self._first is None and self._waiting_since:
            self._first = min(since for _, since in self._waiting_since.values())
        return [] if self._first is None else [(self._first + patience, text)]

    def _is_check_due(self) -> bool:
        """Return whether to check all ranks again, which would be too expensive after every heartbeat."""
        if time.monotonic() < self._check_due:
            return False
        self._check_due = time.monotonic() + STALL_CHECK_SECONDS
        return True

    def _stalled(self, now: float) -> bool:
        alive = [info.rank for info in self._supervisor.state.ranks if info.state in ("starting", "running")]
        beats = [self._beats[rank] for rank in alive if rank in self._beats]
        if len(beats) < len(alive) or not any(beat.waiting is not None for beat in beats):
            return False
        return all(now - self._moved[rank] > STALL_SECONDS for rank in alive)

    def _report(self, found: Diagnosis | None) -> None:
        """Record a stall in the journal. Also print it if it is the attempt's first, unless a live panel shows it."""
        # During the diagnosis, a rank may have made progress, or the run may have ended.
        if not self._stall or self._supervisor.state.ended is not None:
            return
        idle = self._clock.now() - max(self._moved.values(), default=self._clock.now())
        self._supervisor.journal.append(RunStalled(steady_time.now() - idle, found.cause if found is not None else ""))
        if not self._printed:
            self._printed = True
            verdict = found.verdict if found is not None else "no rank makes progress"
            self._supervisor.show_without_panel(f"run {self._supervisor.id} has stalled: {verdict}")

    def _end_stall(self) -> None:
        if self._stall:
            self._stall = False
            if self._supervisor.state.stall is not None:
                self._supervisor.journal.append(RunMoved())

    def diagnose_then(self, report: Callable[[Diagnosis | None], None]) -> None:
        """Diagnose the run on another thread, then call ``report`` with the result on the run's thread.

        If the diagnosis fails, ``report`` is called with None.
        """
        self.busy = True
        supervisor = self._supervisor

        def work() -> None:
            try:
                found: Diagnosis | None = Session(
                    supervisor.commands.requests, lambda: supervisor.state.rank_states
                ).diagnose()
            except Exception:  # noqa: BLE001 - a failing diagnosis must not prevent the end of the run
                found = None
            supervisor.commands.post(lambda _: self._finish(found, report))

        threading.Thread(target=work, name="notebook-accelerate-diagnosis", daemon=True).start()

    def _finish(self, found: Diagnosis | None, report: Callable[[Diagnosis | None], None]) -> None:
        self.busy = False
        if found is not None:
            self._supervisor.journal.append(DiagnosisAdded(found))
            if found.mistake:
                self._supervisor.journal.append(WarningAdded(found.mistake))
        report(found)
