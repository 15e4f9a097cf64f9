"""Start ranks on a machine other than the kernel's. The kernel completes their orders, and a host adapts the orders."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accelerate.hardware import detect
from notebook_accelerate.launch.processes.interpreters import RAY_PACKAGES
from notebook_accelerate.launch.processes.orphan_guard import own_mark
from notebook_accelerate.launch.processes.spawn import SpawnBackend
from notebook_accelerate.launch.processes.zygote import ZygoteBackend

if TYPE_CHECKING:
    from notebook_accelerate.launch.processes.pickled import PickledFunction
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

CARRIED = ("ACCELERATE_", "NOTEBOOK_ACCELERATE_")
"""Prefixes of the kernel's environment variables that are passed on to remote ranks."""
NOT_CARRIED = ("NOTEBOOK_ACCELERATE_SECRET", "NOTEBOOK_ACCELERATE_ON", "NOTEBOOK_ACCELERATE_STORE")


class PlacedFork(ZygoteBackend):
    """Forks ranks from this host's server process. The kernel has already pickled the function.

    Args:
        function: The pickled function.
        variables: The environment variables of the ranks.
        note: A function that shows a line if the server has to be replaced.
        stopping: A function that returns whether the ranks are no longer wanted. It is called repeatedly while the
            server imports torch.
    """

    def __init__(
        self,
        function: PickledFunction,
        variables: Mapping[str, str],
        note: Callable[[str], None],
        stopping: Callable[[], bool],
    ) -> None:
        super().__init__(function, ())
        self._variables, self._note, self._stopping = variables, note, stopping

    def complete(self, order: WorkerOrder) -> WorkerOrder:
        """Return the order unchanged, because the kernel has completed it."""
        return order


class PlacedSpawn(SpawnBackend):
    """Starts a fresh interpreter for each rank, on TPUs, on platforms that cannot fork, or on request."""

    complete = PlacedFork.complete


def can_fork_ranks() -> bool:
    """Return whether the ranks of this host can be forked."""
    return hasattr(os, "fork") and detect().accelerator != "tpu"


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
    own = [entry for entry in sys.path if not entry.endswith(RAY_PACKAGES)]
    known = {os.path.realpath(entry) for entry in own}
    theirs = [entry for entry in order.sys_path or () if os.path.realpath(entry) not in known]
    order.sys_path = own + [entry for entry in theirs if Path(entry).exists()]
    if order.cwd is not None and not Path(order.cwd).is_dir():
        order.cwd = None
