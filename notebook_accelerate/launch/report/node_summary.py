"""Many ranks in few lines: grouped by the machine they run on, and those that stand out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

MANY = 16
"""Of more ranks than this, views show a summary per node and the ranks that stand out; the others are folded."""
SHOWN_NODES = 16
SHOWN_RANKS = 12
_STATES = ("failed", "stopped", "starting", "running", "succeeded")
"""In the order in which a summary names them."""


class Placed(Protocol):
    """What grouping needs to know of a rank."""

    @property
    def rank(self) -> int:
        """Global index."""

    @property
    def state(self) -> str:
        """What it does."""

    @property
    def node(self) -> int:
        """Index of its machine."""

    @property
    def host(self) -> str:
        """Name of that machine; "" for this one."""


Rank = TypeVar("Rank", bound=Placed)


def by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """Return the ranks of each node, by its index."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return dict(sorted(found.items()))


def node_name(ranks: Sequence[Placed], *, several: bool) -> str:
    """Return what the node of these ranks is called, as "node 1 · worker-7".

    Args:
        ranks: The ranks of one node.
        several: Whether there are others.
    """
    host = ranks[0].host or ("this machine" if several else "")
    number = f"node {ranks[0].node}" if several else "all ranks"
    return f"{number} · {host}" if host else number


def states(ranks: Iterable[Placed]) -> str:
    """Return how many ranks are in which state, the worst first, as "1 failed, 7 running"."""
    counts = Counter(rank.state for rank in ranks)
    order = [*_STATES, *sorted(set(counts) - set(_STATES))]
    return ", ".join(f"{counts[state]:,} {state}" for state in order if counts[state])


def worst_state(state: str) -> int:
    """Return what to sort states by, so that the worst comes first."""
    return _STATES.index(state) if state in _STATES else len(_STATES)


__all__ = ["MANY", "SHOWN_NODES", "SHOWN_RANKS", "Placed", "by_node", "node_name", "states", "worst_state"]
