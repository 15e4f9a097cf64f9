"""Error messages about failures of a run."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

from notebook_accelerate.errors import LaunchError, WorkerError
from notebook_accelerate.launch.state import failures
from notebook_accelerate.launch.state.run_events import RunEnded
from notebook_accelerate.telemetry import steady_time, tracebacks
from notebook_accelerate.telemetry.cell_sources import is_cell
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accelerate.launch.state.run_state import RunState
    from notebook_accelerate.telemetry import RankFailure


HEADLINE_CHARACTERS = 1000
"""Maximum length of a message's first line in a headline, and of its other lines; the report has all of it."""
MESSAGE_LINES = 20
"""Maximum number of these other lines."""


def headline(found: Sequence[RankFailure]) -> str:
    """Return one line about the first failure."""
    group = failures.grouped(list(found))[0]
    first = group[0]
    text = _short(first)
    text = text if len(text) <= HEADLINE_CHARACTERS else text[:HEADLINE_CHARACTERS] + " …"
    where = ""
    if first.chain and first.chain[-1].frames:
        frames = first.chain[-1].frames
        # The user's innermost line is more informative than the library's line that it called.
        where = (
            f" at {tracebacks.frame_location(next((f for f in reversed(frames) if is_cell(f.filename)), frames[-1]))}"
        )
    return f"{rank_names([f.rank for f in group])}: {text}{where}"


def failed(run_id: int, state: RunState) -> RunEnded:
    """Return the end of a run whose ranks failed."""
    found = state.failures
    first = found[0]
    kind = "WorkerDiedError" if first.kind in ("signal", "exit", "lost") and not first.chain else "WorkerError"
    verb = "failed first" if len(found) > 1 else "failed"
    message = f"run {run_id} failed. {headline(found)}"
    if len(failures.grouped(list(found))) > 1:
        message = f"run {run_id}: {rank_names([first.rank])} {verb}: {headline(found).partition(': ')[2]}"
    if len(state.attempts) > 1:
        message += f" (attempt {len(state.attempts)})"
    return RunEnded("failed", kind, message + _further_lines(first))


def _further_lines(failure: RankFailure) -> str:
    """Return the lines of a message after its first; many errors give their reason there."""
    lines = [f"\n  {line}" for line in failure.message.rstrip().split("\n")[1:]]
    text = "".join(lines[:MESSAGE_LINES])
    cut = len(lines) > MESSAGE_LINES or len(text) > HEADLINE_CHARACTERS
    return text[:HEADLINE_CHARACTERS] + " …" * cut


def system_error(error: OSError) -> BaseException:
    """Return the error of a launch that the system refused; an OSError of the user's, without a number, stays."""
    if error.errno is None:
        return error
    limits = {errno.EMFILE: "ulimit -n", errno.ENFILE: "sysctl fs.file-max", errno.EAGAIN: "ulimit -u"}
    hint = f"; raise the limit: {limits[error.errno]}" if error.errno in limits else ""
    found = LaunchError(f"the ranks could not be started: {error}{hint}")
    found.__cause__ = error
    return found


def stopped(run_id: int, started: float) -> RunEnded:
    """Return the end of a run that the user stopped; ``started`` is in seconds since the epoch."""
    return RunEnded("stopped", "RunStoppedError", f"run {run_id} was stopped after {steady_time.now() - started:.1f} s")


def original(error: WorkerError) -> BaseException | None:
    """Return the exception of the user's function on the rank that failed first."""
    if error.failures:
        return error.failures[0].exception
    return error.__cause__


def failure_lines(found: Sequence[RankFailure]) -> list[str]:
    """Return the lines of every group of failures with its traceback, the first failure first."""
    lines: list[str] = []
    for position, group in enumerate(failures.grouped(list(found))):
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
    """Return the first line of a failure's message; for a consequence, without torch's source files and advice."""
    text = failure.message.split("\n")[0]
    return _SOURCE_PLACE.sub("", text).split(". ")[0] if failure.consequence else text
