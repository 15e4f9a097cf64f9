"""Waits of the main thread that every interrupt ends.

An interrupt that arrives after the interpreter's last look for signals, and before the system call that blocks, does
not end that call: the handler would run only when something else wakes the thread. Waits are cut into slices.
"""

from __future__ import annotations

import threading

SLICE = 0.2
"""Seconds after which a wait looks for interrupts again."""


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait until ``event`` is set, at most ``timeout`` seconds (None: any time); return whether it is set."""
    if timeout is not None:
        return event.wait(timeout)
    while not event.wait(SLICE):
        pass
    return True


def slice_of(left: float | None) -> float:
    """Return how long a condition's next wait may last, of ``left`` seconds in all (None: any time)."""
    return SLICE if left is None else min(left, SLICE)
