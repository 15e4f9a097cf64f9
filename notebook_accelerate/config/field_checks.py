"""Checks of single fields and arguments, with the messages that users see."""

from __future__ import annotations

from collections.abc import Iterable


def check_one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    """Check that a value is among the allowed ones.

    Args:
        name: Name of the field or argument.
        value: Its value.
        allowed: The allowed values.

    Raises:
        ValueError: It is not; the message lists the allowed values.
    """
    choices = list(allowed)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not allowed; pass one of {', '.join(map(repr, choices))}")


def check_whole_number(name: str, value: object, least: int = 1) -> None:
    """Check that a value is a whole number of at least ``least``.

    Args:
        name: Name of the field or argument.
        value: Its value.
        least: The smallest number allowed.

    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is not allowed; pass a whole number of at least {least}")


def check_type(name: str, value: object, kind: type) -> None:
    """Check that a value is an object of a class.

    Args:
        name: Name of the field or argument.
        value: Its value.
        kind: The class.

    Raises:
        ValueError: It is of another class; the message shows the call.
    """
    if not isinstance(value, kind):
        raise ValueError(f"{name}={value!r} is not allowed; pass an object: {name}={kind.__name__}(...)")


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float; bool is neither.

    Args:
        value: Anything.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)
