"""Explains from its last output why a rank died in native code or lost its peer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from notebook_accelerate.debugging import stack_dumps
from notebook_accelerate.launch.state import failures
from notebook_accelerate.telemetry import FrameInfo, RankFailure, tracebacks

LAST_LINES = 300
_CAUSES = (
    (
        re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)"),
        (
            "the ranks called a collective with different shapes or in a different order "
            "({0} bytes came from a peer where {1} were expected)"
        ),
    ),
)
"""Messages of gloo when it aborts, and their meaning."""


def explained(failure: RankFailure, lines: Sequence[str]) -> RankFailure:
    """Add to a crash in native code where it happened, and the cause if it is known.

    Args:
        failure: A failure.
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
    for stack in stack_dumps.parse(text).values():
        names = [frame.filename for frame in stack]
        begin = next((place for place, name in enumerate(names) if name.endswith("worker/entry.py")), None)
        if begin is not None:
            users = [frame for frame in stack[begin:] if tracebacks.is_user_code(frame.filename)]
            return users[-1] if users else None
    return None


def with_leavers(found: Sequence[RankFailure], gone: Sequence[int]) -> list[RankFailure]:
    """Add to a lost connection that the peer had ended normally.

    Args:
        found: The failures, the first one first.
        gone: The ranks whose function had returned.
    """
    if not found or not gone or not failures.looks_like_lost_peer(found[0]):
        return list(found)
    who = ("rank " if len(gone) == 1 else "ranks ") + ", ".join(map(str, gone))
    why = f"{who} had already returned: every rank must make the same collective calls; "
    return [replace(found[0], message=why + found[0].message), *found[1:]]
