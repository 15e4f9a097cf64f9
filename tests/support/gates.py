"""Gates that block calls to a function, so that a test can act just before a call, such as a thread's write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 200.0


class Gate:
    """Replaces a function, and blocks calls to it until the gate is opened.

    Args:
        function: The function to call after the gate has been opened.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Wait until the gate is open, and then call the function."""
        self.reached.set()
        assert self.opened.wait(PATIENCE), "the gate was not opened in time"
        return self._function(*arguments, **named)

    def open(self) -> None:
        """Let all calls continue."""
        self.opened.set()


def after_the_main_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls ``function`` only after the main thread of its process has ended."""

    def late(*arguments: Any) -> Any:
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        return function(*arguments)

    return late
