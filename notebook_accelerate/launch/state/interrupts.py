"""Interrupts of the main thread: waits that any SIGINT can end, and blocks that defer SIGINT.

A signal that arrives between the interpreter's last check and a blocking system call does not end that call, and its
handler runs only when something else wakes the thread. Waits are therefore divided into slices.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLICE = 0.2
"""Maximum number of seconds between two checks for interrupts during a wait."""


def wait_for(event: threading.Event, timeout: float | None = None) -> bool:
    """Wait until ``event`` is set, or for ``timeout`` seconds. Return whether ``event`` is set."""
    if timeout is not None:
        return event.wait(timeout)
    while not event.wait(SLICE):
        pass
    return True


def next_wait(left: float | None) -> float:
    """Return how long to wait on a condition before checking for interrupts.

    ``left`` is the number of remaining seconds, or None if there is no limit.
    """
    return SLICE if left is None else min(left, SLICE)


@contextmanager
def handle_interrupts(handler: Callable[[], None]) -> Iterator[None]:
    """Call ``handler`` for every SIGINT in the block, instead of the installed handler.

    This has no effect if SIGINT is ignored, or on any thread other than the main thread, because Python runs signal
    handlers only there.
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
