"""Reading the frames of running threads, which may return from them at any bytecode."""

from __future__ import annotations

import gc
import sys
import threading
from itertools import islice

import pytest

from notebook_accelerate.telemetry.tracebacks import callers, current_frames, frame_of
from notebook_accelerate.worker import stacks
from notebook_accelerate.worker.timed_samples import TimedSamples

DEEP = 30


class Deep(threading.Thread):
    """A thread that waits in ``DEEP`` nested calls, returns from all, and then calls functions of other sizes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.inside, self.go, self.back, self.end = (threading.Event() for _ in range(4))

    def run(self) -> None:
        self.call(DEEP)
        self.other(3 * DEEP)

    def call(self, depth: int) -> None:
        if depth > 1:
            return self.call(depth - 1)
        self.inside.set()
        self.go.wait(30)
        return None

    def other(self, depth: int) -> None:
        one = two = three = four = five = depth + 10**6
        if depth > 1:
            return self.other(depth - 1)
        self.back.set()
        self.end.wait(30 + 0 * (one + two + three + four + five))
        return None


class Cycle:
    """An object whose finalizer lets a thread continue when it is collected."""

    def __init__(self, thread: Deep) -> None:
        self.cycle, self.thread = self, thread

    def __del__(self) -> None:
        self.thread.go.set()
        self.thread.back.wait(1)


def test_a_collection_does_not_let_a_thread_return_from_frames_that_are_being_read() -> None:
    thread = Deep()
    thread.start()
    assert thread.inside.wait(30)
    innermost = frame_of(thread)
    thresholds = gc.get_threshold()
    gc.collect()
    try:
        garbage = Cycle(thread)
        del garbage
        # The collector reaches this threshold while the frames are read.
        gc.set_threshold(gc.get_count()[0] + DEEP // 2)
        names = [frame.f_code.co_name for frame in islice(callers(innermost), 2 * DEEP)]
    finally:
        gc.set_threshold(*thresholds)
        thread.go.set()
        thread.end.set()
        thread.join()
    assert names.count("call") == DEEP
    assert names[-1] == "_bootstrap"
    assert gc.isenabled()


def test_a_profile_takes_its_samples_between_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(stacks, "in_function", lambda _: not found.append(gc.isenabled()))
    samples = TimedSamples()
    samples._sample(current_frames())
    assert len(found) > 5
    assert set(found) == {sys.version_info[:2] != (3, 11)}
    assert gc.isenabled()
