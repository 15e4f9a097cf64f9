"""The debugger in a rank. The user types its commands in the notebook."""

from __future__ import annotations

import io
import os
import pdb  # noqa: T100 - this module opens a rank's debugger
import sys
from bdb import BdbQuit
from types import FrameType, TracebackType
from typing import Any

from notebook_accelerate.errors import NotebookAccelerateError
from notebook_accelerate.telemetry import emit
from notebook_accelerate.telemetry.debug_protocol import DebuggerLeftEvent
from notebook_accelerate.worker import stacks
from notebook_accelerate.worker.agent import Agent


class Terminal(io.TextIOBase):
    """The input and output of a debugger. Output is collected and sent with the next prompt."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._written = ""

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        self._written += text
        return len(text)

    def readline(self, _size: int | None = -1, /) -> str:  # type: ignore[override]
        shown, newline, prompt = self._written.rpartition("\n")
        self._written = ""
        try:
            return self._agent.ask(prompt, shown=shown + newline, kind="debugger") + "\n"
        except EOFError:
            return ""

    def finish(self) -> None:
        """Print the output written after the last line was read."""
        if self._written:
            sys.stdout.write(self._written.rstrip("\n") + "\n")
            self._written = ""


class _Session:
    """The state of this rank's debugger."""

    agent: Agent | None = None
    process = 0
    debugger: Any = None
    terminal: Terminal | None = None
    frame: FrameType | None = None


def install(agent: Agent) -> None:
    """Make ``breakpoint()`` and ``pdb.set_trace()`` in this process open the debugger in the notebook."""
    _Session.agent, _Session.process = agent, os.getpid()
    sys.breakpointhook = _hook
    pdb.set_trace = _set_trace


def stopped_frame() -> FrameType | None:
    """Return the frame at which the debugger has stopped this rank, or None while the rank runs."""
    return _Session.frame


def stopped_at() -> str:
    """Return where the debugger has stopped this rank, such as "breakpoint at line 12", or "" while the rank runs."""
    return f"breakpoint at line {_Session.frame.f_lineno}" if _Session.frame is not None else ""


def variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables that an expression in ``frame`` can use, including those set at the debugger's prompt."""
    debugger = _Session.debugger
    if _Session.frame is not None and getattr(debugger, "curframe", None) is frame:
        # Before Python 3.13, reading f_locals would undo the assignments made at the prompt.
        return {**frame.f_globals, **debugger.curframe_locals}
    return stacks.frame_variables(frame)


def _hook(*_: object, **__: object) -> None:
    stop_at(sys._getframe(1))


def _set_trace(*, header: str | None = None, **_: object) -> None:
    stop_at(sys._getframe(1), header)


def stop_at(frame: FrameType | None, header: str | None = None) -> None:
    """Open the debugger at ``frame``, on the main thread.

    Raises:
        NotebookAccelerateError: This is not the rank's own process, which receives the user's input.
    """
    if os.getpid() != _Session.process:
        raise NotebookAccelerateError(
            "a breakpoint in a process that a rank has started, such as a DataLoader worker, cannot be opened in "
            "the notebook; read the data in the rank itself: DataLoader(..., num_workers=0)"
        )
    debugger = _debugger()
    if header is not None:
        debugger.message(header)
    debugger.set_trace(frame or sys._getframe(1))


def stop_in(frame: FrameType | None) -> None:
    """Open the debugger at the next line of ``frame``, a running function, but not in functions that it calls."""
    _debugger().next_in = frame
    stop_at(frame)


def inspect_frame(frame: FrameType | None) -> None:
    """Open the debugger on a frame without running it further. Return when the user continues."""
    debugger = _debugger()
    debugger.reset()
    try:
        debugger.interaction(frame or sys._getframe(1), None)
    finally:
        _release()


def post_mortem(traceback: TracebackType) -> None:
    """Open the debugger at the innermost frame of ``traceback``. Return when the user quits."""
    debugger = _debugger()
    debugger.reset()
    try:
        debugger.interaction(None, traceback)
    except BdbQuit:
        pass
    finally:
        _release()


def _debugger() -> Any:
    """Return this rank's debugger. All breakpoints share it, so that breakpoints set in it are kept."""
    if _Session.debugger is None:
        assert _Session.agent is not None, "a rank is connected before it runs"
        _Session.terminal = Terminal(_Session.agent)
        _create_shell()
        _Session.debugger = _debugger_class()(stdin=_Session.terminal, stdout=_Session.terminal, nosigint=True)
        _Session.debugger.use_rawinput = False
    return _Session.debugger


def _create_shell() -> None:
    """Create the shell that IPython's debugger needs, but without output outside the debugger's terminal.

    The shell is created without a history and without a terminal title. Otherwise the shells of all ranks would open
    the user's own history file at the same time, and IPython 7 would write a title into the output.
    """
    ipython: Any = sys.modules.get("IPython")
    if "IPython.core.debugger" not in sys.modules or ipython.get_ipython() is not None:
        return
    from IPython.terminal.interactiveshell import TerminalInteractiveShell
    from traitlets.config import Config

    main = sys.modules["__main__"]  # Creating a shell replaces the module __main__.
    settings = {"HistoryManager": {"enabled": False}, "TerminalInteractiveShell": {"term_title": False}}
    TerminalInteractiveShell.instance(config=Config(settings))
    sys.modules["__main__"] = main


def _debugger_class() -> Any:
    """Return a subclass of IPython's debugger if IPython is loaded, otherwise of the standard library's."""
    debugger: Any = sys.modules.get("IPython.core.debugger")
    if debugger is None:
        base: Any = next(kind for kind in pdb.Pdb.__mro__ if kind.__module__ == "pdb")
    else:
        base = debugger.Pdb

    class RankDebugger(base):  # type: ignore[misc]
        """Records the frame at which it has stopped the rank, and hides the launcher's frames."""

        next_in: FrameType | None = None

        def get_stack(self, frame: Any, traceback: Any) -> tuple[list[tuple[FrameType, int]], int]:
            stack, index = super().get_stack(frame, traceback)
            launcher = [n for n, (each, _) in enumerate(stack) if each.f_code.co_filename in stacks.LAUNCHERS]
            first = launcher[-1] + 1 if launcher else 0
            return (stack[first:], index - first) if first <= index else (stack, index)

        def set_step(self) -> None:
            # set_trace calls this method last, before it starts tracing. Stop only at lines of this frame.
            frame, self.next_in = self.next_in, None
            if frame is None:
                super().set_step()
            else:
                self.set_next(frame)

        def interaction(self, frame: Any, traceback: Any, *args: Any, **kwargs: Any) -> None:
            _Session.frame = frame if frame is not None else stacks.frame_in_traceback(traceback)
            try:
                super().interaction(frame, traceback, *args, **kwargs)
            finally:
                _Session.frame = None

        def set_quit(self) -> None:
            super().set_quit()
            _release()

        def set_continue(self) -> None:
            super().set_continue()
            _release()

    return RankDebugger


def _release() -> None:
    if _Session.terminal is not None:
        _Session.terminal.finish()
    emit(DebuggerLeftEvent())
