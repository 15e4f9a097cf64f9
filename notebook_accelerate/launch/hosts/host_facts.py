"""What a host tells about itself when it joins, and which hosts fit into one run."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from notebook_accelerate.hardware.versions import installed_version
from notebook_accelerate.launch.hosts.remote.host_connection import node_name

NOTEBOOK, COMMAND = "notebook", "command"
"""The kinds of hosts: one has a cell with the function, the other receives the function from the first notebook."""

MAX_PROCESSES = 4096
"""More ranks on one host are a mistake."""


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """One host of a run.

    Attributes:
        kind: `NOTEBOOK` or `COMMAND`.
        host: Name of its machine.
        pid: Its process.
        node_rank: The ``node_rank`` that it was launched with; -1: the first notebook assigns one.
        processes: Ranks it starts; 0: as many as the first notebook.
        accelerator: Device type of its ranks.
        versions: Its versions by name: python, torch, notebook_accelerate.
        num_nodes: The number of nodes that it was launched with; 0: it does not know.
        rdzv_id: The name of the run that it wants to join; "" joins any.
        address: Its own address on the way to the first notebook; "" if unknown.
    """

    kind: str = NOTEBOOK
    host: str = ""
    pid: int = 0
    node_rank: int = -1
    processes: int = 0
    accelerator: str = "cpu"
    versions: Mapping[str, str]
    num_nodes: int = 0
    rdzv_id: str = ""
    address: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as JSON values, for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostFacts:
        """Return the facts from the result of `as_dict`.

        Raises:
            ValueError: A value is missing or of another type.
        """
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        found = cls(**{"versions": {}, **known})
        numbers = (found.pid, found.node_rank, found.processes, found.num_nodes)
        texts = (found.kind, found.host, found.accelerator, found.rdzv_id, found.address)
        if not all(isinstance(number, int) for number in numbers) or not all(isinstance(text, str) for text in texts):
            raise ValueError("a host sent facts of other types")
        if not isinstance(found.versions, Mapping) or not 0 <= found.processes <= MAX_PROCESSES:
            raise ValueError(f"a host sent facts that are not possible: {found.processes} processes")
        return found

    @property
    def title(self) -> str:
        """Its machine and process in messages."""
        return f"{self.host} ({'kernel' if self.kind == NOTEBOOK else 'process'} {self.pid})"


def own_facts(**values: Any) -> HostFacts:
    """Return the facts of this process."""
    return HostFacts(host=own_name(), pid=os.getpid(), versions=own_versions(), **values)


def own_name() -> str:
    """Return the name of this machine."""
    return platform.node() or socket.gethostname()


def own_versions() -> dict[str, str]:
    """Return the versions that must match between the machines of a run; a package that is missing is left out."""
    packages = {"torch": "torch", "notebook_accelerate": "notebook-accelerate"}
    found = {name: version for name, package in packages.items() if (version := installed_version(package))}
    return {"python": platform.python_version(), **found}


def same_version(name: str, one: str, other: str) -> bool:
    """Return whether two versions fit.

    Python must match in its minor version (cloudpickle carries byte code), torch without its build (CPU and CUDA builds
    of one version are compatible), and this package in its full version (its processes exchange messages).
    """
    if name == "python":
        return one.split(".")[:2] == other.split(".")[:2]
    return one.partition("+")[0] == other.partition("+")[0]


def listed(hosts: Iterable[HostFacts], separator: str = ", ") -> str:
    """Return a text that lists hosts."""
    return separator.join(host.title for host in hosts)


def waiting_text(backend: str, num_nodes: int, arrived: Sequence[HostFacts]) -> str:
    """Return one line with the hosts that have arrived and those that are missing; the first notebook is the first."""
    text = f"{len(arrived)} of {num_nodes} nodes have joined"
    if backend == "static":
        missing = _missing(num_nodes, arrived)
        return f"{text}; waiting for {missing}" if missing else text
    hosts = ", ".join(host.host for host in arrived)
    more = num_nodes - len(arrived)
    return f"{text} ({hosts}); waiting for {more} more" if more > 0 else f"{text} ({hosts})"


def timeout_text(backend: str, num_nodes: int, arrived: Sequence[HostFacts], seconds: float) -> str:
    """Return the message that names the hosts missing at the join timeout."""
    text = waiting_text(backend, num_nodes, arrived).partition(";")[0]
    limit = f"within {seconds:g} s (rdzv_conf={{'join_timeout': {seconds:g}}})"
    if backend == "static":
        return f"{_missing(num_nodes, arrived)} did not join {limit}: {text}"
    missing = num_nodes - len(arrived)
    return f"{missing} {'node' if missing == 1 else 'nodes'} did not join {limit}: {text}"


def _missing(num_nodes: int, arrived: Sequence[HostFacts]) -> str:
    """Return "node 1", "nodes 1, 2" or "1 of nodes 1, 2" for the nodes that are missing; "" when none is."""
    asked = {host.node_rank for host in arrived}
    free = [number for number in range(num_nodes) if number not in asked]
    unnumbered = sum(host.node_rank < 0 for host in arrived)  # they fill gaps once all have joined
    if len(free) == unnumbered:
        return ""
    shown = ", ".join(map(str, free[:10])) + (", …" if len(free) > 10 else "")
    nodes = f"node{'s' if len(free) > 1 else ''} {shown}"
    return f"{len(free) - unnumbered} of {nodes}" if unnumbered else nodes


def late_text(members: Sequence[HostFacts], num_nodes: int, max_restarts: int) -> str:
    """Return the message to a host that arrives after the start of the run, and cannot join it.

    Args:
        members: The hosts of the run.
        num_nodes: The number of nodes that the run was launched with.
        max_restarts: The run's ``max_restarts``.
    """
    who = listed(members)
    again = "stop it, and start it on every node again"
    if len(members) < num_nodes:
        return (
            f"the run began without this node, with {len(members)} of {num_nodes}: {who}; it includes another by "
            f"a restart, and max_restarts={max_restarts} leaves none. To include this one, {again}: a function that "
            "loads the newest checkpoint resumes there"
        )
    more = f"num_nodes={num_nodes + 1}"
    return f"the run has its {num_nodes} nodes already: {who}. To include this one, {again}, with {more}"


def late_join_text(members: Sequence[HostFacts], num_nodes: int) -> str:
    """Return the message to a late host while it waits to join."""
    who = listed(members)
    return f"the run began without this node, with {len(members)} of {num_nodes}: {who}; they restart with it"


def joining_text(host: HostFacts) -> str:
    """Return the message of the run about a late host."""
    return f"a late node joins, {host.title}: all restart with it"


def problem(host: HostFacts, members: Sequence[HostFacts], backend: str) -> str:
    """Return why a host cannot join ``members``, the first notebook first; "" when it can."""
    first = members[0]
    if host.num_nodes and host.num_nodes != first.num_nodes:
        given = " and ".join(map(str, sorted({host.num_nodes, first.num_nodes})))
        return f"the nodes have different num_nodes={given}; pass the same"
    twice = [each for each in members if host.node_rank >= 0 and each.node_rank == host.node_rank]
    if backend == "static" and twice:
        who = f"{twice[0].title} and {host.title}"
        return f"two nodes have node_rank={host.node_rank}: {who}; pass a different one to each"
    if first.accelerator not in ("cpu", host.accelerator) or (
        host.kind == NOTEBOOK and host.accelerator != first.accelerator
    ):
        kinds = " and ".join(sorted({host.accelerator, first.accelerator}))
        return f"the nodes have different devices, {kinds}; to train on the CPU everywhere pass cpu=True"
    return _version_problem(host, first)


def _version_problem(host: HostFacts, first: HostFacts) -> str:
    """Return why the versions of a host do not fit; a notebook with another torch only gets a note."""
    exact = ("notebook_accelerate",) if host.kind == NOTEBOOK else tuple(first.versions)
    for name in exact:
        found, wanted = host.versions.get(name, ""), first.versions.get(name, "")
        if not found:
            return f"{host.title} has no {name}; the first notebook has {wanted}: install the same version there"
        if not same_version(name, found, wanted):
            return f"{host.title} has {name} {found}; the first notebook has {wanted}: install the same version there"
    return ""


def version_note(hosts: Sequence[HostFacts]) -> str:
    """Return a warning if the hosts have different versions of torch; "" otherwise."""
    versions = [host.versions.get("torch", "") for host in hosts]
    if all(same_version("torch", version, versions[0]) for version in versions):
        return ""
    each = ", ".join(f"{node_name(index, host.host)} {versions[index]}" for index, host in enumerate(hosts))
    return f"the nodes have different versions of torch ({each}); collectives may fail"


__all__ = [
    "COMMAND",
    "NOTEBOOK",
    "HostFacts",
    "joining_text",
    "late_join_text",
    "late_text",
    "listed",
    "own_facts",
    "own_name",
    "own_versions",
    "problem",
    "same_version",
    "timeout_text",
    "version_note",
    "waiting_text",
]
