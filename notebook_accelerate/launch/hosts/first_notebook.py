"""The first notebook's part in a run on several machines: waiting for the hosts, and keeping track of them."""

from __future__ import annotations

import errno
import pickle
import re
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from notebook_accelerate.errors import ChannelClosedError, LaunchError, RunStoppedError, RunTimeoutError, WorkerError
from notebook_accelerate.launch.hosts import host_facts as facts_of
from notebook_accelerate.launch.hosts.host_backend import HostBackend
from notebook_accelerate.launch.hosts.host_facts import name_cells_in, notebook_hello
from notebook_accelerate.launch.hosts.joining import instruction_lines, interface_to
from notebook_accelerate.launch.hosts.remote import host_protocol as protocol
from notebook_accelerate.launch.hosts.remote.host_connection import HostConnection
from notebook_accelerate.launch.hosts.remote.host_protocol import node_name
from notebook_accelerate.launch.hosts.remote.listener import HostListener
from notebook_accelerate.launch.plan.planner import joined, on_node
from notebook_accelerate.launch.processes import ports
from notebook_accelerate.launch.processes.event_loop import DispatchSelector, dispatch
from notebook_accelerate.launch.state import failures, run_events
from notebook_accelerate.launch.state.run_state import without_result
from notebook_accelerate.launch.supervisor.command_queue import WaitingTarget
from notebook_accelerate.launch.supervisor.rank_supervisor import RankSupervisor
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP, StopReason

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.hosts.remote.listener import IncomingHost
    from notebook_accelerate.launch.output.publisher import Publisher
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.launch.supervisor.command_queue import CommandQueue
    from notebook_accelerate.launch.supervisor.rank_group import RankGroup
    from notebook_accelerate.telemetry import Event, RankFailure
    from notebook_accelerate.telemetry.store import Record

JOIN_SECONDS, LAST_CALL_SECONDS = 600.0, 30.0
"""The defaults of ``join_timeout`` and ``last_call_timeout`` in seconds, which are the same as torch's."""
WAIT_SECONDS = 0.2
MAX_NAMED = 8
_KEPT_HERE = (
    run_events.RunCreated,
    run_events.RunPlanned,
    run_events.RankReturned,
    run_events.NoteAdded,
    run_events.RunEnded,
)
"""Events that are not sent to other notebooks, because those record their own, or receive the data in another way."""


class FirstNotebook(RankSupervisor):
    """Supervises a run on several machines. It waits for hosts on the other machines and makes them run their ranks.

    Args:
        run: The run to supervise; see `Supervisor`.
        commands: The user's commands.
        publisher: Shows output in the notebook.
        secret: The secret to print for the hosts, or "" if the user provided it.
    """

    def __init__(self, run: Run, commands: CommandQueue, publisher: Publisher, secret: str = "") -> None:
        super().__init__(run, commands, publisher)
        self._secret = secret
        self._hosts: list[HostConnection] = []
        self._wait = WaitingTarget(publisher)
        self._group: RankGroup | None = None
        self._makes_room: StopReason | None = None
        self._shown = ""
        self._unsubscribe: Callable[[], None] | None = None

    # ---- before the ranks start

    def listen(self, address: str, port: int, secret: str, *, must: bool) -> None:
        """Start accepting hosts.

        Args:
            address: The address by which the hosts know this machine.
            port: The port to listen on.
            secret: The secret that the hosts must have.
            must: Whether this is certainly the first notebook, even if the address belongs to a gateway in front of
                this machine.

        Raises:
            OSError: The port is taken, or the address does not belong to this machine.
        """

        # Don't show the text directly: this is called on the listener's thread, and only the run's thread may do so.
        def report(text: str) -> None:
            self.commands.post(lambda _: self.note(text, shown_as=f"⚠ {text}"))

        alive = keep_alive(self.config)
        try:
            self._listener = HostListener(address, secret.encode(), port, report=report, keep_alive=alive)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or not must:
                raise
            everywhere = "0.0.0.0"  # noqa: S104 - behind a gateway, the address is not this machine's own
            self._listener = HostListener(everywhere, secret.encode(), port, report=report, keep_alive=alive)

    def reserve(self, plan: LaunchPlan) -> LaunchPlan:
        """Keep the plan and return it unchanged. The process group's port is reserved separately for each attempt."""
        self._plan, self._own = plan, notebook_hello(0, plan, self.config)
        return plan

    def _run(self, plan: LaunchPlan) -> run_events.RunEnded:
        self._unsubscribe = self.journal.subscribe(self._stream)
        return super()._run(plan)

    @property
    def _members(self) -> list[protocol.HelloEvent]:
        return [self._own, *(host.hello for host in self._hosts)]

    def _await_hosts(self, plan: LaunchPlan, number: int) -> LaunchPlan | StopReason:
        """Wait until the hosts have joined. Return the plan, or the reason why the run was stopped before that.

        Raises:
            LaunchError: Too few hosts joined in time.
        """
        if not self.config.block:
            self.started.set()  # Don't block the cell, because hosts may take minutes to join.
        if not self._shown:
            for line in instruction_lines(self.config, self.function_name, self._secret):
                if not self._secret:  # Keep the secret out of the report, because reports are shared.
                    self.journal.append(run_events.NoteAdded(line))
                self.show(f"  {line}")
        deadline, last_call = time.monotonic() + join_seconds(self.config), 0.0
        with DispatchSelector() as selector:
            self.commands.watch(lambda source, call: selector.register(source, selectors.EVENT_READ, call), self._wait)
            selector.register(self._listener, selectors.EVENT_READ, lambda: self._accept(selector))
            for host in self._hosts:
                host.connect(selector)
            dispatch(selector, 0)  # Find out about hosts that have arrived or were lost since the last attempt.
            self._drop_lost()
            while not self._is_complete(number, last_call):
                dispatch(selector, WAIT_SECONDS)
                self.publisher.flush()
                self._drop_lost()
                if reason := self._check_stopped():
                    return reason
                if len(self._hosts) + 1 < self._least:
                    last_call = 0.0
                elif not last_call:
                    last_call = time.monotonic() + _setting(self.config, "last_call_timeout", LAST_CALL_SECONDS)
                if time.monotonic() > deadline and len(self._hosts) + 1 < self._least:
                    seconds, backend = join_seconds(self.config), self.config.rdzv_backend
                    raise LaunchError(facts_of.timeout_text(backend, self.config.num_nodes, self._members, seconds))
                self._show_waiting()
            for host in self._hosts:
                host.disconnect()
        return self._joined(number)

    @property
    def _least(self) -> int:
        return self.config.min_nodes or self.config.num_nodes

    def _is_complete(self, number: int, last_call: float) -> bool:
        """Return whether all hosts have joined. At a restart or after the last call, the minimum number is enough."""
        count = len(self._hosts) + 1
        enough = count >= self._least
        return count == self.config.num_nodes or (enough and (number > 0 or 0 < last_call <= time.monotonic()))

    def _joined(self, number: int) -> LaunchPlan | StopReason:
        """Assign numbers to the hosts and their ranks, and return the plan.

        If a host has been lost, wait for another one. If the run is stopped during that wait, return the reason.
        """
        if self.config.rdzv_backend == "static":
            self._hosts = _in_asked_order(self._hosts)
        for index, host in enumerate(self._hosts, 1):
            host.node = index
            try:
                host.measure_clock()
            except ChannelClosedError as error:
                host.lost = f"was lost: {error}"
        if any(host.lost for host in self._hosts):
            self._drop_lost()
            return self._await_hosts(self._plan, number)
        sizes = [facts.processes for facts in self._members]
        address = self.config.rendezvous_address[0]
        name = f"{self.config.rdzv_id}-{self.id}"
        plan = joined(self._plan, sizes, (address, self._store_port()), interface_to(address), name)
        if note := facts_of.version_note(self._members):
            self.note(note, shown_as=f"⚠ {note}")
        for index, host in enumerate(self._hosts, 1):
            own_plan = pickle.dumps(on_node(plan, index))
            host.send(
                protocol.WaitingEvent(self._members_text(plan, index)),
                protocol.HostPlanEvent(self._own.host, host.clock_offset, own_plan),
            )
        self.show(self._members_text(plan, 0))
        self.journal.append(run_events.RunPlanned(plan, 0, plan.world_size))
        return plan

    def _store_port(self) -> int:
        """Reserve a new port for the store that rank 0 serves, as every attempt needs one."""
        self._release_port()
        port, _ = ports.reserve((self.id, "store"), 0, fixed=False)
        return port

    def _release_port(self) -> None:
        ports.release((self.id, "store"))

    def _members_text(self, plan: LaunchPlan, here: int) -> str:
        parts, count = [], len(plan.sizes)
        for index, facts in enumerate(self._members):
            first = sum(plan.sizes[:index])
            last = first + plan.sizes[index] - 1
            ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
            parts.append(f"{ranks} on {node_name(index, facts.host)}{', here' if index == here else ''}")
        if len(parts) > MAX_NAMED:
            parts[MAX_NAMED - 1 :] = [f"… {parts[-1]}"]
        return f"{f'all {count} nodes have' if count > 1 else 'one node has'} joined: {'; '.join(parts)}"

    # ---- hosts that arrive or are lost while the run waits

    def _accept(self, selector: DispatchSelector | None) -> None:
        """Handle messages from hosts, and admit or refuse new hosts. While ranks are running, ``selector`` is None."""
        self._listener.dispatch()
        while (incoming := self._listener.next_host(0.0)) is not None:
            if (host := self._made(incoming)) is not None:
                self._admit(host, selector)

    def _admit(self, host: HostConnection, selector: DispatchSelector | None) -> None:
        if selector is not None:
            self._hosts.append(host)
            host.connect(selector)
            self._show_waiting(again=True)
        elif self._has_room:
            members = self._members
            self._hosts.append(host)
            host.send(protocol.WaitingEvent(facts_of.late_join_text(members, self.config.num_nodes)))
            self._makes_room = self._makes_room or StopReason(WorkerError, facts_of.joining_text(host.hello))
            if self._group is not None:
                host.connect(self._group.selector)
        else:
            host.close(facts_of.late_text(self._members, self.config.num_nodes, self.config.max_restarts))

    def _made(self, incoming: IncomingHost) -> HostConnection | None:
        """Return the connection to a new host. If the host cannot take part, refuse it and return None."""
        host, hello = HostConnection(incoming), incoming.hello
        hello.processes = hello.processes or self._plan.num_processes
        if reason := self._refusal(hello):
            host.close(reason)
            self.note(f"{hello.title} was refused: {reason}")
            return None
        host.on_message = lambda event: self._handle(event, host)
        return host

    def _refusal(self, hello: protocol.HelloEvent) -> str:
        address, port = self.config.rendezvous_address
        if hello.rdzv_id and hello.rdzv_id != self.config.rdzv_id:
            return f"a rendezvous answers at {address}:{port}, but not for rdzv_id={hello.rdzv_id!r}"
        if self._group is None and len(self._hosts) + 1 >= self.config.num_nodes:
            return facts_of.late_text(self._members, self.config.num_nodes, self.config.max_restarts)
        return facts_of.problem(hello, self._members, self.config.rdzv_backend)

    def _drop_lost(self) -> None:
        for host in [host for host in self._hosts if host.lost]:
            self._hosts.remove(host)
            host.close()
            reason = host.lost.removeprefix(f"{host.name} ")
            self.note(f"{host.hello.title} is no longer joining: it {reason}")

    def _show_waiting(self, *, again: bool = False) -> None:
        text = facts_of.waiting_text(self.config.rdzv_backend, self.config.num_nodes, self._members)
        if text != self._shown:
            self.show(text)
        if text != self._shown or again:
            for host in self._hosts:
                host.send(protocol.WaitingEvent(text))
        self._shown = text

    def _check_stopped(self) -> StopReason | None:
        """Return the reason to stop waiting for hosts, and record it. Return None to continue."""
        limit, clock = self.config.timeout, self.clock
        if limit is not None and clock.now() > clock.started + limit:
            self._wait.stop(0, StopReason(RunTimeoutError, f"the run reached its timeout of {limit:g} s"))
        state, reason = self.state, self._wait.stop_reason
        if reason is not None and state.stop_phase == "none" and state.ended is None:
            self.journal.append(run_events.StopAdvanced("interrupting", reason.text))
        return reason

    # ---- while the ranks are running

    def _with_hosts(self, own: ProcessBackend, group: RankGroup) -> ProcessBackend:
        self._group, self._makes_room = group, None
        group.listen(self._listener, lambda: self._accept(None))
        group.after_turn = lambda: self._stop_to_make_room(group)
        return HostBackend(own, self._plan.num_processes, self._hosts)

    def _stop_to_make_room(self, group: RankGroup) -> None:
        """Stop the ranks so that a late host can join, unless a debugger is in use or a rank has failed."""
        busy = self.clock.suspended or group.stops.failures or group.stops.held
        late = any(not host.lost and not host.ranks for host in self._hosts)
        if late and self._makes_room is not None and not busy and group.stops.make_room(self._makes_room):
            self.show(self._makes_room.text)

    def _handle(self, event: Event, host: HostConnection) -> None:
        """Handle a host's message about the whole run."""
        if isinstance(event, protocol.StopRequest):
            name = host.name if host.node > 0 else host.hello.title
            reason = StopReason(RunStoppedError, f"{name}: it was stopped")
            target = self._wait if self._group is None else self._group
            self.show(reason.text)
            target.stop(event.grace, reason)

    def _can_restart(self, group: RankGroup, found: Sequence[RankFailure]) -> bool:
        """Return whether another attempt may follow, after failures or after a stop for a late host."""
        self._group = None
        for host in self._hosts:
            host.disconnect()
        lost = [host for host in self._hosts if host.lost]
        for host in lost:
            self._hosts.remove(host)
            host.close()
        reason = group.stops.reason
        makes_room = (
            reason is not None and reason is self._makes_room and all(map(failures.looks_like_lost_peer, found))
        )
        if not makes_room and (reason is not None or not found):
            return False
        return not lost or (self.config.rdzv_backend == "c10d" and len(self._hosts) + 1 >= self._least)

    @property
    def _has_room(self) -> bool:
        """Whether the run may restart to include another host."""
        attempts = self.state.attempts
        number = attempts[-1].number if attempts else 0
        few = len(self._hosts) + 1 < self.config.num_nodes
        return self.config.rdzv_backend == "c10d" and few and number < self.config.max_restarts

    # ---- messages to the other notebooks

    def _stream(self, records: Sequence[Record]) -> None:
        """Send the run's own events in ``records`` to the other notebooks."""
        if records[0].rank != run_events.RUN:
            return
        wanted = [record._replace(event=self._for_other_notebooks(record.event)) for record in records]
        wanted = [record for record in wanted if not isinstance(record.event, _KEPT_HERE)]
        payload = protocol.JournalEvent(pickle.dumps(wanted)) if wanted and self._hosts else None
        for host in self._hosts:
            if payload is not None and host.hello.kind == protocol.NOTEBOOK:
                host.send(payload)
        if isinstance(ended := records[-1].event, run_events.RunEnded) and self.state.held:
            self._send_end(ended, held=True)

    def _for_other_notebooks(self, event: Event) -> Event:
        """Return an event for other notebooks, with this node's name added to its cells and to a stop by its user."""
        event = without_result(name_cells_in(event, " of node 0"), "")
        if isinstance(event, run_events.StopAdvanced) and event.reason == USER_STOP.text:
            return replace(event, reason=f"{node_name(0, self._own.host)}: {event.reason}")
        return event

    def _send_end(self, ended: run_events.RunEnded, *, held: bool = False) -> None:
        message = ended.message
        # Add this node's name if its user has stopped the run, but not if a user of another node has.
        if re.search(rf"( s|had joined): {USER_STOP.text}$", message):
            message = f"{message.removesuffix(USER_STOP.text)}{node_name(0, self._own.host)}: {USER_STOP.text}"
        for host in self._hosts:
            host.send(protocol.RunOverEvent(ended.status, ended.error, message, held))

    def _disconnect(self, ended: run_events.RunEnded) -> None:
        if self._unsubscribe is None:  # The run has not started.
            return
        self._unsubscribe()
        self._send_end(ended)
        for host in self._hosts:
            host.close()
        self._hosts.clear()  # Otherwise, the hosts, which refer to this object, would keep the run's results alive.
        self._release_port()

    def _release(self) -> None:
        self._listener.close()
        self._listener.wait_until_free()
        del self._listener  # Otherwise, the listener, which refers to this object, would keep the run's results alive.
        super()._release()


def join_seconds(config: LaunchConfig) -> float:
    """Return how many seconds a notebook waits for the others to join."""
    return _setting(config, "join_timeout", _setting(config, "timeout", JOIN_SECONDS))


def _setting(config: LaunchConfig, name: str, default: float) -> float:
    return float((config.rdzv_conf or {}).get(name, default))


def keep_alive(config: LaunchConfig) -> tuple[float, float]:
    """Return the keep-alive interval, and how long a host may be silent before it counts as lost, in seconds."""
    interval = _setting(config, "keep_alive_interval", 5)
    return interval, interval * _setting(config, "keep_alive_max_attempt", 3)


def _in_asked_order(hosts: list[HostConnection]) -> list[HostConnection]:
    """Return the hosts sorted by the ``node_rank`` that each has requested.

    Hosts that have not requested a number fill the gaps in order of arrival.
    """
    asked = {host.hello.node: host for host in hosts if host.hello.node > 0}
    others = iter([host for host in hosts if host.hello.node <= 0])
    return [asked.get(number) or next(others) for number in range(1, len(hosts) + 1)]
