from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import pytest

from notebook_accelerate.telemetry import AnsweredEvent, Channel, InputReply, InputRequest, Sink, StatusEvent
from notebook_accelerate.worker.agent import Agent


def test_a_handler_that_fails_does_not_end_the_hearing(capsys: pytest.CaptureFixture[str]) -> None:
    kernel, theirs = Channel.pair()
    agent = Agent(Sink(Channel(theirs)))
    heard: list[InputReply] = []

    def fails(event: StatusEvent) -> None:
        raise AttributeError("half imported")

    agent.on(StatusEvent, fails)
    agent.on(InputReply, heard.append)
    kernel.send(StatusEvent("running"), InputReply("still there"))
    for _, event in agent.sink.channel.receive(10.0):
        agent._hear(event)
    assert [reply.text for reply in heard] == ["still there"]
    assert "AttributeError: half imported" in capsys.readouterr().err
    kernel.close()
    agent.sink.channel.close()


def test_the_answer_to_an_earlier_question_is_not_taken_for_that_to_a_later_one() -> None:
    kernel, theirs = Channel.pair()
    agent = Agent(Sink(Channel(theirs)))
    agent.start()
    kernel.send(InputReply("late", 0), InputReply("yes", 1))
    assert agent.ask("> ") == "yes"
    heard: list[object] = []
    while len(heard) < 2:
        heard += [event for _, event in kernel.receive(10.0)]
    request, answered = heard
    assert isinstance(request, InputRequest)
    assert (request.number, answered) == (1, AnsweredEvent(1))
    agent.stop()
    agent._thread.join()
    kernel.close()
    agent.sink.channel.close()


def test_a_process_that_a_rank_has_started_has_nobody_to_ask() -> None:
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


def test_an_interrupt_as_soon_as_a_question_is_asked_ends_it() -> None:
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
