"""Describe exceptions safely, even if their attributes or ``__str__`` raise."""

from __future__ import annotations

from typing import Any

MAX_TEXT = 2000
"""Characters of an exception's text in an error about it."""


def class_name(error: BaseException) -> str:
    """Return the name of an exception's class, whatever its metaclass does."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def attribute(error: BaseException | None, name: str, base: type[BaseException] = BaseException) -> Any:
    """Return an attribute that an exception has from a built-in class, whatever its own class does.

    Args:
        error: The exception, an instance of ``base``.
        name: The attribute, such as "__cause__".
        base: The class that defines it.
    """
    return base.__dict__[name].__get__(error)


def describe_error(error: BaseException, limit: int = MAX_TEXT) -> str:
    """Return an exception's class and the start of its text, which its class may be unable to make.

    Args:
        error: The exception.
        limit: Maximum number of characters.
    """
    try:
        text = f"{class_name(error)}: {error}"
    except BaseException:  # noqa: BLE001 - the user's class, which may exit
        return class_name(error)
    return text if len(text) <= limit else text[:limit] + " …"


def exit_code(error: BaseException | None) -> str:
    """Return the repr of the code of a ``SystemExit``, which may be any object of the user."""
    code = attribute(error, "code", SystemExit)
    try:
        return repr(code)
    except BaseException:  # noqa: BLE001 - the user's class, which may exit
        return f"<{type(code).__name__}>"
