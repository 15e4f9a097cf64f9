"""The one way ranks are stopped: KeyboardInterrupt, then SIGTERM, then SIGKILL."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from notebook_accelerate.launch.processes.rank_process import RankProcess

TERMINATE_AT = 0.6
"""Share of the grace after which SIGTERM follows."""


class StopSignals:
    """Signals ranks in steps until they have ended.

    Args:
        grace: Seconds until SIGKILL.
        start: When the first step is due, in ``time.monotonic`` seconds; None means now.
    """

    def __init__(self, grace: float, start: float | None = None) -> None:
        begin = time.monotonic() if start is None else start
        self._taken = False
        self._steps = [
            (begin, signal.SIGINT, False),
            (begin + grace * TERMINATE_AT, signal.SIGTERM, False),
            (begin + grace, signal.SIGKILL, True),
        ]

    @property
    def begun(self) -> bool:
        """Whether a signal has been sent."""
        return self._taken

    def kill_now(self) -> None:
        """Skip to the last step."""
        self._steps = [(time.monotonic(), signal.SIGKILL, True)]

    def next_due(self) -> float | None:
        """Return when the next step is due, in ``time.monotonic`` seconds; None after the last."""
        return self._steps[0][0] if self._steps else None

    def climb(self, ranks: Iterable[RankProcess]) -> bool:
        """Take the steps that are due on every rank that is left; return whether any was taken."""
        alive = list(ranks)
        taken = False
        while self._steps and self._steps[0][0] <= time.monotonic():
            _, number, group = self._steps.pop(0)
            taken = self._taken = True
            for rank in alive:
                rank.send_signal(number, group=group)
        return taken
