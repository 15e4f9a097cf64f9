"""Accelerate itself in the ranks: what its ``Accelerator.log`` records."""

from __future__ import annotations

from functools import wraps
from typing import Any

from notebook_accelerate.integrations.reporting.sources import send_numbers
from notebook_accelerate.telemetry.automatic_metrics import reported


def connect(module: Any) -> None:
    """Report what an Accelerator of Accelerate logs; this package under its name reports by itself."""
    if module.__name__ != "accelerate.accelerator":
        return
    kind = module.Accelerator
    original = kind.log

    @wraps(original)
    def log(self: Any, values: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
        send_numbers(values, step)
        with reported():
            return original(self, values, step, *args, **kwargs)

    kind.log = log
