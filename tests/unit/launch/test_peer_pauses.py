"""The first notebook shows where another one waits for its user, and how to answer from here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
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
WAITING = protocol.PauseEvent(1, True, "rank 1 is waiting for input")
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
        self.pauses = PeerPauses(context_of(self.run, self.publisher), cast("Any", None), lambda: shows_all)
        self.pauses.set_nodes(NODES, 0)
        self.ends = Channel.pair()

    def open_prompt(self) -> None:
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


@pytest.mark.parametrize("prompt_first", [True, False])
def test_the_message_has_the_way_to_answer_in_either_order_of_events(first: First, prompt_first: bool) -> None:
    if prompt_first:
        first.open_prompt()
        first.pauses.handle(WAITING)
    else:
        first.pauses.handle(WAITING)
        assert first.lines == []
        first.open_prompt()
        first.pauses.announce()
    assert first.lines == [f"{THERE}; run.debug(rank=1) opens it here too"]
    first.pauses.announce()
    first.pauses.handle(WAITING)
    assert len(first.lines) == 1


def test_a_pause_that_ends_before_its_prompt_arrives_is_not_shown(first: First) -> None:
    first.pauses.handle(WAITING)
    first.pauses.handle(protocol.PauseEvent(1, False))
    first.open_prompt()
    first.pauses.announce()
    assert first.lines == []


def test_a_pause_that_cannot_be_opened_here_is_shown_at_once(first: First) -> None:
    first.pauses.handle(protocol.PauseEvent(1, True, "rank 1 is paused"))
    assert first.lines == ["node 1 (right): rank 1 is paused, in its notebook"]
    for other in (First(block=True), First(shows_all=False)):
        other.pauses.handle(WAITING)
        assert other.lines == [THERE]
        close(other)
