"""The worker-side state that a new rank must not inherit, by dotted name: this room imports none of it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack

from notebook_accelerate.telemetry import Sink, current_sink

RESETS: list[str] = ["notebook_accelerate.state:reset_shared_state"]
"""Functions that forget a process's shared state; each runs in every new worker whose process has loaded its module."""

SCOPES: list[tuple[str, str, str]] = [
    ("notebook_accelerate.state", "isolated_shared_state", "start_afresh"),
]
"""Per module: a context manager that puts the shared state aside for an inline run and brings it back afterwards, and
the function that starts afresh where the run itself was the first to load the module."""


def reset() -> None:
    """Forget what the process that this one was forked from had set up."""
    for dotted in RESETS:
        module, name = dotted.split(":")
        if module in sys.modules:
            getattr(sys.modules[module], name)()


def isolated() -> AbstractContextManager[object]:
    """Put the kernel's shared state aside while an inline run has its own."""
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
    """Return this worker's sink."""
    sink = current_sink()
    assert sink is not None, "a worker is connected before it runs"
    return sink
