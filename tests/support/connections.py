"""The connections that psutil reports for a process."""

from __future__ import annotations

from typing import Any

import psutil


def connections(kind: str = "inet", pid: int | None = None) -> list[Any]:
    """Return the connections of a process. Before psutil 6.0, the method had another name.

    Args:
        kind: psutil's name for the families to return.
        pid: The id of the process, or None for this process.
    """
    process: Any = psutil.Process(pid)
    read = getattr(process, "net_connections", None) or process.connections
    found: list[Any] = read(kind)
    return found
