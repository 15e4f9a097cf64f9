"""Checks and converts values that are logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from notebook_accelerate.state.warn_once import warn_once

Kind = Literal["number", "text", "numbers"]


class LogValueError(ValueError):
    """The argument of `log` is not a dictionary. Values that a tracker does not record are left out instead."""


def with_text_names(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return values by names that are texts; another name is converted, with one warning.

    Args:
        values: The logged values.
    """
    if all(isinstance(name, str) for name in values):
        return dict(values)
    for name in values:
        if not isinstance(name, str):
            warn_once(
                f"log() got the name {name!r} ({type(name).__name__}), which is recorded as {_as_text(name)!r}; names "
                f'are texts: accelerator.log({{"{_as_text(name)}": ...}})'
            )
    return {name if isinstance(name, str) else _as_text(name): value for name, value in values.items()}


def _as_text(name: object) -> str:
    if isinstance(name, bytes):
        return name.decode(errors="replace")
    return "/".join(map(str, name)) if isinstance(name, tuple) else str(name)


def number_of(value: Any) -> float | int | None:
    """Convert a value to a plain number.

    Args:
        value: An int, float, bool, numpy number, or a tensor or array of one element.

    Returns:
        The number; None if the value is not a number.
    """
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "item"):
        return None
    size = value.numel() if hasattr(value, "numel") else getattr(value, "size", 1)
    if size != 1:
        return None
    found = value.item()
    return found if isinstance(found, (int, float)) else None


def by_kind(
    values: Mapping[str, Any], tracker: str, kinds: Sequence[Kind] = ("number", "text", "numbers")
) -> dict[str, tuple[Kind, Any]]:
    """Return the values that a tracker records, each with its kind; others are left out, with one warning each.

    Args:
        values: The logged values.
        tracker: Name of the vendor, for the warning.
        kinds: The kinds of values that it records.

    Returns:
        The kind, and the value as plain Python, by name.
    """
    found: dict[str, tuple[Kind, Any]] = {}
    for name, value in values.items():
        recorded = _classified(value)
        if recorded is not None and recorded[0] in kinds:
            found[name] = recorded
            continue
        shape = getattr(value, "shape", None)
        what = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
        warn_once(
            f"{tracker} records numbers{' and texts' if 'text' in kinds else ''}: {name!r} ({what}) is left out; write "
            f'accelerator.log({{"{name}": {name.rpartition("/")[2]}.mean().item()}}) to record the mean of a tensor'
        )
    return found


def _classified(value: Any) -> tuple[Kind, Any] | None:
    """Return the kind of a value, and the value as plain Python; None for others."""
    if (number := number_of(value)) is not None:
        return "number", number
    if isinstance(value, str):
        return "text", value
    if isinstance(value, Mapping):
        numbers = {str(key): number_of(item) for key, item in value.items()}
        if None not in numbers.values():
            return "numbers", numbers
    return None


def scalars(values: Mapping[str, Any], tracker: str, texts: bool) -> dict[str, Any]:
    """Return the numbers among values, dictionaries of numbers as ``name/key``; others are left out, with a warning.

    Args:
        values: The logged values.
        tracker: Name of the vendor, for the warning.
        texts: Whether it records texts, too.
    """
    found: dict[str, Any] = {}
    kinds: Sequence[Kind] = ("number", "text", "numbers") if texts else ("number", "numbers")
    for name, (kind, plain) in by_kind(values, tracker, kinds).items():
        found.update({f"{name}/{key}": item for key, item in plain.items()} if kind == "numbers" else {name: plain})
    return found


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert numpy numbers and tensors of one element to plain numbers, and keep all other values.

    Args:
        values: The logged values.
    """
    return {name: value if (number := number_of(value)) is None else number for name, value in values.items()}
