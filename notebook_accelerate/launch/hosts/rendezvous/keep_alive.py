"""Participation while the ranks run: sends keep-alives and news, and decides the end together with the others."""

from __future__ import annotations

import time
from typing import Any

from notebook_accelerate.launch.hosts.rendezvous import membership
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.participant import Participant

SILENT = "the rendezvous, which it hosts, no longer answers"


class Attempt:
    """One attempt, from the arrival of all notebooks to the common decision.

    Args:
        participant: This notebook's participant state.
        members: All notebooks of the attempt, in order.

    Attributes:
        store_lost: Whether the store is lost, and with it the notebook that hosted it.
    """

    def __init__(self, participant: Participant, members: list[Node]) -> None:
        self._participant, self._members = participant, members
        self.store_lost = False
        self._seen_news = -1
        self._reported: set[tuple[str, str]] = set()
        self._pauses: dict[str, dict[str, Any]] = {}
        self._lost: dict[str, str] = {}
        self._ends: dict[str, dict[str, Any]] = {}
        self._ended = False
        self._listener: dict[str, Any] | None = None
        now = time.monotonic()
        self._next_keep_alive = 0.0
        self._last_alive: dict[str, tuple[int, float]] = {node.name: (0, now) for node in members}

    # ---- from this notebook

    def publish(self, kind: str, values: dict[str, Any]) -> None:
        """Publish values of this notebook to the others; they replace the earlier values of that kind."""
        if not self.store_lost:
            self._participant.round.post(f"{kind}/{self._participant.node.name}", values)
            self._participant.round.count("news", 1)

    def publish_end(self, end: dict[str, Any]) -> None:
        """Publish how this notebook's ranks have ended; it then waits for the decision."""
        self._ended = True
        self._ends[self._participant.node.name] = end
        self.publish("end", end)

    def publish_listener(self, listener: dict[str, Any]) -> None:
        """Publish the address of this notebook's listener; only the first notebook has one."""
        self._listener = listener
        self._participant.round.post("listener", listener)
        self._participant.round.count("news", 1)

    def leave(self, why: str) -> None:
        """Publish that this notebook leaves, unless its ranks have ended."""
        if self._participant.node.name not in self._ends:
            self._declare_lost(self._participant.node, why)

    def on_store_lost(self) -> None:
        """Handle a store that no longer answers: report the notebook that hosts it as lost."""
        if self.store_lost:
            return
        self.store_lost = True
        index = next((index for index, node in enumerate(self._members) if node.hosting), 0)
        node = self._members[index]
        if node.name not in self._ends and node.name not in self._lost:
            self._report("lost", index, membership.lost_text(index, node.host, SILENT))

    # ---- all notebooks

    def step(self) -> protocol.DecisionEvent | None:
        """Check the other notebooks, and return the common decision once there is one."""
        if self.store_lost:
            return self._decide_alone()
        self._keep_alive()
        news = self._participant.round.count("news")
        if news == self._seen_news:
            return None
        self._seen_news = news
        self._read_news()
        self._read_late_notebooks()
        return self._decide()

    def _keep_alive(self) -> None:
        now = time.monotonic()
        interval, limit = stores.keep_alive(self._participant.order)
        if now < self._next_keep_alive:
            return
        self._next_keep_alive = now + min(interval, 1.0) / 2
        own = self._participant.node.name
        self._participant.round.count(f"alive/{own}", 1)
        for node in self._members:
            if node.name in (own, *self._lost, *self._ends):
                continue
            count = self._participant.round.count(f"alive/{node.name}")
            before, since = self._last_alive[node.name]
            if count != before:
                self._last_alive[node.name] = (count, now)
            elif now - since > limit:
                self._declare_lost(node, f"it sent no keep-alive for {limit:g} s")

    def _declare_lost(self, node: Node, why: str) -> None:
        self._participant.round.first(f"lost/{node.name}", {"why": why})
        self._participant.round.count("news", 1)

    # ---- to the kernel

    def _read_news(self) -> None:
        here = self._participant.round
        if self._listener is None and (listener := here.read("listener")):
            self._listener = listener
            self._participant.channel.send(protocol.ListenerEvent(str(listener["address"]), int(listener["port"])))
        for index, node in enumerate(self._members):
            if node.name not in self._lost and (lost := here.read(f"lost/{node.name}")):
                self._lost[node.name] = str(lost["why"])
                self._report("lost", index, membership.lost_text(index, node.host, self._lost[node.name]))
            # A notebook that waits for the others after its ranks have ended can still be stopped.
            if (end := here.read(f"end/{node.name}")) and end != self._ends.get(node.name):
                self._ends[node.name] = end
                if end["outcome"] in ("failed", "stopped") and not any(name == node.name for name, _ in self._reported):
                    self._reported.add((node.name, end["outcome"]))
                    self._report(end["outcome"], index, f"{membership.title(index, node.host)}: {end['text']}")
            if node.name != self._participant.node.name:
                self._read_peer_news(index, node)

    def _read_peer_news(self, index: int, node: Node) -> None:
        pause = self._participant.round.read(f"pause/{node.name}")
        if pause is not None and pause != self._pauses.get(node.name):
            self._pauses[node.name] = pause
            self._participant.channel.send(protocol.PauseEvent(index, bool(pause["paused"]), str(pause["text"])))
        news = self._participant.round.read(f"news/{node.name}")
        if news is not None and (node.name, news["kind"]) not in self._reported:
            self._reported.add((node.name, news["kind"]))
            text = f"{membership.title(index, node.host)}: {news['text']}"
            self._participant.channel.send(protocol.NewsEvent(news["kind"], index, text, news.get("failures", [])))

    def _read_late_notebooks(self) -> None:
        if not self._has_room():
            return
        for name, node in self._late_notebooks().items():
            if (name, "joining") not in self._reported:
                self._reported.add((name, "joining"))
                self._report("joining", 0, membership.joining_text(node))

    def _report(self, kind: str, index: int, text: str) -> None:
        self._participant.channel.send(protocol.NewsEvent(kind, index, text))

    # ---- the common decision

    def _has_room(self) -> bool:
        return membership.has_room(self._members, self._participant.attempt, self._participant.order.backend)

    def _late_notebooks(self) -> dict[str, Node]:
        """Return the late notebooks that ask to join the run, by name."""
        directory = self._participant.directory
        found = [directory.read(f"late/{n}") for n in range(1, directory.count("late") + 1)]
        members = {node.name for node in self._members}
        there = [
            Node.from_dict(values)
            for values in found
            if values and values["name"] not in members and not directory.read(f"gone/{values['arrival']}")
        ]
        return {node.name: node for node in there[: max(0, self._participant.order.num_nodes - len(members))]}

    def _decide(self) -> protocol.DecisionEvent | None:
        if not self._ended:
            return None
        participant = self._participant
        late = list(self._late_notebooks().values()) if self._has_room() else []
        attempt, backend = participant.attempt, participant.order.backend
        wanted = membership.decide(self._members, self._ends, self._lost, attempt, backend, late)
        return None if wanted is None else self._decided(participant.round.first("decision", wanted))

    def _decide_alone(self) -> protocol.DecisionEvent | None:
        """Decide without the others: the store is lost, and with it the notebook that hosted it."""
        if not self._ended:
            return None
        host = next((node for node in self._members if node.hosting), self._members[0])
        if any(node.name not in self._ends for node in self._members):  # otherwise the host had nothing more to publish
            self._lost.setdefault(host.name, SILENT)
        return self._decided({"action": "end", "reason": "", "remaining": [self._participant.node.name]})

    def _decided(self, decision: dict[str, Any]) -> protocol.DecisionEvent:
        indices = {node.name: str(index) for index, node in enumerate(self._members)}
        self._participant.remaining = list(decision["remaining"])
        return protocol.DecisionEvent(
            decision["action"], decision["reason"], {indices[name]: end for name, end in self._ends.items()},
            {indices[name]: why for name, why in self._lost.items()},
        )  # fmt: skip
