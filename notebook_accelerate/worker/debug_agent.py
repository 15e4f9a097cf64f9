"""The debugging half of a rank's agent: answers what the kernel asks, without help of the function that runs.

Requests that need the main thread are served where it is safe: at a step boundary (an optimizer step, ``log``), or,
when none comes, at the main thread's next bytecode (a signal handler), or, when that does not come either because
the thread waits in C, from the agent's thread, which can look at its frames.
"""

from __future__ import annotations

import faulthandler
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType, TracebackType
from typing import Any, Protocol

from notebook_accelerate.telemetry import Event, GroupTimeoutEvent, Sink
from notebook_accelerate.telemetry.debug_protocol import (
    HEARTBEAT_SECONDS,
    AskReply,
    AskRequest,
    AttachRequest,
    BreakRequest,
    CellRequest,
    CompleteReply,
    CompleteRequest,
    DoneReply,
    DumpReadyEvent,
    HeartbeatEvent,
    PauseRequest,
    Request,
    ResumeRequest,
    StacksReply,
    StacksRequest,
)
from notebook_accelerate.telemetry.pickling import dump_answer
from notebook_accelerate.worker import breakpoints, collective_timeouts, flight_recorder, stacks

BOUNDARY_SECONDS = 0.5
"""How long a request waits for a step boundary before the main thread is interrupted between two bytecodes."""
BYTECODE_SECONDS = 0.5
"""How long it waits for the next bytecode then, before it is served from the agent's thread."""
STUCK_SECONDS = 2.0
"""A main thread that has not moved for so long has its open collectives looked up for the heartbeat."""


class AgentApi(Protocol):
    """What the debugging half needs of the rank's agent."""

    sink: Sink

    def on(self, kind: type[Event], handler: Callable[[Any], None]) -> None:
        """Call ``handler(event)`` on the agent's thread for every event of ``kind`` from the kernel."""

    def every_tick(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on the agent's thread, about 20 times a second."""

    def ask(self, prompt: str, *, password: bool = False, shown: str = "", kind: str = "input") -> str:
        """Have the user answer."""


cell_requests: queue.SimpleQueue[CellRequest] = queue.SimpleQueue()
"""Cells for a warm rank; the first may come before it looks for one, as soon as it has said that it runs."""


class _Pending:
    """A request on its way to the main thread."""

    def __init__(self, serve: Callable[[FrameType | None, str], None], *, from_agent: bool) -> None:
        self.serve = serve
        self.from_agent = from_agent
        self.deadline = time.monotonic() + BOUNDARY_SECONDS
        self.signalled = False


class DebugAgent:
    """Installed once per rank.

    Args:
        host: The rank's agent.
    """

    def __init__(self, host: AgentApi) -> None:
        self._host = host
        self._code: CodeType | None = None
        # Re-entrant: the signal handler may find the main thread inside it. For the same reason replies from the main
        # thread are queued, never sent: the handler may find it in the middle of a frame.
        self._lock = threading.RLock()
        self._pending: list[_Pending] = []
        self._interruptible = math.inf  # from when on; until there is a handler, the signal would end the process
        self._traceback: TracebackType | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._quit = False
        self._resumes = 0
        self._resume = threading.Event()
        self._paused = ""
        self._timeouts: collective_timeouts.Watch | None = None
        self._main = threading.main_thread()
        self._position: tuple[object, int] | None = None
        self._cpu_clock = time.pthread_getcpuclockid(self._main.ident) if self._main.ident is not None else None
        self._cpu = 0.0
        self._moved = time.time()
        self._next_heartbeat = 0.0
        handlers: dict[type[Event], Callable[[Any], None]] = {
            StacksRequest: self._on_stacks,
            AskRequest: self._on_ask,
            CompleteRequest: self._on_complete,
            PauseRequest: self._on_pause,
            ResumeRequest: self._on_resume,
            BreakRequest: self._on_break,
            AttachRequest: self._on_attach,
            CellRequest: cell_requests.put,
        }
        for kind, handler in handlers.items():
            host.on(kind, handler)
        host.every_tick(self._tick)

    def install(self, function: Callable[..., Any]) -> None:
        """Take the signals; call on the main thread, before the function runs."""
        self._code = stacks.code_of(function)
        self._timeouts = collective_timeouts.Watch()
        signal.signal(signal.SIGUSR2, self._on_signal)
        self._interruptible = time.monotonic() + BOUNDARY_SECONDS
        descriptor = _memory_file()
        if descriptor is not None:
            faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
            self._host.sink.emit(DumpReadyEvent(f"/proc/{os.getpid()}/fd/{descriptor}"))

    # ---- the main thread

    def hold(self, traceback: TracebackType) -> None:
        """Keep the frames of a failure until the user has quit its debugger, or the kernel ends this process."""
        self._traceback = traceback
        self._paused = "failed; its frames are kept"
        with suppress(KeyboardInterrupt):  # the kernel lets go
            while not self._quit:
                self._commands.get()()

    def _post_mortem(self, request: Request) -> None:
        self._host.sink.emit(DoneReply(request.number, "stopped"))
        if self._traceback is not None:
            breakpoints.post_mortem(self._traceback)
        self._quit = True

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        self._serve(frame, "")

    def _at_boundary(self) -> None:
        self._serve(stacks.main_frame(), "")

    def _serve(self, frame: FrameType | None, note: str) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._host.sink.on_step = None
                    return
                pending = self._pending.pop(0)
            resumes = self._resumes
            pending.serve(frame, note)
            if self._resumes != resumes:  # it was held here: the next pause is for the next boundary
                return

    def _wait(self, why: str, frame: FrameType | None, resumes: int) -> None:
        """Hold the main thread until it has been resumed once more than ``resumes`` times."""
        self._paused = why
        try:
            while self._resumes == resumes:
                self._serve(frame, "")
                self._resume.wait(0.2)  # short waits let KeyboardInterrupt in, and the debugger
        finally:
            self._paused = ""

    # ---- the agent's thread

    def _tick(self) -> None:
        self._watch_main_thread()
        if self._timeouts is not None and (asked := self._timeouts.look()) is not None:
            self._host.sink.emit(GroupTimeoutEvent(asked))
        now = time.monotonic()
        with self._lock:
            due = [pending for pending in self._pending if now >= max(pending.deadline, self._interruptible)]
            for pending in due:
                if pending.signalled and pending.from_agent:
                    self._pending.remove(pending)
        for pending in due:
            if not pending.signalled:
                pending.signalled, pending.deadline = True, now + BYTECODE_SECONDS
                if self._main.ident is not None:
                    signal.pthread_kill(self._main.ident, signal.SIGUSR2)
            elif pending.from_agent:
                pending.serve(stacks.main_frame(), "looked at from outside: the main thread waits in C")
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._beat()

    def _watch_main_thread(self) -> None:
        """Note when the main thread moves: another bytecode, or processor time it has used."""
        frame = stacks.main_frame()
        position = (frame.f_code, frame.f_lasti) if frame is not None else None
        cpu = time.clock_gettime(self._cpu_clock) if self._cpu_clock is not None else 0.0
        if position != self._position or cpu - self._cpu > 0.01:
            self._moved = time.time()
        self._position, self._cpu = position, cpu

    def _beat(self) -> None:
        waiting = None
        if time.time() - self._moved > STUCK_SECONDS:
            with suppress(Exception):  # the recorder's format is torch's own affair
                open_ones, _ = flight_recorder.read()
                waiting = min(open_ones, key=lambda collective: collective.since, default=None)
        self._host.sink.emit(HeartbeatEvent(self._moved, waiting))

    def _queue(self, serve: Callable[[FrameType | None, str], None], *, from_agent: bool = False) -> None:
        with self._lock:
            self._pending.append(_Pending(serve, from_agent=from_agent))
        self._host.sink.on_step = self._at_boundary

    def _on_stacks(self, request: Request) -> None:
        waiting, last = flight_recorder.read()
        threads = stacks.all_stacks()
        if self._traceback is not None:
            threads["MainThread"] = stacks.of_traceback(self._traceback)
        reply = StacksReply(request.number, threads, self._moved, waiting, last, self._paused_text())
        self._host.sink.send(reply)

    def _paused_text(self) -> str:
        return self._paused or breakpoints.stopped_at()

    def _on_ask(self, request: AskRequest) -> None:
        self._in_frame(lambda frame, note: self._answer(request, frame, note))

    def _on_complete(self, request: CompleteRequest) -> None:
        self._in_frame(lambda frame, _: self._complete(request, self._find(request.frame, frame)))

    def _complete(self, request: CompleteRequest, frame: FrameType | None) -> None:
        found: list[str] = []
        with suppress(Exception):  # attributes are looked up: properties may raise anything
            found = stacks.completions(breakpoints.variables(frame), request.text) if frame is not None else []
        self._host.sink.emit(CompleteReply(request.number, found))

    def _in_frame(self, serve: Callable[[FrameType | None, str], None]) -> None:
        """Serve at once where the main thread stands still for the user; else at a step boundary."""
        if breakpoints.stopped_frame() is not None or self._traceback is not None or self._paused:
            serve(stacks.main_frame(), "")
        else:
            self._queue(serve, from_agent=True)

    def _find(self, name: str, frame: FrameType | None) -> FrameType | None:
        """Return the frame that is meant: by name, else of the debugger or failure, else the function's."""
        stopped = breakpoints.stopped_frame()
        if stopped is not None:
            return stopped if not name else stacks.find(stopped, name, self._code)
        if self._traceback is not None:
            return stacks.in_traceback(self._traceback, name)
        return stacks.find(frame, name, self._code)

    def _answer(self, request: AskRequest, frame: FrameType | None, note: str) -> None:
        found = self._find(request.frame, frame)
        if found is None:
            stack = ", ".join(dict.fromkeys(stacks.names(frame)))
            self._host.sink.emit(
                AskReply(request.number, f"no function {request.frame!r} runs now; there are: {stack}")
            )
            return
        self._host.sink.emit(evaluate(request, found, note))

    def _on_pause(self, request: Request) -> None:
        self._resume.clear()
        resumes = self._resumes  # as of now: whoever hears that it is paused may resume it before it waits

        def pause(frame: FrameType | None, _note: str) -> None:
            place = stacks.stack(stacks.find(frame, "", self._code))
            self._host.sink.emit(DoneReply(request.number, "paused"))
            self._wait(f"paused at line {place[-1].lineno}" if place else "paused", frame, resumes)

        self._queue(pause)

    def _on_resume(self, request: Request) -> None:
        self._resumes += 1
        self._resume.set()
        with self._lock:
            self._pending = [pending for pending in self._pending if pending.from_agent]
        self._host.sink.send(DoneReply(request.number, "resumed"))

    def _on_break(self, request: Request) -> None:
        if self._traceback is not None:
            self._commands.put(lambda: self._post_mortem(request))
            return

        def stop_here(frame: FrameType | None, _note: str) -> None:
            self._host.sink.emit(DoneReply(request.number, "stopped"))
            where = stacks.users(frame, self._code)
            breakpoints.look_at(where) if self._paused else breakpoints.stop_in(where)

        self._queue(stop_here)

    def _on_attach(self, request: Request) -> None:
        try:
            import debugpy  # noqa: T100 - the user asked for it
        except ImportError:
            self._host.sink.send(DoneReply(request.number, error="debugpy is not installed; run: pip install debugpy"))
            return
        try:
            host, port = debugpy.listen(("127.0.0.1", 0))  # noqa: T100 - the same
            self._host.sink.send(DoneReply(request.number, f"{host}:{port}"))
        except Exception as error:  # noqa: BLE001 - whatever debugpy says, the kernel shows it
            self._host.sink.send(DoneReply(request.number, error=f"{type(error).__name__}: {error}"))


def evaluate(request: AskRequest, frame: FrameType, note: str) -> AskReply:
    """Return the value of the request's expression in ``frame``, as the kernel will see it."""
    try:
        value = eval(request.expression, breakpoints.variables(frame))  # noqa: S307 - the user's own expression
    except BaseException as error:  # noqa: BLE001 - it must not reach the function that is being watched
        return AskReply(request.number, f"{type(error).__name__}: {error}")
    text = short_repr(value)
    payload = dump_answer(value)
    return AskReply(request.number, "", f"{text}  ({note})" if note else text, payload)


def short_repr(value: object) -> str:
    """Return what a value looks like, at most 2,000 characters of it."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a broken __repr__
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    return text if len(text) <= 2000 else text[:2000] + " …"


def _memory_file() -> int | None:
    if not hasattr(os, "memfd_create"):
        return None
    with suppress(OSError):
        return os.memfd_create("notebook-accelerate-stacks")
    return None
