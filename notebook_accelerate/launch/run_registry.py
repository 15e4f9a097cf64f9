"""The registry of this kernel's runs."""

from __future__ import annotations

import atexit
import builtins
import gc
import os
import threading
import traceback
import warnings
import weakref
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from notebook_accelerate._mistakes import reports_mistakes
from notebook_accelerate.errors import DeviceBusyError
from notebook_accelerate.hardware.process_liveness import this_process
from notebook_accelerate.launch import attaching
from notebook_accelerate.launch.detached.run_directory import DirectoryEntry
from notebook_accelerate.launch.detached.served_run import finish_services
from notebook_accelerate.launch.notifying import finish_messages
from notebook_accelerate.launch.output.running_cell import running_kernel
from notebook_accelerate.launch.processes.zygote import close_zygote
from notebook_accelerate.launch.run import result_bytes, wait_for_release, without_results
from notebook_accelerate.launch.run_display import load
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry.tracebacks import built_in_attribute

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from notebook_accelerate.launch.kept.kept_runs import KeptRuns
    from notebook_accelerate.launch.plan.planner import LaunchPlan
    from notebook_accelerate.launch.processes.device_claims import Claim
    from notebook_accelerate.launch.run import Run

KEPT_RUNS = 100
"""Maximum number of ended runs to keep. The oldest are dropped first."""
KEPT_RESULTS = 3
"""The number of most recently ended runs that keep their results even if the user no longer refers to them."""
KEPT_RESULT_BYTES = 1_000_000_000
"""Maximum total size in bytes of the results of these `KEPT_RESULTS` runs. The last run's are never dropped."""

_Method = TypeVar("_Method", bound="Callable[..., None]")
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)
"""The class of exception groups, or None in Python 3.10."""


class _Entry:
    """A run, or its summary once the user no longer refers to it.

    Args:
        run: The run to keep.

    Attributes:
        run: The run while it is running or its results are kept, otherwise None.
        has_cleared_frames: Whether `clear_frames` has been called since the run ended.
    """

    def __init__(self, run: Run) -> None:
        self.run: Run | None = run
        self._known = weakref.ref(run)
        self._summary: Run | None = None
        self.has_cleared_frames = False

    @property
    def living(self) -> Run | None:
        """The run if its ranks are running or held, otherwise None."""
        run = self.run
        return run if run is not None and (run.ended is None or run.held) else None

    def drop_results(self) -> None:
        """Drop the results and keep everything else. If the user refers to the run, it still has its results."""
        if self.run is not None:
            self._summary, self.run = without_results(self.run), None

    def clear_frames(self) -> bool:
        """Clear the local variables in the tracebacks of a failed run. Return whether there were any tracebacks.

        If the function ran in the kernel itself, the frames refer to the function's tensors. After an out-of-memory
        error, these tensors occupy the memory that the next launch needs. The tracebacks themselves remain.
        """
        run = self.run
        if run is None or run.ended is None:
            return False
        self.has_cleared_frames = True
        errors: dict[int, BaseException] = {}
        left: list[BaseException | None] = [failure.exception for failure in run.failures]
        while left:
            error = left.pop()
            if error is not None and id(error) not in errors:
                errors[id(error)] = error
                left += [built_in_attribute(error, "__cause__"), built_in_attribute(error, "__context__")]
                if _GROUP is not None and issubclass(type(error), _GROUP):
                    left += built_in_attribute(error, "exceptions", _GROUP)
        tracebacks = [
            found for error in errors.values() if (found := built_in_attribute(error, "__traceback__")) is not None
        ]
        for found in tracebacks:
            traceback.clear_frames(found)
        return bool(tracebacks)

    def current(self) -> Run:
        """Return the run, or its summary if the user no longer refers to it."""
        run = self._known() or self._summary
        assert run is not None, "an entry refers to its run until the run's summary is made"
        return run


# The lock is reentrant because a garbage collection while it is held may run user code that calls `runs`.
_lock = threading.RLock()
_entries: list[_Entry] = []
_watching_exit = False
_watchers: list[weakref.WeakMethod[Callable[[Run], None]]] = []
_launchers: list[weakref.WeakMethod[Callable[[], None]]] = []


def _renew_lock() -> None:
    """Replace the lock in a forked process, where nothing releases it if another thread held it during the fork."""
    global _lock  # noqa: PLW0603 - a lock that another thread held cannot be released
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def register_run(run: Run) -> None:
    """Register ``run``, and ensure that it is stopped when the kernel exits."""
    global _watching_exit  # noqa: PLW0603 - one exit handler per kernel
    with _lock:
        _entries.append(_Entry(run))
        ended = [entry for entry in _entries if entry.living is None]
        for old in ended[: max(0, len(ended) - KEPT_RUNS)]:
            # `ended` keeps the run alive until the lock is released, because deleting a run may run user code.
            _entries.remove(old)
        if not _watching_exit:
            atexit.register(shutdown)
            _watching_exit = True
    run.add_done_callback(_drop_old_results)
    announce_run(run)


def announce_run(run: Run) -> None:
    """Pass a new run to the methods registered with `watch_launches`."""
    for watcher in _alive(_watchers):
        try:
            watcher(run)
        except Exception as error:  # noqa: BLE001 - a view must never prevent the start of a run
            with suppress(Warning):  # Warnings may be configured to raise errors.
                warnings.warn(f"a view of launches failed: {type(error).__name__}: {error}", stacklevel=2)


def _alive(references: list[weakref.WeakMethod[_Method]]) -> list[_Method]:
    """Return the methods whose objects exist, and drop the others from the list."""
    with _lock:
        references[:] = [reference for reference in references if reference() is not None]
        return [method for reference in references if (method := reference()) is not None]


def _drop_old_results(_ended: Run) -> None:
    """Drop the results of all ended runs except the last few."""
    with _lock:
        ended = [entry.run for entry in _entries if entry.run is not None and entry.living is None]
    # Also drop the errors of launches that started no rank, because the errors' frames refer to the arguments.
    old = {run.id for run in ended if all(info.pid is None for info in run.ranks)}
    total = 0
    kept = [run for run in ended if run.id not in old]
    for position, run in enumerate(sorted(kept, key=lambda run: run.ended or 0.0, reverse=True)):
        total += result_bytes(run)
        if position and (position >= KEPT_RESULTS or total > KEPT_RESULT_BYTES):
            old.add(run.id)
    with _lock:
        for entry in _entries:
            if entry.run is not None and entry.run.id in old:
                entry.drop_results()
    # `ended` keeps the runs alive until here, where the lock is released, because deleting results may run user code.


def watch_launches(launched: Callable[[Run], None]) -> None:
    """Call a method with each new run, on the thread that launches it, until the method's object is deleted."""
    with _lock:
        _watchers.append(weakref.WeakMethod(launched))


def watch_shutdown(end: Callable[[], None]) -> None:
    """Register a method that `shutdown` calls first. Afterwards, the method's object must launch no further runs."""
    with _lock:
        _launchers.append(weakref.WeakMethod(end))


class Runs(list["Run"]):
    """A list of runs. As the value of a cell's last line, it is shown as a `widgets.RunsTable` with curves."""

    def _table(self) -> Any:
        # Compare folders, because a lost run is opened again whenever it is listed. After a call with all=True,
        # `runs()` lists the runs that the call has opened, so that their table adds later runs, too.
        mine, listed = ([run.folder or run.id for run in each] for each in (self, runs()))
        return load("runs")(None if mine == listed else self)

    def _ipython_display_(self) -> None:
        if running_kernel() is None:
            raise NotImplementedError  # IPython then shows the list's MIME bundle.
        self._table()._ipython_display_()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return {"text/plain": repr(self)}


@overload
def runs(folder: None = None, *, all: bool = False) -> Runs: ...


@overload
def runs(folder: str | os.PathLike[str]) -> KeptRuns: ...


def runs(folder: str | os.PathLike[str] | None = None, *, all: bool = False) -> Runs | KeptRuns:
    """Return this kernel's runs and the detached runs of this project, oldest first. A cell shows them as a table.

    With a folder, return a table of the runs that are kept in it.

    Runs that a variable refers to keep their results, and so do the last three that ended, if those results take at
    most 1 GB. For older runs, everything except the results is kept.

    Args:
        folder: The folder passed as ``save``. If None, return this kernel's runs, and the detached runs of all kernels:
            those that are running, and the last twenty ended ones that were launched in the past 30 days and have not
            been deleted.
        all: Whether to list the user's detached runs from all folders. By default, only runs that were launched in the
            working directory's git repository, or without a repository below the working directory, are listed, and
            those that this kernel has attached to.

    Returns:
        A list of runs. For a folder, a table of their settings, code version, final metrics and duration.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    if folder is not None:
        from notebook_accelerate.launch.kept.kept_runs import kept_runs

        return kept_runs(folder)
    detached = attaching.detached_runs(None if all else attaching.project_folder())
    return Runs(sorted([*own_runs(), *detached], key=lambda run: run.started))


def own_runs() -> list[Run]:
    """Return the runs that this kernel supervises or has supervised, oldest first."""
    with _lock:
        return [entry.current() for entry in _entries]


@reports_mistakes
def debug(rank: int | None = None) -> None:
    """Use a rank's debugger in this cell, until the rank continues or quits; see ``Run.debug``.

    This debugs the last run with a rank at a breakpoint, or else the last run that failed with ``hold_on_error=True``
    and whose ranks are still held, or else the last run that is running.

    Args:
        rank: The rank's global index. None means the first rank stopped in a debugger, or else the first that failed,
            the first that waits for input, or the first that is running, in this order.

    Raises:
        ValueError: There is no run to debug, or the run has no such rank.
    """
    detached = [run for run in attaching.attached_runs() if run.ended is None or run.held]
    living = sorted([*_living(), *detached], key=lambda run: run.started)
    stopped = [run for run in living if internals(run).commands.prompts.debugged()]
    chosen = stopped or [run for run in living if run.held] or living
    if not chosen:
        raise ValueError(
            "no run can be debugged: none is running, and no ranks are kept after a failure; "
            "launch with notebook_launcher(..., hold_on_error=True), or with block=False and call debug() while it runs"
        )
    chosen[-1].debug(rank)


def _living() -> list[Run]:
    with _lock:
        return [run for entry in _entries if (run := entry.living) is not None]


def shutdown(all: bool = False) -> None:
    """Stop every run and sweep of this kernel, and end the server process of the zygote start method.

    Args:
        all: Whether to stop the user's detached runs too. By default, they continue.
    """
    for end in _alive(_launchers):
        end()
    own = _living()
    for run in own:
        run.stop(grace=1.0, wait=False)
    if all:
        attaching.stop_detached(grace=1.0)
    for run in own:
        wait_for_release(run)
    finish_services()
    finish_messages()
    close_zygote()


def release_held() -> None:
    """Free memory for a launch: end the ranks that failed runs hold, and clear the variables in their tracebacks."""
    held = [run for run in _living() if run.held]
    for run in held:
        run.stop(grace=1.0, wait=False)
    for run in held:
        wait_for_release(run)
    with _lock:
        entries = [entry for entry in _entries if not entry.has_cleared_frames]
    cleared = [entry.clear_frames() for entry in entries]
    if any(cleared):
        gc.collect()  # An Accelerator and its models refer to each other, so only the collector frees them.


def entry_of(run: Run, socket: Path, origin: Mapping[str, Any], *, detached: bool) -> DirectoryEntry:
    """Return the entry that lets other processes find a run that this process supervises.

    Args:
        run: The run, which has a plan.
        socket: The path of the socket over which other processes control the run.
        origin: Where the run was launched, from `detached_launch.origin`.
        detached: Whether the run is detached.
    """
    return DirectoryEntry(
        name=run.name,
        folder="" if run.folder is None else str(run.folder),
        socket=str(socket),
        created=run.started,
        process=asdict(this_process()),
        origin=origin,
        detached=detached,
        ranks=0 if run.plan is None else run.plan.num_processes,
    )


def busy_error(claim: Claim, plan: LaunchPlan) -> DeviceBusyError:
    """Return the error of a launch that needs devices of another run.

    Args:
        claim: The claim of the other run.
        plan: The plan of the launch.
    """
    own = next((place for place, run in enumerate(runs()) if claim.is_own and run.id == claim.number), None)
    pid = claim.process["pid"]
    who, name = f"the run {claim.name} of process {pid}", f"{claim.name}@{pid}"
    if claim.detached:
        who, name = f"the detached run {claim.name}", claim.name
    run = f"notebook_accelerate.attach({name!r})"
    if own is not None:
        who, run = f"run {claim.number} ({claim.name})", f"notebook_accelerate.runs()[{own}]"
    devices = ", ".join(device for device in claim.devices if device in plan.slots)
    return DeviceBusyError(
        f"{who} holds {devices}; wait for it, end it with {run}.stop(), or pass queue=True to start after it"
    )
