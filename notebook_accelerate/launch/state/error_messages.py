"""What the kernel says of failures."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from notebook_accelerate.errors import RunStoppedError, WorkerDiedError, WorkerError
from notebook_accelerate.launch.state import failures
from notebook_accelerate.telemetry import tracebacks
from notebook_accelerate.telemetry.payload import is_cell
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry import RankFailure


HEADLINE_CHARACTERS = 1000
"""A longer first line of a message is cut in a headline; the report has it whole."""


def headline(found: Sequence[RankFailure]) -> str:
    """Return the first failure in one line."""
    group = failures.grouped(list(found))[0]
    first = group[0]
    text = _short(first)
    text = text if len(text) <= HEADLINE_CHARACTERS else text[:HEADLINE_CHARACTERS] + " …"
    where = ""
    if first.chain and first.chain[-1].frames:
        frames = first.chain[-1].frames
        # The user's own innermost line says more than the line of the library that it called.
        where = (
            f" at {tracebacks.frame_location(next((f for f in reversed(frames) if is_cell(f.filename)), frames[-1]))}"
        )
    return f"{rank_names([f.rank for f in group])}: {text}{where}"


def worker_error(run: Run) -> WorkerError:
    """Return the error of a run that failed; its cause is the original exception, where there is one."""
    first = run.failures[0]
    kind = WorkerDiedError if first.kind in ("signal", "exit", "lost") and not first.chain else WorkerError
    verb = "failed first" if len(run.failures) > 1 else "failed"
    message = f"run {run.id} failed. {headline(run.failures)}"
    if len(failures.grouped(list(run.failures))) > 1:
        message = f"run {run.id}: {rank_names([first.rank])} {verb}: {headline(run.failures).partition(': ')[2]}"
    if len(run.attempts) > 1:
        message += f" (attempt {len(run.attempts)})"
    return kind(message, run, run.failures)


def stopped(run: Run) -> RunStoppedError:
    """Return the error of a run that the user stopped."""
    return RunStoppedError(f"run {run.id} was stopped after {run.elapsed:.1f} s", run)


def original(error: WorkerError) -> BaseException | None:
    """Return the exception that the user's function raised on the rank that failed first."""
    if error.failures:
        return error.failures[0].exception
    return error.__cause__


def failure_lines(found: Sequence[RankFailure]) -> list[str]:
    """Return every group of failures with its traceback, the first failure first."""
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
    """Return the first line of a failure's message; where it only followed, without torch's source files and advice."""
    text = failure.message.split("\n")[0]
    return _SOURCE_PLACE.sub("", text).split(". ")[0] if failure.consequence else text
