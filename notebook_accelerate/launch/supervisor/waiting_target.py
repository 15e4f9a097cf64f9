"""Carries out a run's commands while it waits for its hosts and has no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accelerate.launch.supervisor.pausable_clock import PausableClock
    from notebook_accelerate.launch.supervisor.run_context import RunContext
    from notebook_accelerate.launch.supervisor.stop_sequence import StopReason


class WaitingTarget:
    """The `CommandTarget` of a run without ranks.

    Args:
        context: The run.
        on_stop: Called with the grace period of every stop.

    Attributes:
        stop_reason: Why the waiting stops; None while it continues. It is never reset: a stop that arrives together
            with the awaited event must be seen by the next wait.
    """

    def __init__(self, context: RunContext, on_stop: Callable[[float], None] = lambda _: None) -> None:
        self._context, self._on_stop = context, on_stop
        self.stop_reason: StopReason | None = None

    @property
    def clock(self) -> PausableClock:
        """See ``CommandTarget.clock``: a rank may be paused just before it starts or just after it has ended."""
        return self._context.clock

    def stop(self, grace: float, reason: StopReason) -> None:
        """See ``RunCommands.stop``."""
        self.stop_reason = self.stop_reason or reason
        self._on_stop(grace)

    def show_under(self, cell: object) -> None:
        """See ``RunCommands.show_under``."""
        self._context.publisher.flush(force=True)
        self._context.publisher.show_under(cell)

    def interrupt(self, ranks: Iterable[int]) -> None:
        """See ``RunCommands.interrupt``; there are no ranks to interrupt."""
