"""Meetings of all ranks that notice when somebody will never come, instead of waiting for a timeout.

A rank that waits at a meeting asks the others, through the store that torch's process group was made with. A thread of
each rank looks for questions twice a second and answers. If every rank that is missing
sits in another collective, which in turn waits for this rank, nobody will ever move: the meeting raises.
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
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.state import PartialState

FIRST_QUESTION = 2.0
"""Seconds at a meeting before the missing ranks are asked."""
STUCK = 5.0
"""Seconds without a move inside a collective after which a rank counts as waiting there."""
_SILENT = 60.0
"""Seconds without an answer after which a rank counts as gone."""
_BETWEEN_LOOKS = 0.5
# Whose lines are not the user's.
_LIBRARIES = ("torch", "deepspeed", "megatron.core", "notebook_accelerate")
_GENERATED = ("<eval_with_key>", "<frozen ", "<string>")
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
_HERE = "here"
_MOVING = "moving"
_desk: _WatchdogServer | None = None


def open_desk() -> None:
    """Answer other ranks' questions from now on; every rank calls this before the first meeting."""
    global _desk  # noqa: PLW0603 - one per process group
    if PartialState().communicator != "torch" or not dist.is_initialized():
        return
    if _desk is None or _desk.group is not dist.group.WORLD:
        _desk = _WatchdogServer()


def meet(what: str) -> None:
    """Wait for all ranks; every rank must call this.

    Args:
        what: The call the user made.

    Raises:
        CheckpointError: The missing ranks wait in other collectives, or are gone.
    """
    if _desk is not None and _desk.group is dist.group.WORLD:
        _desk.meet(what)


class _WatchdogServer:
    """Where one rank comes to meetings, and answers whether it will."""

    def __init__(self) -> None:
        self.group = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.meetings = 0
        store: Any = PrefixStore("notebook_accelerate/attendance", _get_default_store())
        self.store = store
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="attendance", daemon=True)
        self._thread.start()
        # A thread that is inside the store when the interpreter ends takes the process down.
        atexit.register(self._close)

    def _close(self) -> None:
        self._end.set()
        self._thread.join(2.0)

    def meet(self, what: str) -> None:
        self.meetings += 1
        number = self.meetings
        self.store.set(f"{number}/{self.rank}", _HERE)
        missing = [rank for rank in range(self.size) if rank != self.rank]
        asked = time.monotonic() + FIRST_QUESTION
        pause = 0.001
        while missing := [rank for rank in missing if not self.store.check([f"{number}/{rank}"])]:
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() >= asked:
                self._ask(number, missing, what)
                asked = time.monotonic() + FIRST_QUESTION

    def _ask(self, number: int, missing: list[int], what: str) -> None:
        """Ask the missing ranks where they are; raise where none of them can come."""
        question = self.store.add("questions", 1)
        self.store.set(f"question/{question}", str(number))
        deadline = time.monotonic() + _SILENT
        places: dict[int, str] = {}
        while len(places) < len(missing):
            for rank in missing:
                if rank not in places and self.store.check([f"answer/{question}/{rank}"]):
                    places[rank] = self.store.get(f"answer/{question}/{rank}").decode()
            if _HERE in places.values() or _MOVING in places.values():
                return
            if time.monotonic() > deadline:
                places.update({rank: "nowhere: it does not answer" for rank in missing if rank not in places})
            time.sleep(0.02)
        where = "; ".join(f"rank {rank} is {place}" for rank, place in sorted(places.items()))
        raise CheckpointError(
            f"Rank {self.rank} is in {what}, and the others will not come: {where}. Every rank must call {what}, "
            f"because every rank has a part of the state: take it out of `if accelerator.is_main_process:`"
        )

    def _answer(self) -> None:
        """Answer questions in a thread, until the process group is gone."""
        question = 1
        try:
            # A connection serves one call at a time: the main thread may be waiting in its own. It is made here
            # because the rank that serves the store may have ended, which a new connection waits out.
            store = self.store.clone()
            while dist.group.WORLD is self.group and not self._end.is_set():
                if not store.check([f"question/{question}"]):
                    self._end.wait(_BETWEEN_LOOKS)
                    continue
                number = int(store.get(f"question/{question}"))
                store.set(f"answer/{question}/{self.rank}", self._where(number))
                question += 1
        except (RuntimeError, ValueError):  # the store was closed with its group
            return

    def _where(self, number: int) -> str:
        first = _place_of_main_thread()
        end = time.monotonic() + STUCK
        while time.monotonic() < end:
            if self.meetings >= number:
                return _HERE
            if first is None or _place_of_main_thread() != first:
                return _MOVING
            time.sleep(0.1)
        return "waiting in another collective" + (f", {first[2]}" if first is not None else "")


def _place_of_main_thread() -> tuple[int, int, str] | None:
    """Return where the main thread is inside a collective of torch; None where it is elsewhere."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frame: FrameType | None = innermost
    libraries = _folders_of_libraries()
    inside, line = False, ""
    while frame is not None and not line:
        name = frame.f_code.co_filename
        inside = inside or _is_collective(frame)
        if not name.startswith((*libraries, *_GENERATED)) and not _is_pythons(name):
            line = f"at {name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    if innermost is None or not inside:
        return None
    return id(innermost), innermost.f_lasti, line


def _folders_of_libraries() -> list[str]:
    """List the folders whose lines are not the user's."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES]
    return [f"{Path(file).parent}{os.sep}" for file in files if file]


def _is_pythons(name: str) -> bool:
    """Tell whether a file is of Python's library, or of the one that brings its newer parts to older versions."""
    return (name.startswith(_STANDARD) and "-packages" not in name) or name.endswith("typing_extensions.py")


def _is_collective(frame: FrameType) -> bool:
    """Tell whether a frame is in torch.distributed, or calls a collective that a compiler has put into a graph."""
    name = frame.f_code.co_filename.replace("\\", "/")
    if "torch/distributed/" in name:
        return True
    return name.endswith("torch/_ops.py") and "c10d_functional" in str(frame.f_locals.get("self", ""))
