"""A notebook's rendezvous when a busy kernel reads several events of the child process at once."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.errors import WorkerError
from notebook_accelerate.launch.hosts.rendezvous import notebook_group as rendezvous
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous.membership import Node, decide
from notebook_accelerate.launch.hosts.rendezvous.peer_ranks import CONNECT_SECONDS
from notebook_accelerate.launch.output.rank_lines import TextPublisher
from notebook_accelerate.launch.processes.fork import ForkBackend
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
JOINED = protocol.AllJoinedEvent(0, 1, NODES, "127.0.0.1", 1)


class FakeClient:
    """A client whose child process sends the events of a test at once."""

    def __init__(self, *_: object) -> None:
        self.channel, theirs = Channel.pair()
        self.child = Channel(theirs)

    def send(self, order: Event) -> None:
        self.channel.send(order)

    def receive(self) -> list[Event]:
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
def group(monkeypatch: pytest.MonkeyPatch, commands: CommandQueue) -> Iterator[rendezvous.NotebookGroup]:
    monkeypatch.setattr(rendezvous, "RendezvousClient", FakeClient)
    run = plan_run(1, started=time.time(), num_nodes=2, node_rank=1, max_restarts=1, rdzv_conf={"secret": "s"})
    context = RunContext(run.id, run.config, run.function_name, run.journal, commands, TextPublisher())
    assert run.plan is not None
    found = rendezvous.NotebookGroup(context, run.plan)
    yield found
    found.close()


def send(group: rendezvous.NotebookGroup, *events: Event) -> None:
    for event in events:
        group._client.child.send(event)  # type: ignore[attr-defined]


def orders(group: rendezvous.NotebookGroup, seconds: float) -> list[Event]:
    return [event for _, event in group._client.child.receive(seconds)]  # type: ignore[attr-defined]


def joined(group: rendezvous.NotebookGroup, *more: Event) -> None:
    send(group, JOINED, *more)
    assert group.gather(0) is not None


def followed(group: rendezvous.NotebookGroup) -> RankGroup:
    plan = group._context.state.plan
    assert plan is not None
    group._context.journal.append(AttemptStarted(0))
    ranks = RankGroup(group._context, plan)
    group.follow(ranks)
    return ranks


def test_a_listener_that_arrives_together_with_the_members_is_connected(group: rendezvous.NotebookGroup) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    begin = time.monotonic()
    joined(group, protocol.ListenerEvent("127.0.0.1", port))
    assert any(f"127.0.0.1:{port}" in note for note in group._context.state.notes), (
        "no connection to the listener was attempted"
    )
    assert time.monotonic() - begin < CONNECT_SECONDS


@pytest.mark.parametrize("position", [0, 1, 2])
def test_news_that_arrive_together_with_the_members_are_handled_once_the_ranks_run(
    group: rendezvous.NotebookGroup, position: int
) -> None:
    events: list[Event] = [
        protocol.PauseEvent(0, True, "rank 0 is paused"),
        protocol.NewsEvent("failed", 0, "rank 0 failed: KeyError"),
    ]
    events.insert(position, protocol.ListenerEvent("127.0.0.1", 1))
    joined(group, *events)
    ranks = followed(group)
    assert ranks.on_step is not None
    ranks.on_step()
    assert group._context.clock.suspended
    reason = ranks.stops.reason
    assert reason is not None
    assert (reason.error, reason.text) == (WorkerError, "rank 0 failed: KeyError")


@pytest.mark.parametrize("events", [[JOINED], [JOINED, protocol.ListenerEvent("127.0.0.1", 1)]])
def test_a_stop_that_arrives_together_with_the_members_is_handled(
    group: rendezvous.NotebookGroup, commands: CommandQueue, events: list[Event]
) -> None:
    commands.stop(5.0)
    send(group, *events)
    assert group.gather(0) is None
    assert group.why_stopped == USER_STOP
    assert orders(group, 0.0) == [protocol.JoinOrder(0), protocol.NewsOrder("stopped", USER_STOP.text)]


def test_pausing_and_interrupting_ended_ranks_does_nothing(
    group: rendezvous.NotebookGroup, commands: CommandQueue
) -> None:
    """Another thread may want that while the ranks end, and this one waits for the other notebooks then."""
    commands.hold_clock(1)
    commands.interrupt([1])
    joined(group, protocol.ListenerEvent("127.0.0.1", 1))
    assert group._context.clock.suspended
    commands.release_clock(1)
    group._carry_out()
    assert not group._context.clock.suspended


def test_a_stop_after_the_ranks_have_ended_prevents_a_restart(
    group: rendezvous.NotebookGroup, commands: CommandQueue
) -> None:
    joined(group, protocol.ListenerEvent("127.0.0.1", 1))
    ranks = followed(group)
    events: list[Event] = []

    def others() -> None:
        """Have the user stop while the other notebook's ranks run, which follow."""
        deadline = time.monotonic() + 60
        while not any(isinstance(event, protocol.EndOrder) for event in events) and time.monotonic() < deadline:
            events.extend(orders(group, 1.0))
        commands.stop(5.0)
        while not any(isinstance(event, protocol.NewsOrder) for event in events) and time.monotonic() < deadline:
            events.extend(orders(group, 1.0))
        events.extend(orders(group, 1.0))
        own = next(event for event in reversed(events) if isinstance(event, protocol.EndOrder))
        ends = {"a": {"outcome": "followed"}, "b": {"outcome": own.outcome, "text": own.text}}
        decided = decide([Node.from_dict(node) for node in NODES], ends, {}, 0, "static")
        assert decided is not None
        ends_by_index = {"0": ends["a"], "1": ends["b"]}
        send(group, protocol.DecisionEvent(decided["action"], decided["reason"], ends_by_index, {}))

    thread = threading.Thread(target=others)
    thread.start()
    for event in (RankStarted(1, 1), RankExited(1, "succeeded", "exit 0")):
        group._context.journal.append(event)
    assert not group.conclude(ranks, ())
    thread.join()
    ended = group.verdict()
    assert (ended.status, ended.error) == ("stopped", "RunStoppedError")


def test_the_start_method_of_this_notebook_is_configured(
    group: rendezvous.NotebookGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow start of the server process is reported with several notebooks, too."""
    own, received = ForkBackend(print, ()), []
    monkeypatch.setattr(own, "configure", lambda *arguments: received.append(arguments))
    given = (LaunchConfig(), print, bool)
    group.backend(own).configure(*given)
    assert received == [given]
