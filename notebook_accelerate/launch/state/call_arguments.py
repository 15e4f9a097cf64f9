"""The launched call: its arguments as plain values for tables of runs, and references from which it can be repeated."""

from __future__ import annotations

import inspect
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from notebook_accelerate.config.plain_values import HIDDEN, hide_credentials, is_secret_name
from notebook_accelerate.errors import LaunchError

Plain = bool | int | float | str | None
MAX_ARGUMENTS = 40
"""Maximum number of arguments to keep. Each value in a dict or dataclass counts separately."""
MAX_CHARS = 120
MAX_DEPTH = 3


def call_arguments(function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Plain]:
    """Return the arguments of a call by parameter name, including defaults.

    Each value in a dict, namespace or dataclass becomes a separate entry, such as ``config.lr``. Other objects are
    represented by their class. The values of names such as ``api_key`` are hidden.

    Args:
        function: The launched function.
        arguments: The function's positional arguments.
    """
    # A `PickledFunction` comes with its plain arguments, because the function itself is not loaded here.
    if (known := getattr(function, "plain_arguments", None)) is not None:
        return dict(known)
    try:
        bound = inspect.signature(function).bind(*arguments)
    # The function has no signature, or does not accept the arguments. The ranks will report the latter.
    except (TypeError, ValueError):
        named: dict[str, Any] = {str(index): value for index, value in enumerate(arguments)}
    else:
        bound.apply_defaults()
        named = dict(bound.arguments)
    found: dict[str, Plain] = {}
    for name, value in named.items():
        for entry, plain in _plain(name, value, MAX_DEPTH):
            if len(found) == MAX_ARGUMENTS:
                return found
            found[entry] = plain
    return found


def _plain(name: str, value: Any, depth: int) -> Iterator[tuple[str, Plain]]:
    if any(map(is_secret_name, name.split("."))):
        yield name, HIDDEN
    elif value is None or type(value) in (bool, int, float):
        yield name, value
    elif isinstance(value, int | float):  # These include numpy's float64, and enums.
        yield name, float(value)
    elif isinstance(value, str):
        yield name, _short(hide_credentials(value))
    elif depth and (entries := _entries(value)) is not None:
        for key, inner in entries.items():
            yield from _plain(f"{name}.{key}" if name not in ("args", "kwargs") else str(key), inner, depth - 1)
    elif isinstance(value, list | tuple) and all(
        isinstance(each, bool | int | float | str) for each in value[:MAX_CHARS]
    ):
        yield name, _short(hide_credentials(repr(value[:MAX_CHARS])))
    else:
        yield name, _short(type(value).__name__)


def _entries(value: Any) -> Mapping[Any, Any] | None:
    if isinstance(value, Mapping):
        return value
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: getattr(value, entry.name) for entry in fields(value)}
    return None


def _short(text: str) -> str:
    return text if len(text) <= MAX_CHARS else text[: MAX_CHARS - 1] + "…"


# ---- the call

_VALUES = (type(None), bool, int, float, complex, str, bytes)
_MAX_SIZE = 10_000
"""Maximum length of a string or container that is stored by value."""


class RunCall:
    """References to a launched function and its arguments, which allow repeating the call. Objects are held weakly.

    Args:
        function: The launched function.
        arguments: The function's positional arguments.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = _reference(function)
        self._arguments = [_reference(argument) for argument in arguments]

    def restore(self, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Return the function and its arguments.

        Args:
            name: The function's name, for the error message.

        Raises:
            LaunchError: The function or an argument no longer exists, or does not support weak references.
        """
        function, *arguments = (reference() for reference in (self._function, *self._arguments))
        gone = ["the function"] if function is _GONE else []
        gone += [f"argument {index}" for index, value in enumerate(arguments) if value is _GONE]
        if gone:
            raise LaunchError(
                f"the run no longer has {' and '.join(gone)}; pass them: notebook_launcher({name}, args, resume=run)"
            )
        return function, tuple(arguments)


_GONE: Any = object()


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value, or `_GONE` if it was deleted or does not support weak references."""
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
