"""Where a launch in several notebooks waits for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.rendezvous.peer_pauses import PeerPauses
    from notebook_accelerate.launch.output.rank_output import Publisher
    from notebook_accelerate.launch.supervisor.pausable_clock import PausableClock
    from notebook_accelerate.launch.supervisor.stop_sequence import StopReason


class PeerWait:
    """Stands in for the group while there is none: before the ranks start, and after they have ended.

    Args:
        publisher: Where progress is shown.
        standstill: Has the stopwatch of the attempt.

    Attributes:
        stop_reason: Why the waiting is to stop; None while it is not. It stays: a stop that is heard together with what
            was waited for must be seen by whoever waits next.
    """

    def __init__(self, publisher: Publisher, standstill: PeerPauses) -> None:
        self._publisher, self._standstill = publisher, standstill
        self.stop_reason: StopReason | None = None

    @property
    def stopwatch(self) -> PausableClock:
        """See ``RankGroup``: ranks are paused, or go on, in the moment in which they have not begun or have ended."""
        return self._standstill.stopwatch

    def stop(self, grace: float, reason: StopReason) -> None:
        """See ``RankGroup.stop``."""
        self.stop_reason = self.stop_reason or reason

    def show_under(self, cell: object) -> None:
        """See ``RankGroup.show_under``."""
        self._publisher.flush(force=True)
        self._publisher.show_under(cell)

    def interrupt(self, ranks: object) -> None:
        """See ``RankGroup.interrupt``: there is nobody."""


__all__ = ["PeerWait"]
