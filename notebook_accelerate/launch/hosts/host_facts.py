"""Facts about hosts: whether they can share a run, which secret they share, and the cells of their notebooks."""

from __future__ import annotations

import linecache
import os
import platform
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.hardware.versions import installed_version
from notebook_accelerate.launch.hosts.remote.host_protocol import NOTEBOOK, HelloEvent, node_name
from notebook_accelerate.launch.state.run_events import FailuresRecorded, RankFailed
from notebook_accelerate.telemetry import Event, ExceptionInfo, FailureEvent, FrameInfo, InputRequest, tracebacks
from notebook_accelerate.telemetry.debug_protocol import CellReply, StacksReply
from notebook_accelerate.telemetry.tracebacks import cell_name, cell_sources, install_sources

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.launch.plan.planner import LaunchPlan


MAX_PROCESSES = 4096
"""Maximum number of ranks on one host. A larger number is treated as a mistake."""


def own_hello(**values: Any) -> HelloEvent:
    """Return the message with which this process describes itself to the kernel as a host."""
    return HelloEvent(host=platform.node() or socket.gethostname(), pid=os.getpid(), versions=own_versions(), **values)


def notebook_hello(node: int, plan: LaunchPlan, config: LaunchConfig) -> HelloEvent:
    """Return the message with which this notebook describes itself to the first one."""
    return own_hello(
        kind=NOTEBOOK,
        node=node,
        processes=plan.num_processes,
        accelerator=plan.accelerator,
        num_nodes=config.num_nodes,
        rdzv_id=config.rdzv_id,
    )


def own_versions() -> dict[str, str]:
    """Return the versions that must match between the machines of a run. Missing packages are left out."""
    packages = {"torch": "torch", "notebook_accelerate": "notebook-accelerate"}
    found = {name: version for name, package in packages.items() if (version := installed_version(package))}
    return {"python": platform.python_version(), **found}


def same_version(name: str, one: str, other: str) -> bool:
    """Return whether two versions are compatible.

    For Python, the minor versions must be equal, because cloudpickle sends byte code. For torch, the builds may differ,
    because CPU and CUDA builds of one version are compatible. For this package, the full versions must be equal,
    because its processes exchange messages.
    """
    if name == "python":
        return one.split(".")[:2] == other.split(".")[:2]
    return one.partition("+")[0] == other.partition("+")[0]


def version_differences(who: str, found: Mapping[str, str], wanted: Mapping[str, str], whose: str) -> list[str]:
    """Return a sentence about each version that does not match; see `same_version`."""
    sentences = []
    for name, version in wanted.items():
        own = found.get(name, "")
        if not own or not same_version(name, own, version):
            what = f"{name} {own}" if own else f"no {name}"
            sentences.append(f"{who} has {what}; {whose} has {version}")
    return sentences


def listed(hosts: Iterable[HelloEvent], separator: str = ", ") -> str:
    """Return the titles of hosts, joined by a separator."""
    return separator.join(host.title for host in hosts)


def waiting_text(backend: str, num_nodes: int, arrived: Sequence[HelloEvent]) -> str:
    """Return a line about how many hosts have joined and which are missing.

    The first item of ``arrived`` is this notebook.
    """
    text = f"{len(arrived)} of {num_nodes} nodes have joined"
    if backend == "static":
        missing = _missing(num_nodes, arrived)
        return f"{text}; waiting for {missing}" if missing else text
    hosts = ", ".join(host.host for host in arrived)
    more = num_nodes - len(arrived)
    return f"{text} ({hosts}); waiting for {more} more" if more > 0 else f"{text} ({hosts})"


def timeout_text(backend: str, num_nodes: int, arrived: Sequence[HelloEvent], seconds: float) -> str:
    """Return the error message about the hosts that are missing at the join timeout."""
    text = waiting_text(backend, num_nodes, arrived).partition(";")[0]
    limit = f"within {seconds:g} s (rdzv_conf={{'join_timeout': {seconds:g}}})"
    if backend == "static":
        return f"{_missing(num_nodes, arrived)} did not join {limit}: {text}"
    missing = num_nodes - len(arrived)
    return f"{missing} {'node' if missing == 1 else 'nodes'} did not join {limit}: {text}"


def _missing(num_nodes: int, arrived: Sequence[HelloEvent]) -> str:
    """Name the missing nodes, as in "node 1", "nodes 1, 2" or "1 of nodes 1, 2". Return "" if no node is missing."""
    asked = {host.node for host in arrived}
    free = [number for number in range(num_nodes) if number not in asked]
    unnumbered = sum(host.node < 0 for host in arrived)  # Hosts without a number will fill the gaps.
    if len(free) == unnumbered:
        return ""
    shown = ", ".join(map(str, free[:10])) + (", …" if len(free) > 10 else "")
    nodes = f"node{'s' if len(free) > 1 else ''} {shown}"
    return f"{len(free) - unnumbered} of {nodes}" if unnumbered else nodes


def late_text(members: Sequence[HelloEvent], num_nodes: int, max_restarts: int) -> str:
    """Return the message for a host that arrives after the start of the run and cannot join.

    Args:
        members: The hosts that take part in the run.
        num_nodes: The number of nodes that the run was launched with.
        max_restarts: The number of restarts that the run was launched with.
    """
    who = listed(members)
    again = "stop the run, and start it again on every node"
    if len(members) < num_nodes:
        return (
            f"the run started without this node, with {len(members)} of {num_nodes}: {who}; another can join only at "
            f"a restart, and max_restarts={max_restarts} allows no further one. To include this node, {again}: a "
            "function that loads the newest checkpoint resumes from it"
        )
    more = f"num_nodes={num_nodes + 1}"
    return f"the run already has its {num_nodes} nodes: {who}. To include this node, {again}, with {more}"


def late_join_text(members: Sequence[HelloEvent], num_nodes: int) -> str:
    """Return the message for a late host that waits for the restart in order to join."""
    who = listed(members)
    return f"the run started without this node, with {len(members)} of {num_nodes}: {who}; they restart to include it"


def joining_text(host: HelloEvent) -> str:
    """Return the run's message about a late host for which the run restarts."""
    return f"a late node joins, {host.title}: all nodes restart to include it"


def problem(host: HelloEvent, members: Sequence[HelloEvent], backend: str) -> str:
    """Return why a host cannot join ``members``, which start with the first notebook. Return "" if it can."""
    first = members[0]
    if not 0 <= host.processes <= MAX_PROCESSES:
        return f"{host.title} would start {host.processes} ranks; at most {MAX_PROCESSES} are allowed"
    if host.num_nodes and host.num_nodes != first.num_nodes:
        given = " and ".join(map(str, sorted({host.num_nodes, first.num_nodes})))
        return f"the nodes have different num_nodes={given}; pass the same num_nodes everywhere"
    twice = [each for each in members if host.node >= 0 and each.node == host.node]
    if backend == "static" and twice:
        who = f"{twice[0].title} and {host.title}"
        return f"two nodes have node_rank={host.node}: {who}; pass a different one to each"
    if first.accelerator not in ("cpu", host.accelerator) or (
        host.kind == NOTEBOOK and host.accelerator != first.accelerator
    ):
        kinds = " and ".join(sorted({host.accelerator, first.accelerator}))
        return f"the nodes have different devices, {kinds}; to train on the CPU everywhere, pass cpu=True"
    return _version_problem(host, first)


def _version_problem(host: HelloEvent, first: HelloEvent) -> str:
    """Return why the versions of a host are incompatible, or "" if they are not.

    In a notebook, a different version of torch is allowed. It only leads to `version_note`.
    """
    exact = ("notebook_accelerate",) if host.kind == NOTEBOOK else tuple(first.versions)
    wanted = {name: first.versions.get(name, "") for name in exact}
    found = version_differences(host.title, host.versions, wanted, "the first notebook")
    return f"{found[0]}: install the same version on it" if found else ""


def version_note(hosts: Sequence[HelloEvent]) -> str:
    """Return a warning if the hosts have different versions of torch, or "" if all have the same."""
    versions = [host.versions.get("torch", "") for host in hosts]
    if all(same_version("torch", version, versions[0]) for version in versions):
        return ""
    each = ", ".join(f"{node_name(index, host.host)} {versions[index]}" for index, host in enumerate(hosts))
    return f"the nodes have different versions of torch ({each}); collectives may fail"


# ---- the secret shared by the notebooks and commands of a run

SECRET_VARIABLE = "NOTEBOOK_ACCELERATE_SECRET"  # noqa: S105 - a variable's name, not a secret


def shared_secret(config: LaunchConfig) -> str:
    """Return the secret that was given for a launch, or "" if there is none."""
    return str((config.rdzv_conf or {}).get("secret") or os.environ.get(SECRET_VARIABLE, ""))


def secret_for_command(file: str | None) -> str:
    """Return the secret for a command, from a file or from the environment.

    Raises:
        ValueError: There is no secret, or the file cannot be read.
    """
    if file is not None:
        try:
            found = Path(file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--secret_file {file}: {error}") from None
        if not found:
            raise ValueError(f"--secret_file {file} is empty; write the run's secret into it")
        return found
    if found := os.environ.get(SECRET_VARIABLE, ""):
        return found
    raise ValueError(
        f"a host needs the run's secret: set {SECRET_VARIABLE}, or pass --secret_file with a file that contains it"
    )


# ---- names and sources of cells in other notebooks, for tracebacks and stacks


def own_cells() -> dict[str, list[str]]:
    """Return this notebook's cells in the format that ``CellsEvent`` uses."""
    return {filename: [cell_name(filename), source] for filename, source in cell_sources().items()}


class ForeignCells:
    """Adds the names and source lines of another notebook's cells to the events of its ranks.

    Args:
        suffix: A function that returns the suffix for names of cells, such as " of node 1".
    """

    def __init__(self, suffix: Callable[[], str]) -> None:
        self._suffix = suffix
        self._names: dict[str, str] = {}

    def add(self, cells: Mapping[str, list[str]]) -> None:
        """Add cells in the format of ``CellsEvent``, and register their source lines for tracebacks."""
        for filename, (name, source) in cells.items():
            linecache.cache.pop(self._names.get(filename, ""), None)
            self._names[filename] = cell = f"{name}{self._suffix()}"
            install_sources({cell: source})

    def clear(self) -> None:
        """Remove all cells that were registered in this process."""
        for name in self._names.values():
            linecache.cache.pop(name, None)
        self._names.clear()

    def with_named_cells(self, event: Event) -> Event:
        """Return a rank's event with the names of cells in place of their file names."""
        if isinstance(event, StacksReply):
            event.threads = {name: self._in_frames(frames) for name, frames in event.threads.items()}
        elif isinstance(event, (FailureEvent, CellReply)):
            event.chain = self._in_chain(event.chain)
        elif isinstance(event, InputRequest):
            event.shown = self.in_text(event.shown)
        return event

    def in_text(self, text: str) -> str:
        """Return ``text`` with the names of cells in place of their file names."""
        for filename, name in list(self._names.items()):  # Iterate over a copy, because another thread may add cells.
            if filename in text:
                text = text.replace(filename, name)
        return text

    def _in_frames(self, frames: tuple[FrameInfo, ...]) -> tuple[FrameInfo, ...]:
        return tuple(self._in_frame(frame) if frame.filename in self._names else frame for frame in frames)

    def _in_frame(self, frame: FrameInfo) -> FrameInfo:
        name = self._names[frame.filename]
        return frame._replace(filename=name, source=frame.source or linecache.getline(name, frame.lineno).strip())

    def _in_chain(self, chain: tuple[ExceptionInfo, ...]) -> tuple[ExceptionInfo, ...]:
        return tuple(
            info._replace(message=self.in_text(info.message), frames=self._in_frames(info.frames)) for info in chain
        )


def name_cells_in(event: Event, suffix: str) -> Event:
    """Return a journal event for another notebook, with this notebook's cells named and marked with ``suffix``."""
    return _with_chains(event, lambda chain: tracebacks.with_named_cells(chain, suffix))


def with_own_cells(event: Event, suffix: str) -> Event:
    """Return a journal event from another notebook, without the suffix that marks this notebook's cells."""

    def own(chain: tuple[ExceptionInfo, ...]) -> tuple[ExceptionInfo, ...]:
        return tuple(info._replace(frames=tuple(map(here, info.frames))) for info in chain)

    def here(frame: FrameInfo) -> FrameInfo:
        return frame._replace(filename=frame.filename.removesuffix(suffix))

    return _with_chains(event, own)


def _with_chains(event: Event, change: Callable[[tuple[ExceptionInfo, ...]], tuple[ExceptionInfo, ...]]) -> Event:
    if isinstance(event, RankFailed):
        return replace(event, failure=replace(event.failure, chain=change(event.failure.chain)))
    if isinstance(event, FailuresRecorded):
        return replace(event, failures=[replace(failure, chain=change(failure.chain)) for failure in event.failures])
    return event
