from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import pytest

from notebook_accelerate.telemetry import AnsweredEvent, Channel, InputReply, InputRequest, Sink, StatusEvent
from notebook_accelerate.telemetry.sink import Agent


def test_a_handler_that_fails_does_not_end_the_thread(capsys: pytest.CaptureFixture[str]) -> None:
    kernel, theirs = Channel.pair()
    agent = Agent(Sink(Channel(theirs)))
    received: list[InputReply] = []

    def fails(event: StatusEvent) -> None:
        raise AttributeError("half imported")

    agent.on(StatusEvent, fails)
    agent.on(InputReply, received.append)
    kernel.send(StatusEvent("running"), InputReply("still there"))
    for _, event in agent.sink.channel.receive(10.0):
        agent._handle(event)
    assert [reply.text for reply in received] == ["still there"]
    assert "AttributeError: half imported" in capsys.readouterr().err
    kernel.close()
    agent.sink.channel.close()


def test_an_answer_to_an_earlier_prompt_is_skipped() -> None:
    kernel, theirs = Channel.pair()
    agent = Agent(Sink(Channel(theirs)))
    agent.start()
    kernel.send(InputReply("late", 0), InputReply("yes", 1))
    assert agent.ask("> ") == "yes"
    received: list[object] = []
    while len(received) < 2:
        received += [event for _, event in kernel.receive(10.0)]
    request, answered = received
    assert isinstance(request, InputRequest)
    assert (request.number, answered) == (1, AnsweredEvent(1))
    agent.stop()
    agent._thread.join()
    kernel.close()
    agent.sink.channel.close()


def test_a_process_that_a_rank_has_started_cannot_prompt() -> None:
    kernel, theirs = Channel.pair()
    agent = Agent(Sink(Channel(theirs)))
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            agent.ask("> ")
        except EOFError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert not kernel.readable()
    kernel.close()
    agent.sink.channel.close()


def test_an_interrupt_right_after_a_prompt_is_sent_ends_it() -> None:
    kernel, theirs = Channel.pair()
    agent = Agent(Sink(Channel(theirs)))

    def press(frame: FrameType, event: str, _: object) -> None:
        if event == "return" and frame.f_code is Sink.send.__code__:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may ignore it
    sys.setprofile(press)
    try:
        with pytest.raises(KeyboardInterrupt):
            agent.ask("> ")
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
    assert [event for _, event in kernel.receive(10.0)][-1] == AnsweredEvent(1)
    kernel.close()
    agent.sink.channel.close()
