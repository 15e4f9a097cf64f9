"""Participation while the ranks run: sends keep-alives and news, and decides the end together with the others."""

from __future__ import annotations

import time
from typing import Any

from notebook_accelerate.launch.hosts.rendezvous import membership as rules
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as say
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_store as stores
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.hosts.rendezvous.participant import Participant

SILENT = "the rendezvous, which it hosts, does not answer any more"


class Watch:
    """One attempt, from the arrival of all notebooks to the common decision.

    Args:
        seat: This notebook's participant state.
        members: All notebooks of the attempt, in order.

    Attributes:
        orphaned: Whether the store is lost, and with it the notebook that hosted it.
    """

    def __init__(self, seat: Participant, members: list[Node]) -> None:
        self._seat, self._members = seat, members
        self.orphaned = False
        self._seen_news = -1
        self._told: set[tuple[str, str]] = set()
        self._stands: dict[str, dict[str, Any]] = {}
        self._lost: dict[str, str] = {}
        self._ends: dict[str, dict[str, Any]] = {}
        self._ended = False
        self._door: dict[str, Any] | None = None
        now = time.monotonic()
        self._beat_at = 0.0
        self._beats: dict[str, tuple[int, float]] = {node.name: (0, now) for node in members}

    # ---- from this notebook

    def tell(self, kind: str, values: dict[str, Any]) -> None:
        """Publish values of this notebook to the others; they replace the earlier values of that kind."""
        if not self.orphaned:
            self._seat.round.post(f"{kind}/{self._seat.node.name}", values)
            self._seat.round.count("news", 1)

    def tell_end(self, end: dict[str, Any]) -> None:
        """Publish how this notebook's ranks have ended; it then waits for the decision."""
        self._ended = True
        self._ends[self._seat.node.name] = end
        self.tell("end", end)

    def open_door(self, door: dict[str, Any]) -> None:
        """Publish the address of this notebook's listener; only the first notebook has one."""
        self._door = door
        self._seat.round.post("door", door)
        self._seat.round.count("news", 1)

    def leave(self, why: str) -> None:
        """Publish that this notebook leaves, unless its ranks have ended."""
        if self._seat.node.name not in self._ends:
            self._declare_lost(self._seat.node, why)

    def store_gone(self) -> None:
        """Handle a store that no longer answers: report the notebook that hosts it as lost."""
        if self.orphaned:
            return
        self.orphaned = True
        index = next((index for index, node in enumerate(self._members) if node.hosting), 0)
        node = self._members[index]
        if node.name not in self._ends and node.name not in self._lost:
            self._tell_kernel("lost", index, rules.lost_text(index, node.host, SILENT))

    # ---- all notebooks

    def step(self) -> say.DecisionEvent | None:
        """Check the other notebooks, and return the common decision once there is one."""
        if self.orphaned:
            return self._decide_alone()
        self._keep_alive()
        news = self._seat.round.count("news")
        if news == self._seen_news:
            return None
        self._seen_news = news
        self._read_news()
        self._read_wishes()
        return self._decide()

    def _keep_alive(self) -> None:
        now = time.monotonic()
        interval, limit = stores.keep_alive(self._seat.order)
        if now < self._beat_at:
            return
        self._beat_at = now + min(interval, 1.0) / 2
        own = self._seat.node.name
        self._seat.round.count(f"alive/{own}", 1)
        for node in self._members:
            if node.name in (own, *self._lost, *self._ends):
                continue
            count = self._seat.round.count(f"alive/{node.name}")
            before, since = self._beats[node.name]
            if count != before:
                self._beats[node.name] = (count, now)
            elif now - since > limit:
                self._declare_lost(node, f"it gave no sign of life for {limit:g} s")

    def _declare_lost(self, node: Node, why: str) -> None:
        self._seat.round.first(f"lost/{node.name}", {"why": why})
        self._seat.round.count("news", 1)

    # ---- to the kernel

    def _read_news(self) -> None:
        here = self._seat.round
        if self._door is None and (door := here.read("door")):
            self._door = door
            self._seat.channel.send(say.ListenerEvent(str(door["address"]), int(door["port"])))
        for index, node in enumerate(self._members):
            if node.name not in self._lost and (lost := here.read(f"lost/{node.name}")):
                self._lost[node.name] = str(lost["why"])
                self._tell_kernel("lost", index, rules.lost_text(index, node.host, self._lost[node.name]))
            # A notebook that waits for the others after its ranks have ended can still be stopped.
            if (end := here.read(f"end/{node.name}")) and end != self._ends.get(node.name):
                self._ends[node.name] = end
                if end["outcome"] in ("failed", "stopped") and not any(name == node.name for name, _ in self._told):
                    self._told.add((node.name, end["outcome"]))
                    self._tell_kernel(end["outcome"], index, f"{rules.title(index, node.host)}: {end['text']}")
            if node.name != self._seat.node.name:
                self._read_news_of(index, node)

    def _read_news_of(self, index: int, node: Node) -> None:
        stand = self._seat.round.read(f"stand/{node.name}")
        if stand is not None and stand != self._stands.get(node.name):
            self._stands[node.name] = stand
            self._seat.channel.send(say.StandEvent(index, bool(stand["standing"]), str(stand["text"])))
        news = self._seat.round.read(f"news/{node.name}")
        if news is not None and (node.name, news["kind"]) not in self._told:
            self._told.add((node.name, news["kind"]))
            text = f"{rules.title(index, node.host)}: {news['text']}"
            self._seat.channel.send(say.NewsEvent(news["kind"], index, text, news.get("failures", [])))

    def _read_wishes(self) -> None:
        if not self._has_room():
            return
        for name, node in self._wishes().items():
            if (name, "joining") not in self._told:
                self._told.add((name, "joining"))
                self._tell_kernel("joining", 0, rules.joining_text(node))

    def _tell_kernel(self, kind: str, index: int, text: str) -> None:
        self._seat.channel.send(say.NewsEvent(kind, index, text))

    # ---- the common decision

    def _has_room(self) -> bool:
        return rules.has_room(self._members, self._seat.attempt, self._seat.order.backend)

    def _wishes(self) -> dict[str, Node]:
        """Return the late notebooks that ask to join the run, by name."""
        directory = self._seat.directory
        found = [directory.read(f"wish/{n}") for n in range(1, directory.count("wishes") + 1)]
        members = {node.name for node in self._members}
        there = [
            Node.from_dict(wish)
            for wish in found
            if wish and wish["name"] not in members and not directory.read(f"gone/{wish['arrival']}")
        ]
        return {node.name: node for node in there[: max(0, self._seat.order.num_nodes - len(members))]}

    def _decide(self) -> say.DecisionEvent | None:
        if not self._ended:
            return None
        seat = self._seat
        wishes = list(self._wishes().values()) if self._has_room() else []
        wanted = rules.decide(self._members, self._ends, self._lost, seat.attempt, seat.order.backend, wishes)
        return None if wanted is None else self._decided(seat.round.first("decision", wanted))

    def _decide_alone(self) -> say.DecisionEvent | None:
        """Decide without the others: the store is lost, and with it the notebook that hosted it."""
        if not self._ended:
            return None
        gone = next((node for node in self._members if node.hosting), self._members[0])
        if any(node.name not in self._ends for node in self._members):  # otherwise the host had nothing more to publish
            self._lost.setdefault(gone.name, SILENT)
        return self._decided({"action": "end", "reason": "", "left": [self._seat.node.name]})

    def _decided(self, decision: dict[str, Any]) -> say.DecisionEvent:
        indices = {node.name: str(index) for index, node in enumerate(self._members)}
        self._seat.left = list(decision["left"])
        return say.DecisionEvent(
            decision["action"], decision["reason"], {indices[name]: end for name, end in self._ends.items()},
            {indices[name]: why for name, why in self._lost.items()}, len(self._seat.left),
        )  # fmt: skip


__all__ = ["Watch"]
