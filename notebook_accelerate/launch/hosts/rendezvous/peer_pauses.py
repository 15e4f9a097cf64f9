"""Suspends the clock of every notebook while one of them waits for its user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from notebook_accelerate.launch.hosts.rendezvous import membership
from notebook_accelerate.launch.hosts.rendezvous import rendezvous_protocol as protocol
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.supervisor.pausable_clock import Elsewhere
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.launch.hosts.rendezvous.rendezvous_client import RendezvousClient
    from notebook_accelerate.launch.supervisor.run_context import RunContext

STOPPED, ASKING = "stopped at a breakpoint", "waiting for input"


class PeerPauses:
    """Exchanges with the other notebooks whether the clock is suspended, and why.

    Args:
        context: This notebook's run.
        client: Sends to the others.
        shows_all: Returns whether this notebook currently shows the ranks of the others.
    """

    def __init__(self, context: RunContext, client: RendezvousClient, shows_all: Callable[[], bool]) -> None:
        self._context, self._client, self._shows_all = context, client, shows_all
        self._clock, self._prompts = context.clock, context.commands.prompts
        self._nodes: list[Node] = []
        self._own_ranks = range(0)
        self._reported = (False, "")
        self._texts: dict[int, str] = {}
        self._unannounced: dict[int, protocol.PauseEvent] = {}

    def set_nodes(self, nodes: list[Node], index: int) -> None:
        """Record the notebooks of the attempt; this one is ``nodes[index]``."""
        self._nodes, self._own_ranks = nodes, membership.ranks_of(nodes, index)

    def begin(self) -> None:
        """Start an attempt, in which no clock is suspended."""
        self._reported, self._texts, self._unannounced = (False, ""), {}, {}
        self._clock.forget_elsewhere()

    def report(self) -> None:
        """Report to the others when this notebook's clock is suspended for its user, and when it resumes."""
        here = self._clock.holders_here()
        reported = (bool(here), self._reasons_text(here))
        if reported != self._reported:
            self._reported = reported
            self._client.send(protocol.PauseOrder(*reported))

    def handle(self, event: protocol.PauseEvent) -> None:
        """Suspend or resume this clock with that of another notebook, and show where the user is expected."""
        change = self._clock.pause if event.paused else self._clock.resume
        change(Elsewhere(event.node))
        reported, self._texts[event.node] = self._texts.get(event.node, ""), event.text
        if event.text != reported:
            self._unannounced[event.node] = event
        self.announce()

    def announce(self) -> None:
        """Show where other notebooks wait for the user, once the prompts that can be opened here have arrived.

        Prompts take another path, so they can arrive after the event.
        """
        for event in list(self._unannounced.values()):
            is_prompt = any(kind in event.text for kind in (STOPPED, ASKING))
            if is_prompt and self._can_open() and not self._open_here(event):
                continue
            del self._unannounced[event.node]
            prompted_here = self._shows_all() and self._prompts.shown_in_cell
            if event.text and not prompted_here:
                name = membership.title(event.node, self._nodes[event.node].host)
                self._context.show(f"{name}: {event.text}{self._how_to_open(event)}", "stderr")

    def _reasons_text(self, here: Iterable[object]) -> str:
        stopped = self._own(self._prompts.debugged())
        kinds = {
            STOPPED: stopped,
            ASKING: self._own(who for who in here if who not in stopped),
            "paused": self._own(who[1] for who in here if isinstance(who, tuple)),
        }
        parts = [f"{rank_names(who)} {'is' if len(who) == 1 else 'are'} {how}" for how, who in kinds.items() if who]
        return " and ".join(parts)

    def _own(self, ranks: Iterable[object]) -> list[int]:
        return sorted(rank for rank in ranks if isinstance(rank, int) and rank in self._own_ranks)

    def _how_to_open(self, event: protocol.PauseEvent) -> str:
        open_here = self._open_here(event)
        if not self._can_open() or not open_here:
            return ", in its notebook"
        return f", in its notebook; run.debug(rank={open_here[0]}) opens it here too"

    def _can_open(self) -> bool:
        """Whether this notebook's user can answer ranks of the others, as soon as their prompts have arrived."""
        return self._shows_all() and not self._context.config.block

    def _open_here(self, event: protocol.PauseEvent) -> list[int]:
        """Return the ranks of the event's notebook whose prompts have arrived here."""
        ranks, prompts = membership.ranks_of(self._nodes, event.node), self._prompts
        return [rank for rank in ranks if rank in prompts.debugged() or prompts.is_open(rank)]
