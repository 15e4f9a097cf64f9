"""Seconds since the epoch by a clock that no step of the system's clock moves, and that counts during sleep."""

from __future__ import annotations

import sys
import time

_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)
if _CLOCK is None and sys.platform == "darwin":
    _CLOCK = time.CLOCK_MONOTONIC  # there it counts during sleep, unlike time.monotonic


def _uptime() -> float:
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)


_offset = time.time() - _uptime()


def now() -> float:
    """Return the seconds since the epoch, as they were when this clock was set."""
    return _uptime() + _offset


def set_to_system_time() -> None:
    """Follow the system's clock, where it was set; only while no run needs the order and distance of its times."""
    set_offset(time.time() - _uptime())


def offset() -> float:
    """Return what ``set_offset`` needs in another process of this machine for the same time."""
    return _offset


def set_offset(seconds: float) -> None:
    """Give this process the time of the process that returned ``seconds`` from ``offset``."""
    global _offset  # noqa: PLW0603 - one clock per process
    _offset = seconds
