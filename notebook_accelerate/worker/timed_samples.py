"""Sample a rank's threads while torch's profiler records, to find the lines of operations and what else runs."""

from __future__ import annotations

import linecache
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from math import inf
from types import CodeType, FrameType
from typing import Any

from notebook_accelerate.telemetry.tracebacks import callers, current_frames, is_user_code, reading
from notebook_accelerate.worker import stacks
from notebook_accelerate.worker.stacks import MAX_DEPTH

RATE = 250.0
"""Samples per second. At this rate, they take 1 % of a rank's time."""
FIRST_RATE, FIRST_SECONDS = 500.0, 0.1
"""A higher rate for the first seconds, because three short steps may take only milliseconds. A sample takes 0.1 ms."""
MAX_SAMPLES = 50_000
BLOCKED = 0.0005
"""A sample that is late by at least this many seconds had to wait for the interpreter lock."""
SWITCH_SECONDS = 0.0002
"""The interpreter's switch interval while samples are taken. After Python's 5 ms, a thread could be at another line."""
_OWN_THREADS = "notebook-accelerate"

Place = tuple[str, int, str]


class TimedSamples:
    """Takes samples on the thread that calls ``run``.

    ``begin`` and ``end`` are called on the main thread and never wait. Both may be called in a signal handler, so they
    must not call ``threading.enumerate``, which needs a lock that the main thread may already hold.
    """

    def __init__(self) -> None:
        self._places: dict[Place, int] = {}
        self._stacks: dict[tuple[int, ...], int] = {}
        self._times: list[int] = []
        self._which: list[int] = []
        self._blocked = 0
        self._while_blocked: dict[int, float] = {}
        self._threads: dict[int, dict[Place, int]] = {}
        self._numbers: dict[int, int] = {}
        self._cpu: dict[int, float] = {}
        self._cpu_at_end: dict[int, float] = {}
        self._main = threading.main_thread().ident or 0
        self._known: dict[tuple[int, int], tuple[int, CodeType]] = {}
        self._seen: set[int] = set()
        self._changed = False
        self._begin = self._at_least = self._seconds = self._main_seconds = 0.0
        self._until = inf
        self._interval = sys.getswitchinterval()
        self._shared = self._shares_interpreter()
        self._begun, self._ended = threading.Event(), threading.Event()

    @staticmethod
    def _shares_interpreter() -> bool:
        """Return whether the function or its libraries run threads besides the main thread."""
        others = [each for each in threading.enumerate() if each is not threading.main_thread()]
        return any(not each.name.startswith(_OWN_THREADS) for each in others)

    @property
    def running(self) -> bool:
        """Whether samples are being taken."""
        return self._begun.is_set() and not self._ended.is_set()

    def begin(self, at_least: float = 0.0) -> None:
        """Start sampling, for at least this many seconds even if ``end`` is called earlier."""
        self._interval = sys.getswitchinterval()
        if not self._shared:  # A shorter interval would make the function's own threads switch more often.
            sys.setswitchinterval(min(SWITCH_SECONDS, self._interval))
        self._at_least = at_least
        self._begin, self._main_seconds = time.perf_counter(), time.thread_time()
        self._begun.set()

    def end(self) -> None:
        """Stop sampling, but not before the minimum time given to ``begin``. Without ``begin``, take no samples."""
        if self.running and time.perf_counter() < self._begin + self._at_least:
            self._until = self._begin + self._at_least
        elif not self._ended.is_set():
            self._close(time.thread_time())

    def _close(self, main_seconds: float) -> None:
        if self._begun.is_set():
            self._seconds = time.perf_counter() - self._begin
            self._main_seconds = main_seconds - self._main_seconds
            self._cpu_at_end = _seconds_of(self._numbers)
            sys.setswitchinterval(self._interval)
        self._ended.set()
        self._begun.set()

    def run(self) -> dict[str, Any]:
        """Take samples from ``begin`` to ``end``, and return them.

        Times are in nanoseconds since the epoch, and stacks are indices, outermost first. ``blocked`` is the share of
        samples that had to wait for the interpreter lock, and ``lock`` the CPU time that the main thread used during
        these waits. Of all threads, the one that held the lock has used the most.
        """
        self._note_threads(current_frames())
        self._begun.wait()
        if not self._ended.is_set():
            self._sample_until_end()
            if self._until < inf:
                self._close(_seconds_of({self._main: os.getpid()}).get(self._main, self._main_seconds))
            self._ended.wait()  # Wait for the end, because the maximum number of samples may be reached earlier.
        return self._result()

    def _sample_until_end(self) -> None:
        number = threading.get_native_id()
        before = self._cpu = _seconds_of(self._numbers)
        delay, period = thread_delay(number), 1 / FIRST_RATE
        due = time.perf_counter() + period
        while len(self._times) < MAX_SAMPLES:
            time.sleep(max(0.0, due - time.perf_counter()))
            now = time.perf_counter()
            if self._ended.is_set() or now >= self._until:
                return
            frames = current_frames()
            self._note_threads(frames)
            times = _seconds_of(self._numbers)
            if now - due >= BLOCKED:
                total = thread_delay(number)
                waited, delay = total - delay, total  # The thread waited for a CPU core, not for the lock.
                if now - due - waited >= BLOCKED:
                    self._note_blocked(before, times)
            before = times
            self._sample(frames)
            del frames  # Don't keep the frames, because they hold the function's variables.
            period = 1 / (FIRST_RATE if now - self._begin < FIRST_SECONDS else RATE)
            due = max(due + period, now)

    def _note_threads(self, identities: Iterable[int]) -> None:
        """Update the threads' numbers if threads have changed, and once more later, for threads that were starting."""
        seen = set(identities)
        changed = seen != self._seen
        if changed or self._changed:
            self._seen, self._changed = seen, changed
            self._numbers = _thread_numbers()

    def _result(self) -> dict[str, Any]:
        # Lines of libraries are not shown, and reading all their files would take a second.
        frames = [[*place, _source(place) if is_user_code(place[0]) else ""] for place in self._places]
        return {
            "frames": frames,
            "stacks": list(self._stacks),
            "times": self._times,
            "which": self._which,
            "seconds": self._seconds,
            "blocked": self._blocked / max(1, len(self._times)),
            "lock": self._while_blocked.get(self._main, 0.0),
            "cpu": self._main_seconds,
            "threads": self._other_threads(),
        }

    def _note_blocked(self, before: Mapping[int, float], now: Mapping[int, float]) -> None:
        """Count a sample that waited for the lock, and each thread's CPU time since the previous sample."""
        self._blocked += 1
        for identity, seconds in now.items():
            used = seconds - before.get(identity, seconds)
            self._while_blocked[identity] = self._while_blocked.get(identity, 0.0) + used

    def _sample(self, frames: Mapping[int, FrameType]) -> None:
        self._times.append(time.time_ns())
        for identity, frame in frames.items():
            if identity != self._main and identity in self._numbers:
                seen = self._threads.setdefault(identity, {})
                place = _user_place(frame)
                seen[place] = seen.get(place, 0) + 1
        with reading():
            self._which.append(self._index(frames.get(self._main)))

    def _index(self, frame: FrameType | None) -> int:
        """Return the index of a stack. Places are cached by instruction, because finding a line number is slow."""
        found: list[int] = []
        while frame is not None and len(found) < MAX_DEPTH:
            code = frame.f_code
            place, _ = self._known.get((id(code), frame.f_lasti)) or self._note_place(frame)
            if place < 0:
                break
            found.append(place)
            frame = frame.f_back
        return self._stacks.setdefault(tuple(reversed(found)), len(self._stacks))

    def _note_place(self, frame: FrameType) -> tuple[int, CodeType]:
        """Return the index of a frame's place (-1 outside the function), and its code, whose id must stay unique."""
        place = -1
        if stacks.in_function(frame):
            place = self._places.setdefault(_place(frame), len(self._places))
        found = self._known[id(frame.f_code), frame.f_lasti] = place, frame.f_code
        return found

    def _other_threads(self) -> list[dict[str, Any]]:
        """Return the CPU time of each Python thread except the main thread, and the line at which it was most often."""
        names = {each.ident: each.name for each in threading.enumerate()}
        rows = []
        for identity, seen in self._threads.items():
            name = names.get(identity, f"thread {identity}")
            place = max(seen, key=lambda each: seen[each])
            cpu = self._cpu_at_end.get(identity, 0.0) - self._cpu.get(identity, 0.0)
            lock = self._while_blocked.get(identity, 0.0)
            rows.append({"name": name, "cpu": cpu, "lock": lock, "frame": [*place, _source(place)]})
        return rows


def thread_delay(number: int) -> float:
    """Return for how many seconds a thread has waited for a CPU core while it could have run, or 0.0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(read_quickly(f"/proc/self/task/{number}/schedstat").split()[1]) / 1e9
    return 0.0


def read_quickly(name: str) -> bytes:
    """Return the first 4 KB of a file, ten times as fast as ``Path.read_text``."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _place(frame: FrameType) -> Place:
    code = frame.f_code
    return code.co_filename, frame.f_lineno or 0, getattr(code, "co_qualname", code.co_name)


def _source(place: Place) -> str:
    return linecache.getline(place[0], place[1]).strip()


def _user_place(frame: FrameType) -> Place:
    for each in islice(callers(frame), MAX_DEPTH):
        if is_user_code(each.f_code.co_filename):
            return _place(each)
    return _place(frame)


def _thread_numbers() -> dict[int, int]:
    """Return the system's number of each Python thread by its identity, except for this package's threads."""
    found = {}
    for thread in threading.enumerate():
        # After a fork, the main thread still has its parent's number in Python versions before 3.13.
        number = os.getpid() if thread is threading.main_thread() else thread.native_id
        if thread.ident is not None and number is not None and not thread.name.startswith(_OWN_THREADS):
            found[thread.ident] = number
    return found


def _seconds_of(numbers: Mapping[int, int]) -> dict[int, float]:
    """Return the CPU time of each thread, by its identity."""
    found = {}
    for identity, number in numbers.items():
        with suppress(OSError, ValueError, OverflowError):  # The thread has exited, or the system has no such clocks.
            found[identity] = time.clock_gettime(_clock_of(number))
    return found


def _clock_of(number: int) -> int:
    """Return Linux's clock for a thread's CPU time. Reading this clock raises OSError after the end of the thread.

    ``pthread_getcpuclockid`` is not used, because it reads the memory of the thread, which may be gone.
    """
    return ~number << 3 | 6
