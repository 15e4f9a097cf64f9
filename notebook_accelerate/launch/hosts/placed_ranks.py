"""Start ranks on a machine other than the kernel's. The kernel completes their orders, and a host adapts the orders."""

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
"""Prefixes of the kernel's environment variables that are passed on to remote ranks."""
NOT_CARRIED = ("NOTEBOOK_ACCELERATE_SECRET", "NOTEBOOK_ACCELERATE_ON", "NOTEBOOK_ACCELERATE_STORE")


class PlacedBackend(SpawnBackend):
    """Starts ranks from a payload that the kernel pickled.

    Args:
        payload: The descriptor of the payload's file, which is closed together with this object.
    """

    def __init__(self, payload: int) -> None:
        ProcessBackend.__init__(self, _elsewhere, ())
        self._payload, self._sources = payload, {}

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        """Return the order unchanged, because the kernel has completed it."""
        return order


def _elsewhere() -> None:
    """A placeholder for the function, which this process never loads."""


def completed_for_another_machine(order: WorkerOrder) -> WorkerOrder:
    """Return an order prepared for another machine. The kernel calls this before it sends the order."""
    carried = {
        name: value for name, value in os.environ.items() if name.startswith(CARRIED) and name not in NOT_CARRIED
    }
    order.environment = {**carried, **order.environment}
    order.base_environment = order.time_offset = None  # The other machine sets its own values.
    order.mark = 0
    return order


def adapt_to_machine(order: WorkerOrder) -> None:
    """Adapt an order to this machine, which will run the rank.

    The rank uses the kernel's working directory if it exists here, unless a runtime environment provides another one.
    The import path consists of this machine's path, followed by the kernel's folders that exist here.
    """
    environment = {name: value for name, value in os.environ.items() if not value.startswith("ray.util.")}
    environment.pop("RAY_LD_PRELOAD_ON_WORKERS", None)
    order.mark = own_mark()  # With this mark, the processes that the rank starts are killed when this process dies.
    order.base_environment = environment
    own = [entry for entry in sys.path if not entry.endswith("thirdparty_files")]
    known = {os.path.realpath(entry) for entry in own}
    theirs = [entry for entry in order.sys_path or () if os.path.realpath(entry) not in known]
    order.sys_path = own + [entry for entry in theirs if Path(entry).exists()]
    if order.cwd is not None and not Path(order.cwd).is_dir():
        order.cwd = None
