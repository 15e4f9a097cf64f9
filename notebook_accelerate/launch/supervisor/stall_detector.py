"""Notices that a run has come to a standstill, and has it diagnosed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from notebook_accelerate.telemetry.debug_protocol import HEARTBEAT_SECONDS, HeartbeatEvent

if TYPE_CHECKING:
    from notebook_accelerate.debug.diagnosis import Diagnosis
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.launch.supervisor.pausable_clock import PausableClock
    from notebook_accelerate.launch.supervisor.rank_group import RankGroup

STALL_SECONDS = 10.0
"""No rank has moved for so long while some wait in a collective: the run is diagnosed, once."""
LOOK_SECONDS = 0.5
"""Least time between two looks at all ranks."""


class StallDetector:
    """Belongs to one group; its methods run on the supervisor's thread, the diagnosis on one of its own.

    Args:
        run: The run.
        report: Shows a line to the user.
    """

    def __init__(self, run: Run, report: Callable[[str], None]) -> None:
        self._run, self._report = run, report
        self._beats: dict[int, HeartbeatEvent] = {}
        self._waiting_since: dict[int, tuple[tuple[str, int], float]] = {}
        self._first: float | None = None
        self._look_due = 0.0
        self._reported = False
        self.busy = False
        self.group_timeout: float | None = None

    def note(self, rank: int, beat: HeartbeatEvent, stopwatch: PausableClock) -> None:
        """A heartbeat has come.

        Args:
            rank: Whose.
            beat: The heartbeat.
            stopwatch: The run's; it stands while the user holds a rank, and a standstill is no news then.
        """
        self._beats[rank] = beat
        collective = beat.waiting
        if collective is None:
            changed = self._waiting_since.pop(rank, None) is not None
        elif changed := self._waiting_since.get(rank, (None, 0.0))[0] != (collective.group, collective.number):
            self._waiting_since[rank] = ((collective.group, collective.number), stopwatch.at(collective.since))
        self._first = None if changed else self._first
        if not (stopwatch.standing or self._reported or self.busy) and self._may_stand(beat) and self._stalled():
            self._reported = True
            self.diagnose_then(lambda verdict: self._report(f"run {self._run.id} stands still: {verdict}"))

    def limits(self) -> list[tuple[float, str]]:
        """Return when the first collective reaches its group's time limit, by the stopwatch, and what to say then."""
        if self.group_timeout is None:
            return []
        text = f"a collective reached the process group's timeout of {self.group_timeout:g} s"
        # Only once the next heartbeat, too, has found the rank there: it may have gone on meanwhile.
        patience = self.group_timeout + 1.5 * HEARTBEAT_SECONDS
        if self._first is None and self._waiting_since:
            self._first = min(since for _, since in self._waiting_since.values())
        return [] if self._first is None else [(self._first + patience, text)]

    def _may_stand(self, beat: HeartbeatEvent) -> bool:
        """Whether a look at all ranks may find a standstill: not while one moves, nor for every rank's heartbeat."""
        if time.time() - beat.moved <= STALL_SECONDS or time.monotonic() < self._look_due:
            return False
        self._look_due = time.monotonic() + LOOK_SECONDS
        return True

    def _stalled(self) -> bool:
        alive = [info.rank for info in self._run.ranks if info.state in ("starting", "running")]
        beats = [self._beats[rank] for rank in alive if rank in self._beats]
        if len(beats) < len(alive) or not any(beat.waiting is not None for beat in beats):
            return False
        return all(time.time() - beat.moved > STALL_SECONDS for beat in beats)

    def diagnose_then(self, tell: Callable[[str], None]) -> None:
        """Have the run diagnosed on another thread, then call ``tell(verdict)`` on the supervisor's."""
        self.busy = True

        def work() -> None:
            try:
                found: Diagnosis | None = self._run.diagnose()
            except Exception:  # noqa: BLE001 - a failing diagnosis must not keep the run from being ended
                found = None
            self._run._post(lambda group: self._tell(group, found, tell))

        threading.Thread(target=work, name="notebook-accelerate-diagnosis", daemon=True).start()

    def _tell(self, _group: RankGroup, found: Diagnosis | None, tell: Callable[[str], None]) -> None:
        self.busy = False
        if found is not None:
            self._run.diagnoses.append(found)
        tell(found.verdict if found is not None else "")
