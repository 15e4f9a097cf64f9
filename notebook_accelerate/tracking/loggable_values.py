"""Checks and converts values that are logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from notebook_accelerate.state.warn_once import warn_once

Kind = Literal["number", "text", "numbers"]


class LogValueError(ValueError):
    """A value cannot be logged. The caller's mistake: it is raised, unlike a failure of a tracker."""


def check_names(values: Mapping[Any, Any]) -> None:
    """Raise ``LogValueError`` if a name is not a text: no tracker, and no panel, can show such a metric."""
    for name in values:
        if not isinstance(name, str):
            raise LogValueError(
                f"log() got the name {name!r} ({type(name).__name__}); names are texts: "
                f'accelerator.log({{"{_as_text(name)}": ...}})'
            )


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


def classify(name: str, value: Any) -> tuple[Kind, Any]:
    """Return whether a value is a number, a text, or a dictionary of numbers.

    Args:
        name: Its name, for the error.
        value: The value.

    Returns:
        The kind, and the value as plain Python.

    Raises:
        LogValueError: It is none of them.
    """
    if (number := number_of(value)) is not None:
        return "number", number
    if isinstance(value, str):
        return "text", value
    if isinstance(value, Mapping):
        numbers = {str(key): number_of(item) for key, item in value.items()}
        if None not in numbers.values():
            return "numbers", numbers
    shape = getattr(value, "shape", None)
    kind = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
    raise LogValueError(
        f"log() got {name!r} = {kind}. It takes numbers (also tensors of one element), texts, dictionaries of numbers: "
        f'accelerator.log({{"{name}": {name.rpartition("/")[2]}.mean().item()}}).'
    )


def numbers_only(values: Mapping[str, Any], tracker: str) -> dict[str, float | int]:
    """Return the numbers among values, dictionaries of numbers as ``name/key``; texts are left out with one warning.

    Args:
        values: The logged values.
        tracker: Name of the vendor, for the warning.

    Raises:
        LogValueError: A value is neither number nor text.
    """
    found: dict[str, float | int] = {}
    for name, value in values.items():
        kind, plain = classify(name, value)
        if kind == "number":
            found[name] = plain
        elif kind == "numbers":
            found.update({f"{name}/{key}": item for key, item in plain.items()})
        else:
            warn_once(f"{tracker} records numbers: the text {name!r} is left out.")
    return found


def scalars_only(values: Mapping[str, Any], tracker: str) -> dict[str, float | int | str]:
    """Return the numbers and texts among values, dictionaries of numbers as ``name/key``; others cause one warning.

    Args:
        values: The logged values.
        tracker: Name of the vendor, for the warning.
    """
    found: dict[str, float | int | str] = {}
    for name, value in values.items():
        try:
            kind, plain = classify(name, value)
        except LogValueError:
            warn_once(f"{tracker} records numbers and texts: {name!r} ({type(value).__name__}) is left out.")
            continue
        if kind == "numbers":
            found.update({f"{name}/{key}": item for key, item in plain.items()})
        else:
            found[name] = plain
    return found


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert numpy numbers and tensors of one element to plain numbers, and keep all other values.

    Args:
        values: The logged values.
    """
    return {name: value if (number := number_of(value)) is None else number for name, value in values.items()}
