"""Joins the other notebooks: connects to the store, registers this notebook, and waits until all have arrived.

The phases are methods: ``_connecting``, ``_arriving``, ``_wishing``, ``_joining``, ``_gathering``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from notebook_accelerate.launch.hosts.rendezvous import membership as rules
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as say
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.participant import Participant
from notebook_accelerate.launch.hosts.rendezvous.signed_messages import ForgedError


class BrokenError(Exception):
    """The rendezvous failed.

    Args:
        kind: As in `rendezvous_protocol.BrokenEvent`.
        text: The reason.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Joining:
    """Joins one notebook to each attempt of a run.

    Args:
        seat: This notebook's participant state.
    """

    def __init__(self, seat: Participant) -> None:
        self._seat = seat
        self._phase: Callable[[], None] = self._connecting
        self._deadline = 0.0
        self._said, self._hosted = "", False
        self._arrival = 0
        self._come: dict[int, Node] = {}
        self._refused: set[int] = set()
        self._looked_at = -1
        self._wished: dict[str, Any] | None = None
        self._connecting_task: stores.Task[stores.Connection] | None = None
        self._handler: Any = None
        self._join: stores.Task[Any] | None = None
        self._expected = 0
        self._ranks_store: Any = None
        self._members: list[Node] = []

    def begin(self, attempt: int) -> None:
        """Join the others for one attempt."""
        seat = self._seat
        seat.attempt = attempt
        self._deadline = time.monotonic() + stores.join_seconds(seat.order)
        self._members = []
        if seat.connection is None:
            self._connect()
        else:
            self._start_joining()

    def step(self) -> list[Node]:
        """Advance the current phase; return the notebooks in order once all have arrived, an empty list before.

        Raises:
            BrokenError: The rendezvous failed.
        """
        try:
            self._phase()
        except (RuntimeError, OSError):
            if self._phase not in (self._arriving, self._wishing):
                raise
            self._look_again()  # the store of an ended run closed while this notebook was connected
        return self._members

    def leave(self, why: str, kind: str) -> None:
        """Withdraw this notebook, so that the others do not wait for it.

        Args:
            why: The reason that the others receive.
            kind: Why the rendezvous failed, as in `rendezvous_protocol.BrokenEvent`; "" when this notebook leaves by
                itself.
        """
        seat = self._seat
        if not self._arrival:
            return
        seat.directory.post(f"gone/{self._arrival}", {"why": why})
        # Notebooks that have already found all members of this round must not wait for this one's ranks.
        seat.round.first(f"lost/{seat.node.name}", {"why": why})
        seat.round.count("news", 1)
        if seat.hosting:  # without the store no notebook can join
            text = why if kind else f"{rules.title(seat.node.node_rank, seat.node.host)}: {why}"
            seat.directory.first("broken", {"kind": kind or "stopped", "text": text})
        seat.directory.count("generation", 1)

    def end_attempt(self) -> None:
        """Release the ranks' store; the ranks have ended."""
        self._ranks_store = None

    # ---- connecting to the store

    def _connect(self) -> None:
        self._connecting_task = stores.Task(lambda: stores.connect(self._seat.order))
        self._phase = self._connecting

    def _look_again(self) -> None:
        """Find or host the store again: the store that answered was that of another run, or of one that has ended."""
        self._seat.connection, self._arrival = None, 0
        self._connect()

    def _connecting(self) -> None:
        seat, task = self._seat, self._connecting_task
        assert task is not None
        if not task.done:
            if time.monotonic() > self._deadline:
                self._missing([seat.node])
            self._say_waiting([seat.node], f" at {seat.where}")
            return
        try:
            connection = task.result()
        except stores.PortTakenError as error:
            raise BrokenError("port", str(error)) from error
        except socket.gaierror as error:
            raise BrokenError("connection", f"{seat.order.address!r} is not a known host: {error}") from error
        except Exception as error:
            if time.monotonic() + 5 > self._deadline:
                self._missing([seat.node])
            text = f"the rendezvous at {seat.where} did not answer: {error}"
            raise BrokenError("connection", text) from error
        self._connected(connection)

    def _connected(self, connection: stores.Connection) -> None:
        seat = self._seat
        seat.connection = connection
        seat.node = replace(seat.node, hosting=connection.hosting)
        if connection.hosting:
            seat.directory.post("hello", {"name": seat.node.name})
        self._phase = self._arriving

    def _arriving(self) -> None:
        """Check that the store belongs to this run, and register this notebook."""
        seat = self._seat
        hello = seat.directory.read("hello")
        running = None if hello is None else seat.directory.read("running")
        if running is not None and not self._has_ended(running):
            self._come_late(running)
            return
        if hello is None or running is not None or self._is_over():
            # The store of another run, or of one that has just ended and that this one follows.
            if hello is not None:
                self._look_again()
            elif time.monotonic() > self._deadline:
                text = f"a rendezvous answers at {seat.where}, but not for rdzv_id={seat.order.run_id!r}"
                raise BrokenError("timeout", text)
            return
        if not self._arrival:
            self._sign_in()
        self._start_joining()

    def _sign_in(self) -> None:
        self._arrival = self._seat.directory.count("arrivals", 1)
        self._seat.directory.post(f"arrival/{self._arrival}", self._seat.node.as_dict())

    def _is_over(self) -> bool:
        """Whether the store stays open only until the others have read the final decision or the failure."""
        return any(self._seat.directory.read(key) is not None for key in ("closed", "broken"))

    # ---- a late notebook

    def _has_ended(self, running: dict[str, Any]) -> bool:
        """Whether a run with all its notebooks has ended, although its store is still open."""
        decision = self._seat.directory.under(running["round"]).read("decision")
        return decision is not None and decision["action"] == "end"

    def _began_without_us(self) -> bool:
        """Check whether the others have started while this notebook waits to be admitted."""
        running = self._seat.directory.read("running")
        if running is None or any(each["name"] == self._seat.node.name for each in running["nodes"]):
            return False
        if self._seat.attempt > running["attempt"]:  # an earlier attempt
            return False
        self._come_late(running)
        return True

    def _come_late(self, running: dict[str, Any]) -> None:
        """Handle a run that started without this notebook: request a restart that includes it, if there is room."""
        seat, order = self._seat, self._seat.order
        members = [Node.from_dict(each) for each in running["nodes"]]
        if trouble := rules.problem(order.backend, [*members, seat.node]):
            raise BrokenError("mismatch", trouble)
        if not rules.has_room(members, running["attempt"], order.backend):
            raise BrokenError("late", rules.late_text(members, order.num_nodes))
        if not self._arrival:
            self._sign_in()
        self._wished = running
        number = seat.directory.count("wishes", 1)
        seat.directory.post(f"wish/{number}", {**seat.node.as_dict(), "arrival": self._arrival})
        seat.directory.under(running["round"]).count("news", 1)
        seat.channel.send(say.WaitingEvent(rules.wish_text(members, order.num_nodes)))
        self._phase = self._wishing

    def _wishing(self) -> None:
        """Wait until the running notebooks decide to restart with this one."""
        assert self._wished is not None
        seat = self._seat
        decision = seat.directory.under(self._wished["round"]).read("decision")
        if time.monotonic() > self._deadline:
            members = [Node.from_dict(each) for each in self._wished["nodes"]]
            raise BrokenError("late", rules.late_text(members, seat.order.num_nodes))
        if decision is None:
            return
        if decision["action"] == "restart" and seat.node.name in decision["left"]:
            seat.attempt, seat.left = int(self._wished["attempt"]) + 1, list(decision["left"])
            self._deadline = time.monotonic() + stores.join_seconds(seat.order)
            self._start_joining()
        elif decision["action"] == "end" or seat.directory.read("running") != self._wished:
            self._phase = self._arriving  # the run is over, or has restarted without this notebook

    # ---- the rendezvous

    def _start_joining(self) -> None:
        self._seat.generation = self._seat.directory.count("generation")
        self._phase = self._joining
        self._join = stores.Task(self._next_rendezvous)

    def _next_rendezvous(self) -> Any:
        """Join through torch's handler; runs on a separate thread, because it blocks."""
        seat, order = self._seat, self._seat.order
        assert seat.connection is not None
        if order.backend == "static" and self._handler is not None:
            return self._handler.next_rendezvous()
        most = len(seat.left) or order.num_nodes
        least = min(seat.node.min_nodes, most)
        run_id = f"{order.run_id}.{seat.round_name}"
        hosting = seat.connection.hosting
        self._handler = stores.handler(order, seat.seal, run_id, least, most, hosting=hosting)
        return self._handler.next_rendezvous()

    def _joining(self) -> None:
        seat = self._seat
        come = self._who_has_come()
        if self._somebody_left():
            return
        assert self._join is not None
        if not self._join.done:
            if trouble := rules.problem(seat.order.backend, come):
                raise BrokenError("mismatch", trouble)
            if time.monotonic() > self._deadline:
                self._missing(come)
            if not self._began_without_us() and not seat.left:
                self._say_waiting(come)
            return
        if seat.hosting and not self._hosted:  # all arrived at once: record the join instructions anyway
            self._say_waiting(come)
        info = self._join.result()
        member = replace(seat.node, order=info.rank)
        seat.round.post(f"member/{info.rank}", member.as_dict())
        self._expected = info.world_size
        self._phase = self._gathering

    def _gathering(self) -> None:
        """Read the node of every member."""
        found = [self._seat.round.read(f"member/{rank}") for rank in range(self._expected)]
        members = [Node.from_dict(each) for each in found if each is not None]
        complete = len(members) == self._expected
        # torch counts two notebooks with the same node_rank as two, so this point can be reached with duplicates.
        if trouble := rules.problem(self._seat.order.backend, members if complete else self._who_has_come()):
            raise BrokenError("mismatch", trouble)
        if not complete:
            if not self._somebody_left() and time.monotonic() > self._deadline:
                self._missing(members)
            return
        place = self._ranks_place()
        if place is not None:
            self._met(rules.in_order(members), *place)

    def _somebody_left(self) -> bool:
        """Check whether a notebook left early; torch's rendezvous still counts it, so the round starts again."""
        if self._seat.directory.count("generation") == self._seat.generation:
            return False
        broken = self._seat.directory.read("broken")
        if broken is not None:
            raise BrokenError(str(broken["kind"]), str(broken["text"]))
        self._start_joining()
        return True

    def _ranks_place(self) -> tuple[str, int] | None:
        """Return the address of the ranks' store; each attempt has a new one, because torch's ranks reuse keys."""
        seat, order = self._seat, self._seat.order
        if seat.attempt == 0 and seat.generation == 0:
            return order.address, order.port
        if seat.hosting and self._ranks_store is None:
            listener = _listen_beside(order.address)
            port = listener.getsockname()[1]
            self._ranks_store = stores.host(order.address, listener, order)
            seat.round.post("store", {"address": order.address, "port": port})
        place = seat.round.read("store")
        return None if place is None else (str(place["address"]), int(place["port"]))

    def _met(self, members: list[Node], address: str, port: int) -> None:
        seat = self._seat
        index = [node.name for node in members].index(seat.node.name)
        told = [node.as_dict() for node in members]
        if index == 0:
            seat.directory.post("running", {"round": seat.round_name, "nodes": told, "attempt": seat.attempt})
        if note := rules.version_note(members):
            seat.channel.send(say.NoteEvent(note))
        way = stores.way_to(seat.order.address, seat.order.port)
        seat.channel.send(say.MetEvent(seat.attempt, index, told, address, port, *way))
        self._members = members

    # ---- arrivals

    def _who_has_come(self) -> list[Node]:
        """Return the notebooks that have arrived and have not left."""
        directory = self._seat.directory
        generation = directory.count("generation")
        changed, self._looked_at = generation != self._looked_at, generation
        for number in range(1, directory.count("arrivals") + 1):
            if number not in self._refused and (changed or number not in self._come):
                self._look_at_arrival(number)
        return list(self._come.values())

    def _look_at_arrival(self, number: int) -> None:
        directory = self._seat.directory
        try:
            if directory.read(f"gone/{number}") is not None:
                self._come.pop(number, None)
            elif told := directory.read(f"arrival/{number}"):
                self._come[number] = Node.from_dict({**told, "order": number})
        except ForgedError:
            self._refused.add(number)
            self._seat.channel.send(say.NoteEvent("a notebook without this run's secret was refused"))

    def _missing(self, come: list[Node]) -> NoReturn:
        """Fail because the join timeout was reached.

        Raises:
            BrokenError: Always; its text lists the missing notebooks.
        """
        seat, order = self._seat, self._seat.order
        if len({node.name for node in come}) >= order.num_nodes:
            who = ", ".join(f"{node.host} (kernel {node.pid})" for node in come)
            raise BrokenError("timeout", f"the run has its {order.num_nodes} notebooks already: {who}")
        text = rules.timeout_text(order.backend, order.num_nodes, come, stores.join_seconds(order))
        if seat.connection is None:
            text += f"; nobody answers at {seat.where}"
        raise BrokenError("timeout", text)

    def _say_waiting(self, come: list[Node], where: str = "") -> None:
        order, hosting = self._seat.order, self._seat.hosting
        text = rules.waiting_text(order.backend, order.num_nodes, come) + where
        if text != self._said:
            self._seat.channel.send(say.WaitingEvent(text, hosting and not self._hosted))
            self._said, self._hosted = text, hosting


def _listen_beside(address: str) -> socket.socket:
    """Return a socket that listens on a free port of ``address``; on all interfaces if the address is not local."""
    try:
        return stores.listen(address, 0)
    except OSError:
        return stores.listen("", 0)


__all__ = ["BrokenError", "Joining"]
