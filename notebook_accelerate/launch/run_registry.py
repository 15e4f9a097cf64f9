"""The runs of this kernel."""

from __future__ import annotations

import atexit
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from notebook_accelerate.errors import DeviceBusyError
from notebook_accelerate.launch.processes.zygote import close_zygote

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.run import Run

KEPT_RUNS = 100
"""Maximum number of ended runs to keep; the oldest are dropped first."""

_lock = threading.Lock()
_runs: list[Run] = []
_watching_exit = False
_watchers: list[weakref.WeakMethod[Callable[[Run], None]]] = []


def add(run: Run) -> None:
    """Register ``run``, and ensure that it ends with the kernel."""
    global _watching_exit  # noqa: PLW0603 - one kernel, one exit
    with _lock:
        _runs.append(run)
        ended = [old for old in _runs if old.ended is not None]
        for old in ended[: max(0, len(ended) - KEPT_RUNS)]:
            _runs.remove(old)
        if not _watching_exit:
            atexit.register(shutdown)
            _watching_exit = True
        watchers = [watcher for reference in _watchers if (watcher := reference()) is not None]
        _watchers[:] = [reference for reference in _watchers if reference() is not None]
    for watcher in watchers:
        with suppress(Exception):  # a view must never prevent the start of a run
            watcher(run)


def watch(launched: Callable[[Run], None]) -> None:
    """Call a method with every run launched later, on the launching thread, as long as the method's object lives."""
    with _lock:
        _watchers.append(weakref.WeakMethod(launched))


def runs() -> list[Run]:
    """Return the runs of this kernel, the oldest first."""
    with _lock:
        return list(_runs)


def shutdown() -> None:
    """Stop every run and end the server process that the zygote start method forks from."""
    for run in runs():
        run.stop(grace=1.0)
    close_zygote()


def release_held() -> None:
    """Release the ranks that failed runs keep for inspection: a new launch needs their resources."""
    for run in runs():
        if run.held:
            run.stop(grace=1.0)


def check_devices(run: Run, launch_plan: LaunchPlan) -> None:
    """Check that no other run holds the accelerators that ``launch_plan`` needs.

    Raises:
        DeviceBusyError: Another run holds one of them.
    """
    if launch_plan.accelerator == "cpu" or launch_plan.where:  # a cluster assigns its devices itself
        return
    for other in runs():
        if other is run or other.ended is not None or other.plan is None:
            continue
        if other.plan.accelerator == launch_plan.accelerator:
            raise DeviceBusyError(
                f"run {other.id} ({other.function_name}) holds the {launch_plan.accelerator} devices; "
                f"wait for it, or end it with notebook_accelerate.runs()[{runs().index(other)}].stop()"
            )
