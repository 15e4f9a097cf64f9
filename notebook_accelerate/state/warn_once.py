"""Warnings that are shown once per process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_PACKAGE = str(Path(__file__).parents[1])
_shown: set[str] = set()


def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, unless this process showed the same message before; the warning points at the user's own code.

    Args:
        message: The message.
        category: The category of the warning.
    """
    if message in _shown:
        return
    _shown.add(message)
    warnings.warn(message, category, stacklevel=_depth_of_user_code())


def reset_warnings() -> None:
    """Let every warning be shown again."""
    _shown.clear()


def _depth_of_user_code() -> int:
    """Return the `stacklevel` at which `warn_once` leaves this package."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return depth
