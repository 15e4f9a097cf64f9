"""Reports why a rank whose function has ended does not end: a thread, a process or a callback that it waits for."""

from __future__ import annotations

import threading
import time
from types import FrameType
from typing import Any

from notebook_accelerate.telemetry.events import ExitWaitEvent
from notebook_accelerate.telemetry.frames import frame_of, main_frame
from notebook_accelerate.worker import exit_handlers, stacks
from notebook_accelerate.worker.agent import Agent

NOTE_SECONDS = 5.0
"""A rank that needs longer than this for its exit reports what it waits for."""


class ExitWatch:
    """Watches the exit of this rank from the agent's thread.

    Args:
        agent: The rank's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._since: float | None = None
        self._noted = False
        agent.every_tick(self._tick)

    def begin(self) -> None:
        """Watch from now on: the function has ended."""
        self._since = time.monotonic()

    def _tick(self) -> None:
        if self._since is None or self._noted or time.monotonic() - self._since < NOTE_SECONDS:
            return
        self._noted = True
        self._agent.sink.emit(ExitWaitEvent(self.text))

    @property
    def text(self) -> str:
        """What the rank waits for; "" while its function runs."""
        if self._since is None:
            return ""
        found = [_thread(each) for each in exit_handlers.unfinished_threads()]
        found = found or [_child(each) for each in exit_handlers.unfinished_children()]
        return f"its function has ended, and it waits for {', '.join(found) or _main_thread()}"


def _thread(thread: threading.Thread) -> str:
    frame = stacks.user_frame(frame_of(thread), None)
    target = _target(thread)
    place = _place(frame)
    return (
        f"the thread {thread.name!r}" + (f" with target {target}" if target else "") + (f", {place}" if place else "")
    )


def _child(child: Any) -> str:
    return f"the process {child.name!r} (pid {child.pid})"  # it keeps no reference to its target


def _target(thread: threading.Thread) -> str:
    """Return the name of a thread's function, or of its class where that has a ``run`` of its own."""
    target = getattr(thread, "_target", None)
    if target is None:
        return "" if type(thread) is threading.Thread else f"{type(thread).__qualname__}.run"
    code = stacks.function_code(target)
    return str(getattr(target, "__qualname__", "")) or (code.co_name if code is not None else repr(target)[:200])


def _main_thread() -> str:
    place = _place(stacks.user_frame(main_frame(), None))
    return f"a callback of its exit, {place}" if place else "a callback of its exit"


def _place(frame: FrameType | None) -> str:
    return "" if frame is None else f"at {frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"
