"""The child process of a kernel that meets the other notebooks: everything that waits, listens or keeps alive is here.

It is one loop over the kernel's orders and the state of the meeting, whose phases are methods: ``_connecting``,
``_joining``, ``_gathering``, ``_running``, ``_leaving``. It ends with the run, and soon after its kernel.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, NoReturn

import torch

from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.rendezvous import messages as say
from notebook_accelerate.launch.rendezvous import nodes as rules
from notebook_accelerate.launch.rendezvous import store as stores
from notebook_accelerate.launch.rendezvous.directory import Directory, ForgedError, Seal
from notebook_accelerate.launch.rendezvous.nodes import Node
from notebook_accelerate.telemetry import Channel, Event

TICK = 0.1
"""Seconds between two looks at the store."""
LINGER = 3.0
"""Seconds that a store outlives the kernel that died beside it, so that the others can read why."""
PARTING = 0.6
"""Seconds that a store waits for those who wait at it to read that nobody will come."""
FAREWELL = 5.0
"""Seconds that a store waits for the others to have read the last word."""

SILENT = "the rendezvous, which it hosts, does not answer any more"


class Child:
    """One notebook's part in a meeting.

    Args:
        channel: To the kernel.
        order: Its first message.
    """

    def __init__(self, channel: Channel, order: say.MeetOrder) -> None:
        self._channel, self._order = channel, order
        self._seal = Seal(order.secret, order.run_id)
        self._node = Node.from_dict({**order.node, "torch": torch.__version__})
        self._phase: Callable[[], None] = self._idle
        self._orders: deque[Event] = deque()
        self._aside = ThreadPoolExecutor(1)
        self._said, self._hosted = "", False
        self._over = False
        self._arrival = 0
        self._come: dict[int, Node] = {}
        self._refused: set[int] = set()
        self._looked_at = -1
        self._expected = 0
        self._connecting_task: stores.Task[stores.Connection] | None = None
        self._connection: stores.Connection | None = None
        self._deadline = 0.0
        self._attempt, self._generation = 0, 0
        self._left: list[str] = []
        self._handler: Any = None
        self._join: stores.Task[Any] | None = None
        self._ranks_store: Any = None
        self._members: list[Node] = []
        self._seen_news = -1
        self._told: set[tuple[str, str]] = set()
        self._stands: dict[str, dict[str, Any]] = {}
        self._lost: dict[str, str] = {}
        self._ends: dict[str, dict[str, Any]] = {}
        self._ended = self._orphaned = False
        self._broken = ""
        self._wished: dict[str, Any] | None = None
        self._door: dict[str, Any] | None = None
        self._beat_at = 0.0
        self._beats: dict[str, tuple[int, float]] = {}

    def run(self, orders: Sequence[Event]) -> None:
        """Serve until the kernel has no more use for this process, or is gone.

        What asks the store runs on a thread beside: a machine that has gone without a word is waited for, for minutes.

        Args:
            orders: What has come already.
        """
        self._orders.extend(orders)
        try:
            while not self._over:
                step, began = self._aside.submit(self._step), time.monotonic()
                self._hear()
                while not step.done() and not self._overdue(began):
                    self._hear()
                if step.done():
                    step.result()
        except ChannelClosedError:
            self._bereaved()

    def _hear(self) -> None:
        self._orders.extend(event for _, event in self._channel.receive(TICK))

    def _overdue(self, began: float) -> bool:
        """See whether the store has not answered for so long that whoever hosts it is taken for lost."""
        limit = stores.keep_alive(self._order)[1]
        if self._connection is None or self._hosting or time.monotonic() - began < limit:
            return False
        self._aside = ThreadPoolExecutor(1)  # the other thread may wait for minutes, and then has nothing to say
        self._store_failed(TimeoutError(f"it did not answer for {limit:g} s"))
        return True

    def _step(self) -> None:
        """Do what the kernel has ordered, then what the phase asks for."""
        try:
            while self._orders:
                self._obey(self._orders.popleft())
            if not self._over:
                self._phase()
        except ForgedError as error:
            self._break("secret", str(error))
        except (RuntimeError, OSError, ValueError) as error:  # what torch raises when a store has gone
            self._store_failed(error)

    # ---- what the kernel says

    def _obey(self, event: Event) -> None:
        if isinstance(event, say.JoinOrder):
            self._begin(event)
        elif isinstance(event, say.NewsOrder):
            self._post("news", {"kind": event.kind, "text": event.text, "failures": event.failures})
        elif isinstance(event, say.StandOrder):
            self._post("stand", {"standing": event.standing, "text": event.text})
        elif isinstance(event, say.EndOrder):
            self._ended = True
            self._ends[self._node.name] = {
                "outcome": event.outcome, "text": event.text, "failures": event.failures, "final": event.final,
            }  # fmt: skip
            self._post("end", self._ends[self._node.name])
        elif isinstance(event, say.DoorEvent):
            self._door = {"address": event.address, "port": event.port}
            with self._store_errors():
                self._round.post("door", self._door)
                self._round.count("news", 1)
        elif isinstance(event, say.LeaveOrder):
            self._go(event.text or "it has left")
            if self._hosting and not self._members and self._phase != self._leaving:
                time.sleep(PARTING)
            self._over = True

    def _begin(self, order: say.JoinOrder) -> None:
        self._attempt = order.attempt
        self._deadline = time.monotonic() + stores.join_seconds(self._order)
        self._members, self._ends, self._lost = [], {}, {}
        self._told, self._beats, self._stands, self._seen_news = set(), {}, {}, -1
        self._ended, self._door = False, None
        if self._connection is None:
            self._connecting_task = stores.Task(lambda: stores.connect(self._order))
            self._phase = self._connecting
        else:
            self._start_joining()

    def _post(self, kind: str, values: dict[str, Any]) -> None:
        if self._orphaned or not self._members:
            return
        with self._store_errors():
            self._round.post(f"{kind}/{self._node.name}", values)
            self._round.count("news", 1)

    @contextlib.contextmanager
    def _store_errors(self) -> Any:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._store_failed(error)

    # ---- phases

    def _idle(self) -> None:
        """Wait for an order."""

    def _connecting(self) -> None:
        task = self._connecting_task
        assert task is not None
        where = f"{self._order.address}:{self._order.port}"
        if not task.done:
            if time.monotonic() > self._deadline:
                self._missing([self._node])
            self._say_waiting([self._node], f" at {where}")
            return
        try:
            connection = task.result()
        except stores.PortTakenError as error:
            self._break("port", str(error))
            return
        except socket.gaierror as error:
            self._break("connection", f"{self._order.address!r} is not a known host: {error}")
            return
        except Exception as error:  # noqa: BLE001 - torch has several for a store that does not answer
            if time.monotonic() + 5 > self._deadline:
                self._missing([self._node])
            else:
                self._break("connection", f"the rendezvous at {where} did not answer: {error}")
            return
        self._connected(connection)

    def _connected(self, connection: stores.Connection) -> None:
        self._connection = connection
        self._node = replace(self._node, hosting=connection.hosting)
        if connection.hosting:
            self._directory.post("hello", {"name": self._node.name})
        self._phase = self._arriving

    def _arriving(self) -> None:
        """See that the store is that of this run, and sign in."""
        hello = self._directory.read("hello")
        running = None if hello is None else self._directory.read("running")
        if running is not None and not self._has_ended(running):
            self._come_late(running)
            return
        if hello is None or running is not None or self._directory.read("closed") is not None:
            # A store of another run, or of one that has just ended and will be followed by this one.
            if hello is not None:
                self._connection, self._arrival = None, 0
                self._connecting_task = stores.Task(lambda: stores.connect(self._order))
                self._phase = self._connecting
            elif time.monotonic() > self._deadline:
                where = f"{self._order.address}:{self._order.port}"
                self._break("timeout", f"a rendezvous answers at {where}, but not for rdzv_id={self._order.run_id!r}")
            return
        if not self._arrival:
            self._sign_in()
        self._start_joining()

    def _has_ended(self, running: dict[str, Any]) -> bool:
        """Whether a run that had all its notebooks has come to its end, though its store is still there."""
        decision = self._directory.under(running["round"]).read("decision")
        return decision is not None and decision["action"] == "end"

    def _began_without_us(self) -> bool:
        """See whether the others have begun, while this notebook waits to be counted."""
        running = self._directory.read("running")
        if running is None or any(each["name"] == self._node.name for each in running["nodes"]):
            return False
        if self._attempt > running["attempt"]:  # that was before
            return False
        self._come_late(running)
        return True

    def _come_late(self, running: dict[str, Any]) -> None:
        """The run has begun without this notebook: have it start again with it, where it has room."""
        members = [Node.from_dict(each) for each in running["nodes"]]
        if trouble := rules.problem(self._order.backend, [*members, self._node]):
            self._break("mismatch", trouble)
        elif not rules.has_room(members, running["attempt"], self._order.backend):
            self._break("late", rules.late_text(members, self._order.num_nodes))
        else:
            if not self._arrival:
                self._sign_in()
            self._wished = running
            number = self._directory.count("wishes", 1)
            self._directory.post(f"wish/{number}", {**self._node.as_dict(), "arrival": self._arrival})
            self._directory.under(running["round"]).count("news", 1)
            self._channel.send(say.WaitingEvent(rules.wish_text(members, self._order.num_nodes)))
            self._phase = self._wishing

    def _wishing(self) -> None:
        """Wait until those that run have decided to start again with this notebook."""
        assert self._wished is not None
        decision = self._directory.under(self._wished["round"]).read("decision")
        if time.monotonic() > self._deadline:
            members = [Node.from_dict(each) for each in self._wished["nodes"]]
            self._break("late", rules.late_text(members, self._order.num_nodes))
        elif decision is None:
            return
        elif decision["action"] == "restart" and self._node.name in decision["left"]:
            self._attempt, self._left = int(self._wished["attempt"]) + 1, list(decision["left"])
            self._deadline = time.monotonic() + stores.join_seconds(self._order)
            self._start_joining()
        elif decision["action"] == "end" or self._directory.read("running") != self._wished:
            self._phase = self._arriving  # it is over, or has started again without this notebook

    def _sign_in(self) -> None:
        self._arrival = self._directory.count("arrivals", 1)
        self._directory.post(f"arrival/{self._arrival}", self._node.as_dict())

    def _wishes(self) -> dict[str, Node]:
        """Return the notebooks that wish to be taken in by the run, by name."""
        found = [self._directory.read(f"wish/{n}") for n in range(1, self._directory.count("wishes") + 1)]
        members = {node.name for node in self._members}
        there = [
            Node.from_dict(wish)
            for wish in found
            if wish and wish["name"] not in members and not self._directory.read(f"gone/{wish['arrival']}")
        ]
        return {node.name: node for node in there[: max(0, self._order.num_nodes - len(members))]}

    def _start_joining(self) -> None:
        self._generation = self._directory.count("generation")
        self._phase = self._joining
        self._join = stores.Task(self._next_rendezvous)

    def _next_rendezvous(self) -> Any:
        """Join through torch's handler; on a thread of its own, for it waits."""
        order = self._order
        assert self._connection is not None
        if order.backend == "static" and self._handler is not None:
            return self._handler.next_rendezvous()
        most = len(self._left) or order.num_nodes
        least = min(self._node.min_nodes, most)
        run_id = f"{order.run_id}.{self._attempt}.{self._generation}"
        hosting = self._connection.hosting
        self._handler = stores.handler(order, self._seal, run_id, least, most, hosting=hosting)
        return self._handler.next_rendezvous()

    def _joining(self) -> None:
        come = self._who_has_come()
        if self._somebody_left():
            return
        assert self._join is not None
        if not self._join.done:
            if trouble := rules.problem(self._order.backend, come):
                self._break("mismatch", trouble)
            elif time.monotonic() > self._deadline:
                self._missing(come)
            elif not self._began_without_us() and not self._left:
                self._say_waiting(come)
            return
        if self._hosting and not self._hosted:  # all have come at once: how they were asked is kept
            self._say_waiting(come)
        info = self._join.result()
        member = replace(self._node, order=info.rank)
        self._round.post(f"member/{info.rank}", member.as_dict())
        self._expected = info.world_size
        self._phase = self._gathering

    def _gathering(self) -> None:
        """Read of all members what they bring."""
        found = [self._round.read(f"member/{rank}") for rank in range(self._expected)]
        members = [Node.from_dict(each) for each in found if each is not None]
        complete = len(members) == self._expected
        # torch counts two notebooks with one node_rank as two, so that this one may be here before they are noticed.
        if trouble := rules.problem(self._order.backend, members if complete else self._who_has_come()):
            self._break("mismatch", trouble)
            return
        if not complete:
            if not self._somebody_left() and time.monotonic() > self._deadline:
                self._missing(members)
            return
        place = self._ranks_place()
        if place is not None:
            self._met(rules.in_order(members), *place)

    def _somebody_left(self) -> bool:
        """See whether a notebook left before all had come; torch's rendezvous, which still counts it, starts anew."""
        if self._directory.count("generation") == self._generation:
            return False
        broken = self._directory.read("broken")
        if broken is None:
            self._start_joining()
        else:
            self._break(str(broken["kind"]), str(broken["text"]))
        return True

    def _ranks_place(self) -> tuple[str, int] | None:
        """Return where the ranks' store is: each attempt has its own, for torch's ranks use the same keys again."""
        order = self._order
        if self._attempt == 0 and self._generation == 0:
            return order.address, order.port
        assert self._connection is not None
        if self._connection.hosting and self._ranks_store is None:
            listener = _listen_beside(order.address)
            port = listener.getsockname()[1]
            self._ranks_store = stores.host(order.address, listener, order)
            self._round.post("store", {"address": order.address, "port": port})
        place = self._round.read("store")
        return None if place is None else (str(place["address"]), int(place["port"]))

    def _met(self, members: list[Node], address: str, port: int) -> None:
        self._members = members
        index = [node.name for node in members].index(self._node.name)
        if index == 0:
            told = {"nodes": [node.as_dict() for node in members], "attempt": self._attempt}
            self._directory.post("running", {"round": f"{self._attempt}.{self._generation}", **told})
        if note := rules.version_note(members):
            self._channel.send(say.NoteEvent(note))
        way = stores.way_to(self._order.address, self._order.port)
        self._channel.send(
            say.MetEvent(self._attempt, index, [node.as_dict() for node in members], address, port, *way)
        )
        now = time.monotonic()
        self._beats = {node.name: (0, now) for node in members}
        self._phase = self._running

    def _running(self) -> None:
        if self._orphaned:
            self._decide_alone()
            return
        self._keep_alive()
        news = self._round.count("news")
        if news != self._seen_news:
            self._seen_news = news
            self._read_news()
            self._read_wishes()
            self._decide()

    def _leaving(self) -> None:
        """Host the store until the others have read the last word."""
        others = len(self._left) - 1
        if not self._hosting or self._round.count("byes") >= others or time.monotonic() > self._deadline:
            self._over = True

    # ---- while the ranks run

    def _keep_alive(self) -> None:
        now = time.monotonic()
        interval, limit = stores.keep_alive(self._order)
        if now < self._beat_at:
            return
        self._beat_at = now + min(interval, 1.0) / 2
        self._round.count(f"alive/{self._node.name}", 1)
        for node in self._members:
            if node.name in (self._node.name, *self._lost, *self._ends):
                continue
            count = self._round.count(f"alive/{node.name}")
            before, since = self._beats[node.name]
            if count != before:
                self._beats[node.name] = (count, now)
            elif now - since > limit:
                self._declare_lost(node, f"it gave no sign of life for {limit:g} s")

    def _declare_lost(self, node: Node, why: str) -> None:
        self._round.first(f"lost/{node.name}", {"why": why})
        self._round.count("news", 1)

    def _read_news(self) -> None:
        if self._door is None and (door := self._round.read("door")):
            self._door = door
            self._channel.send(say.DoorEvent(str(door["address"]), int(door["port"])))
        for index, node in enumerate(self._members):
            if node.name not in self._lost and (lost := self._round.read(f"lost/{node.name}")):
                self._lost[node.name] = str(lost["why"])
                self._tell_kernel("lost", index, rules.lost_text(index, node.host, self._lost[node.name]))
            if node.name not in self._ends and (end := self._round.read(f"end/{node.name}")):
                self._ends[node.name] = end
                if end["outcome"] in ("failed", "stopped") and not any(name == node.name for name, _ in self._told):
                    self._told.add((node.name, end["outcome"]))
                    self._tell_kernel(end["outcome"], index, f"{rules.title(index, node.host)}: {end['text']}")
            if node.name != self._node.name:
                self._read_news_of(index, node)

    def _read_wishes(self) -> None:
        if not rules.has_room(self._members, self._attempt, self._order.backend):
            return
        for name, node in self._wishes().items():
            if (name, "joining") not in self._told:
                self._told.add((name, "joining"))
                self._tell_kernel("joining", 0, rules.joining_text(node))

    def _read_news_of(self, index: int, node: Node) -> None:
        stand = self._round.read(f"stand/{node.name}")
        if stand is not None and stand != self._stands.get(node.name):
            self._stands[node.name] = stand
            self._channel.send(say.StandEvent(index, bool(stand["standing"]), str(stand["text"])))
        news = self._round.read(f"news/{node.name}")
        if news is not None and (node.name, news["kind"]) not in self._told:
            self._told.add((node.name, news["kind"]))
            text = f"{rules.title(index, node.host)}: {news['text']}"
            self._channel.send(say.NewsEvent(news["kind"], index, text, news.get("failures", [])))

    def _tell_kernel(self, kind: str, index: int, text: str) -> None:
        self._channel.send(say.NewsEvent(kind, index, text))

    def _decide(self) -> None:
        if not self._ended:
            return
        again = rules.has_room(self._members, self._attempt, self._order.backend)
        wishes = list(self._wishes().values()) if again else []
        wanted = rules.decide(self._members, self._ends, self._lost, self._attempt, self._order.backend, wishes)
        if wanted is not None:
            self._decided(self._round.first("decision", wanted))

    def _decide_alone(self) -> None:
        """The store is gone, and with it whoever hosted it: there is nobody to decide with."""
        if self._ended:
            gone = next((node for node in self._members if node.hosting), self._members[0])
            why = {gone.name: SILENT}
            self._decided({"action": "end", "reason": "", "left": [self._node.name]}, {**why, **self._lost})

    def _decided(self, decision: dict[str, Any], lost: dict[str, str] | None = None) -> None:
        indices = {node.name: str(index) for index, node in enumerate(self._members)}
        lost = self._lost if lost is None else lost
        self._left = list(decision["left"])
        self._channel.send(
            say.DecisionEvent(
                decision["action"], decision["reason"], {indices[name]: end for name, end in self._ends.items()},
                {indices[name]: why for name, why in lost.items()}, len(self._left),
            )
        )  # fmt: skip
        self._ranks_store = None
        if decision["action"] == "restart" and self._node.name in self._left:
            self._phase = self._idle
            return
        self._deadline = time.monotonic() + FAREWELL
        self._phase = self._leaving
        if self._orphaned:
            self._over = True
        elif self._hosting:
            self._directory.post("closed", {})
        else:
            self._round.count("byes", 1)

    # ---- what goes wrong

    def _missing(self, come: list[Node]) -> None:
        order = self._order
        if len({node.name for node in come}) >= order.num_nodes:
            who = ", ".join(f"{node.host} (kernel {node.pid})" for node in come)
            self._break("timeout", f"the run has its {order.num_nodes} notebooks already: {who}")
            return
        text = rules.timeout_text(order.backend, order.num_nodes, come, stores.join_seconds(order))
        if self._connection is None:
            text += f"; nobody answers at {order.address}:{order.port}"
        self._break("timeout", text)

    def _break(self, kind: str, text: str) -> None:
        self._channel.send(say.BrokenEvent(kind, text))
        self._broken = kind
        self._go(text)
        self._phase = self._idle

    def _store_failed(self, error: Exception) -> None:
        if self._phase == self._leaving:
            self._over = True
        elif not self._members:
            where = f"{self._order.address}:{self._order.port}"
            text = f"the notebook that hosts the rendezvous at {where} left before all had joined"
            detail = str(error).partition("\n")[0][:200]
            self._channel.send(say.BrokenEvent("connection", f"{text} ({type(error).__name__}: {detail})"))
            self._phase = self._idle
        elif not self._orphaned:
            self._orphaned = True
            index = next((index for index, node in enumerate(self._members) if node.hosting), 0)
            node = self._members[index]
            if node.name not in self._ends and node.name not in self._lost:
                text = rules.lost_text(index, node.host, SILENT)
                self._tell_kernel("lost", index, text)

    def _bereaved(self) -> None:
        """Tell the others that this kernel is gone, as far as the store still answers."""
        leaving = self._phase == self._leaving
        wait([self._aside.submit(self._wait_for_byes if leaving else self._say_farewell)], 2 * FAREWELL)

    def _say_farewell(self) -> None:
        self._go("its kernel ended")
        if self._hosting:
            time.sleep(LINGER)

    def _wait_for_byes(self) -> None:
        while not self._over:
            self._step()
            time.sleep(TICK)

    def _go(self, why: str) -> None:
        """Tell the others not to wait for this notebook any longer."""
        if self._connection is None or self._orphaned:
            return
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            if self._members:
                if self._node.name not in self._ends:
                    self._declare_lost(self._node, why)
            elif self._arrival:
                self._directory.post(f"gone/{self._arrival}", {"why": why})
                if self._hosting:  # nobody can meet without the store
                    text = why if self._broken else f"{rules.title(self._node.node_rank, self._node.host)}: {why}"
                    self._directory.first("broken", {"kind": self._broken or "stopped", "text": text})
                self._directory.count("generation", 1)

    # ---- looks

    @property
    def _hosting(self) -> bool:
        return self._connection is not None and self._connection.hosting

    @property
    def _directory(self) -> Directory:
        assert self._connection is not None
        return Directory(self._connection.store, f"notebook_accelerate/{self._order.run_id}", self._seal)

    @property
    def _round(self) -> Directory:
        return self._directory.under(f"{self._attempt}.{self._generation}")

    def _who_has_come(self) -> list[Node]:
        """Return who has come and has not left again."""
        generation = self._directory.count("generation")
        changed, self._looked_at = generation != self._looked_at, generation
        for number in range(1, self._directory.count("arrivals") + 1):
            if number not in self._refused and (changed or number not in self._come):
                self._look_at_arrival(number)
        return list(self._come.values())

    def _look_at_arrival(self, number: int) -> None:
        try:
            if self._directory.read(f"gone/{number}") is not None:
                self._come.pop(number, None)
            elif told := self._directory.read(f"arrival/{number}"):
                self._come[number] = Node.from_dict({**told, "order": number})
        except ForgedError:
            self._refused.add(number)
            self._channel.send(say.NoteEvent("a notebook without this run's secret was refused"))

    def _say_waiting(self, come: list[Node], where: str = "") -> None:
        text = rules.waiting_text(self._order.backend, self._order.num_nodes, come) + where
        if text != self._said:
            self._channel.send(say.WaitingEvent(text, self._hosting and not self._hosted))
            self._said, self._hosted = text, self._hosting


def _listen_beside(address: str) -> socket.socket:
    """Return a socket that listens on any free port of an address; on all where it is not this machine's own."""
    try:
        return stores.listen(address, 0)
    except OSError:
        return stores.listen("", 0)


def main(descriptor: int) -> NoReturn:
    """Be the child process.

    Args:
        descriptor: Its end of the socket pair with the kernel.
    """
    # torch would open a store of its own for the ranks, on every interface: they use the one at the meeting point.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    channel = Channel(socket.socket(fileno=descriptor))
    with contextlib.suppress(ChannelClosedError):
        first, *more = [event for _, event in channel.receive()]
        assert isinstance(first, say.MeetOrder)
        Child(channel, first).run(more)
    os._exit(0)  # torch's waiting threads have nothing more to say
