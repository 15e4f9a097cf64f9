"""Replaces methods of other libraries by ones that also report, and never lets reporting fail a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any

from notebook_accelerate import telemetry
from notebook_accelerate.telemetry import MetricEvent
from notebook_accelerate.telemetry.step_sources import reported

_MARK = "_reports_to_a_run"


def after(owner: Any, name: str, report: Callable[..., None]) -> None:
    """Call ``report`` with the arguments of ``owner.name`` after each call of it; does nothing where there is none.

    Args:
        owner: A class, or a module.
        name: The method or function.
        report: What it raises is ignored.
    """
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _MARK):
        return

    @wraps(original)
    def reporting(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        with suppress(Exception):  # another version may pass other arguments
            report(*args, **kwargs)
        return result

    setattr(reporting, _MARK, True)
    setattr(owner, name, reporting)


def mark_reported(owner: Any, name: str) -> None:
    """Keep what ``owner.name`` writes to other trackers from being copied: its numbers are reported elsewhere.

    Args:
        owner: A class.
        name: The method.
    """
    original = getattr(owner, name)

    @wraps(original)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with reported():
            return original(*args, **kwargs)

    setattr(owner, name, marked)


def send_numbers(values: Mapping[Any, Any], step: Any = None) -> None:
    """Send the numbers among ``values`` as metrics of this rank."""
    numbers = {str(name): number for name, value in values.items() if (number := _number(value)) is not None}
    if numbers:
        telemetry.emit(MetricEvent(numbers, None if step is None else int(step)))


def _number(value: Any) -> float | None:
    """Return a number, or the number of a tensor or array with one element; None for other values."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return None
