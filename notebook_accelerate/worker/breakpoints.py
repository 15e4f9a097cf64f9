"""The debugger in a rank: its lines are typed in the notebook."""

from __future__ import annotations

import io
import os
import pdb  # noqa: T100 - a rank's breakpoints are this module's business
import sys
from bdb import BdbQuit
from types import FrameType, TracebackType
from typing import Any, Protocol

from notebook_accelerate.errors import NotebookAccelerateError
from notebook_accelerate.telemetry import emit
from notebook_accelerate.telemetry.debug_protocol import DebuggerLeftEvent
from notebook_accelerate.worker import stacks

CONTEXT_LINES = 7


class Prompter(Protocol):
    """Who puts a prompt before the user."""

    def ask(self, prompt: str, *, password: bool = False, shown: str = "", kind: str = "input") -> str:
        """Return the user's line; raise EOFError when there is nobody to ask."""


class Terminal(io.TextIOBase):
    """Both ends of a debugger: what it writes waits for the next line it reads, and travels with that prompt."""

    def __init__(self, asker: Prompter) -> None:
        self._asker = asker
        self._written = ""

    def readable(self) -> bool:  # noqa: D102 - io's interface
        return True

    def writable(self) -> bool:  # noqa: D102 - io's interface
        return True

    def write(self, text: str, /) -> int:  # noqa: D102 - io's interface
        self._written += text
        return len(text)

    def readline(self, _size: int | None = -1, /) -> str:  # type: ignore[override]  # noqa: D102 - io's interface
        shown, newline, prompt = self._written.rpartition("\n")
        self._written = ""
        try:
            return self._asker.ask(prompt, shown=shown + newline, kind="debugger") + "\n"
        except EOFError:
            return ""

    def finish(self) -> None:
        """Print what was written after the last line read."""
        if self._written:
            sys.stdout.write(self._written.rstrip("\n") + "\n")
            self._written = ""


class _Session:
    """What this rank's debugger is doing."""

    asker: Prompter | None = None
    process = 0
    debugger: Any = None
    terminal: Terminal | None = None
    frame: FrameType | None = None


def install(asker: Prompter) -> None:
    """Send every breakpoint of this process to the notebook."""
    _Session.asker, _Session.process = asker, os.getpid()
    sys.breakpointhook = _hook
    pdb.set_trace = _set_trace


def stopped_frame() -> FrameType | None:
    """Return the frame at which the debugger has this rank stopped now."""
    return _Session.frame


def stopped_at() -> str:
    """Return "breakpoint at line 12" while the debugger has this rank stopped; "" otherwise."""
    return f"breakpoint at line {_Session.frame.f_lineno}" if _Session.frame is not None else ""


def variables(frame: FrameType) -> dict[str, Any]:
    """Return what an expression in ``frame`` can name, with what was assigned at the debugger's prompt."""
    debugger = _Session.debugger
    if _Session.frame is not None and getattr(debugger, "curframe", None) is frame:
        return {**frame.f_globals, **debugger.curframe_locals}  # before Python 3.13 a look at f_locals undoes these
    return stacks.variables(frame)


def _hook(*_: object, **__: object) -> None:
    stop_at(sys._getframe(1))


def _set_trace(*, header: str | None = None, **_: object) -> None:
    stop_at(sys._getframe(1), header)


def stop_at(frame: FrameType | None, header: str | None = None) -> None:
    """Open the debugger at ``frame``, on the main thread.

    Raises:
        NotebookAccelerateError: This is not the rank's own process: what is typed in the notebook would not come here.
    """
    if os.getpid() != _Session.process:
        raise NotebookAccelerateError(
            "a breakpoint in a process that a rank has started, such as a worker of a DataLoader, cannot be opened in "
            "the notebook; read the data in the rank itself: DataLoader(..., num_workers=0)"
        )
    debugger = _debugger()
    if header is not None:
        debugger.message(header)
    debugger.set_trace(frame or sys._getframe(1))


def stop_in(frame: FrameType | None) -> None:
    """Open the debugger at the next line of ``frame``, a function that runs: not in what it has called."""
    _debugger().next_in = frame
    stop_at(frame)


def look_at(frame: FrameType | None) -> None:
    """Open the debugger on a frame that stands still and will go on standing; returns when the user continues."""
    debugger = _debugger()
    debugger.reset()
    try:
        debugger.interaction(frame or sys._getframe(1), None)
    finally:
        _left()


def post_mortem(traceback: TracebackType) -> None:
    """Open the debugger at the end of ``traceback`` and return when the user quits."""
    debugger = _debugger()
    debugger.reset()
    try:
        debugger.interaction(None, traceback)
    except BdbQuit:
        pass
    finally:
        _left()


def _debugger() -> Any:
    """Return this rank's debugger: the same one for every breakpoint, so that its own breakpoints stay."""
    if _Session.debugger is None:
        assert _Session.asker is not None, "a rank is connected before it runs"
        _Session.terminal = Terminal(_Session.asker)
        _Session.debugger = _debugger_class()(stdin=_Session.terminal, stdout=_Session.terminal, nosigint=True)
        _Session.debugger.use_rawinput = False
    return _Session.debugger


def _debugger_class() -> Any:
    """Derive from IPython's debugger where IPython is loaded, from the standard library's elsewhere."""
    debugger: Any = sys.modules.get("IPython.core.debugger")
    if debugger is None:
        base: Any = next(kind for kind in pdb.Pdb.__mro__ if kind.__module__ == "pdb")
    else:
        base = debugger.Pdb

    class RankDebugger(base):  # type: ignore[misc]
        """Knows at which frame it has the rank stopped, and shows the function's own frames only."""

        next_in: FrameType | None = None

        def get_stack(self, frame: Any, traceback: Any) -> tuple[list[tuple[FrameType, int]], int]:
            stack, index = super().get_stack(frame, traceback)
            below = [place for place, (each, _) in enumerate(stack) if each.f_code.co_filename in stacks.LAUNCHERS]
            first = below[-1] + 1 if below else 0
            return (stack[first:], index - first) if first <= index else (stack, index)

        def set_step(self) -> None:
            # What set_trace calls last before tracing begins: from here on only this frame's lines are of interest.
            frame, self.next_in = self.next_in, None
            if frame is None:
                super().set_step()
            else:
                self.set_next(frame)

        def interaction(self, frame: Any, traceback: Any, *args: Any, **kwargs: Any) -> None:
            _Session.frame = frame if frame is not None else stacks.innermost(traceback)
            try:
                super().interaction(frame, traceback, *args, **kwargs)
            finally:
                _Session.frame = None

        def set_quit(self) -> None:
            super().set_quit()
            _left()

        def set_continue(self) -> None:
            super().set_continue()
            _left()

    return RankDebugger


def _left() -> None:
    if _Session.terminal is not None:
        _Session.terminal.finish()
    emit(DebuggerLeftEvent())
