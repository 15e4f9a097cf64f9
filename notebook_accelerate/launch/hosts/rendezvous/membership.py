"""Pure functions that decide who takes part, who is missing, and whether all end or restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Node:
    """One notebook of a run.

    Attributes:
        name: Unique among all notebooks that ever arrive.
        host: Name of its machine.
        pid: Process id of its kernel.
        node_rank: The ``node_rank`` it was launched with.
        processes: Ranks it starts.
        accelerator: Device type of its ranks.
        torch: Its version of torch.
        num_nodes: The number of notebooks it was launched with.
        min_nodes: The minimum number of notebooks it was launched with.
        max_restarts: The ``max_restarts`` it was launched with.
        hosting: Whether its child process hosts the store.
        order: Its index in torch's rendezvous.
    """

    name: str
    host: str
    pid: int
    node_rank: int
    processes: int
    accelerator: str = "cpu"
    torch: str = ""
    num_nodes: int = 2
    min_nodes: int = 2
    max_restarts: int = 0
    hosting: bool = False
    order: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the node as a dict, for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Node:
        """Return the node from the result of `as_dict`; unknown keys are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


def in_order(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes in rank order: by ``node_rank``, then the host of the store, then by arrival."""
    return sorted(nodes, key=lambda node: (node.node_rank, not node.hosting, node.order))


def ranks_of(nodes: Sequence[Node], index: int) -> range:
    """Return the global indices of a node's ranks."""
    first = sum(node.processes for node in nodes[:index])
    return range(first, first + nodes[index].processes)


def title(index: int, host: str) -> str:
    """Return the name of a node in messages."""
    return f"node {index} ({host})" if host else f"node {index}"


def kernels(nodes: Iterable[Node], separator: str = ", ") -> str:
    """Return a text that lists the kernels of nodes."""
    return separator.join(f"{node.host} (kernel {node.pid})" for node in nodes)


def waiting_text(backend: str, num_nodes: int, arrived: Sequence[Node]) -> str:
    """Return one line with the notebooks that have arrived and those that are missing."""
    text = f"{len(arrived)} of {num_nodes} nodes have joined"
    if backend == "static":
        missing = _missing(num_nodes, arrived)
        return f"{text}; waiting for {missing}" if missing else text
    hosts = ", ".join(node.host for node in sorted(arrived, key=lambda node: node.order))
    more = num_nodes - len(arrived)
    return f"{text} ({hosts}); waiting for {more} more" if more > 0 else f"{text} ({hosts})"


def _missing(num_nodes: int, arrived: Sequence[Node]) -> str:
    """Return "node 1" or "nodes 1, 2" for the missing node ranks; "" when none is missing."""
    numbers = sorted(set(range(num_nodes)) - {node.node_rank for node in arrived})
    shown = ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
    return f"node{'s' if len(numbers) > 1 else ''} {shown}" if numbers else ""


def timeout_text(backend: str, num_nodes: int, arrived: Sequence[Node], seconds: float) -> str:
    """Return the message that lists the notebooks missing at the join timeout."""
    text = waiting_text(backend, num_nodes, arrived).partition(";")[0]
    limit = f"within {seconds:g} s (rdzv_conf={{'join_timeout': {seconds:g}}})"
    if backend == "static":
        return f"{_missing(num_nodes, arrived)} did not join {limit}: {text}"
    missing_count = num_nodes - len(arrived)
    noun = "node" if missing_count == 1 else "nodes"
    return f"{missing_count} {noun} did not join {limit}: {text}"


def late_text(members: Sequence[Node], num_nodes: int) -> str:
    """Return the message to a notebook that arrives after the start of the run and is refused.

    Args:
        members: The notebooks of the run.
        num_nodes: The number of notebooks that the late one was launched with.
    """
    who = kernels(members)
    again = "stop it on one of them, and start it on every node again"
    if len(members) < num_nodes:
        return (
            f"the run began without this node, with {len(members)} of {num_nodes}: {who}; it includes another by "
            f"a restart, and max_restarts={members[0].max_restarts} leaves none. To include this one, "
            f"{again}: a function that loads the newest checkpoint resumes there"
        )
    more = f"num_nodes={len(members) + 1}"
    return f"the run has its {num_nodes} nodes already: {who}. To include this one, {again}, with {more}"


def has_room(members: Sequence[Node], attempt: int, backend: str) -> bool:
    """Return whether a run that has started restarts to include another notebook."""
    first = members[0]
    return backend == "c10d" and len(members) < first.num_nodes and attempt < first.max_restarts


def late_join_text(members: Sequence[Node], num_nodes: int) -> str:
    """Return the message of a late notebook while it waits to join."""
    who = kernels(members)
    return f"the run began without this node, with {len(members)} of {num_nodes}: {who}; they restart with it"


def joining_text(node: Node) -> str:
    """Return the message of the running notebooks about a late one."""
    return f"a late node joins, {kernels([node])}: all restart with it"


def problem(backend: str, arrived: Sequence[Node]) -> str:
    """Return why these notebooks cannot form one run; "" when they can."""
    given = {node.num_nodes for node in arrived}
    if len(given) > 1:
        return f"the nodes have different num_nodes={_values(given)}; pass the same"
    if backend == "static":
        twice = [rank for rank, count in Counter(node.node_rank for node in arrived).items() if count > 1]
        if twice:
            who = kernels((node for node in arrived if node.node_rank == twice[0]), " and ")
            return f"two nodes have node_rank={twice[0]}: {who}; pass a different one to each"
    kinds = {node.accelerator for node in arrived}
    if len(kinds) > 1:
        return f"the nodes have different devices, {_values(kinds)}; to train on the CPU everywhere pass cpu=True"
    return ""


def _values(values: Collection[object]) -> str:
    return " and ".join(str(value) for value in sorted(values, key=str))


def version_note(nodes: Sequence[Node]) -> str:
    """Return a warning if the nodes have different versions of torch; "" otherwise."""
    versions = {node.torch.partition("+")[0] for node in nodes}
    if len(versions) < 2:
        return ""
    each = ", ".join(f"{title(index, node.host)} {node.torch}" for index, node in enumerate(nodes))
    return f"the nodes have different versions of torch ({each}); collectives may fail"


def decide(
    nodes: Sequence[Node],
    ends: Mapping[str, Mapping[str, Any]],
    lost: Mapping[str, str],
    attempt: int,
    backend: str,
    late: Sequence[Node] = (),
) -> dict[str, Any] | None:
    """Return the common decision, once every notebook has reported its end or was lost.

    Args:
        nodes: The nodes in order.
        ends: The end that each reported ("outcome", "text", "failures", "final"), by name.
        lost: Why a node counts as lost, by name.
        attempt: Number of this attempt, from 0.
        backend: "static" or "c10d".
        late: Late notebooks that ask to join.

    Returns:
        A decision: "action" ("end" or "restart"), "reason", and "remaining", the names of the nodes that continue; None
        while a node has not reported its end.
    """
    if any(node.name not in ends and node.name not in lost for node in nodes):
        return None
    first = nodes[0]
    lost_names = [node.name for node in nodes if node.name in lost]
    remaining = [node.name for node in nodes if node.name not in lost]
    outcomes = {ends[name]["outcome"] for name in remaining if name in ends}
    reason = _reason(nodes, ends, lost)
    # Without a failure or a lost node, a notebook with the outcome "followed" stopped to let a late one join.
    cause = "failed" in outcomes or "followed" in outcomes or bool(lost_names)
    again = attempt < first.max_restarts and "stopped" not in outcomes and cause
    again = again and not any(end.get("final") for end in ends.values())
    if lost_names:
        hosting = any(node.hosting and node.name in lost_names for node in nodes)
        again = again and backend == "c10d" and len(remaining) + len(late) >= first.min_nodes and not hosting
    if again:
        remaining += [node.name for node in late]
        reason = reason or ", ".join(joining_text(node) for node in late)
    return {"action": "restart" if again else "end", "reason": reason, "remaining": remaining}


def _reason(nodes: Sequence[Node], ends: Mapping[str, Mapping[str, Any]], lost: Mapping[str, str]) -> str:
    for index, node in enumerate(nodes):
        if node.name in lost:
            return lost_text(index, node.host, lost[node.name])
    for wanted in ("stopped", "failed"):
        for index, node in enumerate(nodes):
            end = ends.get(node.name, {})
            if end.get("outcome") == wanted and end.get("text"):
                return f"{title(index, node.host)}: {end['text']}"
    return ""


def lost_text(index: int, host: str, why: str) -> str:
    """Return a sentence that reports a lost node and the reason."""
    return f"{title(index, host)} was lost: {why}"
