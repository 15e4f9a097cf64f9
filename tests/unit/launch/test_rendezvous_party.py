"""One notebook's part in a meeting, where a busy kernel reads several words of the child process at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from notebook_accelerate.errors import WorkerError
from notebook_accelerate.launch.hosts.rendezvous import notebook_group as rendezvous
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as say
from notebook_accelerate.launch.hosts.rendezvous.membership import Node, decide
from notebook_accelerate.launch.hosts.rendezvous.peer_ranks import VISIT_SECONDS
from notebook_accelerate.launch.output.rank_lines import TextPublisher
from notebook_accelerate.launch.state.run_events import AttemptStarted, RankExited, RankStarted
from notebook_accelerate.launch.supervisor.command_queue import CommandQueue
from notebook_accelerate.launch.supervisor.rank_group import RankGroup
from notebook_accelerate.launch.supervisor.run_context import RunContext
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP
from notebook_accelerate.telemetry import Channel, Event
from tests.support.runs import plan_run

NODES = [
    Node(name="a", host="left", pid=1, node_rank=0, processes=1, max_restarts=1).as_dict(),
    Node(name="b", host="right", pid=2, node_rank=1, processes=1, max_restarts=1).as_dict(),
]
MET = say.MetEvent(0, 1, NODES, "127.0.0.1", 1)


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
def commands() -> Iterator[CommandQueue]:
    found = CommandQueue()
    yield found
    found.close()


@pytest.fixture
def party(monkeypatch: pytest.MonkeyPatch, commands: CommandQueue) -> Iterator[rendezvous.NotebookGroup]:
    monkeypatch.setattr(rendezvous, "RendezvousClient", Told)
    run = plan_run(1, started=time.time(), num_nodes=2, node_rank=1, max_restarts=1, rdzv_conf={"secret": "s"})
    context = RunContext(run.id, run.config, run.function_name, run.journal, commands, TextPublisher())
    assert run.plan is not None
    found = rendezvous.NotebookGroup(context, run.plan)
    yield found
    found.close()


def tell(party: rendezvous.NotebookGroup, *events: Event) -> None:
    for event in events:
        party._meeting.child.send(event)  # type: ignore[attr-defined]


def orders(party: rendezvous.NotebookGroup, seconds: float) -> list[Event]:
    return [event for _, event in party._meeting.child.receive(seconds)]  # type: ignore[attr-defined]


def met(party: rendezvous.NotebookGroup, *more: Event) -> None:
    tell(party, MET, *more)
    assert party.gather(0) is not None


def attended(party: rendezvous.NotebookGroup) -> RankGroup:
    plan = party._context.state.plan
    assert plan is not None
    party._context.journal.append(AttemptStarted(0))
    group = RankGroup(party._context, plan)
    party.attend(group)
    return group


def test_the_door_that_is_told_together_with_the_meeting_is_called(party: rendezvous.NotebookGroup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    begin = time.monotonic()
    met(party, say.ListenerEvent("127.0.0.1", port))
    assert any(f"127.0.0.1:{port}" in note for note in party._context.state.notes), "nobody called at the door"
    assert time.monotonic() - begin < VISIT_SECONDS


@pytest.mark.parametrize("door", [0, 1, 2])
def test_news_that_come_together_with_the_meeting_are_heard_once_the_ranks_run(
    party: rendezvous.NotebookGroup, door: int
) -> None:
    told: list[Event] = [
        say.StandEvent(0, True, "rank 0 is paused"),
        say.NewsEvent("failed", 0, "rank 0 failed: KeyError"),
    ]
    told.insert(door, say.ListenerEvent("127.0.0.1", 1))
    met(party, *told)
    group = attended(party)
    assert group.on_step is not None
    group.on_step()
    assert party._context.clock.suspended
    reason = group.stops.reason
    assert reason is not None
    assert (reason.error, reason.text) == (WorkerError, "rank 0 failed: KeyError")


@pytest.mark.parametrize("together", [[MET], [MET, say.ListenerEvent("127.0.0.1", 1)]])
def test_a_stop_that_comes_together_with_the_meeting_is_heard(
    party: rendezvous.NotebookGroup, commands: CommandQueue, together: list[Event]
) -> None:
    commands.stop(5.0)
    tell(party, *together)
    assert party.gather(0) is None
    assert party.why_stopped == USER_STOP
    assert orders(party, 0.0) == [say.JoinOrder(0), say.NewsOrder("stopped", USER_STOP.text)]


def test_ranks_that_have_ended_are_paused_and_interrupted_in_vain(
    party: rendezvous.NotebookGroup, commands: CommandQueue
) -> None:
    """Another thread may want that while the ranks end, and this one waits for the other notebooks then."""
    commands.hold_clock(1)
    commands.interrupt([1])
    met(party, say.ListenerEvent("127.0.0.1", 1))
    assert party._context.clock.suspended
    commands.release_clock(1)
    party._carry_out()
    assert not party._context.clock.suspended


def test_a_stop_after_the_ranks_have_ended_keeps_all_from_starting_again(
    party: rendezvous.NotebookGroup, commands: CommandQueue
) -> None:
    met(party, say.ListenerEvent("127.0.0.1", 1))
    group = attended(party)
    told: list[Event] = []

    def others() -> None:
        """Have the user stop while the other notebook's ranks run, which follow."""
        deadline = time.monotonic() + 60
        while not any(isinstance(event, say.EndOrder) for event in told) and time.monotonic() < deadline:
            told.extend(orders(party, 1.0))
        commands.stop(5.0)
        while not any(isinstance(event, say.NewsOrder) for event in told) and time.monotonic() < deadline:
            told.extend(orders(party, 1.0))
        told.extend(orders(party, 1.0))
        own = next(event for event in reversed(told) if isinstance(event, say.EndOrder))
        ends = {"a": {"outcome": "followed"}, "b": {"outcome": own.outcome, "text": own.text}}
        decided = decide([Node.from_dict(node) for node in NODES], ends, {}, 0, "static")
        assert decided is not None
        told_of = {"0": ends["a"], "1": ends["b"]}
        tell(party, say.DecisionEvent(decided["action"], decided["reason"], told_of, {}, len(decided["left"])))

    thread = threading.Thread(target=others)
    thread.start()
    for event in (RankStarted(1, 1), RankExited(1, "succeeded", "exit 0")):
        party._context.journal.append(event)
    assert not party.conclude(group, ())
    thread.join()
    ended = party.verdict()
    assert (ended.status, ended.error) == ("stopped", "RunStoppedError")
