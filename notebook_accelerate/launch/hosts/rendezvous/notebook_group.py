"""A launch in several notebooks: waits for the others, exchanges news with them, and agrees on the common end."""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from notebook_accelerate.errors import LaunchError, RunStoppedError, RunTimeoutError, WorkerError
from notebook_accelerate.launch.hosts.remote.host_protocol import HelloEvent
from notebook_accelerate.launch.hosts.remote.listener import HostListener, connect_to_kernel
from notebook_accelerate.launch.hosts.rendezvous import membership, peer_failures
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous.join_instructions import instruction_lines
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.peer_pauses import PeerPauses
from notebook_accelerate.launch.hosts.rendezvous.peer_ranks import (
    CONNECT_SECONDS,
    GroupBackend,
    PeerConnection,
    accept_notebooks,
)
from notebook_accelerate.launch.hosts.rendezvous.rank_mirror import RankMirror
from notebook_accelerate.launch.hosts.rendezvous.rendezvous_client import RendezvousClient, shared_secret
from notebook_accelerate.launch.hosts.rendezvous.wait_for_peers import PeerWait
from notebook_accelerate.launch.plan.planner import joined
from notebook_accelerate.launch.processes.selecting import DispatchSelector, dispatch
from notebook_accelerate.launch.state import error_messages, failures
from notebook_accelerate.launch.state.run_events import FailuresRecorded, NoteAdded, RunEnded, RunPlanned, StopAdvanced
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP, StopReason
from notebook_accelerate.telemetry import Event, RankFailure, steady_time

if TYPE_CHECKING:
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend
    from notebook_accelerate.launch.supervisor.rank_group import RankGroup
    from notebook_accelerate.launch.supervisor.run_context import RunContext
    from notebook_accelerate.telemetry.store import Record

WAIT_NOTE_SECONDS = 1.0
"""Seconds that the others have to end after this notebook, before it reports that it waits for them."""
_Event = TypeVar("_Event", bound=Event)


class NotebookGroup:
    """The notebooks of one run, from the side of one of them.

    Args:
        context: This notebook's run.
        plan: The plan before the rendezvous.
    """

    def __init__(self, context: RunContext, plan: LaunchPlan) -> None:
        self._context, self._plan = context, plan
        self._client = RendezvousClient(context.config, plan)
        self._received: list[Event] = []
        self._group: RankGroup | None = None
        self._ended = False
        self._joining: StopReason | None = None
        self.attempt = 0
        self.nodes: list[Node] = []
        self.index = plan.node
        self.reason = ""
        self.stopped = ""
        self.leave_reason = "it was stopped"
        """Why this notebook leaves the others before the common end, if it does."""
        self._unsuccessful: list[dict[str, Any]] = []
        self._own_stop: StopReason | None = None
        self._secret = shared_secret(context.config).encode()
        self._pauses = PeerPauses(context, self._client, lambda: bool(self._connections))
        self._wait = PeerWait(context)
        self.failures_elsewhere: tuple[RankFailure, ...] = ()
        """What failed in another notebook, which keeps its ranks for the debugger as this one does."""
        self._connections: dict[int, PeerConnection] = {}
        self._mirror: RankMirror | None = None

    # ---- before the ranks start

    def gather(self, attempt: int) -> LaunchPlan | None:
        """Wait for the others and return this notebook's plan; None when it was stopped meanwhile.

        Raises:
            LaunchError: The others did not arrive, or cannot form one run with this notebook.
        """
        self._client.send(protocol.JoinOrder(attempt))
        event = self._await(protocol.AllJoinedEvent)
        if event is None:
            return None
        self.nodes, self.index = [Node.from_dict(node) for node in event.nodes], event.index
        self._pauses.set_nodes(self.nodes, self.index)
        self.attempt = event.attempt
        interface = "" if "GLOO_SOCKET_IFNAME" in os.environ else event.interface
        name = f"{self._context.config.rdzv_id}-{self.nodes[0].name}"
        processes = [node.processes for node in self.nodes]
        self._plan = joined(self._plan, processes, event.index, (event.address, event.port), interface, name)
        self._context.show(self._members_text())
        self._connect(event)
        if self._stopped_waiting():
            return None
        complete = len(self._connections) == len(self.nodes) - 1
        shows_all = complete and bool(self._connections)
        first, count = (0, self._plan.world_size) if shows_all else (self._plan.first_rank, self._plan.num_processes)
        self._context.journal.append(RunPlanned(self._plan, first, count))
        return self._plan

    def _connect(self, event: protocol.AllJoinedEvent) -> None:
        """Connect the other notebooks to the first if they share a secret, unless stopped meanwhile."""
        if not self._secret or len(self.nodes) == 1:
            return
        if event.index == 0:
            self._accept_connections(event.own_address)
            return
        listener = self._await(protocol.ListenerEvent, seconds=CONNECT_SECONDS)
        if listener is None or self._stopped_waiting():
            return
        own = self.nodes[event.index]
        hello = HelloEvent(event.index, own.host, {"name": own.name})
        try:
            self._mirror = RankMirror(
                connect_to_kernel(listener.address, listener.port, self._secret, hello), self._note
            )
        except (OSError, LaunchError) as error:
            where = f"{listener.address}:{listener.port}"
            self._note(f"the first node does not show the ranks of this one: {where}: {error}")

    def _accept_connections(self, address: str) -> None:
        """Accept the connections of the others, and stop listening after that."""
        try:
            listener = HostListener(address, self._secret, report=self._note)
        except OSError as error:
            self._note(f"this node shows its own ranks only: it cannot listen on {address}: {error}")
            return
        try:
            self._client.send(protocol.ListenerEvent(address, listener.port))
            self._connections = accept_notebooks(listener, self.nodes, self._is_stopping)
        finally:
            listener.close()
        absent = [i for i in range(1, len(self.nodes)) if i not in self._connections]
        if absent and self._wait.stop_reason is None:
            for connection in self._connections.values():
                connection.channel.close()
            self._connections = {}
            names = ", ".join(membership.title(i, self.nodes[i].host) for i in absent)
            self._note(f"this node shows its own ranks only: {names} did not connect to {address}:{listener.port}")

    def _is_stopping(self) -> bool:
        self._carry_out()
        return self._wait.stop_reason is not None

    def _note(self, text: str) -> None:
        self._context.note(text, shown_as=f"⚠ {text}")

    def backend(self, own: ProcessBackend) -> ProcessBackend:
        """Return the backend that starts this notebook's ranks and, if it shows all ranks, attaches the others'."""
        peers = [(connection, self.nodes[index].processes) for index, connection in sorted(self._connections.items())]
        return GroupBackend(own, self.index, peers)

    def store_samples(self, records: list[Record]) -> None:
        """Store samples of this notebook's ranks."""
        self._context.journal.add(records)
        if self._mirror is not None:
            self._mirror.sampled(records)

    def _members_text(self) -> str:
        parts = []
        for index, node in enumerate(self.nodes):
            own = membership.ranks_of(self.nodes, index)
            ranks = f"rank {own[0]}" if len(own) == 1 else f"ranks {own[0]}-{own[-1]}"
            parts.append(f"{ranks} on {membership.title(index, node.host)}{', here' if index == self.index else ''}")
        if len(parts) > 8:
            parts[7:] = [f"… {parts[-1]}"]
        return f"all {len(self.nodes)} nodes have joined: {'; '.join(parts)}"

    # ---- while the ranks run

    def follow(self, group: RankGroup) -> None:
        """Exchange news with the others while ``group`` runs."""
        self._group = group
        self.stopped, self._own_stop = "", None
        self._pauses.begin()
        self._joining = None
        group.listen(self._client.channel, self._receive_news)
        group.on_step = partial(self._step, group)
        group.stops.on_stopping = self._report_stop
        group.stops.on_release = self._report_release
        group.events.observer = self._mirror
        for connection in self._connections.values():
            connection.stopping = lambda: group.stops.stopping
            connection.handle_news = partial(self._handle_news, group=group)

    def _report_stop(self, reason: StopReason | None) -> None:
        """Report that this notebook stops its ranks: because of ``reason``, or because one of them failed."""
        if reason is not None:
            self._own_stop = reason
            if self._mirror is not None:
                self._mirror.stopping(self.index, "stopped", reason.text)
            self._client.send(protocol.NewsOrder("stopped", reason.text))
        elif self._group is not None:
            found = failures.ordered(self._group.stops.failures)
            # This rank's failure is a consequence: the notebook of the lost peer reports the cause.
            if not failures.looks_like_lost_peer(found[0]):
                reported = peer_failures.to_json(found, self.index)
                self._client.send(protocol.NewsOrder("failed", error_messages.headline(found), reported))

    def _report_release(self) -> None:
        self._client.send(protocol.NewsOrder("released", "the ranks held after the failure have been released"))

    def _step(self, group: RankGroup) -> None:
        received, self._received = self._received, []
        self._handle(received, group)  # events that arrived together with an awaited one
        self._pauses.report()
        self._pauses.announce()
        self._stop_for_late_notebook(group)

    def _stop_for_late_notebook(self, group: RankGroup) -> None:
        """Stop to let a late notebook join, unless a debugger is in use."""
        busy = self._context.clock.suspended or group.stops.failures or group.stops.held
        if self._joining is None or busy or not group.stops.follow(self._joining):
            return
        self._context.show(self._joining.text)
        if self._mirror is not None:
            self._mirror.stopping(self.index, "joining", self._joining.text)

    def _receive_news(self) -> None:
        assert self._group is not None
        self._handle(self._receive(), self._group)

    def _handle(self, events: list[Event], group: RankGroup) -> None:
        for event in events:
            if isinstance(event, protocol.NewsEvent):
                self._handle_news(event, group)
            elif isinstance(event, protocol.PauseEvent):
                self._pauses.handle(event)
            else:
                self._received.append(event)

    def _receive(self) -> list[Event]:
        try:
            return self._client.receive()
        except LaunchError as error:
            if self._group is None:
                raise
            self._group.unlisten(self._client.channel)
            self._ended = True
            return [protocol.NewsEvent("lost", self.index, str(error))]

    def _handle_news(self, news: protocol.NewsEvent, group: RankGroup) -> None:
        if news.kind == "joining":
            self._joining = self._joining or StopReason(WorkerError, news.text)
            self._stop_for_late_notebook(group)
            return
        if news.kind == "stopped":
            self.stopped = self.stopped or news.text
        error = {"stopped": RunStoppedError}.get(news.kind, WorkerError)
        hold = news.kind == "failed" and self._context.config.debug
        if hold and not self.failures_elsewhere:
            rank = membership.ranks_of(self.nodes, news.node).start
            own = RankFailure(rank, "exception", steady_time.now(), news.text)
            found = peer_failures.from_json(news.failures) or [own]
            self.failures_elsewhere = tuple(failures.ordered(found))
        if group.stops.follow(StopReason(error, news.text), hold=hold):
            self._context.show(news.text, "stdout" if news.kind == "stopped" else "stderr")

    # ---- after the ranks have ended

    def conclude(self, group: RankGroup, found: tuple[RankFailure, ...]) -> bool:
        """Send the others how this notebook's ranks ended, and return whether all start again."""
        self._group = None
        self._pauses.report()
        self._disconnect()
        if self._ended:  # without the child process the others cannot be reached
            lost = peer_failures.lost_failures(self.nodes, {str(self.index): "its rendezvous process ended"})
            self._record(found or lost)
            return False
        made_room = self._joining is not None and all(map(failures.looks_like_lost_peer, found))
        made_room = made_room and bool(found or group.stops.reason)
        if made_room:
            found = ()
        stopped = self._own_stop is not None
        followed = (made_room or group.stops.reason is not None) and not stopped
        outcome = "stopped" if stopped else "failed" if found else "followed" if followed else "succeeded"
        text = self._own_stop.text if self._own_stop else error_messages.headline(found) if found else ""
        own = [failure for failure in found if failure.rank in self._own_ranks or failure.kind == "lost"]
        reported = peer_failures.to_json(own, self.index)
        # A run whose ranks were held after its failure has already ended for the user.
        end = protocol.EndOrder(outcome, text, reported, final=self._context.state.ended is not None)
        self._client.send(end)
        decision = self._await(protocol.DecisionEvent, waiting_text=self._waiting_text)
        if decision is None:  # stopped after all ranks here had ended: no restart
            self._client.send(replace(end, outcome="stopped", text=self.why_stopped.text))
            decision = self._await(protocol.DecisionEvent, stoppable=False)
        assert decision is not None
        return self._context.state.ended is None and self._apply_decision(decision, found)

    def _record(self, found: tuple[RankFailure, ...]) -> None:
        if self._context.state.ended is None:
            self._context.journal.append(FailuresRecorded(found))

    def _apply_decision(self, decision: protocol.DecisionEvent, own: tuple[RankFailure, ...]) -> bool:
        reported = peer_failures.from_json(each for end in decision.ends.values() for each in end.get("failures", ()))
        lost = peer_failures.lost_failures(self.nodes, decision.lost)
        found = peer_failures.merged(own, self._own_ranks, reported, lost)
        self._record(found)
        self.reason = error_messages.headline(found) if found and not lost else decision.reason
        self._unsuccessful = [end for end in decision.ends.values() if end.get("outcome") != "succeeded"]
        ends = [end for end in decision.ends.values() if end.get("outcome") == "stopped"]
        if ends and not self.stopped and self._own_stop is None:
            self.stopped = decision.reason
        return decision.action == "restart"

    def verdict(self) -> RunEnded:
        """Return how the run ended, the same in every notebook."""
        run_id, state = self._context.id, self._context.state
        if self._own_stop is not None or self.stopped:
            why = self._own_stop or StopReason(RunStoppedError, self.stopped)
            text = f"run {run_id} ended after {steady_time.now() - state.started:.1f} s: {why.text}"
            return RunEnded("stopped", why.error.__name__, text)
        if state.failures:
            return error_messages.failed(run_id, state)
        if self._unsuccessful:
            text = f"run {run_id} failed: {self.reason or 'not all notebooks succeeded'}"
            return RunEnded("failed", "WorkerError", text)
        return RunEnded("succeeded")

    def _disconnect(self) -> None:
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        for connection in self._connections.values():
            connection.disconnect()
            connection.channel.close()
        self._connections = {}

    @property
    def _own_ranks(self) -> range:
        return membership.ranks_of(self.nodes, self.index)

    @property
    def why_stopped(self) -> StopReason:
        """Why this notebook stopped waiting for the others."""
        return self._own_stop or USER_STOP

    def close(self) -> None:
        """End the child process; it notifies the others if they still wait for this notebook."""
        self._disconnect()
        self._client.close(leaving="" if self._ended else self.leave_reason)

    # ---- waiting

    def _await(
        self,
        wanted: type[_Event],
        *,
        stoppable: bool = True,
        waiting_text: Callable[[], str] | None = None,
        seconds: float | None = None,
    ) -> _Event | None:
        """Return the next event of a kind; None when the run is stopped or the time is over before it arrives."""
        since, shown = time.monotonic(), waiting_text is None
        with DispatchSelector() as selector:
            selector.register(
                self._client.channel, selectors.EVENT_READ, lambda: self._received.extend(self._receive())
            )
            selector.register(self._context.commands.wake, selectors.EVENT_READ, self._carry_out)
            while True:
                event = self._take_until(wanted)
                if event is not None:
                    self._ended = isinstance(event, protocol.DecisionEvent) and event.action == "end"
                    return event
                if stoppable and self._stopped_waiting():
                    return None
                if seconds is not None and time.monotonic() - since > seconds:
                    return None
                if waiting_text is not None and not shown and time.monotonic() - since > WAIT_NOTE_SECONDS:
                    shown = True
                    self._context.show(waiting_text())
                dispatch(selector, 0.2)
                self._context.publisher.flush()

    def _take_until(self, wanted: type[_Event]) -> _Event | None:
        """Handle the received events up to the first one of a kind, and return that one; later events are kept.

        News of the current attempt that arrives before the listener's address is kept too: `_step` handles it once
        there are ranks.
        """
        found, kept = None, []
        while self._received and found is None:
            event = self._received.pop(0)
            if isinstance(event, wanted):
                found = event
            elif wanted is protocol.ListenerEvent and isinstance(event, (protocol.NewsEvent, protocol.PauseEvent)):
                kept.append(event)
            elif isinstance(event, protocol.WaitingEvent):
                self._on_waiting(event)
            elif isinstance(event, protocol.NoteEvent):
                self._note(event.text)
            elif isinstance(event, protocol.PauseEvent):
                self._pauses.handle(event)
            elif isinstance(event, protocol.NewsEvent) and event.kind == "stopped" and not self.stopped:
                self.stopped = event.text
                self._context.show(event.text)
            elif isinstance(event, protocol.JoinFailedEvent):
                raise LaunchError(event.text)
        self._received[:0] = kept
        return found

    def _on_waiting(self, event: protocol.WaitingEvent) -> None:
        if event.first:
            for line in instruction_lines(self._context.config, self._context.function_name):
                self._context.journal.append(NoteAdded(line))
                self._context.show(f"  {line}")
        self._context.show(event.text)

    def _carry_out(self) -> None:
        self._context.commands.carry_out(self._wait)

    def _stopped_waiting(self) -> bool:
        """Check whether this notebook must stop waiting; if so, notify the others."""
        wait = self._wait
        if self._own_stop is not None and self._own_stop is wait.stop_reason:
            return True
        limit, clock = self._context.config.timeout, self._context.clock
        if limit is not None and clock.now() > clock.started + limit:
            wait.stop(0, StopReason(RunTimeoutError, f"the run reached its timeout of {limit:g} s"))
        if wait.stop_reason is None:
            return False
        self._own_stop = wait.stop_reason
        if self._context.state.stop_phase == "none" and self._context.state.ended is None:
            self._context.journal.append(StopAdvanced("interrupting", wait.stop_reason.text))
        self._client.send(protocol.NewsOrder("stopped", wait.stop_reason.text))
        return True

    def _waiting_text(self) -> str:
        others = [membership.title(index, node.host) for index, node in enumerate(self.nodes) if index != self.index]
        return f"the ranks of this node have ended; waiting for {', '.join(others[:8])}"
