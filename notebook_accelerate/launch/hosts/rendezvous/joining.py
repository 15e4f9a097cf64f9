"""Joins the other notebooks: connects to the store, registers this notebook, and waits until all have arrived.

The phases are methods: ``_connecting``, ``_arriving``, ``_awaiting_restart``, ``_joining``, ``_gathering``.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NoReturn

from notebook_accelerate.launch.hosts.addresses import listen
from notebook_accelerate.launch.hosts.rendezvous import membership
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.participant import Participant
from notebook_accelerate.launch.hosts.rendezvous.signed_messages import ForgedError


class JoinError(Exception):
    """The rendezvous failed, with the reason."""


class Joining:
    """Joins one notebook to each attempt of a run.

    Args:
        participant: This notebook's participant state.
    """

    def __init__(self, participant: Participant) -> None:
        self._participant = participant
        self._phase: Callable[[], None] = self._connecting
        self._deadline = 0.0
        self._waiting_text, self._instructions_sent = "", False
        self._arrival = 0
        self._arrived: dict[int, Node] = {}
        self._refused: set[int] = set()
        self._generation_seen = -1
        self._late_for: dict[str, Any] | None = None
        self._connecting_task: Future[stores.Connection] | None = None
        self._handler: Any = None
        self._join: Future[Any] | None = None
        self._expected = 0
        self._ranks_store: Any = None
        self._members: list[Node] = []

    def begin(self, attempt: int) -> None:
        """Join the others for one attempt."""
        participant = self._participant
        participant.attempt = attempt
        self._deadline = time.monotonic() + stores.join_seconds(participant.order)
        self._members = []
        if participant.connection is None:
            self._connect()
        else:
            self._start_joining()

    def step(self) -> list[Node]:
        """Advance the current phase; return the notebooks in order once all have arrived, an empty list before.

        Raises:
            JoinError: The rendezvous failed.
        """
        try:
            self._phase()
        except (RuntimeError, OSError):
            if self._phase not in (self._arriving, self._awaiting_restart):
                raise
            self._reconnect()  # the store of an ended run closed while this notebook was connected
        return self._members

    def leave(self, why: str, *, failed: bool) -> None:
        """Withdraw this notebook, so that the others do not wait for it.

        Args:
            why: The reason that the others receive.
            failed: Whether the rendezvous failed; otherwise this notebook leaves by itself.
        """
        participant = self._participant
        if not self._arrival:
            return
        participant.directory.post(f"gone/{self._arrival}", {"why": why})
        # Notebooks that have already found all members of this round must not wait for this one's ranks.
        participant.round.first(f"lost/{participant.node.name}", {"why": why})
        participant.round.count("news", 1)
        if participant.hosting:  # without the store no notebook can join
            text = why if failed else f"{membership.title(participant.node.node_rank, participant.node.host)}: {why}"
            participant.directory.first("failure", {"text": text})
        participant.directory.count("generation", 1)

    def end_attempt(self) -> None:
        """Release the ranks' store; the ranks have ended."""
        self._ranks_store = None

    # ---- connecting to the store

    def _connect(self) -> None:
        self._connecting_task = stores.in_thread(lambda: stores.connect(self._participant.order))
        self._phase = self._connecting

    def _reconnect(self) -> None:
        """Find or host the store again: the store that answered was that of another run, or of one that has ended."""
        self._participant.connection, self._arrival = None, 0
        self._connect()

    def _connecting(self) -> None:
        participant, task = self._participant, self._connecting_task
        assert task is not None
        if not task.done():
            if time.monotonic() > self._deadline:
                self._time_out([participant.node])
            self._send_waiting([participant.node], f" at {participant.endpoint}")
            return
        try:
            connection = task.result()
        except stores.PortTakenError as error:
            raise JoinError(str(error)) from error
        except socket.gaierror as error:
            raise JoinError(f"{participant.order.address!r} is not a known host: {error}") from error
        except Exception as error:
            if time.monotonic() + 5 > self._deadline:
                self._time_out([participant.node])
            text = f"the rendezvous at {participant.endpoint} did not answer: {error}"
            raise JoinError(text) from error
        self._connected(connection)

    def _connected(self, connection: stores.Connection) -> None:
        participant = self._participant
        participant.connection = connection
        participant.node = replace(participant.node, hosting=connection.hosting)
        if connection.hosting:
            participant.directory.post("hello", {"name": participant.node.name})
        self._phase = self._arriving

    def _arriving(self) -> None:
        """Check that the store belongs to this run, and register this notebook."""
        participant = self._participant
        hello = participant.directory.read("hello")
        running = None if hello is None else participant.directory.read("running")
        if running is not None and not self._has_ended(running):
            self._join_late(running)
            return
        if hello is None or running is not None or self._is_over():
            # The store of another run, or of one that has just ended and that this one follows.
            if hello is not None:
                self._reconnect()
            elif time.monotonic() > self._deadline:
                run_id = participant.order.run_id
                raise JoinError(f"a rendezvous answers at {participant.endpoint}, but not for rdzv_id={run_id!r}")
            return
        if not self._arrival:
            self._register()
        self._start_joining()

    def _register(self) -> None:
        self._arrival = self._participant.directory.count("arrivals", 1)
        self._participant.directory.post(f"arrival/{self._arrival}", self._participant.node.as_dict())

    def _is_over(self) -> bool:
        """Whether the store stays open only until the others have read the final decision or the failure."""
        return any(self._participant.directory.read(key) is not None for key in ("closed", "failure"))

    # ---- a late notebook

    def _has_ended(self, running: dict[str, Any]) -> bool:
        """Whether a run with all its notebooks has ended, although its store is still open."""
        decision = self._participant.directory.under(running["round"]).read("decision")
        return decision is not None and decision["action"] == "end"

    def _started_without_this(self) -> bool:
        """Check whether the others have started while this notebook waits to be admitted."""
        running = self._participant.directory.read("running")
        if running is None or any(each["name"] == self._participant.node.name for each in running["nodes"]):
            return False
        if self._participant.attempt > running["attempt"]:  # an earlier attempt
            return False
        self._join_late(running)
        return True

    def _join_late(self, running: dict[str, Any]) -> None:
        """Handle a run that started without this notebook: request a restart that includes it, if there is room."""
        participant, order = self._participant, self._participant.order
        members = [Node.from_dict(each) for each in running["nodes"]]
        if mismatch := membership.problem(order.backend, [*members, participant.node]):
            raise JoinError(mismatch)
        if not membership.has_room(members, running["attempt"], order.backend):
            raise JoinError(membership.late_text(members, order.num_nodes))
        if not self._arrival:
            self._register()
        self._late_for = running
        number = participant.directory.count("late", 1)
        participant.directory.post(f"late/{number}", {**participant.node.as_dict(), "arrival": self._arrival})
        participant.directory.under(running["round"]).count("news", 1)
        participant.channel.send(protocol.WaitingEvent(membership.late_join_text(members, order.num_nodes)))
        self._phase = self._awaiting_restart

    def _awaiting_restart(self) -> None:
        """Wait until the running notebooks decide to restart with this one."""
        assert self._late_for is not None
        participant = self._participant
        decision = participant.directory.under(self._late_for["round"]).read("decision")
        if time.monotonic() > self._deadline:
            members = [Node.from_dict(each) for each in self._late_for["nodes"]]
            raise JoinError(membership.late_text(members, participant.order.num_nodes))
        if decision is None:
            return
        if decision["action"] == "restart" and participant.node.name in decision["remaining"]:
            participant.attempt, participant.remaining = int(self._late_for["attempt"]) + 1, list(decision["remaining"])
            self._deadline = time.monotonic() + stores.join_seconds(participant.order)
            self._start_joining()
        elif decision["action"] == "end" or participant.directory.read("running") != self._late_for:
            self._phase = self._arriving  # the run is over, or has restarted without this notebook

    # ---- the rendezvous

    def _start_joining(self) -> None:
        self._participant.generation = self._participant.directory.count("generation")
        self._phase = self._joining
        self._join = stores.in_thread(self._next_rendezvous)

    def _next_rendezvous(self) -> Any:
        """Join through torch's handler; runs on a separate thread, because it blocks."""
        participant, order = self._participant, self._participant.order
        assert participant.connection is not None
        if order.backend == "static" and self._handler is not None:
            return self._handler.next_rendezvous()
        most = len(participant.remaining) or order.num_nodes
        least = min(participant.node.min_nodes, most)
        run_id = f"{order.run_id}.{participant.round_name}"
        hosting = participant.connection.hosting
        self._handler = stores.handler(order, participant.signer, run_id, least, most, hosting=hosting)
        return self._handler.next_rendezvous()

    def _joining(self) -> None:
        participant = self._participant
        arrived = self._arrived_nodes()
        if self._restart_after_departure():
            return
        assert self._join is not None
        if not self._join.done():
            if mismatch := membership.problem(participant.order.backend, arrived):
                raise JoinError(mismatch)
            if time.monotonic() > self._deadline:
                self._time_out(arrived)
            if not self._started_without_this() and not participant.remaining:
                self._send_waiting(arrived)
            return
        if participant.hosting and not self._instructions_sent:  # all arrived at once: send the instructions anyway
            self._send_waiting(arrived)
        info = self._join.result()
        member = replace(participant.node, order=info.rank)
        participant.round.post(f"member/{info.rank}", member.as_dict())
        self._expected = info.world_size
        self._phase = self._gathering

    def _gathering(self) -> None:
        """Read the node of every member."""
        found = [self._participant.round.read(f"member/{rank}") for rank in range(self._expected)]
        members = [Node.from_dict(each) for each in found if each is not None]
        complete = len(members) == self._expected
        # torch counts two notebooks with the same node_rank as two, so this point can be reached with duplicates.
        nodes = members if complete else self._arrived_nodes()
        if mismatch := membership.problem(self._participant.order.backend, nodes):
            raise JoinError(mismatch)
        if not complete:
            if not self._restart_after_departure() and time.monotonic() > self._deadline:
                self._time_out(members)
            return
        address = self._ranks_address()
        if address is not None:
            self._complete(membership.in_order(members), *address)

    def _restart_after_departure(self) -> bool:
        """Check whether a notebook left early; torch's rendezvous still counts it, so the round starts again."""
        if self._participant.directory.count("generation") == self._participant.generation:
            return False
        failure = self._participant.directory.read("failure")
        if failure is not None:
            raise JoinError(str(failure["text"]))
        self._start_joining()
        return True

    def _ranks_address(self) -> tuple[str, int] | None:
        """Return the address of the ranks' store; each attempt has a new one, because torch's ranks reuse keys."""
        participant, order = self._participant, self._participant.order
        if participant.attempt == 0 and participant.generation == 0:
            return order.address, order.port
        if participant.hosting and self._ranks_store is None:
            listener = _listen_beside(order.address)
            port = listener.getsockname()[1]
            self._ranks_store = stores.host(order.address, listener, order)
            participant.round.post("store", {"address": order.address, "port": port})
        address = participant.round.read("store")
        return None if address is None else (str(address["address"]), int(address["port"]))

    def _complete(self, members: list[Node], address: str, port: int) -> None:
        participant = self._participant
        index = [node.name for node in members].index(participant.node.name)
        nodes = [node.as_dict() for node in members]
        if index == 0:
            running = {"round": participant.round_name, "nodes": nodes, "attempt": participant.attempt}
            participant.directory.post("running", running)
        if note := membership.version_note(members):
            participant.channel.send(protocol.NoteEvent(note))
        route = stores.route_to(participant.order.address, participant.order.port)
        participant.channel.send(protocol.AllJoinedEvent(participant.attempt, index, nodes, address, port, *route))
        self._members = members

    # ---- arrivals

    def _arrived_nodes(self) -> list[Node]:
        """Return the notebooks that have arrived and have not left."""
        directory = self._participant.directory
        generation = directory.count("generation")
        changed, self._generation_seen = generation != self._generation_seen, generation
        for number in range(1, directory.count("arrivals") + 1):
            if number not in self._refused and (changed or number not in self._arrived):
                self._read_arrival(number)
        return list(self._arrived.values())

    def _read_arrival(self, number: int) -> None:
        directory = self._participant.directory
        try:
            if directory.read(f"gone/{number}") is not None:
                self._arrived.pop(number, None)
            elif values := directory.read(f"arrival/{number}"):
                self._arrived[number] = Node.from_dict({**values, "order": number})
        except ForgedError:
            self._refused.add(number)
            self._participant.channel.send(protocol.NoteEvent("a notebook without this run's secret was refused"))

    def _time_out(self, arrived: list[Node]) -> NoReturn:
        """Fail because the join timeout was reached.

        Raises:
            JoinError: Always; its text lists the missing notebooks.
        """
        participant, order = self._participant, self._participant.order
        if len({node.name for node in arrived}) >= order.num_nodes:
            names = membership.kernels(arrived)
            raise JoinError(f"the run has its {order.num_nodes} nodes already: {names}")
        text = membership.timeout_text(order.backend, order.num_nodes, arrived, stores.join_seconds(order))
        if participant.connection is None:
            text += f"; no rendezvous answers at {participant.endpoint}"
        raise JoinError(text)

    def _send_waiting(self, arrived: list[Node], endpoint: str = "") -> None:
        order, hosting = self._participant.order, self._participant.hosting
        text = membership.waiting_text(order.backend, order.num_nodes, arrived) + endpoint
        if text != self._waiting_text:
            self._participant.channel.send(protocol.WaitingEvent(text, hosting and not self._instructions_sent))
            self._waiting_text, self._instructions_sent = text, hosting


def _listen_beside(address: str) -> socket.socket:
    """Return a socket that listens on a free port of ``address``; on all interfaces if the address is not local."""
    try:
        return listen(address, 0)
    except OSError:
        return listen("", 0)
