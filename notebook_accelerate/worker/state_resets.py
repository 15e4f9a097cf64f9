"""Shared state that a new rank must not inherit, by dotted name: this package does not import it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack

from notebook_accelerate.telemetry import Sink, current_sink

RESETS: list[str] = ["notebook_accelerate.state:reset_shared_state"]
"""Functions that reset shared state; each runs in every new rank whose process has loaded its module."""

SCOPES: list[tuple[str, str, str]] = [
    ("notebook_accelerate.state", "isolated_shared_state", "start_afresh"),
]
"""Per module: a context manager that replaces the shared state during an inline run and restores it afterwards, and
the function that resets the state where the run itself was the first to load the module."""


def reset() -> None:
    """Reset the shared state that the parent process had set up."""
    for dotted in RESETS:
        module, name = dotted.split(":")
        if module in sys.modules:
            getattr(sys.modules[module], name)()


def isolated() -> AbstractContextManager[object]:
    """Give an inline run its own shared state, and restore the kernel's afterwards."""
    stack = ExitStack()
    for module, scope, fresh in SCOPES:
        if module in sys.modules:
            stack.enter_context(getattr(sys.modules[module], scope)())
        else:
            stack.callback(_call_if_loaded, module, fresh)
    return stack


def _call_if_loaded(module: str, name: str) -> None:
    if module in sys.modules:
        getattr(sys.modules[module], name)()


def require_sink() -> Sink:
    """Return this rank's sink."""
    sink = current_sink()
    assert sink is not None, "a rank is connected before it runs"
    return sink
