"""Stacks of a rank that cannot answer: its signal handler writes them, whatever holds the interpreter."""

from __future__ import annotations

import os
import re
import time

from notebook_accelerate.telemetry import FrameInfo

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(?P<name>[^\]]*)\])?.*:$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)$')
SETTLE_SECONDS = 0.05


def read_new(descriptor: int, before: int, timeout: float) -> str:
    """Return what was written to a dump file after its first ``before`` bytes, once it has stopped growing.

    Args:
        descriptor: The rank's dump file, open for reading.
        before: Its size when the signal was sent.
        timeout: Seconds to wait for something to come.
    """
    deadline = time.monotonic() + timeout
    size, settled = before, False
    while not settled:
        time.sleep(SETTLE_SECONDS)
        over = time.monotonic() >= deadline  # said before the look: what has come while this process waited counts
        now = os.fstat(descriptor).st_size
        settled, size = over or now == size > before, now
    return os.pread(descriptor, size - before, before).decode(errors="replace")


def parse(text: str) -> dict[str, tuple[FrameInfo, ...]]:
    """Return a faulthandler dump's stacks by thread, the thread that got the signal first, outermost frame first."""
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
