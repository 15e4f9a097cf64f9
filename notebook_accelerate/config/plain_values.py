"""Small helpers on plain values."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import reduce
from typing import Any


def convert_bytes(size: float) -> str:
    """Return a size in the unit a person reads it in.

    Args:
        size: Bytes.

    Returns:
        The size with two decimals, such as ``1.5 GB``; units are powers of 1024.
    """
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if abs(size) < 1024.0:
            return f"{round(size, 2)} {unit}"
        size /= 1024.0
    return f"{round(size, 2)} PB"


def get_pretty_name(obj: Any) -> str:
    """Return the qualified name of a class or function, or of an object's class.

    Args:
        obj: Anything.
    """
    if not hasattr(obj, "__qualname__") and not hasattr(obj, "__name__"):
        obj = type(obj)
    return str(getattr(obj, "__qualname__", None) or getattr(obj, "__name__", None) or obj)


def merge_dicts(source: MutableMapping[str, Any], destination: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Merge one nested dict into another, which is changed.

    Args:
        source: Its values win.
        destination: What it is merged into.

    Returns:
        The destination.
    """
    for key, value in source.items():
        if isinstance(value, MutableMapping):
            inner = destination.get(key)
            destination[key] = merge_dicts(value, inner if isinstance(inner, MutableMapping) else {})
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return the attribute behind a dotted path.

    Args:
        obj: Where the path starts.
        attr: The path, as ``model.layers.0``.

    Returns:
        The attribute.

    Raises:
        AttributeError: A part of the path does not exist.
    """
    return reduce(getattr, attr.split("."), obj)


def said(value: Any) -> str:
    """Return a setting as a person reads it: of dataclasses only what differs from their defaults.

    Args:
        value: A plain value, a dataclass, or a dict of them by name.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={said(entry)}" for name, entry in value.items())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(said, value))}]"
    if isinstance(value, Enum) or not is_dataclass(value) or isinstance(value, type):
        return repr(getattr(value, "value", value) if isinstance(value, Enum) else value)
    changed = {entry.name: given for entry in fields(value) if (given := getattr(value, entry.name)) != entry.default}
    return f"{type(value).__name__}({said(changed)})"


__all__ = ["convert_bytes", "get_pretty_name", "merge_dicts", "recursive_getattr", "said"]
