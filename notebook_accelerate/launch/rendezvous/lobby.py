"""Where a launch in several notebooks waits for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accelerate.launch.ending import StopReason
    from notebook_accelerate.launch.output import Publisher


class Lobby:
    """Stands in for the group while there is none: before the ranks start, and after they have ended.

    Args:
        publisher: Where progress is shown.

    Attributes:
        stop_reason: Why the waiting is to stop; None while it is not.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.stop_reason: StopReason | None = None

    def stop(self, grace: float, reason: StopReason) -> None:
        """See ``Group.stop``."""
        self.stop_reason = self.stop_reason or reason

    def show_under(self, cell: object) -> None:
        """See ``Group.show_under``."""
        self._publisher.flush(force=True)
        self._publisher.show_under(cell)

    def interrupt(self, ranks: object) -> None:
        """See ``Group.interrupt``: there is nobody."""


__all__ = ["Lobby"]
