"""Converts failures for exchange between notebooks, and merges those of all notebooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from notebook_accelerate.launch.hosts.rendezvous import membership
from notebook_accelerate.launch.hosts.rendezvous.membership import Node
from notebook_accelerate.launch.state import failures
from notebook_accelerate.telemetry import RankFailure, steady_time, tracebacks
from notebook_accelerate.telemetry.failure import to_chain


def to_json(found: Iterable[RankFailure], index: int) -> list[dict[str, Any]]:
    """Return the failures of node ``index`` as JSON values; exception objects stay in their own notebook."""
    return [
        {
            "rank": failure.rank, "kind": failure.kind, "time": failure.time, "message": failure.message,
            "chain": tracebacks.with_named_cells(failure.chain, f" of node {index}"), "signal": failure.signal,
        }
        for failure in found
    ]  # fmt: skip


def from_json(reported: Iterable[Mapping[str, Any]]) -> list[RankFailure]:
    """Return the failures from the result of `to_json`; those of an incompatible version are skipped."""
    found = []
    for each in reported:
        with suppress(KeyError, TypeError, ValueError):
            found.append(
                RankFailure(
                    int(each["rank"]), str(each["kind"]), float(each["time"]), str(each["message"]),
                    to_chain(each["chain"]), signal=each.get("signal"),
                )
            )  # fmt: skip
    return found


def lost_failures(nodes: Sequence[Node], lost: Mapping[str, str]) -> tuple[RankFailure, ...]:
    """Return a failure for each rank of the nodes that were lost.

    Args:
        nodes: All nodes, in order.
        lost: Why a node was lost, by its index.
    """
    found = []
    for index, why in sorted((int(index), why) for index, why in lost.items()):
        text = membership.lost_text(index, nodes[index].host, why)
        found += [RankFailure(rank, "lost", steady_time.now(), text) for rank in membership.ranks_of(nodes, index)]
    return tuple(found)


def merged(
    here: Iterable[RankFailure],
    own_ranks: Collection[int],
    reported: Iterable[RankFailure],
    lost: Sequence[RankFailure],
) -> tuple[RankFailure, ...]:
    """Return every rank's failure, the first failure first; after a lost node the others are its consequences.

    Args:
        here: Failures that this notebook has seen; these have their exceptions.
        own_ranks: The ranks that it starts.
        reported: Failures that all notebooks reported; these have the names of the others' cells.
        lost: Failures of the ranks that were lost.
    """
    by_rank = {failure.rank: failure for failure in reported}
    for failure in here:
        keeps = failure.rank in own_ranks or failure.rank not in by_rank
        chain = failure.chain if keeps else by_rank[failure.rank].chain
        by_rank[failure.rank] = replace(failure, chain=chain)
    gone = {failure.rank for failure in lost}
    rest = failures.ordered([failure for rank, failure in by_rank.items() if rank not in gone])
    return (*lost, *(replace(failure, consequence=True) if lost else failure for failure in rest))
