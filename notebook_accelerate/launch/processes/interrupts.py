"""SIGINT without KeyboardInterrupt: a handler of our own while code runs that no exception may cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
