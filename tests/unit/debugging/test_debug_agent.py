"""The debugging part of a rank's agent, with messages that arrive at the worst moments."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from notebook_accelerate.telemetry import Event, install_sink, step_time
from notebook_accelerate.telemetry.debug_protocol import DoneReply, PausedEvent, PauseRequest, UnpauseRequest
from notebook_accelerate.worker import debug_agent as debugging


class Host:
    """Replaces a rank's agent and its sink. The kernel's answers may arrive before `send` returns."""

    def __init__(self) -> None:
        self.sink: Any = self
        self.on_step: Callable[[], None] | None = None
        self.handlers: dict[type[Event], Callable[[Any], None]] = {}
        self.said: list[tuple[int, str]] = []
        self.answers: list[Event] = []

    def on(self, kind: type[Event], handler: Callable[[Any], None]) -> None:
        """Register a handler."""
        self.handlers[kind] = handler

    def every_tick(self, callback: Callable[[], None]) -> None:
        """Ignore a function that would be called periodically."""

    def ask(self, prompt: str, *, password: bool = False, shown: str = "", kind: str = "input") -> str:
        """Raise EOFError, because there is no answer."""
        raise EOFError

    def hear(self, event: Event) -> None:
        """Deliver a message from the kernel."""
        self.handlers[type(event)](event)

    def emit(self, event: Event) -> None:
        """Send a message to the kernel, and deliver the kernel's answers."""
        if isinstance(event, PausedEvent):
            return
        assert isinstance(event, DoneReply)
        self.said.append((event.number, event.text))
        while event.text == "paused" and self.answers:
            self.hear(self.answers.pop(0))

    send = emit


@pytest.fixture
def host() -> Host:
    """Return the stub of a rank's agent, with the debugging part attached."""
    host = Host()
    debugging.DebugAgent(host)
    return host


def reach_a_boundary(host: Host) -> None:
    """Reach a step boundary, as training does, on a thread. Fail if it is held forever."""
    assert host.on_step is not None
    training = threading.Thread(target=host.on_step, daemon=True)
    training.start()
    training.join(60)
    assert not training.is_alive(), f"held forever; sent: {host.said}"


def test_a_rank_that_is_resumed_before_it_starts_waiting_continues(host: Host) -> None:
    host.hear(PauseRequest(1))
    host.answers = [UnpauseRequest(2)]
    reach_a_boundary(host)
    assert host.said == [(1, "paused"), (2, "unpaused")]


def test_a_rank_that_is_paused_again_continues_to_the_next_boundary_first(host: Host) -> None:
    host.hear(PauseRequest(1))
    host.answers = [UnpauseRequest(2), PauseRequest(3)]
    reach_a_boundary(host)
    assert host.said == [(1, "paused"), (2, "unpaused")]
    host.answers = [UnpauseRequest(4)]
    reach_a_boundary(host)
    assert host.said[2:] == [(3, "paused"), (4, "unpaused")]
    reach_a_boundary(host)
    assert host.on_step is None


def test_a_rank_with_an_optimizer_is_paused_after_a_step_and_not_when_it_logs(host: Host) -> None:
    install_sink(host.sink)
    try:
        step_time.end_step()
        host.hear(PauseRequest(1))
        host.answers = [UnpauseRequest(2)]
        reach_a_boundary(host)
        assert host.said == []
        step_time.end_step()
        assert host.said == [(1, "paused"), (2, "unpaused")]
        step_time.end_step()
        assert (host.on_step, step_time.at_end) == (None, set())
    finally:
        install_sink(None)


def test_an_interrupt_ends_a_pause(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    agent: Any = host.handlers[PauseRequest].__self__  # type: ignore[attr-defined]
    monkeypatch.setattr(agent._unpaused, "wait", interrupted)
    host.hear(PauseRequest(1))
    with pytest.raises(KeyboardInterrupt):
        agent._at_boundary()
    assert agent._paused == ""
