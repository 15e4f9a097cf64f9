"""What a notebook's child process says and does at the meeting, where things come in an order that nobody expects."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from notebook_accelerate.launch.hosts.rendezvous import rendezvous_loop as children
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as say
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.joining import Joining
from notebook_accelerate.launch.hosts.rendezvous.keep_alive import SILENT, Watch
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.participant import Participant
from notebook_accelerate.telemetry import Channel, Event


class Mortal:
    """A store whose host may go."""

    def __init__(self) -> None:
        self._store = HashStore()
        self.gone = False

    def __getattr__(self, name: str) -> object:
        if self.gone:
            raise RuntimeError("the connection was reset by the peer")
        return getattr(self._store, name)


class Notebook:
    """One notebook's child process, as far as it needs neither processes nor torch's rendezvous.

    Args:
        node_rank: Its index.
        store: Where it meets the others.
        hosting: Whether it hosts that.
    """

    def __init__(self, node_rank: int, store: Mortal, *, hosting: bool = False) -> None:
        self.kernel, theirs = Channel.pair()
        node = Node(name="ab"[node_rank], host="h", pid=1, node_rank=node_rank, processes=1, max_restarts=1)
        self.order = say.RendezvousOrder("static", "127.0.0.1", 1, "run", 2, node.as_dict())
        self.channel = Channel(theirs)
        self.child = children.Child(self.channel, self.order)
        self.seat: Participant = self.child._seat
        self.joining: Joining = self.child._joining
        self.seat.connection = stores.Connection(store, hosting=hosting)
        self.node = Node.from_dict({**node.as_dict(), "hosting": hosting})
        self.seat.node = self.node

    def watch(self, members: list[Node]) -> Watch:
        """Let it have met the others."""
        self.child._watch = Watch(self.seat, members)
        self.child._phase = self.child._running
        return self.child._watch

    def said(self) -> list[Event]:
        """Return what its kernel has been told."""
        return [event for _, event in self.kernel.receive(0.0)]

    def close(self) -> None:
        self.child._aside.shutdown()
        self.kernel.close()
        self.channel.close()


@pytest.fixture
def store() -> Mortal:
    return Mortal()


@pytest.fixture
def pair(store: Mortal) -> Iterator[list[Notebook]]:
    """Return two notebooks, of which the first hosts the store."""
    found = [Notebook(0, store, hosting=True), Notebook(1, store)]
    yield found
    for notebook in found:
        notebook.close()


def watches(pair: list[Notebook]) -> list[Watch]:
    members = [notebook.node for notebook in pair]
    return [notebook.watch(members) for notebook in pair]


def end(outcome: str) -> dict[str, object]:
    return {"outcome": outcome, "text": "", "failures": [], "final": False}


def test_a_notebook_that_is_stopped_after_its_ranks_had_ended_is_not_started_again(pair: list[Notebook]) -> None:
    first, second = watches(pair)
    first.tell_end(end("failed"))
    assert second.step() is None
    first.tell_end(end("stopped"))
    second.tell_end(end("followed"))
    decisions = [watch.step() for watch in (second, first)]
    assert [decision.action for decision in decisions if decision is not None] == ["end", "end"]


def test_who_had_told_the_end_of_its_ranks_is_not_lost_with_the_store(pair: list[Notebook], store: Mortal) -> None:
    first, second = watches(pair)
    first.tell_end(end("succeeded"))
    assert second.step() is None
    store.gone = True
    with pytest.raises(RuntimeError):
        second.step()
    second.store_gone()
    second.tell_end(end("succeeded"))
    decision = second.step()
    assert decision is not None
    assert (decision.action, decision.lost, sorted(decision.ends)) == ("end", {}, ["0", "1"])


def test_who_had_not_told_it_is_lost_with_the_store(pair: list[Notebook], store: Mortal) -> None:
    _, second = watches(pair)
    store.gone = True
    second.store_gone()
    second.tell_end(end("failed"))
    decision = second.step()
    assert decision is not None
    assert decision.lost == {"0": SILENT}


def test_who_leaves_when_all_have_come_is_lost_for_those_that_have_begun(pair: list[Notebook]) -> None:
    first, second = pair
    second.joining._sign_in()
    watch = first.watch([first.node, second.node])
    second.joining.leave("it was stopped", "")
    watch.step()
    assert first.said() == [say.NewsEvent("lost", 1, "node 1 (h) was lost: it was stopped")]


def test_a_host_that_leaves_lets_the_others_read_why(pair: list[Notebook], monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair
    watches(pair)
    slept: list[float] = []

    def look(seconds: float) -> None:
        slept.append(seconds)
        assert second.child._watch is not None
        second.child._watch.step()

    monkeypatch.setattr(children.time, "sleep", look)
    first.child._orders.append(say.LeaveOrder("the launch failed"))
    first.child._step()
    assert slept == [children.PARTING]
    assert first.child._over
    assert second.said() == [say.NewsEvent("lost", 0, "node 0 (h) was lost: the launch failed")]


@pytest.mark.parametrize("word", ["closed", "broken"])
@pytest.mark.parametrize("when", ["at the store", "on the way", "after the last word"])
def test_the_store_of_the_run_before_is_left_for_the_next_one(
    pair: list[Notebook], store: Mortal, monkeypatch: pytest.MonkeyPatch, word: str, when: str
) -> None:
    """Whoever hosted it may be gone before, while or after this notebook has read that it is over."""
    first, second = pair
    first.seat.directory.post("hello", {"name": "a"})
    if when != "on the way":
        first.seat.directory.post(word, {"kind": "stopped", "text": "it was stopped"})
    found = [stores.Connection(store, hosting=False), stores.Connection(Mortal(), hosting=True)]
    monkeypatch.setattr(stores, "connect", lambda _: found.pop(0))
    second.seat.connection = None
    second.joining.begin(0)
    store.gone = when == "on the way"
    deadline = time.monotonic() + 60
    while not second.seat.hosting:
        assert time.monotonic() < deadline
        second.child._phase = second.child._gathering
        second.child._step()
        store.gone = store.gone or (when == "at the store" and second.seat.connection is not None)
    assert second.seat.directory.read("hello") == {"name": "b"}
    assert not [event for event in second.said() if isinstance(event, say.BrokenEvent)]


def test_a_late_notebook_whose_run_is_gone_begins_the_next_one(
    pair: list[Notebook], store: Mortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair
    first.seat.directory.post("hello", {"name": "a"})
    first.seat.directory.post("running", {"round": "0.0", "nodes": [first.node.as_dict()], "attempt": 0})
    second.seat.order.backend = "c10d"
    second.joining._deadline = time.monotonic() + 60
    second.joining._arriving()
    assert isinstance(second.said()[-1], say.WaitingEvent)
    store.gone = True
    monkeypatch.setattr(stores, "connect", lambda _: stores.Connection(Mortal(), hosting=True))
    while not second.seat.hosting:
        assert time.monotonic() < second.joining._deadline
        second.joining.step()


def test_torchs_own_error_of_a_store_that_has_gone_is_told_in_words(
    pair: list[Notebook], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second = pair

    def fail() -> list[Node]:
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(second.joining, "step", fail)
    second.child._phase = second.child._gathering
    second.child._step()
    (told,) = second.said()
    assert isinstance(told, say.BrokenEvent)
    assert "left before all had joined (RendezvousConnectionError" in told.text
