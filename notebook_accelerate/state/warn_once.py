"""Warnings that are said once."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
_said: set[str] = set()


def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, unless this process was warned with the same words before; the place shown is the caller's own code.

    Args:
        message: What to say.
        category: The kind of warning.
    """
    if message in _said:
        return
    _said.add(message)
    warnings.warn(message, category, stacklevel=_depth_of_user_code())


def forget_notices() -> None:
    """Let every warning be said again."""
    _said.clear()


def _depth_of_user_code() -> int:
    """Return the `stacklevel` at which `warn_once` leaves this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return depth
