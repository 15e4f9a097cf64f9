"""Warnings that point at the user's code; shown each time, or once per process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1])
_shown: set[str] = set()


def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, unless this process showed the same message before; the warning points at the user's own code.

    Args:
        message: The message.
        category: The category of the warning.
    """
    if message not in _shown:
        _shown.add(message)
        warn_user(message, category)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn each time; the warning points at the user's own code.

    Args:
        message: The message.
        category: The category of the warning.
    """
    depth, _ = user_frame()
    warnings.warn(message, category, stacklevel=depth)


def reset_warnings() -> None:
    """Let every warning be shown again."""
    _shown.clear()


def user_frame() -> tuple[int, FrameType]:
    """Return the innermost frame outside of this package, and its depth below this function."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return depth, frame
