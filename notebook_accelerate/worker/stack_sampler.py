"""Samples the stack of a rank's main thread, on a thread that exists only meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import islice, takewhile
from types import CodeType

from notebook_accelerate.telemetry import Event
from notebook_accelerate.telemetry.debug_protocol import SampleReply, SampleRequest
from notebook_accelerate.telemetry.frames import callers, main_frame
from notebook_accelerate.worker import stacks

MAX_DEPTH = 100
"""Frames of a stack, the innermost ones."""
MAX_STACKS = 20_000
"""Different stacks that are counted; time in others counts for the first function alone."""

Key = tuple[tuple[CodeType, int], ...]


def start(request: SampleRequest, reply: Callable[[Event], None]) -> None:
    """Sample for the seconds of a request, then reply."""
    threading.Thread(target=_sample, args=(request, reply), name="notebook-accelerate-sample", daemon=True).start()


def _sample(request: SampleRequest, reply: Callable[[Event], None]) -> None:
    """Weigh each sample by the time since the one before: the GIL may have been held in between."""
    found: dict[Key, list[float]] = {}
    begin = last = time.perf_counter()
    period = 1 / request.rate
    due = begin + period
    while last - begin < request.seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        key = _stack()
        now = time.perf_counter()
        if key not in found and len(found) >= MAX_STACKS:
            key = key[:1]
        entry = found.setdefault(key, [0.0, 0])
        entry[0] += now - last
        entry[1] += 1
        last = now
        due = max(due + period, now)
    reply(_folded(request.number, found, last - begin))


def _stack() -> Key:
    """Return the main thread's frames up to the launched function, outermost first."""
    inside = takewhile(stacks.in_function, callers(main_frame()))
    return tuple((frame.f_code, frame.f_lineno or 0) for frame in islice(inside, MAX_DEPTH))[::-1]


def _folded(number: int, found: dict[Key, list[float]], seconds: float) -> SampleReply:
    places: dict[tuple[str, int, str], int] = {}
    rows = []
    for key, (weight, count) in found.items():
        indices = [
            places.setdefault((code.co_filename, line, getattr(code, "co_qualname", code.co_name)), len(places))
            for code, line in key
        ]
        rows.append((weight, int(count), indices))
    return SampleReply(number, list(places), rows, seconds)
