"""Checks of single fields and arguments, with the messages that users see."""

from __future__ import annotations

import numbers
import sys
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


def check_whole_number(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Check that a value is a whole number of at least ``least``.

    Args:
        name: Name of the field or argument.
        value: Its value.
        least: The smallest number allowed.
        most: The largest number allowed; None: no limit.

    Raises:
        ValueError: It is something else.
    """
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):  # type: ignore[operator]
        limit = "" if most is None else f", at most {most:,}"
        raise ValueError(f"{name}={short_repr(value)} is not allowed; pass a whole number of at least {least}{limit}")


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


MAX_SECONDS = 10**9
"""Most seconds of a limit, 31 years: the waits of the operating system and of Python have limits, too."""


def check_number(
    name: str, value: object, what: str = "a number", *, most: float = sys.float_info.max, zero: bool = False
) -> None:
    """Check that a value is a finite number above 0.

    Args:
        name: Name of the field or argument.
        value: Its value.
        what: What to pass, for the message.
        most: The largest number allowed.
        zero: Whether 0 is allowed, too.

    Raises:
        ValueError: It is something else, such as a bool, NaN, an infinity or a text.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)  # numpy's are, too
    if not (real and 0 <= value <= most and (zero or value > 0)):  # type: ignore[operator]
        limit = f", at most {most:,}" if most < sys.float_info.max else ""
        least = "of at least" if zero else "above"
        raise ValueError(f"{name}={short_repr(value)} is not allowed; pass {what} {least} 0{limit}")


def check_seconds(name: str, value: object, *, most: float = MAX_SECONDS, zero: bool = True, none: str = "") -> None:
    """Check that a value is a number of seconds that every wait accepts.

    Args:
        name: Name of the field or argument.
        value: Its value.
        most: The largest number allowed.
        zero: Whether 0 is allowed, too.
        none: The meaning of None, for the message; "": None is not allowed.

    Raises:
        ValueError: It is something else.
    """
    if value is None and none:
        return
    try:
        check_number(name, value, "seconds", most=most, zero=zero)
    except ValueError as error:
        raise ValueError(f"{error}, or None for {none}" if none else str(error)) from None


def short_repr(value: object) -> str:
    """Return a shortened ``repr`` for a message. The ``repr`` of a very large int raises ValueError."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of more than 4,300 digits"
    return text if len(text) <= 80 else f"{text[:80]}..."


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float; bool is neither.

    Args:
        value: Anything.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)
