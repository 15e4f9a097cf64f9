"""The arguments of a launched function, as tables of runs show them: plain values by name."""

from __future__ import annotations

import inspect
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import SimpleNamespace
from typing import Any

from notebook_accelerate.config.plain_values import HIDDEN, hide_credentials

Plain = bool | int | float | str | None
MAX_ARGUMENTS = 40
"""Arguments, and entries of settings among them, that are kept."""
MAX_CHARS = 120
MAX_DEPTH = 3
_SECRET = re.compile(r"(?:^|_)(?:token|password|passwd|secret|credentials?|api_?key)(?:$|_)", re.IGNORECASE)


def call_arguments(function: Callable[..., Any], arguments: Sequence[Any]) -> dict[str, Plain]:
    """Return the arguments of a call by the names of their parameters; defaults are included.

    Dicts, namespaces and dataclasses become one entry per value, such as ``config.lr``. Of other objects the class is
    kept; the values of names such as ``api_key`` are hidden.

    Args:
        function: The function.
        arguments: Its positional arguments.
    """
    if (known := getattr(function, "plain_arguments", None)) is not None:  # pickled by another process
        return dict(known)
    try:
        bound = inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):  # it does not take them, which the ranks report; or it has no signature
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
    if _SECRET.search(name.rpartition(".")[2]):
        yield name, HIDDEN
    elif value is None or type(value) in (bool, int, float):
        yield name, value
    elif isinstance(value, int | float):  # as numpy's float64 and enums
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
