"""A clock in seconds since the epoch that ignores changes to the system time and continues while the machine sleeps."""

from __future__ import annotations

import sys
import time

_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)
if _CLOCK is None and sys.platform == "darwin":
    _CLOCK = time.CLOCK_MONOTONIC  # On macOS, this clock counts during sleep, unlike time.monotonic.


def _uptime() -> float:
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


_offset = time.time() - _uptime()


def now() -> float:
    """Return the seconds since the epoch, counted from the system's time when this clock was set."""
    return _uptime() + _offset


def set_to_system_time() -> None:
    """Adopt the system's time, in case it was changed. Call this only while no run needs its times to be in order."""
    set_offset(time.time() - _uptime())


def offset() -> float:
    """Return the argument for ``set_offset`` that sets another process's clock on this machine to the same time."""
    return _offset


def set_offset(seconds: float) -> None:
    """Set this process's clock to the clock of the process whose ``offset()`` returned ``seconds``."""
    global _offset  # noqa: PLW0603 - one clock per process
    _offset = seconds
