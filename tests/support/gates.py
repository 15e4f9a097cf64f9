"""What holds a function up, so that a test sees the moment before: a thread that has begun to write, and has not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE = 200.0


class Gate:
    """Stands in a function's place and holds every call until it is opened, for ever.

    Args:
        function: What is called then.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Wait, then do what the function does."""
        self.reached.set()
        assert self.opened.wait(PATIENCE), "nobody opened the gate"
        return self._function(*arguments, **named)

    def open(self) -> None:
        """Let all calls go on."""
        self.opened.set()


def after_the_main_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls ``function`` once the main thread of its process has come to its end."""

    def late(*arguments: Any) -> Any:
        while threading.main_thread().is_alive():
            time.sleep(0.01)
        return function(*arguments)

    return late
