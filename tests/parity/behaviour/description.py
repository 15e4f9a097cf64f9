"""Descriptions of programs' results as plain data, so that the results of two packages can be compared."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

_DEPTH = 12
_AS_TEXT = (torch.dtype, torch.device, torch.Size, Path, slice, range, complex)


def describe(value: Any, depth: int = 0) -> Any:
    """Return a value as nested lists and dicts of plain values. Other objects are represented by their type's name."""
    if depth > _DEPTH:
        return "..."
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "name": value.name, "value": describe(value.value, depth + 1)}
    if value is None or type(value) in (bool, int, float, bytes):
        return value
    if isinstance(value, str):
        return value.replace("notebook_accelerate", "accelerate").replace(str(Path.cwd()), "<folder>")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, depth + 1)
    for kind, description in _KINDS:
        if isinstance(value, kind):
            return description(value, depth + 1)
    return {"object": type(value).__name__}


def _tensor(value: torch.Tensor, depth: int) -> Any:
    facts = {"tensor": type(value).__name__, "dtype": str(value.dtype), "shape": list(value.shape)}
    facts |= {"device": value.device.type, "requires_grad": value.requires_grad}
    if value.device.type != "meta":
        plain = value.detach()
        plain = plain.full_tensor() if hasattr(plain, "full_tensor") else plain
        plain = plain.to_dense() if plain.layout is not torch.strided else plain
        facts["values"] = plain.to(torch.float64 if plain.is_floating_point() else plain.dtype).tolist()
    return facts


def _module(value: torch.nn.Module, depth: int) -> Any:
    tensors = {**dict(value.named_parameters()), **dict(value.named_buffers())}
    return {"module": type(value).__name__, "state": describe(tensors, depth), "training": value.training}


def _dataclass(value: Any, depth: int) -> Any:
    fields = {field.name: describe(getattr(value, field.name, "absent"), depth) for field in dataclasses.fields(value)}
    return {"dataclass": type(value).__name__, "fields": fields}


def _mapping(value: Mapping[Any, Any], depth: int) -> Any:
    items = [[describe(key, depth), describe(item, depth)] for key, item in value.items()]
    kind = type(value).__name__
    # An OrderedDict equals a dict with the same items in the same order.
    return {"mapping": "dict" if kind == "OrderedDict" else kind, "items": items}


def _sequence(value: Any, depth: int) -> Any:
    return {"sequence": type(value).__name__, "items": [describe(item, depth) for item in value]}


_KINDS: tuple[tuple[Any, Any], ...] = (
    (torch.Tensor, _tensor),
    (torch.nn.Module, _module),
    (_AS_TEXT, lambda value, _: f"{type(value).__name__} {value}"),
    ((np.ndarray, np.generic), lambda value, _: {"numpy": str(value.dtype), "values": value.tolist()}),
    (type, lambda value, _: f"class {value.__name__}"),
    ((FunctionType, MethodType), lambda value, _: f"function {value.__name__}"),
    (inspect.Signature, lambda value, _: list(value.parameters)),
    (BaseException, lambda value, _: {"exception": lineage(type(value)), "raised at": raised_at(value)}),
    (Mapping, _mapping),
    ((list, tuple), _sequence),
    ((set, frozenset), lambda value, depth: sorted((describe(item, depth) for item in value), key=repr)),
)


# If Accelerate does not check an argument, it fails with one of these, while this package raises ValueError.
_UNCHECKED = {"AttributeError", "TypeError", "KeyError", "IndexError", "AssertionError", "NotImplementedError"}


def raised_at(error: BaseException) -> str | None:
    """Return the innermost position in the package accelerate that an exception came through, as ``file:line``."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        _, inside, path = frame.f_code.co_filename.rpartition("/accelerate/")
        found = f"{path}:{line}" if inside else found
    return found


def lineage(kind: type) -> list[str]:
    """Return the names of a class and its bases, most specific first."""
    return [each.__name__ for each in kind.__mro__]


def differences(theirs: Any, ours: Any, tolerance: float = 0.0, at: str = "") -> list[str]:
    """Compare two descriptions.

    Args:
        theirs: The description from Accelerate.
        ours: The description from this package, whose dataclasses may have more fields.
        tolerance: The relative tolerance of floats.
        at: The position in the result, with which the lines start.

    Returns:
        One line for each difference.
    """
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return _dict_differences(theirs, ours, tolerance, at)
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(theirs) != len(ours):
            return [f"{at}: {len(theirs)} items there, {len(ours)} here: {_short(theirs)} / {_short(ours)}"]
        pairs = enumerate(zip(theirs, ours, strict=True))
        return [line for key, (a, b) in pairs for line in differences(a, b, tolerance, f"{at}[{key}]")]
    same = theirs == ours and type(theirs) is type(ours)
    if isinstance(theirs, float) and isinstance(ours, float):
        both_nan = math.isnan(theirs) and math.isnan(ours)
        same = same or both_nan or math.isclose(theirs, ours, rel_tol=tolerance, abs_tol=tolerance)
    return [] if same else [f"{at}: {_short(theirs)} there, {_short(ours)} here"]


def _dict_differences(theirs: dict[str, Any], ours: dict[str, Any], tolerance: float, at: str) -> list[str]:
    if "exception" in theirs and "exception" in ours:
        name = theirs["exception"][0]
        if name in ours["exception"] or (name in _UNCHECKED and "ValueError" in ours["exception"]):
            return []
        return [f"{at}: {theirs['exception'][0]} there, {ours['exception'][0]} here"]
    if "dataclass" in theirs:  # Ignore fields that only this package's dataclass has.
        ours = {**ours, "fields": {key: ours.get("fields", {}).get(key, "absent") for key in theirs["fields"]}}
    if theirs.keys() != ours.keys():
        return [f"{at}: {_short(theirs)} there, {_short(ours)} here"]
    return [line for key in theirs for line in differences(theirs[key], ours[key], tolerance, f"{at}.{key}")]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."
