"""Stacks of a rank that cannot reply: its signal handler writes them, even while native code holds the GIL."""

from __future__ import annotations

import os
import re
import time

from notebook_accelerate.telemetry import FrameInfo

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])?.*:$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
SETTLE_SECONDS = 0.05


def read_new(descriptor: int, before: int, timeout: float) -> str:
    """Return the bytes of a dump file after its first ``before`` ones, once the file has stopped growing.

    Args:
        descriptor: The rank's dump file, open for reading.
        before: Its size when the signal was sent.
        timeout: Seconds to wait for the first bytes.
    """
    deadline = time.monotonic() + timeout
    size, settled = before, False
    while not settled:
        time.sleep(SETTLE_SECONDS)
        over = time.monotonic() >= deadline  # read before the size: bytes that arrive in between count
        now = os.fstat(descriptor).st_size
        settled, size = over or now == size > before, now
    return os.pread(descriptor, size - before, before).decode(errors="replace")


def parse(text: str) -> dict[str, tuple[FrameInfo, ...]]:
    """Return the stacks of a faulthandler dump by thread, first the signalled thread's, outermost frame first."""
    threads: dict[str, list[FrameInfo]] = {}
    current: list[FrameInfo] = []
    first = ""
    for line in text.splitlines():
        if head := _THREAD.match(line):
            name = head["name"] or head[1]
            first = name if line.startswith("Current") else first
            current = threads.setdefault(name, [])
        elif frame := _FRAME.match(line):
            number = int(frame["line"]) if frame["line"].isdigit() else 0
            current.append(FrameInfo(frame["file"], number, frame["name"], ""))
    order = sorted(threads, key=lambda name: name != first)
    return {name: tuple(reversed(threads[name])) for name in order}
