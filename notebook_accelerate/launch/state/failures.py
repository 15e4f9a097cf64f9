"""Builds failures from reports and exits of ranks, and finds out which was first."""

from __future__ import annotations

import re
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from notebook_accelerate.errors import NotebookAccelerateError
from notebook_accelerate.launch.state.rank_exit import Exit
from notebook_accelerate.telemetry import FailureEvent, RankFailure, steady_time, tracebacks
from notebook_accelerate.telemetry.cell_sources import is_cell
from notebook_accelerate.telemetry.error_text import describe_error, exit_code
from notebook_accelerate.telemetry.pickling import load_bytes
from notebook_accelerate.telemetry.sampler import machine_memory

UNPICKLE_SECONDS = 2.0
"""Seconds that all exceptions of a run together may take to be unpickled."""
_PEER_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket Timeout|connectFullMesh|recvValue failed|"
    r"failed to recv|caused pair closure|[Tt]imed out waiting|NCCL error|ncclRemoteError|gloo.*(closed|reset)",
)
"""Messages of torch in a rank whose peer is lost."""
_UNKNOWN_EXIT = "; its exit status is unknown, because the kernel ignores SIGCHLD or one of its threads called os.wait"


class ExceptionLoader:
    """Unpickles the exceptions that the ranks of one run sent, within ``UNPICKLE_SECONDS`` for all of them.

    Usually all ranks raise the same exception: with a limit for each, slow ones would delay the run by the number of
    ranks.
    """

    def __init__(self) -> None:
        self._left = UNPICKLE_SECONDS

    def load(self, payload: bytes) -> tuple[BaseException | None, str]:
        """Return an exception object, or None and why it cannot be unpickled.

        Its class may do anything when it is unpickled, on a thread of its own: the run's thread must not wait for it.
        """
        if self._left <= 0:
            return None, f"not unpickled: those of other ranks took {UNPICKLE_SECONDS:g} s"
        found: list[tuple[BaseException | None, str]] = []
        thread = threading.Thread(
            target=lambda: found.append(_unpickled(payload)), name="notebook-accelerate-exception", daemon=True
        )
        began = time.monotonic()
        thread.start()
        thread.join(self._left)
        self._left -= time.monotonic() - began
        if found:
            return found[0]
        self._left = 0.0
        return None, f"the exception takes more than {UNPICKLE_SECONDS:g} s to be unpickled"


def _unpickled(payload: bytes) -> tuple[BaseException | None, str]:
    try:
        value = load_bytes(payload)
    except BaseException as error:  # noqa: BLE001 - an exception class may refuse its own arguments
        return None, f"the exception cannot be unpickled: {describe_error(error)}"
    return (value if issubclass(type(value), BaseException) else None), ""


def from_event(rank: int, event: FailureEvent, exceptions: ExceptionLoader) -> RankFailure:
    """Return the failure that a rank reported."""
    chain = tracebacks.name_cells_of(event.chain)
    last = chain[-1]
    exception, note = exceptions.load(event.payload) if event.payload else (None, event.note)
    message = f"{last.type}: {last.message}".rstrip(": ")
    if event.kind == "exit":
        is_exit = exception is not None and issubclass(type(exception), SystemExit)
        code = exit_code(exception) if is_exit else last.message
        message = f"the function called sys.exit({code})"
    if note:
        message += f"  ({note})"
    # isinstance would ask the class of the exception, which may fail.
    if exception is not None and issubclass(
        type(exception), NotebookAccelerateError
    ):  # exceptions of the user keep their arguments
        exception.args = tuple(
            tracebacks.name_cells(part) if isinstance(part, str) else part for part in exception.args
        )
    return RankFailure(rank, event.kind, event.time, message, chain, exception)


LARGE_SHARE = 0.5
"""A rank that held this share of the machine's memory was likely killed for it."""


def from_exit(rank: int, end: Exit, *, oom_kills: int | None, channel_error: str = "") -> RankFailure:
    """Return the failure of a rank that died without reporting one.

    Args:
        rank: Global index.
        end: How its process ended.
        oom_kills: How many processes the out-of-memory killer of the rank's machine has ended during the run; None:
            the system does not say.
        channel_error: Why nothing was read from its channel at the end; "" where everything was.
    """
    now = steady_time.now()
    if end.lost:
        return RankFailure(rank, "lost", now, end.lost)
    if end.signal is None and channel_error:
        return RankFailure(rank, "exit", now, f"its result is lost, because its channel ended: {channel_error}")
    if end.signal is None:
        status = f" with exit status {end.code}" if end.code is not None else ""
        message = f"its process ended{status} before the function returned"
        message += " (os._exit?)" if end.code is not None else _UNKNOWN_EXIT
        return RankFailure(rank, "exit", now, message)
    name = _signal_name(end.signal)
    message = f"killed by {name} (signal {end.signal}){_cause(end, oom_kills)}"
    return RankFailure(rank, "signal", now, message, signal=end.signal)


def exit_text(end: Exit) -> str:
    """Return how a process ended, as "exit 0", "exit unknown", "SIGKILL" or "lost"."""
    if end.lost:
        return "lost"
    if end.signal is not None:
        return _signal_name(end.signal)
    return f"exit {'unknown' if end.code is None else end.code}"


def _signal_name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return "a signal"


def _cause(end: Exit, oom_kills: int | None) -> str:
    if end.signal == signal.SIGKILL:
        total, available = machine_memory()
        held = f"it held {_gib(end.max_rss)} at its peak, " if end.max_rss else ""
        verdict = _who_killed(oom_kills, large=end.max_rss > LARGE_SHARE * total)
        return f": {verdict}; {held}the machine has {_gib(total)}, {_gib(available)} of it free now"
    hints = {
        signal.SIGSEGV: "a crash in native code; the Python stack is in its stderr",
        signal.SIGBUS: "a crash in native code, or /dev/shm is full (DataLoader workers)",
        signal.SIGABRT: "native code gave up; its stderr says why",
        signal.SIGILL: "native code built for another processor",
        signal.SIGFPE: "an arithmetic fault in native code",
        signal.SIGTERM: "another process ended it",
    }
    hint = hints.get(signal.Signals(end.signal)) if end.signal in set(signal.Signals) else None
    return f": {hint}" if hint else ""


def _who_killed(oom_kills: int | None, *, large: bool) -> str:
    if oom_kills:
        return "the out-of-memory killer ended it"
    if large:  # a killer that is no part of the system's core, such as systemd-oomd, is not counted
        return "likely an out-of-memory killer"
    if oom_kills is None:
        return "perhaps the out-of-memory killer, perhaps another process"
    return "another process sent it: the system has counted no out-of-memory kill since the run began"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def oom_kill_count() -> int | None:
    """Return how many processes of this machine, or this control group, were killed for memory; None: unknown."""
    counts = [count for path in _OOM_COUNTERS if (count := _oom_kills_in(Path(path))) is not None]
    return sum(counts) if counts else None


_OOM_COUNTERS = (
    "/proc/vmstat",
    "/sys/fs/cgroup/memory.events",
    "/sys/fs/cgroup/memory/memory.oom_control",  # version 1
)


def _oom_kills_in(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def ordered(failures: list[RankFailure]) -> list[RankFailure]:
    """Return the failures with the first one first and those that only followed marked as consequences.

    A rank whose peer has died often reports that before the supervisor notices the death, so time alone does not
    decide: a lost connection counts as a consequence whenever another rank failed in another way.
    """
    lost = {id(failure): looks_like_lost_peer(failure) for failure in failures}
    by_time = sorted(failures, key=lambda failure: (lost[id(failure)], failure.time))
    if not by_time:
        return []
    first = by_time[0]
    return [first, *(replace(other, consequence=not _same(first, other)) for other in by_time[1:])]


def looks_like_lost_peer(failure: RankFailure) -> bool:
    """Whether a failure is only the loss of the connection to another rank."""
    if failure.kind != "exception" or not failure.chain:
        return False
    last = failure.chain[-1]
    by_type = last.type.rpartition(".")[2] in ("DistBackendError", "DistNetworkError", "DistStoreError")
    by_message = last.type in ("RuntimeError", "ConnectionError", "ConnectionResetError", "BrokenPipeError")
    return by_type or (by_message and _PEER_LOST.search(last.message) is not None)


def _same(first: RankFailure, other: RankFailure) -> bool:
    """Whether two ranks failed in the same way, so that neither is the other's consequence."""
    if first.kind != other.kind:
        return False
    if first.chain and other.chain:
        return first.chain[-1].type == other.chain[-1].type and places(first) == places(other)
    return first.message == other.message and not first.chain


def places(failure: RankFailure) -> tuple[tuple[str, int], ...]:
    """Return where a failure happened: file and line of each frame of its last exception.

    The file name of a cell differs between notebooks, so the function's name replaces it.
    """
    frames = failure.chain[-1].frames if failure.chain else ()
    return tuple((frame.function if is_cell(frame.filename) else frame.filename, frame.lineno) for frame in frames)


def grouped(failures: list[RankFailure]) -> list[list[RankFailure]]:
    """Return the failures in groups of the same traceback, in order of their first members."""
    groups: list[list[RankFailure]] = []
    for failure in failures:
        for group in groups:
            if group[0].consequence == failure.consequence and _same(group[0], failure):
                group.append(failure)
                break
        else:
            groups.append([failure])
    return groups
