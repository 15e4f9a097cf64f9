"""Where another notebook waits for its user: told in the first one together with the way to answer from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as say
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.peer_pauses import PeerPauses
from notebook_accelerate.launch.output.rank_lines import TextPublisher
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.prompts import Prompt
from notebook_accelerate.launch.supervisor.command_queue import CommandQueue
from notebook_accelerate.telemetry import Channel
from notebook_accelerate.telemetry.events import InputRequest
from tests.support.runs import context_of, make_run

NODES = [
    Node(name="a", host="left", pid=1, node_rank=0, processes=1),
    Node(name="b", host="right", pid=2, node_rank=1, processes=1),
]
WAITS = say.StandEvent(1, True, "rank 1 is waiting for input")
THERE = "node 1 (right): rank 1 is waiting for input, in its notebook"


class Lines(TextPublisher):
    """Keeps the lines of the launch."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, stream: str, text: str) -> None:
        self.lines.append(text)


class First:
    """The first of two notebooks, which shows the other one's ranks."""

    def __init__(self, *, block: bool = False, shows_all: bool = True) -> None:
        self.run: Run = make_run(2, block=block)
        self.publisher = Lines()
        self.lines = self.publisher.lines
        self.standstill = PeerPauses(context_of(self.run, self.publisher), cast("Any", None), lambda: shows_all)
        self.standstill.meet(NODES, 0)
        self.ends = Channel.pair()

    def asked(self) -> None:
        request = InputRequest("who? ", number=1)
        self.run.commands.prompts.put(Prompt(1, request, self.ends[0], lambda _: None, here=False))


@pytest.fixture
def first() -> Iterator[First]:
    found = First()
    yield found
    close(found)


def close(notebook: First) -> None:
    cast("CommandQueue", notebook.run.commands).close()
    notebook.ends[0].close()
    notebook.ends[1].close()


@pytest.mark.parametrize("question_first", [True, False])
def test_it_is_said_how_to_answer_whichever_word_comes_first(first: First, question_first: bool) -> None:
    if question_first:
        first.asked()
        first.standstill.hear(WAITS)
    else:
        first.standstill.hear(WAITS)
        assert first.lines == []
        first.asked()
        first.standstill.announce()
    assert first.lines == [f"{THERE}; run.debug(rank=1) opens it here too"]
    first.standstill.announce()
    first.standstill.hear(WAITS)
    assert len(first.lines) == 1


def test_what_is_over_before_its_question_came_is_not_said(first: First) -> None:
    first.standstill.hear(WAITS)
    first.standstill.hear(say.StandEvent(1, False))
    first.asked()
    first.standstill.announce()
    assert first.lines == []


def test_what_cannot_be_opened_here_is_said_at_once(first: First) -> None:
    first.standstill.hear(say.StandEvent(1, True, "rank 1 is paused"))
    assert first.lines == ["node 1 (right): rank 1 is paused, in its notebook"]
    for other in (First(block=True), First(shows_all=False)):
        other.standstill.hear(WAITS)
        assert other.lines == [THERE]
        close(other)
