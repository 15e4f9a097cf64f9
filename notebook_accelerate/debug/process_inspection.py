"""What can be seen of a rank that cannot answer, from a process on its machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from notebook_accelerate.debug import native_stacks, stack_dumps

DUMP_SECONDS = 0.5


class Look(NamedTuple):
    """What was seen.

    Attributes:
        dump: What faulthandler wrote; "" where the rank has no such handler.
        native: Its main thread's frames by py-spy; empty where that is missing, or may not look.
    """

    dump: str = ""
    native: tuple[str, ...] = ()


class Outside:
    """Looks at one process.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._dump: int | None = None
        self._lock = threading.Lock()

    def open_dump(self, path: str) -> None:
        """The rank's stacks will appear in ``path``, held open: the rank may end of the signal that asks for them."""
        with suppress(OSError), self._lock:
            if self._dump is not None:
                os.close(self._dump)
            self._dump = os.open(path, os.O_RDONLY)

    def look(self, send_signal: Callable[[int], None]) -> Look:
        """Have the rank's signal handler write its stacks, and look at it natively."""
        return Look(self._dumped(send_signal), native_stacks.stack(self._pid))

    def _dumped(self, send_signal: Callable[[int], None]) -> str:
        with self._lock:
            dump = None if self._dump is None else os.dup(self._dump)
        if dump is None:
            return ""
        with os.fdopen(dump, "rb"):
            before = os.fstat(dump).st_size
            send_signal(signal.SIGUSR1)
            return stack_dumps.read_new(dump, before, DUMP_SECONDS)

    def close(self) -> None:
        """Let go of the dump."""
        with self._lock:
            dump, self._dump = self._dump, None
        if dump is not None:
            os.close(dump)
