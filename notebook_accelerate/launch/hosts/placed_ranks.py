"""Start the ranks of a kernel on another machine. The kernel completes their orders, and a host adapts them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accelerate.launch.processes.orphan_guard import own_mark
from notebook_accelerate.launch.processes.rank_process import ProcessBackend
from notebook_accelerate.launch.processes.spawn import SpawnBackend

if TYPE_CHECKING:
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

CARRIED = ("ACCELERATE_", "NOTEBOOK_ACCELERATE_")
"""Prefixes of the kernel's environment variables that remote ranks receive too."""
NOT_CARRIED = ("NOTEBOOK_ACCELERATE_SECRET", "NOTEBOOK_ACCELERATE_ON", "NOTEBOOK_ACCELERATE_STORE")


class PlacedBackend(SpawnBackend):
    """Starts ranks from a payload that the kernel pickled.

    Args:
        payload: Descriptor of the payload's file, which is closed with this object.
    """

    def __init__(self, payload: int) -> None:
        ProcessBackend.__init__(self, _elsewhere, ())
        self._payload, self._sources = payload, {}

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        """Return the order unchanged, because the kernel has completed it."""
        return order


def _elsewhere() -> None:
    """Placeholder for the function, which this process never loads."""


def completed_for_another_machine(order: WorkerOrder) -> WorkerOrder:
    """Return an order adapted from this machine to another one. Called in the kernel."""
    carried = {
        name: value for name, value in os.environ.items() if name.startswith(CARRIED) and name not in NOT_CARRIED
    }
    order.environment = {**carried, **order.environment}
    order.base_environment = order.time_offset = None  # That machine uses its own values.
    order.mark = 0
    return order


def adapt_to_machine(order: WorkerOrder) -> None:
    """Adapt an order to this machine, which runs the rank.

    The working directory is the kernel's if it exists here, unless a runtime environment provides one. The import path
    is this machine's, followed by the kernel's folders that exist here.
    """
    environment = {name: value for name, value in os.environ.items() if not value.startswith("ray.util.")}
    environment.pop("RAY_LD_PRELOAD_ON_WORKERS", None)
    order.mark = own_mark()  # The processes that the rank starts are killed when this process ends.
    order.base_environment = environment
    own = [entry for entry in sys.path if not entry.endswith("thirdparty_files")]
    known = {os.path.realpath(entry) for entry in own}
    theirs = [entry for entry in order.sys_path or () if os.path.realpath(entry) not in known]
    order.sys_path = own + [entry for entry in theirs if Path(entry).exists()]
    if order.cwd is not None and not Path(order.cwd).is_dir():
        order.cwd = None
