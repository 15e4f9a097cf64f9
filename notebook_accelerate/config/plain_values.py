"""Helpers for plain values: sizes, names, nested dicts and settings as text."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import reduce
from typing import Any

from notebook_accelerate.config.hidden_values import hide_credentials, shown_value


def convert_bytes(size: float) -> str:
    """Return a size in a readable unit.

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
        source: The dict whose values win.
        destination: The dict that is changed.

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
    """Return the attribute at a dotted path.

    Args:
        obj: The object where the path starts.
        attr: The path, as ``model.layers.0``.

    Returns:
        The attribute.

    Raises:
        AttributeError: A part of the path does not exist.
    """
    return reduce(getattr, attr.split("."), obj)


def format_setting(value: Any) -> str:
    """Return a setting as readable text; of dataclasses only the fields that differ from their defaults.

    Args:
        value: A plain value, a dataclass, or a dict of them by name.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={format_setting(shown_value(str(name), entry))}" for name, entry in value.items())
    if isinstance(value, str):
        return repr(hide_credentials(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(format_setting, value))}]"
    if isinstance(value, Enum) or not is_dataclass(value) or isinstance(value, type):
        return repr(getattr(value, "value", value) if isinstance(value, Enum) else value)
    changed = {entry.name: given for entry in fields(value) if (given := getattr(value, entry.name)) != entry.default}
    return f"{type(value).__name__}({format_setting(changed)})"
