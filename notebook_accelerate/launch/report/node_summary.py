"""Ranks grouped by node, and their states in a few words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

MANY = 16
"""Of more ranks than this, views show a summary per node and the outliers; the other ranks are folded."""
SHOWN_NODES = 16
SHOWN_RANKS = 12
_STATES = ("failed", "stopped", "starting", "running", "succeeded")
"""In the order in which a summary lists them."""


class RankOnNode(Protocol):
    """The attributes of a rank that grouping reads."""

    @property
    def rank(self) -> int:
        """Global index."""

    @property
    def state(self) -> str:
        """Its state, such as running."""

    @property
    def node(self) -> int:
        """Index of its machine."""

    @property
    def host(self) -> str:
        """Name of that machine; "" for this one."""


Rank = TypeVar("Rank", bound=RankOnNode)


def by_node(ranks: Iterable[Rank]) -> dict[int, list[Rank]]:
    """Return the ranks of each node, by its index."""
    found: dict[int, list[Rank]] = {}
    for rank in ranks:
        found.setdefault(rank.node, []).append(rank)
    return dict(sorted(found.items()))


def node_name(ranks: Sequence[RankOnNode], *, several: bool) -> str:
    """Return the name of a node, as "node 1 · worker-7".

    Args:
        ranks: The ranks of the node.
        several: Whether there are other nodes.
    """
    host = ranks[0].host or ("this machine" if several else "")
    number = f"node {ranks[0].node}" if several else "all ranks"
    return f"{number} · {host}" if host else number


def state_counts(ranks: Iterable[RankOnNode]) -> str:
    """Return the number of ranks in each state, the worst first, as "1 failed, 7 running"."""
    counts = Counter(rank.state for rank in ranks)
    return ", ".join(f"{counts[state]:,} {state}" for state in sorted(counts, key=lambda s: (severity(s), s)))


def severity(state: str) -> int:
    """Return a sort key for states: the worst is 0."""
    return _STATES.index(state) if state in _STATES else len(_STATES)
