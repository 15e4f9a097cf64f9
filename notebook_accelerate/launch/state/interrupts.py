"""Interrupts of the main thread: waits that every SIGINT ends, and blocks that defer it.

If an interrupt arrives between the interpreter's last check for signals and a blocking system call, it does not end
that call. The handler would run only when something else wakes the thread. Waits are therefore divided into slices.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLICE = 0.2
"""Seconds after which a wait checks for interrupts again."""


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait until ``event`` is set, for at most ``timeout`` seconds if given. Return whether ``event`` is set."""
    if timeout is not None:
        return event.wait(timeout)
    while not event.wait(SLICE):
        pass
    return True


def next_wait(left: float | None) -> float:
    """Return the duration of a condition's next wait, with ``left`` seconds remaining, or None for no limit."""
    return SLICE if left is None else min(left, SLICE)


@contextmanager
def handle_interrupts(handler: Callable[[], None]) -> Iterator[None]:
    """Call ``handler`` for every SIGINT in the block, instead of the installed handler.

    Only the main thread receives signals. On another thread, or if SIGINT is ignored, nothing changes.
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
    """If a SIGINT arrives in the block, raise KeyboardInterrupt at the end of the block."""
    pressed: list[bool] = []
    with handle_interrupts(lambda: pressed.append(True)):
        yield
    if pressed:
        raise KeyboardInterrupt
