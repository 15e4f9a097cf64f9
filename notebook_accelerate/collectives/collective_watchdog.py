"""A barrier that raises when other ranks cannot reach it, instead of waiting for a timeout.

A rank that waits at the barrier queries the missing ranks through the store that torch's process group was made with.
A thread of each rank looks for queries twice a second and answers them. If every missing rank is stuck in another
collective, which in turn waits for this rank, the program is deadlocked, and the barrier raises.
"""

from __future__ import annotations

import atexit
import os
import sys
import sysconfig
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state import PartialState
from notebook_accelerate.telemetry.frames import callers, main_frame
from notebook_accelerate.torch_internals import default_store

QUERY_INTERVAL = 2.0
"""Seconds at the barrier before the missing ranks are queried, and between two queries."""
STUCK_AFTER = 5.0
"""Seconds without progress inside a collective after which a rank counts as stuck in it."""
_ANSWER_TIMEOUT = 60.0
"""Seconds without an answer after which a rank counts as dead."""
_POLL_INTERVAL = 0.5
# Packages and files whose lines are not the user's.
_LIBRARIES = ("torch", "deepspeed", "megatron.core", "notebook_accelerate")
_GENERATED = ("<eval_with_key>", "<frozen ", "<string>")
_STANDARD_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_ARRIVED = "arrived"
_RUNNING = "running"
_watchdog: _CollectiveWatchdog | None = None


def start_watchdog() -> None:
    """Start to answer other ranks' queries; every rank must call this before the first `wait_for_all_ranks`."""
    global _watchdog  # noqa: PLW0603 - one per process group
    if PartialState().communicator != "torch" or not dist.is_initialized():
        return
    if _watchdog is None or _watchdog.group is not dist.group.WORLD:
        _watchdog = _CollectiveWatchdog()


def wait_for_all_ranks(call: str) -> None:
    """Wait for all ranks; every rank must call this. Does nothing before `start_watchdog`.

    Args:
        call: Name of the user's call, for the error.

    Raises:
        CheckpointError: The missing ranks are stuck in other collectives, or dead.
    """
    if _watchdog is not None and _watchdog.group is dist.group.WORLD:
        _watchdog.wait(call)


class _CollectiveWatchdog:
    """One rank's side of the barriers, and the thread that answers the other ranks' queries."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.barriers = 0
        store: Any = PrefixStore("notebook_accelerate/collective_watchdog", default_store())
        self.store = store
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._answer_queries, name="collective watchdog", daemon=True)
        self._thread.start()
        # A thread that is inside the store when the interpreter exits crashes the process.
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._stopping.set()
        self._thread.join(2.0)

    def wait(self, call: str) -> None:
        self.barriers += 1
        barrier = self.barriers
        self.store.set(f"{barrier}/{self.rank}", _ARRIVED)
        missing = [rank for rank in range(self.size) if rank != self.rank]
        next_query = time.monotonic() + QUERY_INTERVAL
        pause = 0.001
        while missing := [rank for rank in missing if not self.store.check([f"{barrier}/{rank}"])]:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() >= next_query:
                self._query(barrier, missing, call)
                next_query = time.monotonic() + QUERY_INTERVAL

    def _query(self, barrier: int, missing: list[int], call: str) -> None:
        """Query the positions of the missing ranks; raise if none of them can arrive."""
        query = self.store.add("queries", 1)
        self.store.set(f"query/{query}", str(barrier))
        deadline = time.monotonic() + _ANSWER_TIMEOUT
        positions: dict[int, str] = {}
        while len(positions) < len(missing):
            for rank in missing:
                if rank not in positions and self.store.check([f"answer/{query}/{rank}"]):
                    positions[rank] = self.store.get(f"answer/{query}/{rank}").decode()
            if _ARRIVED in positions.values() or _RUNNING in positions.values():
                return
            if time.monotonic() > deadline:
                positions.update({rank: "dead: it does not answer" for rank in missing if rank not in positions})
            time.sleep(0.02)
        found = "; ".join(f"rank {rank} is {position}" for rank, position in sorted(positions.items()))
        raise CheckpointError(
            f"Rank {self.rank} is in {call}, and the other ranks cannot reach it: {found}. Every rank must call "
            f"{call}, because every rank has a part of the state: take it out of `if accelerator.is_main_process:`"
        )

    def _answer_queries(self) -> None:
        """Answer queries in a thread, until the process group is destroyed."""
        query = 1
        try:
            # A connection serves one call at a time, and the main thread may be waiting in its own. It is cloned here
            # because a new connection waits until a timeout if the rank that serves the store has ended.
            store = self.store.clone()
            while dist.group.WORLD is self.group and not self._stopping.is_set():
                if not store.check([f"query/{query}"]):
                    self._stopping.wait(_POLL_INTERVAL)
                    continue
                barrier = int(store.get(f"query/{query}"))
                store.set(f"answer/{query}/{self.rank}", self._position(barrier))
                query += 1
        except (RuntimeError, ValueError):  # the store was closed with its group
            return

    def _position(self, barrier: int) -> str:
        first = _position_in_collective()
        deadline = time.monotonic() + STUCK_AFTER
        while time.monotonic() < deadline:
            if self.barriers >= barrier:
                return _ARRIVED
            if first is None or _position_in_collective() != first:
                return _RUNNING
            time.sleep(0.1)
        return "waiting in another collective" + (f", {first[2]}" if first is not None else "")


def _position_in_collective() -> tuple[int, int, str] | None:
    """Return the main thread's innermost frame, instruction and line of user code; None outside of a collective."""
    innermost = main_frame()
    libraries = _library_folders()
    inside, line = False, ""
    for frame in callers(innermost):
        name = frame.f_code.co_filename
        inside = inside or _is_collective(frame)
        if not name.startswith((*libraries, *_GENERATED)) and not _is_standard_library(name):
            line = f"at {name}:{frame.f_lineno} ({frame.f_code.co_name})"
            break
    if innermost is None or not inside:
        return None
    return id(innermost), innermost.f_lasti, line


def _library_folders() -> list[str]:
    """List the folders of the imported libraries whose lines are not the user's."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return [f"{Path(file).parent}{os.sep}" for file in files if file]


def _is_standard_library(name: str) -> bool:
    """Tell whether a file belongs to the standard library or to its backport typing_extensions."""
    return (name.startswith(_STANDARD_LIBRARY) and "-packages" not in name) or name.endswith("typing_extensions.py")


def _is_collective(frame: FrameType) -> bool:
    """Tell whether a frame is in torch.distributed, or calls a collective that a compiler put into a graph."""
    name = frame.f_code.co_filename.replace("\\", "/")
    if "torch/distributed/" in name:
        return True
    return name.endswith("torch/_ops.py") and "c10d_functional" in str(frame.f_locals.get("self", ""))
