"""Interrupts of the main thread: waits that every SIGINT ends, and blocks that it does not cut in two.

An interrupt that arrives after the interpreter's last look for signals, and before the system call that blocks, does
not end that call: the handler would run only when something else wakes the thread. Waits are cut into slices.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def handle_interrupts(handler: Callable[[], None]) -> Iterator[None]:
    """Call ``handler`` for every SIGINT in the block, in place of the handler that is installed.

    Only the main thread receives signals: on another one, or where SIGINT is ignored, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, lambda _number, _frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a SIGINT that arrives in the block at its end."""
    pressed: list[bool] = []
    with handle_interrupts(lambda: pressed.append(True)):
        yield
    if pressed:
        raise KeyboardInterrupt
