"""The time limits of a run: its timeout, its hang timeout, and the process group's timeout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accelerate.launch.supervisor.rank_events import RankEventHandler
    from notebook_accelerate.launch.supervisor.run_context import RunContext
    from notebook_accelerate.launch.supervisor.stop_sequence import StopSequence


class TimeLimits:
    """The limits of one attempt, by the run's clock.

    Args:
        context: The run.
        events: Records when a rank was last active, and which collectives wait.
        stops: The limits are not in force once the attempt is being stopped.
    """

    def __init__(self, context: RunContext, events: RankEventHandler, stops: StopSequence) -> None:
        self._config, self._clock, self._events, self._stops = context.config, context.clock, events, stops

    def seconds_left(self) -> float | None:
        """Return the seconds until the next limit; None when none is in force."""
        now = self._clock.now()
        return min((due - now for due, _ in self._limits()), default=None)

    def reached(self) -> str:
        """Return the reason to stop the run; "" while no limit is reached."""
        now = self._clock.now()
        return next((reason for due, reason in self._limits() if now >= due), "")

    def _limits(self) -> list[tuple[float, str]]:
        """Return when each limit is reached, by the run's clock, and the reason then."""
        stops, stall = self._stops, self._events.stall
        if stops.reason or stops.failures or stops.held or self._clock.suspended or stall.busy:
            return []
        limits = []
        timeout, hang_timeout = self._config.timeout, self._config.hang_timeout
        if timeout is not None:
            limits.append((self._clock.started + timeout, f"the run reached its timeout of {timeout:g} s"))
        if hang_timeout is not None:
            reason = f"no rank gave a sign of life for {hang_timeout:g} s (hang_timeout)"
            limits.append((self._events.last_activity + hang_timeout, reason))
        return [*limits, *stall.limits()]


__all__ = ["TimeLimits"]
