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
from notebook_accelerate.launch.hosts.remote.listener import HostListener, call
from notebook_accelerate.launch.hosts.rendezvous import membership as rules
from notebook_accelerate.launch.hosts.rendezvous import peer_failures
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as say
from notebook_accelerate.launch.hosts.rendezvous.join_instructions import invitation
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.peer_pauses import PeerPauses
from notebook_accelerate.launch.hosts.rendezvous.peer_ranks import VISIT_SECONDS, PeerConnection, Together, receive
from notebook_accelerate.launch.hosts.rendezvous.rank_mirror import RankMirror
from notebook_accelerate.launch.hosts.rendezvous.rendezvous_client import RendezvousClient, shared_secret
from notebook_accelerate.launch.hosts.rendezvous.wait_for_peers import PeerWait
from notebook_accelerate.launch.plan.planner import joined
from notebook_accelerate.launch.processes.selecting import dispatch
from notebook_accelerate.launch.state import error_messages, failures
from notebook_accelerate.launch.state.run_events import FailuresRecorded, NoteAdded, RunEnded, RunPlanned, StopAdvanced
from notebook_accelerate.launch.supervisor.stop_sequence import USER_STOP, StopReason
from notebook_accelerate.telemetry import Event, RankFailure

if TYPE_CHECKING:
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend
    from notebook_accelerate.launch.supervisor.rank_group import RankGroup
    from notebook_accelerate.launch.supervisor.run_context import RunContext
    from notebook_accelerate.telemetry.store import Record

PATIENCE = 1.0
"""Seconds that the others have to end after this notebook, before it reports that it waits for them."""
GOODBYE_SECONDS = 2.0
_Event = TypeVar("_Event", bound=Event)


class NotebookGroup:
    """The notebooks of one run, from the side of one of them.

    Args:
        context: This notebook's run.
        plan: The plan before the rendezvous.
    """

    def __init__(self, context: RunContext, plan: LaunchPlan) -> None:
        self._context, self._plan = context, plan
        self._meeting = RendezvousClient(context.config, plan)
        self._heard: list[Event] = []
        self._group: RankGroup | None = None
        self._over = False
        self._joining: StopReason | None = None
        self.attempt = 0
        self.nodes: list[Node] = []
        self.index = plan.node
        self.reason = ""
        self.stopped = ""
        self.trouble = "it was stopped"
        """Why this notebook leaves the others before the common end, if it does."""
        self._odd: list[dict[str, Any]] = []
        self._own_stop: StopReason | None = None
        self._secret = shared_secret(context.config).encode()
        self._standstill = PeerPauses(context, self._meeting, lambda: bool(self._links))
        self._lobby = PeerWait(context)
        self.failures_elsewhere: tuple[RankFailure, ...] = ()
        """What failed in another notebook, which keeps its ranks for the debugger as this one does."""
        self._links: dict[int, PeerConnection] = {}
        self._tap: RankMirror | None = None

    # ---- before the ranks start

    def gather(self, attempt: int) -> LaunchPlan | None:
        """Wait for the others and return this notebook's plan; None when it was stopped meanwhile.

        Raises:
            LaunchError: The others did not arrive, or cannot form one run with this notebook.
        """
        self._meeting.send(say.JoinOrder(attempt))
        met = self._await(say.MetEvent)
        if met is None:
            return None
        self.nodes, self.index = [Node.from_dict(node) for node in met.nodes], met.index
        self._standstill.meet(self.nodes, self.index)
        self.attempt = met.attempt
        interface = "" if "GLOO_SOCKET_IFNAME" in os.environ else met.interface
        name = f"{self._context.config.rdzv_id}-{self.nodes[0].name}"
        processes = [node.processes for node in self.nodes]
        self._plan = joined(self._plan, processes, met.index, (met.address, met.port), interface, name)
        self._say(self._who_is_where())
        self._link(met)
        if self._stopped_waiting():
            return None
        whole = len(self._links) == len(self.nodes) - 1
        shows_all = whole and bool(self._links)
        first, count = (0, self._plan.world_size) if shows_all else (self._plan.first_rank, self._plan.num_processes)
        self._context.journal.append(RunPlanned(self._plan, first, count))
        return self._plan

    def _link(self, met: say.MetEvent) -> None:
        """Connect the other notebooks to the first if they share a secret, unless stopped meanwhile."""
        if not self._secret or len(self.nodes) == 1:
            return
        if met.index == 0:
            self._receive(met.own_address)
            return
        heard = self._await(say.ListenerEvent, seconds=VISIT_SECONDS)
        if heard is None or self._stopped_waiting():
            return
        hello = HelloEvent(met.index, self.nodes[met.index].host, {"name": self.nodes[met.index].name})
        try:
            self._tap = RankMirror(call(heard.address, heard.port, self._secret, hello), self._note)
        except (OSError, LaunchError) as error:
            self._note(f"the first notebook does not show the ranks of this one: {heard.address}:{heard.port}: {error}")

    def _receive(self, address: str) -> None:
        """Accept the connections of the others, and stop listening after that."""
        try:
            door = HostListener(address, self._secret, report=self._note)
        except OSError as error:
            self._note(f"this notebook shows its own ranks only: it cannot listen on {address}: {error}")
            return
        try:
            self._meeting.send(say.ListenerEvent(address, door.port))
            self._links = receive(door, self.nodes, self._stops_meanwhile)
        finally:
            door.close()
        silent = [rules.title(i, node.host) for i, node in enumerate(self.nodes) if i and i not in self._links]
        if silent and self._lobby.stop_reason is None:
            for link in self._links.values():
                link.channel.close()
            self._links = {}
            self._note(
                f"this notebook shows its own ranks only: {', '.join(silent)} did not call {address}:{door.port}"
            )

    def _stops_meanwhile(self) -> bool:
        self._carry_out()
        return self._lobby.stop_reason is not None

    def _note(self, text: str) -> None:
        self._context.note(text, shown_as=f"⚠ {text}")

    def backend(self, own: ProcessBackend) -> ProcessBackend:
        """Return the backend that starts this notebook's ranks and, if it shows all ranks, attaches the others'."""
        links = [(link, self.nodes[index].processes) for index, link in sorted(self._links.items())]
        return Together(own, self.index, links)

    def keep(self, records: list[Record]) -> None:
        """Store samples of this notebook's ranks."""
        self._context.journal.add(records)
        if self._tap is not None:
            self._tap.sampled(records)

    def _who_is_where(self) -> str:
        parts = []
        for index, node in enumerate(self.nodes):
            own = rules.ranks_of(self.nodes, index)
            ranks = f"rank {own[0]}" if len(own) == 1 else f"ranks {own[0]}-{own[-1]}"
            parts.append(f"{ranks} on {rules.title(index, node.host)}{', here' if index == self.index else ''}")
        if len(parts) > 8:
            parts[7:] = [f"… {parts[-1]}"]
        return f"all {len(self.nodes)} notebooks have joined: {'; '.join(parts)}"

    # ---- while the ranks run

    def attend(self, group: RankGroup) -> None:
        """Exchange news with the others while ``group`` runs."""
        self._group = group
        self.stopped, self._own_stop = "", None
        self._standstill.begin()
        self._joining = None
        group.listen(self._meeting.channel, self._take_news)
        group.on_step = partial(self._step, group)
        group.stops.on_stopping = self._tell_others
        group.stops.on_release = self._tell_of_letting_go
        group.events.observer = self._tap
        for link in self._links.values():
            link.stopping, link.react = lambda: group.stops.stopping, partial(self._react, group=group)

    def _tell_others(self, reason: StopReason | None) -> None:
        """Report that this notebook stops its ranks: because of ``reason``, or because one of them failed."""
        if reason is not None:
            self._own_stop = reason
            if self._tap is not None:
                self._tap.stopping(self.index, "stopped", reason.text)
            self._meeting.send(say.NewsOrder("stopped", reason.text))
        elif self._group is not None:
            found = failures.ordered(self._group.stops.failures)
            # This rank's failure is a consequence: the notebook of the lost peer reports the cause.
            if not failures.looks_like_lost_peer(found[0]):
                told = peer_failures.as_told(found, self.index)
                self._meeting.send(say.NewsOrder("failed", error_messages.headline(found), told))

    def _tell_of_letting_go(self) -> None:
        self._meeting.send(say.NewsOrder("released", "the ranks that were kept after the failure have been let go"))

    def _step(self, group: RankGroup) -> None:
        heard, self._heard = self._heard, []
        self._take(heard, group)  # events that arrived together with an awaited one
        self._standstill.tell()
        self._standstill.announce()
        self._make_room(group)

    def _make_room(self, group: RankGroup) -> None:
        """Stop to let a late notebook join, unless a debugger is in use."""
        busy = self._context.clock.suspended or group.stops.failures or group.stops.held
        if self._joining is None or busy or not group.stops.follow(self._joining):
            return
        self._say(self._joining.text)
        if self._tap is not None:
            self._tap.stopping(self.index, "joining", self._joining.text)

    def _take_news(self) -> None:
        assert self._group is not None
        self._take(self._hear(), self._group)

    def _take(self, events: list[Event], group: RankGroup) -> None:
        for event in events:
            if isinstance(event, say.NewsEvent):
                self._react(event, group)
            elif isinstance(event, say.StandEvent):
                self._standstill.hear(event)
            else:
                self._heard.append(event)

    def _hear(self) -> list[Event]:
        try:
            return self._meeting.heard()
        except LaunchError as error:
            if self._group is None:
                raise
            self._group.unlisten(self._meeting.channel)
            self._over = True
            return [say.NewsEvent("lost", self.index, str(error))]

    def _react(self, news: say.NewsEvent, group: RankGroup) -> None:
        if news.kind == "joining":
            self._joining = self._joining or StopReason(WorkerError, news.text)
            self._make_room(group)
            return
        if news.kind == "stopped":
            self.stopped = self.stopped or news.text
        error = {"stopped": RunStoppedError}.get(news.kind, WorkerError)
        hold = news.kind == "failed" and self._context.config.debug
        if hold and not self.failures_elsewhere:
            rank = rules.first_rank(self.nodes, news.node)
            told = peer_failures.from_told(news.failures) or [RankFailure(rank, "exception", time.time(), news.text)]
            self.failures_elsewhere = tuple(failures.ordered(told))
        if group.stops.follow(StopReason(error, news.text), hold=hold):
            self._say(news.text, "stdout" if news.kind == "stopped" else "stderr")

    # ---- after the ranks have ended

    def conclude(self, group: RankGroup, found: tuple[RankFailure, ...]) -> bool:
        """Send the others how this notebook's ranks ended, and return whether all start again."""
        self._group = None
        self._standstill.tell()
        self._unlink()
        if self._over:  # without the child process the others cannot be reached
            lost = peer_failures.of_lost(self.nodes, {str(self.index): "its rendezvous process ended"})
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
        told = peer_failures.as_told(own, self.index)
        # A run whose ranks were held after its failure has already ended for the user.
        end = say.EndOrder(outcome, text, told, final=self._context.state.ended is not None)
        self._meeting.send(end)
        decision = self._await(say.DecisionEvent, saying=self._waits_for_others)
        if decision is None:  # stopped after all ranks here had ended: no restart
            self._meeting.send(replace(end, outcome="stopped", text=self.why_stopped.text))
            decision = self._await(say.DecisionEvent, stoppable=False)
        assert decision is not None
        return self._context.state.ended is None and self._settle(decision, found)

    def _record(self, found: tuple[RankFailure, ...]) -> None:
        if self._context.state.ended is None:
            self._context.journal.append(FailuresRecorded(found))

    def _settle(self, decision: say.DecisionEvent, own: tuple[RankFailure, ...]) -> bool:
        told = peer_failures.from_told(each for end in decision.ends.values() for each in end.get("failures", ()))
        lost = peer_failures.of_lost(self.nodes, decision.lost)
        found = peer_failures.of_all(own, self._own_ranks, told, lost)
        self._record(found)
        self.reason = error_messages.headline(found) if found and not lost else decision.reason
        self._odd = [end for end in decision.ends.values() if end.get("outcome") != "succeeded"]
        ends = [end for end in decision.ends.values() if end.get("outcome") == "stopped"]
        if ends and not self.stopped and self._own_stop is None:
            self.stopped = decision.reason
        return decision.action == "restart"

    def verdict(self) -> RunEnded:
        """Return how the run ended, the same in every notebook."""
        run_id, state = self._context.id, self._context.state
        if self._own_stop is not None or self.stopped:
            why = self._own_stop or StopReason(RunStoppedError, self.stopped)
            text = f"run {run_id} ended after {time.time() - state.started:.1f} s: {why.text}"
            return RunEnded("stopped", why.error.__name__, text)
        if state.failures:
            return error_messages.failed(run_id, state)
        if self._odd:
            text = f"run {run_id} failed: {self.reason or 'not all notebooks succeeded'}"
            return RunEnded("failed", "WorkerError", text)
        return RunEnded("succeeded")

    def _unlink(self) -> None:
        if self._tap is not None:
            self._tap.close()
            self._tap = None
        for link in self._links.values():
            link.disconnect()
            link.channel.close()
        self._links = {}

    @property
    def _own_ranks(self) -> range:
        return rules.ranks_of(self.nodes, self.index)

    @property
    def why_stopped(self) -> StopReason:
        """Why this notebook stopped waiting for the others."""
        return self._own_stop or USER_STOP

    def close(self) -> None:
        """End the child process; it notifies the others if they still wait for this notebook."""
        self._unlink()
        self._meeting.close(leaving="" if self._over else self.trouble)

    # ---- waiting

    def _await(
        self,
        wanted: type[_Event],
        *,
        stoppable: bool = True,
        saying: Callable[[], str] | None = None,
        seconds: float | None = None,
    ) -> _Event | None:
        """Return the next event of a kind; None when the run is stopped or the time is over before it arrives."""
        since, said = time.monotonic(), saying is None
        with selectors.DefaultSelector() as selector:
            selector.register(self._meeting.channel, selectors.EVENT_READ, lambda: self._heard.extend(self._hear()))
            selector.register(self._context.commands.wake, selectors.EVENT_READ, self._carry_out)
            while True:
                event = self._take_until(wanted)
                if event is not None:
                    self._over = isinstance(event, say.DecisionEvent) and event.action == "end"
                    return event
                if stoppable and self._stopped_waiting():
                    return None
                if seconds is not None and time.monotonic() - since > seconds:
                    return None
                if saying is not None and not said and time.monotonic() - since > PATIENCE:
                    said = True
                    self._say(saying())
                dispatch(selector, 0.2)
                self._context.publisher.flush()

    def _take_until(self, wanted: type[_Event]) -> _Event | None:
        """Handle the received events up to the first one of a kind, and return that one; later events are kept.

        News of the current attempt that arrives before the listener's address is kept too: `_step` handles it once
        there are ranks.
        """
        found, kept = None, []
        while self._heard and found is None:
            event = self._heard.pop(0)
            if isinstance(event, wanted):
                found = event
            elif wanted is say.ListenerEvent and isinstance(event, (say.NewsEvent, say.StandEvent)):
                kept.append(event)
            elif isinstance(event, say.WaitingEvent):
                self._on_waiting(event)
            elif isinstance(event, say.NoteEvent):
                self._note(event.text)
            elif isinstance(event, say.StandEvent):
                self._standstill.hear(event)
            elif isinstance(event, say.NewsEvent) and event.kind == "stopped" and not self.stopped:
                self.stopped = event.text
                self._say(event.text)
            elif isinstance(event, say.BrokenEvent):
                raise LaunchError(event.text)
        self._heard[:0] = kept
        return found

    def _on_waiting(self, event: say.WaitingEvent) -> None:
        if event.first:
            for line in invitation(self._context.config, self._context.function_name):
                self._context.journal.append(NoteAdded(line))
                self._say(f"  {line}")
        self._say(event.text)

    def _carry_out(self) -> None:
        self._context.commands.carry_out(self._lobby)

    def _stopped_waiting(self) -> bool:
        """Check whether this notebook must stop waiting; if so, notify the others."""
        lobby = self._lobby
        if self._own_stop is not None and self._own_stop is lobby.stop_reason:
            return True
        limit, clock = self._context.config.timeout, self._context.clock
        if limit is not None and clock.now() > clock.started + limit:
            lobby.stop(0, StopReason(RunTimeoutError, f"the run reached its timeout of {limit:g} s"))
        if lobby.stop_reason is None:
            return False
        self._own_stop = lobby.stop_reason
        if self._context.state.stop_phase == "none" and self._context.state.ended is None:
            self._context.journal.append(StopAdvanced("interrupting", lobby.stop_reason.text))
        self._meeting.send(say.NewsOrder("stopped", lobby.stop_reason.text))
        return True

    def _waits_for_others(self) -> str:
        others = [rules.title(index, node.host) for index, node in enumerate(self.nodes) if index != self.index]
        return f"the ranks of this notebook have ended; waiting for {', '.join(others[:8])}"

    def _say(self, text: str, stream: str = "stdout") -> None:
        self._context.show(text, stream)


__all__ = ["NotebookGroup"]
