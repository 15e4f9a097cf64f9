"""The rendezvous process of one notebook, with events in unexpected orders."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from notebook_accelerate.launch.hosts.rendezvous import rendezvous_loop as children
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.joining import Joining
from notebook_accelerate.launch.hosts.rendezvous.keep_alive import SILENT, Attempt
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.participant import Participant
from notebook_accelerate.telemetry import Channel, Event


class LosableStore:
    """A store whose host may be lost."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.lost = False

    def __getattr__(self, name: str) -> object:
        if self.lost:
            raise RuntimeError("the connection was reset by the peer")
        return getattr(self._store, name)


class Notebook:
    """One notebook's child process, as far as it needs neither processes nor torch's rendezvous.

    Args:
        node_rank: Its index.
        store: The rendezvous store.
        hosting: Whether it hosts the store.
    """

    def __init__(self, node_rank: int, store: LosableStore, *, hosting: bool = False) -> None:
        self.kernel, theirs = Channel.pair()
        node = Node(name="ab"[node_rank], host="h", pid=1, node_rank=node_rank, processes=1, max_restarts=1)
        self.order = protocol.RendezvousOrder("static", "127.0.0.1", 1, "run", 2, node.as_dict())
        self.channel = Channel(theirs)
        self.child = children.Child(self.channel, self.order)
        self.participant: Participant = self.child._participant
        self.joining: Joining = self.child._joining
        self.participant.connection = stores.Connection(store, hosting=hosting)
        self.node = Node.from_dict({**node.as_dict(), "hosting": hosting})
        self.participant.node = self.node

    def attempt(self, members: list[Node]) -> Attempt:
        """Start an attempt after all have joined."""
        self.child._attempt = Attempt(self.participant, members)
        self.child._phase = self.child._running
        return self.child._attempt

    def received(self) -> list[Event]:
        """Return the events that its kernel has received."""
        return [event for _, event in self.kernel.receive(0.0)]

    def close(self) -> None:
        self.child._executor.shutdown()
        self.kernel.close()
        self.channel.close()


@pytest.fixture
def store() -> LosableStore:
    return LosableStore()


@pytest.fixture
def pair(store: LosableStore) -> Iterator[list[Notebook]]:
    """Return two notebooks, of which the first hosts the store."""
    found = [Notebook(0, store, hosting=True), Notebook(1, store)]
    yield found
    for notebook in found:
        notebook.close()


def attempts(pair: list[Notebook]) -> list[Attempt]:
    members = [notebook.node for notebook in pair]
    return [notebook.attempt(members) for notebook in pair]


def end(outcome: str) -> dict[str, object]:
    return {"outcome": outcome, "text": "", "failures": [], "final": False}


def test_a_notebook_stopped_after_its_ranks_ended_does_not_restart(pair: list[Notebook]) -> None:
    first, second = attempts(pair)
    first.publish_end(end("failed"))
    assert second.step() is None
    first.publish_end(end("stopped"))
    second.publish_end(end("followed"))
    decisions = [attempt.step() for attempt in (second, first)]
    assert [decision.action for decision in decisions if decision is not None] == ["end", "end"]


def test_a_host_that_published_its_end_is_not_lost_with_the_store(pair: list[Notebook], store: LosableStore) -> None:
    first, second = attempts(pair)
    first.publish_end(end("succeeded"))
    assert second.step() is None
    store.lost = True
    with pytest.raises(RuntimeError):
        second.step()
    second.on_store_lost()
    second.publish_end(end("succeeded"))
    decision = second.step()
    assert decision is not None
    assert (decision.action, decision.lost, sorted(decision.ends)) == ("end", {}, ["0", "1"])


def test_a_host_that_did_not_publish_its_end_is_lost_with_the_store(pair: list[Notebook], store: LosableStore) -> None:
    _, second = attempts(pair)
    store.lost = True
    second.on_store_lost()
    second.publish_end(end("failed"))
    decision = second.step()
    assert decision is not None
    assert decision.lost == {"0": SILENT}


def test_a_notebook_that_leaves_after_all_joined_is_reported_lost(pair: list[Notebook]) -> None:
    first, second = pair
    second.joining._register()
    attempt = first.attempt([first.node, second.node])
    second.joining.leave("it was stopped", failed=False)
    attempt.step()
    assert first.received() == [protocol.NewsEvent("lost", 1, "node 1 (h) was lost: it was stopped")]


def test_a_leaving_host_keeps_the_store_open_for_its_reason(
    pair: list[Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    attempts(pair)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert second.child._attempt is not None
        second.child._attempt.step()

    monkeypatch.setattr(children.time, "sleep", sleep)
    first.child._orders.append(protocol.LeaveOrder("the launch failed"))
    first.child._step()
    assert slept == [children.LEAVE_SECONDS]
    assert first.child._ended
    assert second.received() == [protocol.NewsEvent("lost", 0, "node 0 (h) was lost: the launch failed")]


@pytest.mark.parametrize("key", ["closed", "failure"])
@pytest.mark.parametrize("when", ["connected", "connecting", "after the end"])
def test_the_store_of_an_ended_run_is_replaced_by_that_of_the_next(
    pair: list[Notebook], store: LosableStore, monkeypatch: pytest.MonkeyPatch, key: str, when: str
) -> None:
    """The host may be lost before, while or after this notebook reads that the run has ended."""
    first, second = pair
    first.participant.directory.post("hello", {"name": "a"})
    if when != "connecting":
        first.participant.directory.post(key, {"text": "it was stopped"})
    found = [stores.Connection(store, hosting=False), stores.Connection(LosableStore(), hosting=True)]
    monkeypatch.setattr(stores, "connect", lambda _: found.pop(0))
    second.participant.connection = None
    second.joining.begin(0)
    store.lost = when == "connecting"
    deadline = time.monotonic() + 60
    while not second.participant.hosting:
        assert time.monotonic() < deadline
        second.child._phase = second.child._joining_others
        second.child._step()
        store.lost = store.lost or (when == "connected" and second.participant.connection is not None)
    assert second.participant.directory.read("hello") == {"name": "b"}
    assert not [event for event in second.received() if isinstance(event, protocol.JoinFailedEvent)]


def test_a_late_notebook_whose_run_is_lost_begins_the_next_one(
    pair: list[Notebook], store: LosableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    first.participant.directory.post("hello", {"name": "a"})
    first.participant.directory.post("running", {"round": "0.0", "nodes": [first.node.as_dict()], "attempt": 0})
    second.participant.order.backend = "c10d"
    second.joining._deadline = time.monotonic() + 60
    second.joining._arriving()
    assert isinstance(second.received()[-1], protocol.WaitingEvent)
    store.lost = True
    monkeypatch.setattr(stores, "connect", lambda _: stores.Connection(LosableStore(), hosting=True))
    while not second.participant.hosting:
        assert time.monotonic() < second.joining._deadline
        second.joining.step()


def test_an_error_of_torch_about_a_lost_store_is_explained(
    pair: list[Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = pair

    def fail() -> list[Node]:
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(second.joining, "step", fail)
    second.child._phase = second.child._joining_others
    second.child._step()
    (failure,) = second.received()
    assert isinstance(failure, protocol.JoinFailedEvent)
    assert "left before all had joined (RendezvousConnectionError" in failure.text
