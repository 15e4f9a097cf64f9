"""Fixtures for tests of launches: interrupts, and a zygote that the leak check sees before and after each test."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

import pytest

import notebook_accelerate
from notebook_accelerate.launch.processes.zygote import ensure_zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[int]:
    """Yield the process id of the zygote, which has imported its modules and forked once."""
    notebook_accelerate.notebook_launcher(print, num_processes=1, start_method="zygote")
    yield ensure_zygote().pid
    notebook_accelerate.shutdown()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt, because a shell makes background jobs, such as a test run, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def press(interruptible: None) -> Iterator[Callable[..., None]]:
    """Yield a function that arranges for a SIGINT when the given code is called or returns."""

    def when(code: CodeType, calls: int = 1, event: str = "call") -> None:
        left = [calls]

        def look(frame: FrameType, seen: str, _: object) -> None:
            if seen == event and frame.f_code is code:
                left[0] -= 1
                if not left[0]:
                    sys.setprofile(None)
                    signal.raise_signal(signal.SIGINT)

        sys.setprofile(look)

    yield when
    sys.setprofile(None)
