"""Shared state that a new rank must not inherit; looked up by name, because this package must not import it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, ExitStack

from notebook_accelerate.telemetry import Sink, current_sink

_STATE = "notebook_accelerate.state"


def reset() -> None:
    """Reset the shared state that the parent process had set up."""
    _call_if_loaded("reset_shared_state")


def isolated() -> AbstractContextManager[object]:
    """Give an inline run its own shared state, and restore the kernel's afterwards."""
    stack = ExitStack()
    if _STATE in sys.modules:
        stack.enter_context(sys.modules[_STATE].isolated_shared_state())
    else:  # the run itself may be the first to load the module
        stack.callback(_call_if_loaded, "start_afresh")
    return stack


def _call_if_loaded(name: str) -> None:
    if _STATE in sys.modules:
        getattr(sys.modules[_STATE], name)()


def require_sink() -> Sink:
    """Return this rank's sink."""
    sink = current_sink()
    assert sink is not None, "a rank is connected before it runs"
    return sink
