"""The worker-side state that a new rank must not inherit, by dotted name: this room imports none of it."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from notebook_accelerate.telemetry import Sink, current_sink

RESETS: list[str] = ["notebook_accelerate.state:reset_shared_state"]
"""Functions that forget a process's shared state; each runs in every new worker whose process has loaded its module."""

SCOPES: list[str] = ["notebook_accelerate.state:isolated_shared_state"]
"""Context managers that put a process's shared state aside for an inline run and bring it back afterwards."""


def _loaded(dotted: str) -> Any:
    module, name = dotted.split(":")
    return getattr(sys.modules[module], name) if module in sys.modules else None


def reset() -> None:
    """Forget what the process that this one was forked from had set up."""
    for dotted in RESETS:
        function = _loaded(dotted)
        if function is not None:
            function()


def isolated() -> AbstractContextManager[object]:
    """Put the kernel's shared state aside while an inline run has its own."""
    stack = ExitStack()
    for dotted in SCOPES:
        module, name = dotted.split(":")
        if module in sys.modules:
            stack.enter_context(getattr(importlib.import_module(module), name)())
    return stack


def require_sink() -> Sink:
    """Return this worker's sink."""
    sink = current_sink()
    assert sink is not None, "a worker is connected before it runs"
    return sink
