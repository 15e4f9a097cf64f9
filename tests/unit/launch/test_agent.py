"""The agent of a rank: prompts, answers, and handlers that raise."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from notebook_accelerate.telemetry import AnsweredEvent, Channel, InputReply, InputRequest, Sink, StatusEvent
from notebook_accelerate.worker.agent import Agent

Ends = tuple[Channel, Agent]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Yield the kernel's end of a channel, and the agent of a rank at the other end."""
    kernel, theirs = Channel.pair()
    agent = Agent(Sink(Channel(theirs)))
    yield kernel, agent
    kernel.close()
    agent.sink.channel.close()


def test_a_failing_handler_does_not_end_the_thread(ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
    kernel, agent = ends
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


def test_an_answer_to_an_earlier_prompt_is_skipped(ends: Ends) -> None:
    kernel, agent = ends
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


def test_a_child_process_of_a_rank_cannot_prompt(ends: Ends) -> None:
    kernel, agent = ends
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


def test_an_interrupt_right_after_sending_a_prompt_ends_it(ends: Ends, press: Callable[..., None]) -> None:
    kernel, agent = ends
    press(Sink.send.__code__, event="return")
    with pytest.raises(KeyboardInterrupt):
        agent.ask("> ")
    assert [event for _, event in kernel.receive(10.0)][-1] == AnsweredEvent(1)
