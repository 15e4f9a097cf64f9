"""One line about an exception of any class."""

from __future__ import annotations

MAX_TEXT = 2000
"""Characters of an exception's text in an error about it."""


def describe_error(error: BaseException, limit: int = MAX_TEXT) -> str:
    """Return an exception's class and the start of its text, which its class may be unable to make.

    Args:
        error: The exception.
        limit: Maximum number of characters.
    """
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the user's class
        return type(error).__name__
    return text if len(text) <= limit else text[:limit] + " …"


__all__ = ["describe_error"]
