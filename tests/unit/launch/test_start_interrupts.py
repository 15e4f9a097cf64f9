"""Interrupts before anything runs, and ends that cannot be shown."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

import pytest

import notebook_accelerate
from notebook_accelerate import notebook_launcher
from notebook_accelerate.errors import RunInterrupted
from notebook_accelerate.launch import Run


@pytest.fixture
def press() -> Iterator[Callable[..., None]]:
    """Return what has SIGINT come as soon as a function is called."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it

    def when(code: CodeType, calls: int = 1) -> None:
        left = [calls]

        def look(frame: FrameType, event: str, _: object) -> None:
            if event == "call" and frame.f_code is code:
                left[0] -= 1
                if not left[0]:
                    sys.setprofile(None)
                    signal.raise_signal(signal.SIGINT)

        sys.setprofile(look)

    yield when
    sys.setprofile(None)
    signal.signal(signal.SIGINT, before)


Press = Callable[..., None]


def test_an_interrupt_while_the_launch_is_planned(press: Press) -> None:
    before = notebook_accelerate.runs()
    press(threading.Thread.start.__code__)
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(time.sleep, (600,), num_processes=2, use_port=0, start_method="fork")
    assert notebook_accelerate.runs() == before


def test_an_interrupt_before_the_runs_thread_has_begun(press: Press) -> None:
    press(threading.Thread.start.__code__, 2)  # the first thread plans
    with pytest.raises(RunInterrupted) as caught:
        notebook_launcher(time.sleep, (600,), num_processes=2, use_port=0, start_method="fork")
    assert caught.value.run.status == "stopped"
    assert caught.value.run.wait(0)


def test_an_interrupt_before_an_inline_run_has_begun(press: Press) -> None:
    press(Run.show_live.__code__)
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(time.sleep, (600,))
    run = notebook_accelerate.runs()[-1]
    assert run.wait(0), "who stops all runs, as at the kernel's end, would wait for it for ever"
    assert run.status == "stopped"


class _Gone:
    """A stream whose reader goes away."""

    closed = gone = False

    def write(self, text: str) -> int:
        if "late" in text:
            raise BrokenPipeError
        return len(text)

    def flush(self) -> None:
        return


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_ends_though_its_end_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        os.write(1, b"early\n")
        time.sleep(0.02)
        os.write(1, b"late\n")

    monkeypatch.setattr(sys, "stdout", _Gone())
    run = notebook_launcher(body, num_processes=1, use_port=0, start_method="fork", block=False, panel=False)
    assert run.wait(20)
