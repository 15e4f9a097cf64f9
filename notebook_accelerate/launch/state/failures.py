"""Build failures from the reports and exits of ranks, and determine the first failure."""

from __future__ import annotations

import errno
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.debugging import process_stacks
from notebook_accelerate.errors import LaunchError, NotebookAccelerateError, WorkerError
from notebook_accelerate.hardware.detection import control_group_files, machine_memory
from notebook_accelerate.launch.state.rank_result import Exit
from notebook_accelerate.launch.state.run_events import RunEnded
from notebook_accelerate.telemetry import FailureEvent, FrameInfo, RankFailure, steady_time, tracebacks
from notebook_accelerate.telemetry.pickling import load_bytes
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.tracebacks import describe_error, exit_code, is_cell

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.run_state import RunState


UNPICKLE_SECONDS = 2.0
"""The total number of seconds that unpickling all exceptions of a run may take."""
_PEER_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket Timeout|connectFullMesh|recvValue failed|"
    r"failed to recv|caused pair closure|[Tt]imed out waiting|NCCL error|ncclRemoteError|gloo.*(closed|reset)",
)
"""Matches torch's error messages in a rank that has lost the connection to a peer."""
_UNKNOWN_EXIT = "; its exit status is unknown, because the kernel ignores SIGCHLD or one of its threads called os.wait"


class ExceptionLoader:
    """Unpickles the exceptions that the ranks of one run sent, all of them within ``UNPICKLE_SECONDS``.

    Usually all ranks raise the same exception. If each exception had its own limit, slow ones would delay the run in
    proportion to the number of ranks.
    """

    def __init__(self) -> None:
        self._left = UNPICKLE_SECONDS

    def load(self, payload: bytes) -> tuple[BaseException | None, str]:
        """Return an exception object, or None and the reason why it cannot be unpickled.

        Unpickling happens on a separate thread, because it may run arbitrary code of the exception's class. That code
        may take longer than the run's thread can wait.
        """
        if self._left <= 0:
            return None, f"not unpickled: the exceptions of other ranks took {UNPICKLE_SECONDS:g} s"
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
        return None, f"unpickling the exception takes more than {UNPICKLE_SECONDS:g} s"


def _unpickled(payload: bytes) -> tuple[BaseException | None, str]:
    try:
        value = load_bytes(payload)
    except BaseException as error:  # noqa: BLE001 - an exception class may refuse its own arguments
        return None, f"the exception cannot be unpickled: {describe_error(error)}"
    return (value if issubclass(type(value), BaseException) else None), ""


def from_event(rank: int, event: FailureEvent, exceptions: ExceptionLoader) -> RankFailure:
    """Build the failure that a rank reported."""
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
    # Leave the user's exceptions unchanged. Don't use isinstance, which would run code of the exception's class.
    if exception is not None and issubclass(type(exception), NotebookAccelerateError):
        exception.args = tuple(
            tracebacks.name_cells(part) if isinstance(part, str) else part for part in exception.args
        )
    return RankFailure(rank, event.kind, event.time, message, chain, exception)


LARGE_SHARE = 0.5
"""A killed rank that held more than this share of the machine's memory was probably killed for that reason."""


def from_exit(rank: int, end: Exit, *, oom_kills: int | None, channel_error: str = "") -> RankFailure:
    """Build the failure of a rank that died without reporting one.

    Args:
        rank: The rank's global index.
        end: How the rank's process ended.
        oom_kills: How many processes the out-of-memory killer of the rank's machine has killed during the run, or None
            if unknown.
        channel_error: Why the rank's channel could not be read completely, or "" if it was.
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
    """Return a short text about how a process ended, such as "exit 0", "exit unknown", "SIGKILL" or "lost"."""
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
        held = f"it held {size_text(end.max_rss)} at its peak, " if end.max_rss else ""
        verdict = _who_killed(oom_kills, large=end.max_rss > LARGE_SHARE * total)
        return f": {verdict}; {held}the machine has {size_text(total)}, {size_text(available)} of it free now"
    hints = {
        signal.SIGSEGV: "a crash in native code; the Python stack is in its stderr",
        signal.SIGBUS: "a crash in native code, or /dev/shm is full (DataLoader workers)",
        signal.SIGABRT: "native code aborted; the reason is in its stderr",
        signal.SIGILL: "native code built for another processor",
        signal.SIGFPE: "an arithmetic fault in native code",
        signal.SIGTERM: "the rank itself or another process sent it",
    }
    hint = hints.get(signal.Signals(end.signal)) if end.signal in set(signal.Signals) else None
    return f": {hint}" if hint else ""


def _who_killed(oom_kills: int | None, *, large: bool) -> str:
    if oom_kills:
        return "the out-of-memory killer ended it"
    if large:  # The system does not count kills by processes such as systemd-oomd.
        return "likely an out-of-memory killer"
    if oom_kills is None:
        return "perhaps the out-of-memory killer, perhaps another process"
    return (
        "the rank itself or another process sent it: the system has counted no out-of-memory kill since the run began"
    )


def oom_kill_count() -> int | None:
    """Return how many processes the out-of-memory killer has ended on this machine or in its control groups.

    Return None if the system does not provide the number.
    """
    groups = [*control_group_files("memory.events"), *control_group_files("memory.oom_control", "memory")]
    counts = [count for path in (Path("/proc/vmstat"), *groups) if (count := _oom_kills_in(path)) is not None]
    return sum(counts) if counts else None


def _oom_kills_in(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def ordered(failures: list[RankFailure]) -> list[RankFailure]:
    """Return the failures, starting with the first one, and mark those that it caused as consequences.

    A rank whose peer has died often reports the lost connection before the supervisor notices the death, so the order
    in time is not enough. A lost connection counts as a consequence whenever another rank failed in another way.
    """
    lost = {id(failure): looks_like_lost_peer(failure) for failure in failures}
    by_time = sorted(failures, key=lambda failure: (lost[id(failure)], failure.time))
    if not by_time:
        return []
    first = by_time[0]
    return [first, *(replace(other, consequence=not _same(first, other)) for other in by_time[1:])]


def looks_like_lost_peer(failure: RankFailure) -> bool:
    """Return whether a failure is only the loss of the connection to another rank."""
    if failure.kind != "exception" or not failure.chain:
        return False
    last = failure.chain[-1]
    by_type = last.type.rpartition(".")[2] in ("DistBackendError", "DistNetworkError", "DistStoreError")
    by_message = last.type in ("RuntimeError", "ConnectionError", "ConnectionResetError", "BrokenPipeError")
    return by_type or (by_message and _PEER_LOST.search(last.message) is not None)


def _same(first: RankFailure, other: RankFailure) -> bool:
    """Return whether two ranks failed in the same way, in which case neither failure caused the other."""
    if first.kind != other.kind:
        return False
    if first.chain and other.chain:
        return first.chain[-1].type == other.chain[-1].type and places(first) == places(other)
    return first.message == other.message and not first.chain


def places(failure: RankFailure) -> tuple[tuple[str, int], ...]:
    """Return the file and line of each frame of a failure's last exception.

    For a cell, the function's name is used, because the cell's file name differs between notebooks.
    """
    frames = failure.chain[-1].frames if failure.chain else ()
    return tuple((frame.function if is_cell(frame.filename) else frame.filename, frame.lineno) for frame in frames)


def grouped(failures: list[RankFailure]) -> list[list[RankFailure]]:
    """Return groups of failures with the same traceback, ordered by the first failure of each group."""
    groups: list[list[RankFailure]] = []
    for failure in failures:
        for group in groups:
            if group[0].consequence == failure.consequence and _same(group[0], failure):
                group.append(failure)
                break
        else:
            groups.append([failure])
    return groups


# ---- explanations from the last output of a rank that crashed in native code

LAST_LINES = 300
_CAUSES = (
    (
        re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)"),
        (
            "the ranks called a collective with different shapes or in a different order "
            "(a peer sent {0} bytes, but {1} were expected)"
        ),
    ),
)
"""Patterns of gloo's messages when it aborts, and the meaning of each."""


def explained(failure: RankFailure, lines: Sequence[str]) -> RankFailure:
    """Add the location of a crash in native code to the failure's message, and the cause if it is known.

    Args:
        failure: The failure of a rank. Unless it is a crash in native code, it is returned unchanged.
        lines: The last lines that the rank wrote to stderr.
    """
    text = "\n".join(lines)
    if failure.kind != "signal" or "Fatal Python error" not in text:
        return failure
    message = failure.message
    if frame := _place(text):
        message += f", at {tracebacks.frame_location(frame)}, in {frame.function}"
    for pattern, meaning in _CAUSES:
        if found := pattern.search(text):
            message += ": " + meaning.format(*found.groups())
    return replace(failure, message=message)


def _place(text: str) -> FrameInfo | None:
    """Return the innermost line of user code in the stack dump of a crash."""
    for stack in process_stacks.parse_dump(text).values():
        names = [frame.filename for frame in stack]
        begin = next((place for place, name in enumerate(names) if name.endswith("worker/entry.py")), None)
        if begin is not None:
            users = [frame for frame in stack[begin:] if tracebacks.is_user_code(frame.filename)]
            return users[-1] if users else None
    return None


def with_returned_peers(found: Sequence[RankFailure], gone: Sequence[int]) -> list[RankFailure]:
    """If the first failure is a lost connection, add to its message that other ranks had already returned.

    Args:
        found: The failures, starting with the first one.
        gone: The ranks on which the function has returned.
    """
    if not found or not gone or not looks_like_lost_peer(found[0]):
        return list(found)
    who = ("rank " if len(gone) == 1 else "ranks ") + ", ".join(map(str, gone))
    why = f"{who} had already returned: every rank must make the same collective calls; "
    return [replace(found[0], message=why + found[0].message), *found[1:]]


# ---- error messages

HEADLINE_CHARACTERS = 1000
"""Maximum length of a message's first line in a headline, and of its other lines together. Reports show all."""
MESSAGE_LINES = 20
"""Maximum number of a message's lines after the first one in a headline."""


def headline(found: Sequence[RankFailure]) -> str:
    """Return a line about the first failure, for the run's error and the panel."""
    group = grouped(list(found))[0]
    first = group[0]
    text = _short(first)
    text = text if len(text) <= HEADLINE_CHARACTERS else text[:HEADLINE_CHARACTERS] + " …"
    where = ""
    if first.chain and first.chain[-1].frames:
        frames = first.chain[-1].frames
        # The innermost line of the user's code says more than a line of the library that it calls.
        where = (
            f" at {tracebacks.frame_location(next((f for f in reversed(frames) if is_cell(f.filename)), frames[-1]))}"
        )
    return f"{rank_names([f.rank for f in group])}: {text}{where}"


def failed(run_id: int, state: RunState) -> RunEnded:
    """Build the event that ends a run whose ranks failed."""
    found = state.failures
    first = found[0]
    kind = "WorkerDiedError" if first.kind in ("signal", "exit", "lost") and not first.chain else "WorkerError"
    verb = "failed first" if len(found) > 1 else "failed"
    message = f"run {run_id} failed. {headline(found)}"
    if len(grouped(list(found))) > 1:
        message = f"run {run_id}: {rank_names([first.rank])} {verb}: {headline(found).partition(': ')[2]}"
    if len(state.attempts) > 1:
        message += f" (attempt {len(state.attempts)})"
    return RunEnded("failed", kind, message + _further_lines(first))


def _further_lines(failure: RankFailure) -> str:
    """Return the lines of a message after the first one, which often give the reason. Long texts are cut."""
    lines = [f"\n  {line}" for line in failure.message.rstrip().split("\n")[1:]]
    text = "".join(lines[:MESSAGE_LINES])
    cut = len(lines) > MESSAGE_LINES or len(text) > HEADLINE_CHARACTERS
    return text[:HEADLINE_CHARACTERS] + " …" * cut


def system_error(error: OSError) -> BaseException:
    """Return the error for a launch that the system refused.

    An OSError without an error number was not raised by the system, and is returned unchanged.
    """
    if error.errno is None:
        return error
    limits = {errno.EMFILE: "ulimit -n", errno.ENFILE: "sysctl fs.file-max", errno.EAGAIN: "ulimit -u"}
    hint = f"; raise the limit: {limits[error.errno]}" if error.errno in limits else ""
    found = LaunchError(f"the ranks could not be started: {error}{hint}")
    found.__cause__ = error
    return found


@contextmanager
def explained_system_errors() -> Iterator[None]:
    """Convert an OSError raised in the block with `system_error`."""
    try:
        yield
    except OSError as error:
        if (problem := system_error(error)) is error:
            raise
        raise problem from error


def stopped(run_id: int, started: float) -> RunEnded:
    """Build the event that ends a run stopped by the user. ``started`` is in seconds since the epoch."""
    return RunEnded("stopped", "RunStoppedError", f"run {run_id} was stopped after {steady_time.now() - started:.1f} s")


def original(error: WorkerError) -> BaseException | None:
    """Return the exception that the user's function raised on the rank that failed first, or None."""
    if error.failures:
        return error.failures[0].exception
    return error.__cause__


def failure_lines(found: Sequence[RankFailure]) -> list[str]:
    """Describe each group of failures with its traceback, starting with the first failure. Return the lines."""
    lines: list[str] = []
    for position, group in enumerate(grouped(list(found))):
        first = group[0]
        who = rank_names([failure.rank for failure in group])
        if position == 0:
            lines.append(f"{who} failed{' first' if len(group) < len(found) else ''}:")
        else:
            kind = "failed because of that" if first.consequence else "failed too"
            lines += ["", f"{who} {kind}:"]
        if first.chain and not first.consequence:
            lines += tracebacks.format_chain(first.chain)
            if first.kind != "exception":
                lines.append(first.message)
        else:
            lines.append("  " + _short(first))
    return lines


_SOURCE_PLACE = re.compile(r"\[/\S+\.(?:cc|cpp|cu|h):\d+\] ?")


def _short(failure: RankFailure) -> str:
    """Return the first line of a failure's message without the places in torch's source files.

    For a consequence, torch's advice is omitted too.
    """
    text = _SOURCE_PLACE.sub("", failure.message.split("\n")[0])
    return text.split(". ")[0] if failure.consequence else text
