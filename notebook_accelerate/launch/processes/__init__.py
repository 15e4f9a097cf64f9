"""The start methods, by name. Entry points of the group ``notebook_accelerate.launch_backends`` can add others."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.rank_process import ProcessBackend

ROWS: dict[str, str] = {
    "fork": "notebook_accelerate.launch.processes.fork:ForkBackend",
    "zygote": "notebook_accelerate.launch.processes.zygote:ZygoteBackend",
    "ray": "notebook_accelerate.launch.hosts.ray.ray_backend:RayBackend",
    "spawn": "notebook_accelerate.launch.processes.spawn:SpawnBackend",
}


def process_backend(name: str) -> type[ProcessBackend]:
    """Return the backend of a start method.

    Raises:
        ValueError: There is no start method with this name; the message lists those that exist.
    """
    rows = dict(ROWS)
    if name not in rows:  # Search the installed packages only now, because that takes longer than forking a rank.
        rows |= {entry.name: entry.value for entry in entry_points(group="notebook_accelerate.launch_backends")}
    if name not in rows:
        raise ValueError(f"start_method={name!r} is not known; pass one of {', '.join(sorted(rows))}")
    module, attribute = rows[name].split(":")
    found: type[ProcessBackend] = getattr(importlib.import_module(module), attribute)
    return found
