"""Find the kernel that runs in this process, and the cell under which a launch shows its output."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from notebook_accelerate.errors import ipython_shell

if TYPE_CHECKING:
    from collections.abc import Iterator

_published_under: ContextVar[Any] = ContextVar("published_under", default=None)


@contextmanager
def published_under(message: Any) -> Iterator[None]:
    """Show launches in the with block under a cell other than the running one.

    For example, a launch after a click in a panel is shown under the cell with the panel.

    Args:
        message: The execute request of the other cell.
    """
    token = _published_under.set(message)
    try:
        yield
    finally:
        _published_under.reset(token)


def parent_message(kernel: Any) -> Any:
    """Return the execute request of the running cell, using ``get_parent``, which both ipykernel 6 and 7 have."""
    return _published_under.get() or kernel.get_parent()


def running_kernel() -> Any | None:
    """Return the ipykernel that runs in this process, or None in a terminal, a script or a test."""
    kernel = getattr(ipython_shell(), "kernel", None)
    return kernel if hasattr(kernel, "iopub_socket") else None
