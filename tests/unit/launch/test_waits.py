"""Interrupts end what the main thread waits for, even if none of its system calls is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from notebook_accelerate.launch.state.interrupts import handle_interrupts, wait_for
from notebook_accelerate.launch.state.prompts import PromptQueue

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("interruptible")]


@contextmanager
def unnoticed_interrupt(handler: Callable[[], None]) -> Iterator[None]:
    """Send a SIGINT during the block, but to another thread, and let ``handler`` handle it."""

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    timer = threading.Timer(0.5, interrupt)
    with handle_interrupts(handler):
        timer.start()
        yield
        timer.join()


def test_an_interrupt_ends_a_wait_for_an_event() -> None:
    event = threading.Event()
    with unnoticed_interrupt(event.set):
        assert wait_for(event)


def test_an_interrupt_ends_a_wait_for_a_prompt() -> None:
    prompts, over = PromptQueue(), threading.Event()
    with unnoticed_interrupt(over.set):
        assert prompts.claim_next(None, until=over.is_set) is None


def test_a_wait_may_have_a_limit() -> None:
    assert not wait_for(threading.Event(), 0.01)
