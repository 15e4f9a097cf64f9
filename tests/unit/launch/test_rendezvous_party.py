"""One notebook's part in a meeting, where a busy kernel reads several words of the child process at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from notebook_accelerate.errors import WorkerError
from notebook_accelerate.launch.output import TextPublisher
from notebook_accelerate.launch.rendezvous import messages as say
from notebook_accelerate.launch.rendezvous import party as rendezvous
from notebook_accelerate.launch.rendezvous.guests import VISIT_SECONDS
from notebook_accelerate.launch.rendezvous.nodes import Node
from notebook_accelerate.launch.stopwatch import Stopwatch
from notebook_accelerate.launch.supervisor import Group
from notebook_accelerate.telemetry import Channel, Event
from tests.support.runs import make_run

NODES = [
    Node(name="a", host="left", pid=1, node_rank=0, processes=1).as_dict(),
    Node(name="b", host="right", pid=2, node_rank=1, processes=1).as_dict(),
]


class Told:
    """A meeting whose child process says what a test gives it, in one go."""

    def __init__(self, *_: object) -> None:
        self.channel, theirs = Channel.pair()
        self.child = Channel(theirs)

    def send(self, order: Event) -> None:
        self.channel.send(order)

    def heard(self) -> list[Event]:
        return [event for _, event in self.channel.receive_available()]

    def close(self, leaving: str) -> None:
        self.channel.close()
        self.child.close()


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch) -> Iterator[rendezvous.Party]:
    monkeypatch.setattr(rendezvous, "Meeting", Told)
    run = make_run(1, num_nodes=2, node_rank=1, rdzv_conf={"secret": "s"})
    run.started = time.time()
    wake, waker = socket.socketpair()
    wake.setblocking(False)
    assert run.plan is not None
    with wake, waker:
        found = rendezvous.Party(run, run.plan, TextPublisher(), wake, list)
        yield found
        found.close()


def met(party: rendezvous.Party, *more: Event) -> None:
    for event in (say.MetEvent(0, 1, NODES, "127.0.0.1", 1), *more):
        party._meeting.child.send(event)  # type: ignore[attr-defined]
    assert party.gather(0) is not None


def test_the_door_that_is_told_together_with_the_meeting_is_called(party: rendezvous.Party) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    begin = time.monotonic()
    met(party, say.DoorEvent("127.0.0.1", port))
    assert any(f"127.0.0.1:{port}" in note for note in party._run.notes), "nobody called at the door"
    assert time.monotonic() - begin < VISIT_SECONDS


@pytest.mark.parametrize("door", [0, 1, 2])
def test_news_that_come_together_with_the_meeting_are_heard_once_the_ranks_run(
    party: rendezvous.Party, door: int
) -> None:
    told: list[Event] = [
        say.StandEvent(0, True, "rank 0 is paused"),
        say.NewsEvent("failed", 0, "rank 0 failed: KeyError"),
    ]
    told.insert(door, say.DoorEvent("127.0.0.1", 1))
    met(party, *told)
    run = party._run
    assert run.plan is not None
    group = Group(run, run.plan, TextPublisher(), party._wake, list, Stopwatch())
    party.attend(group)
    assert group.on_step is not None
    group.on_step()
    assert party._standstill.stopwatch.standing
    reason = group.ending.reason
    assert reason is not None
    assert (reason.error, reason.text) == (WorkerError, "rank 0 failed: KeyError")
