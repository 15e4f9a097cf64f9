"""Issue warnings that point to the user's code, every time or once per process."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

_PACKAGE = str(Path(__file__).parents[1])
_shown: set[str] = set()


def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's code, unless this process has already issued the same message.

    Args:
        message: The text of the warning.
        category: The category of the warning.
    """
    if message not in _shown:
        _shown.add(message)
        warn_user(message, category)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that points to the user's code.

    Args:
        message: The text of the warning.
        category: The category of the warning.
    """
    depth, _ = user_frame()
    warnings.warn(message, category, stacklevel=depth)


def reset_warnings() -> None:
    """Forget which warnings have been issued, so that all may be issued again."""
    _shown.clear()


def user_frame() -> tuple[int, FrameType]:
    """Return the innermost frame outside of this package, and its distance from this function."""
    depth, frame = 0, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        depth, frame = depth + 1, frame.f_back
    return depth, frame
