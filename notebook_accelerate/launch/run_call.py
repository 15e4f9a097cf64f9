"""What was launched, for a run that goes on with it: nothing that the user has deleted is kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from notebook_accelerate.errors import LaunchError

_VALUES = (type(None), bool, int, float, complex, str, bytes)
_MAX_SIZE = 10_000
"""Characters or bytes of a text that is kept itself."""


class RunCall:
    """A function and its arguments, by weak references where they are objects.

    Args:
        function: The launched function.
        arguments: Its arguments.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = _reference(function)
        self._arguments = [_reference(argument) for argument in arguments]

    def restore(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function and its arguments.

        Args:
            name: The function's name, for the error.

        Raises:
            LaunchError: One of them exists no more.
        """
        function, *arguments = (reference() for reference in (self._function, *self._arguments))
        gone = ["the function"] if function is _GONE else []
        gone += [f"argument {index}" for index, value in enumerate(arguments) if value is _GONE]
        if gone:
            raise LaunchError(
                f"{' and '.join(gone)} of the run exist no more; pass them: notebook_launcher({name}, args, resume=run)"
            )
        return function, tuple(arguments)


_GONE: Any = object()


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value, or `_GONE` once the user has deleted it."""
    if type(value) in _VALUES and (not isinstance(value, (str, bytes)) or len(value) <= _MAX_SIZE):
        return lambda: value
    if type(value) is tuple and len(value) <= _MAX_SIZE:
        parts = [_reference(part) for part in value]
        return lambda: _GONE if any(part() is _GONE for part in parts) else tuple(part() for part in parts)
    if type(value) is dict and len(value) <= _MAX_SIZE and all(type(key) in _VALUES for key in value):
        items = {key: _reference(part) for key, part in value.items()}
        return lambda: (
            _GONE if any(part() is _GONE for part in items.values()) else {key: part() for key, part in items.items()}
        )
    if type(value) is list and len(value) <= _MAX_SIZE:
        parts = [_reference(part) for part in value]
        return lambda: _GONE if any(part() is _GONE for part in parts) else [part() for part in parts]
    try:
        known = weakref.ref(value)
    except TypeError:
        return lambda: _GONE
    return lambda: _GONE if (found := known()) is None else found


__all__ = ["RunCall"]
