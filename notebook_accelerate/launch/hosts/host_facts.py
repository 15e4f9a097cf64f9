"""Facts that hosts exchange: which hosts fit into one run, the run's secret, and the cells of their notebooks."""

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
"""More ranks on one host are a mistake."""


def own_hello(**values: Any) -> HelloEvent:
    """Return what this process tells about itself."""
    return HelloEvent(host=platform.node() or socket.gethostname(), pid=os.getpid(), versions=own_versions(), **values)


def notebook_hello(node: int, plan: LaunchPlan, config: LaunchConfig) -> HelloEvent:
    """Return what this notebook tells about itself."""
    return own_hello(
        kind=NOTEBOOK,
        node=node,
        processes=plan.num_processes,
        accelerator=plan.accelerator,
        num_nodes=config.num_nodes,
        rdzv_id=config.rdzv_id,
    )


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


def version_differences(who: str, found: Mapping[str, str], wanted: Mapping[str, str], whose: str) -> list[str]:
    """Return a sentence for each version that does not match; see `same_version`."""
    sentences = []
    for name, version in wanted.items():
        own = found.get(name, "")
        if not own or not same_version(name, own, version):
            what = f"{name} {own}" if own else f"no {name}"
            sentences.append(f"{who} has {what}; {whose} has {version}")
    return sentences


def listed(hosts: Iterable[HelloEvent], separator: str = ", ") -> str:
    """Return a text that lists hosts."""
    return separator.join(host.title for host in hosts)


def waiting_text(backend: str, num_nodes: int, arrived: Sequence[HelloEvent]) -> str:
    """Return one line with the hosts that have arrived and those that are missing; the first notebook is the first."""
    text = f"{len(arrived)} of {num_nodes} nodes have joined"
    if backend == "static":
        missing = _missing(num_nodes, arrived)
        return f"{text}; waiting for {missing}" if missing else text
    hosts = ", ".join(host.host for host in arrived)
    more = num_nodes - len(arrived)
    return f"{text} ({hosts}); waiting for {more} more" if more > 0 else f"{text} ({hosts})"


def timeout_text(backend: str, num_nodes: int, arrived: Sequence[HelloEvent], seconds: float) -> str:
    """Return the message that names the hosts missing at the join timeout."""
    text = waiting_text(backend, num_nodes, arrived).partition(";")[0]
    limit = f"within {seconds:g} s (rdzv_conf={{'join_timeout': {seconds:g}}})"
    if backend == "static":
        return f"{_missing(num_nodes, arrived)} did not join {limit}: {text}"
    missing = num_nodes - len(arrived)
    return f"{missing} {'node' if missing == 1 else 'nodes'} did not join {limit}: {text}"


def _missing(num_nodes: int, arrived: Sequence[HelloEvent]) -> str:
    """Return "node 1", "nodes 1, 2" or "1 of nodes 1, 2" for the nodes that are missing; "" when none is."""
    asked = {host.node for host in arrived}
    free = [number for number in range(num_nodes) if number not in asked]
    unnumbered = sum(host.node < 0 for host in arrived)  # they fill gaps once all have joined
    if len(free) == unnumbered:
        return ""
    shown = ", ".join(map(str, free[:10])) + (", …" if len(free) > 10 else "")
    nodes = f"node{'s' if len(free) > 1 else ''} {shown}"
    return f"{len(free) - unnumbered} of {nodes}" if unnumbered else nodes


def late_text(members: Sequence[HelloEvent], num_nodes: int, max_restarts: int) -> str:
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


def late_join_text(members: Sequence[HelloEvent], num_nodes: int) -> str:
    """Return the message to a late host while it waits to join."""
    who = listed(members)
    return f"the run began without this node, with {len(members)} of {num_nodes}: {who}; they restart with it"


def joining_text(host: HelloEvent) -> str:
    """Return the message of the run about a late host."""
    return f"a late node joins, {host.title}: all restart with it"


def problem(host: HelloEvent, members: Sequence[HelloEvent], backend: str) -> str:
    """Return why a host cannot join ``members``, the first notebook first; "" when it can."""
    first = members[0]
    if not 0 <= host.processes <= MAX_PROCESSES:
        return f"{host.title} would start {host.processes} ranks; at most {MAX_PROCESSES} are allowed"
    if host.num_nodes and host.num_nodes != first.num_nodes:
        given = " and ".join(map(str, sorted({host.num_nodes, first.num_nodes})))
        return f"the nodes have different num_nodes={given}; pass the same"
    twice = [each for each in members if host.node >= 0 and each.node == host.node]
    if backend == "static" and twice:
        who = f"{twice[0].title} and {host.title}"
        return f"two nodes have node_rank={host.node}: {who}; pass a different one to each"
    if first.accelerator not in ("cpu", host.accelerator) or (
        host.kind == NOTEBOOK and host.accelerator != first.accelerator
    ):
        kinds = " and ".join(sorted({host.accelerator, first.accelerator}))
        return f"the nodes have different devices, {kinds}; to train on the CPU everywhere pass cpu=True"
    return _version_problem(host, first)


def _version_problem(host: HelloEvent, first: HelloEvent) -> str:
    """Return why the versions of a host do not fit; a notebook with another torch only gets a note."""
    exact = ("notebook_accelerate",) if host.kind == NOTEBOOK else tuple(first.versions)
    wanted = {name: first.versions.get(name, "") for name in exact}
    found = version_differences(host.title, host.versions, wanted, "the first notebook")
    return f"{found[0]}: install the same version there" if found else ""


def version_note(hosts: Sequence[HelloEvent]) -> str:
    """Return a warning if the hosts have different versions of torch; "" otherwise."""
    versions = [host.versions.get("torch", "") for host in hosts]
    if all(same_version("torch", version, versions[0]) for version in versions):
        return ""
    each = ", ".join(f"{node_name(index, host.host)} {versions[index]}" for index, host in enumerate(hosts))
    return f"the nodes have different versions of torch ({each}); collectives may fail"


# ---- the secret that the notebooks and commands of one run share

SECRET_VARIABLE = "NOTEBOOK_ACCELERATE_SECRET"  # noqa: S105 - the name of a variable


def shared_secret(config: LaunchConfig) -> str:
    """Return the secret that a launch was given; "" without one."""
    return str((config.rdzv_conf or {}).get("secret") or os.environ.get(SECRET_VARIABLE, ""))


def secret_for_command(file: str | None) -> str:
    """Return the secret of a command: from a file, or from the environment.

    Raises:
        ValueError: There is none, or the file cannot be read.
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


# ---- names and sources of the cells of other notebooks, for tracebacks and stacks


def own_cells() -> dict[str, list[str]]:
    """Return this notebook's cells, as ``CellsEvent`` has them."""
    return {filename: [cell_name(filename), source] for filename, source in cell_sources().items()}


class ForeignCells:
    """Adds the names and source lines of another notebook's cells to the events of its ranks.

    Args:
        suffix: Returns the suffix of the names of cells, as " of node 1".
    """

    def __init__(self, suffix: Callable[[], str]) -> None:
        self._suffix = suffix
        self._names: dict[str, str] = {}

    def add(self, cells: Mapping[str, list[str]]) -> None:
        """Add cells in the format of ``CellsEvent``, and register their source lines under their names."""
        for filename, (name, source) in cells.items():
            linecache.cache.pop(self._names.get(filename, ""), None)
            self._names[filename] = cell = f"{name}{self._suffix()}"
            install_sources({cell: source})

    def clear(self) -> None:
        """Remove all registered cells from this process."""
        for name in self._names.values():
            linecache.cache.pop(name, None)
        self._names.clear()

    def with_named_cells(self, event: Event) -> Event:
        """Return a rank's event with its cells named as in this notebook."""
        if isinstance(event, StacksReply):
            event.threads = {name: self._in_frames(frames) for name, frames in event.threads.items()}
        elif isinstance(event, (FailureEvent, CellReply)):
            event.chain = self._in_chain(event.chain)
        elif isinstance(event, InputRequest):
            event.shown = self.in_text(event.shown)
        return event

    def in_text(self, text: str) -> str:
        """Return ``text`` with the file names of cells replaced by the cells' names."""
        for filename, name in list(self._names.items()):  # another thread adds to them
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
    """Return an event of the journal with this notebook's cells named, for another notebook."""
    return _with_chains(event, lambda chain: tracebacks.with_named_cells(chain, suffix))


def with_own_cells(event: Event, suffix: str) -> Event:
    """Return another notebook's event of the journal; cells with ``suffix`` are this notebook's, and lose it."""

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
