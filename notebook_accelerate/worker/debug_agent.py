"""The part of a rank's agent that serves debugging requests, without any help from the running function.

Requests that need the main thread are served when that is safe: at a step boundary (an optimizer step, ``log``). If
there is no boundary, they are served at the main thread's next bytecode (by a signal handler). If the main thread waits
in C, a separate thread serves them by reading the main thread's frames. That thread may have to wait in C too, because
a tensor has no value before its device has computed it.
"""

from __future__ import annotations

import faulthandler
import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_accelerate.hardware import device_table
from notebook_accelerate.telemetry import GroupTimeoutEvent, steady_time, step_time
from notebook_accelerate.telemetry.debug_protocol import (
    HEARTBEAT_SECONDS,
    AskReply,
    AskRequest,
    BreakRequest,
    CellRequest,
    CompleteReply,
    CompleteRequest,
    DebugpyRequest,
    DoneReply,
    DumpReadyEvent,
    HeartbeatEvent,
    MemoryReply,
    MemoryRequest,
    PausedEvent,
    PauseRequest,
    ProfileReply,
    ProfileRequest,
    Request,
    SampleRequest,
    StacksReply,
    StacksRequest,
    UnpauseRequest,
)
from notebook_accelerate.telemetry.pickling import anonymous_file, dump_answer
from notebook_accelerate.telemetry.tracebacks import describe_error, main_frame
from notebook_accelerate.worker import breakpoints, collective_timeouts, stacks, waits
from notebook_accelerate.worker.agent import Agent
from notebook_accelerate.worker.console import flush
from notebook_accelerate.worker.exit_handlers import ExitWatch
from notebook_accelerate.worker.stacks import start_sampling

if TYPE_CHECKING:
    from notebook_accelerate.worker.step_profiler import StepProfiler


BOUNDARY_SECONDS = 0.5
"""How long a request waits for a step boundary before the main thread is interrupted between two bytecodes."""
BYTECODE_SECONDS = 0.5
"""After that, how long a request waits for the main thread's next bytecode before a separate thread serves it."""
LOCKED_SECONDS = 5.0
"""How long the thread that serves a request may keep the interpreter lock, unless an operation releases it."""
BUSY_SECONDS = 0.3
"""How long the thread that serves a request may take before the agent checks whether the devices are busy."""
WAITING_REQUESTS = 4
"""Maximum number of threads that serve requests at the same time, because each may occupy a core."""
DEVICE_BUSY = (
    "the device is busy, and this value waits for it; ask for one that is not on a device, or see run.diagnose()"
)
ASKED_AGAIN = "the same question is still being answered; ask for less, or see run.diagnose()"
TOO_MANY = f"{WAITING_REQUESTS} earlier questions are still being answered; see run.diagnose()"
LOOK_SECONDS = 1.0
"""If the main thread computes in one place for this long, the agent checks whether it waits for a device or rank."""
STUCK_SECONDS = 2.0
"""The heartbeat includes the open collective of a main thread that has not moved for this long."""


cell_requests: queue.SimpleQueue[CellRequest] = queue.SimpleQueue()
"""Cells for a warm rank. They are queued, because the first cell may arrive before the rank starts to wait for it."""


class _Pending:
    """A request that waits until the main thread can serve it.

    Attributes:
        serve: Called with the main thread's frame and a note for the reply.
        refuse: Called with an error message to send as the reply instead, or None if only the main thread can serve the
            request.
        key: Identifies the request. A second one with the same key is refused while the first waits for a busy device.
        at_step: Whether to serve the request only at the end of an optimizer step, if there are such steps.
        deadline: When to try the next way of serving the request.
        signalled: Whether the main thread has been interrupted for the request.
    """

    def __init__(
        self,
        serve: Callable[[FrameType | None, str], None],
        refuse: Callable[[str], None] | None,
        *,
        key: object,
        at_step: bool,
        patience: float,
    ) -> None:
        self.serve = serve
        self.refuse = refuse
        self.key = key
        self.at_step = at_step
        self.deadline = time.monotonic() + patience
        self.signalled = False


class _RequestThread(threading.Thread):
    """Serves a request while the main thread waits in C, and keeps the main thread from running at the same time.

    When the main thread's call returns, the main thread must wait for the GIL. Otherwise the process could crash with a
    segmentation fault, because one thread would read ``parameter.grad`` while the other sets it (torch 2.13).

    Args:
        pending: The request to serve.
        interval: The interpreter's switch interval, which is restored at the end.
    """

    def __init__(self, pending: _Pending, interval: float) -> None:
        super().__init__(name="notebook-accelerate-request", daemon=True)
        self.pending, self.interval = pending, interval
        self.calls = waits.DeviceCalls()
        self.deadline = time.monotonic() + (BUSY_SECONDS if device_table.accelerator_in_use() else LOCKED_SECONDS)
        self.is_late = self.is_refused = False

    def run(self) -> None:
        device_table.select_again()
        sys.setswitchinterval(LOCKED_SECONDS)
        try:
            with self.calls.watch():
                self.pending.serve(main_frame(), "read by another thread: the main thread waits in C")
        finally:
            if not self.is_late:
                sys.setswitchinterval(self.interval)

    def give_up_if_late(self, devices: waits.DeviceWatch) -> None:
        """If the request takes too long, let other threads run as usual, and refuse it if it waits for a device.

        Args:
            devices: Reports whether devices are busy.
        """
        if self.is_refused or time.monotonic() < self.deadline:
            return
        # Check again later, because the request may not have started to read from a device yet.
        self.deadline = time.monotonic() + LOOK_SECONDS
        if not self.is_late:
            self.is_late = True
            sys.setswitchinterval(self.interval)
        if self.pending.refuse is not None and self.calls.inside and devices.busy():
            self.is_refused = True
            self.pending.refuse(DEVICE_BUSY)


class DebugAgent:
    """Serves debugging requests. Each rank has one.

    Args:
        agent: The rank's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._code: CodeType | None = None
        # Re-entrant, because the signal handler may interrupt the main thread while it holds the lock. For the same
        # reason, the main thread only queues replies and never sends them: the handler may interrupt it in the middle
        # of a frame.
        self._lock = threading.RLock()
        self._pending: list[_Pending] = []
        self._request_threads: list[_RequestThread] = []
        # No signals are sent before this time. Without a handler, a signal would end the process.
        self._interruptible = math.inf
        self._traceback: TracebackType | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._quit = False
        self._unpauses = 0
        self._unpaused = threading.Event()
        self._paused, self._by_user = "", False
        self._timeouts: collective_timeouts.GroupTimeouts | None = None
        self._main = threading.main_thread().ident or 0
        self._position: tuple[object, int] | None = None
        self._cpu_clock = time.pthread_getcpuclockid(self._main)
        self._cpu = 0.0
        self._moved = steady_time.now()
        self._last_check = 0.0
        self._devices = waits.DeviceWatch()
        self._next_heartbeat = 0.0
        self._profiler: StepProfiler | None = None
        agent.on(StacksRequest, self._on_stacks)
        agent.on(AskRequest, self._on_ask)
        agent.on(CompleteRequest, self._on_complete)
        agent.on(PauseRequest, self._on_pause)
        agent.on(UnpauseRequest, self._on_unpause)
        agent.on(BreakRequest, self._on_break)
        agent.on(DebugpyRequest, self._on_debugpy)
        agent.on(CellRequest, cell_requests.put)
        agent.on(SampleRequest, self._on_sample)
        agent.on(ProfileRequest, self._on_profile)
        agent.on(MemoryRequest, self._on_memory)
        agent.every_tick(self._tick)
        self.exit_watch = ExitWatch(agent)

    def install(self, function: Callable[..., Any]) -> None:
        """Install the signal handlers. Call it on the main thread, before the function runs."""
        self._code = stacks.function_code(function)
        self._timeouts = collective_timeouts.GroupTimeouts()
        signal.signal(signal.SIGUSR2, self._on_signal)
        self._interruptible = time.monotonic() + BOUNDARY_SECONDS
        with suppress(OSError):
            descriptor = anonymous_file()
            faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)
            self._agent.sink.emit(DumpReadyEvent(f"/proc/{os.getpid()}/fd/{descriptor}"))

    # ---- the main thread

    def hold(self, traceback: TracebackType) -> None:
        """Keep the frames of a failure until the user quits the debugger or the kernel ends this process."""
        self._traceback = traceback
        self._paused = "failed; its frames are kept"
        with suppress(KeyboardInterrupt):  # The kernel sends an interrupt to release the rank.
            while not self._quit:
                self._commands.get()()

    def _post_mortem(self, request: Request) -> None:
        self._agent.sink.emit(DoneReply(request.number, "stopped"))
        if self._traceback is not None:
            breakpoints.post_mortem(self._traceback)
        self._quit = True

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        self._serve(frame)

    def _at_boundary(self) -> None:
        """Serve requests at a metric or a report of progress, except pauses if there are optimizer steps.

        Otherwise ranks would pause at different places within a step.
        """
        if self._profiler is not None:
            self._profiler.at_boundary()
        self._serve(main_frame(), between_steps=not step_time.steps())

    def _at_step(self) -> None:
        self._serve(main_frame())

    def _serve(self, frame: FrameType | None, *, between_steps: bool = True) -> None:
        while True:
            with self._lock:
                if not self._pending:
                    self._agent.sink.on_step = None if self._profiler is None else self._at_boundary
                    step_time.at_end.discard(self._at_step)
                    return
                pending = next((each for each in self._pending if between_steps or not each.at_step), None)
                if pending is None:
                    return
                self._pending.remove(pending)
            unpauses = self._unpauses
            pending.serve(frame, "")
            # This request has paused the rank, so leave the next pause request to the next boundary.
            if self._unpauses != unpauses:
                return

    def _wait(self, why: str, frame: FrameType | None, unpauses: int) -> None:
        """Pause the main thread until the count of resumptions differs from ``unpauses``."""
        self._paused, self._by_user = why, True
        try:
            while self._unpauses == unpauses:
                self._serve(frame)
                self._unpaused.wait(0.2)  # Wait only briefly each time, to handle KeyboardInterrupt and the debugger.
        finally:
            self._paused, self._by_user = "", False
            self._agent.sink.emit(PausedEvent(False))

    # ---- the agent's thread

    def _tick(self) -> None:
        self._record_movement()
        if self._timeouts is not None and (limit := self._timeouts.poll()) is not None:
            self._agent.sink.emit(GroupTimeoutEvent(limit))
        profiler = self._profiler
        if profiler is not None and (act := profiler.due(self._moved)) is not None:
            self._queue(act)
        now = time.monotonic()
        with self._lock:
            due = [pending for pending in self._pending if now >= max(pending.deadline, self._interruptible)]
            for pending in due:
                if pending.signalled and pending.refuse is not None:
                    self._pending.remove(pending)
        for pending in due:
            if not pending.signalled:
                pending.signalled, pending.deadline = True, now + BYTECODE_SECONDS
                signal.pthread_kill(self._main, signal.SIGUSR2)
            elif pending.refuse is not None:
                self._serve_on_new_thread(pending)
        self._request_threads = [thread for thread in self._request_threads if thread.is_alive()]
        for thread in self._request_threads:
            thread.give_up_if_late(self._devices)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._send_heartbeat()

    def _serve_on_new_thread(self, pending: _Pending) -> None:
        waiting = [thread for thread in self._request_threads if thread.is_alive()]
        again = any(thread.is_late and thread.pending.key == pending.key for thread in waiting)
        if (again or len(waiting) >= WAITING_REQUESTS) and pending.refuse is not None:
            refused = any(thread.is_refused for thread in waiting)
            pending.refuse(DEVICE_BUSY if refused else ASKED_AGAIN if again else TOO_MANY)
            return
        # A thread that is not late has set a long interval, so take the original interval that this thread has saved.
        early = [thread for thread in waiting if not thread.is_late]
        interval = early[0].interval if early else sys.getswitchinterval()
        thread = _RequestThread(pending, interval)
        self._request_threads.append(thread)
        thread.start()

    def _record_movement(self) -> None:
        """Record when the main thread makes progress: a new bytecode, CPU time or a finished step.

        A thread that sleeps in each step may be at the same bytecode whenever it is checked, so its CPU time counts as
        progress too, except while it waits for a device, because waiting for CUDA also uses the CPU.
        """
        frame = main_frame()
        position = (frame.f_code, frame.f_lasti) if frame is not None else None
        cpu = time.clock_gettime(self._cpu_clock)
        if position != self._position or (cpu - self._cpu > 0.01 and self._computes()):
            self._moved = steady_time.now()
        self._moved = max(self._moved, self._agent.sink.last_step)
        self._position, self._cpu = position, cpu

    def _computes(self) -> bool:
        """Return whether a main thread that uses a core is computing, and not waiting for a device or for other ranks.

        Devices and collectives are checked once a second.
        """
        if not device_table.accelerator_in_use():
            return True
        now = steady_time.now()
        if now - max(self._moved, self._last_check) < LOOK_SECONDS:
            return False
        self._last_check = now
        with suppress(Exception):  # The format of the flight recorder is internal to torch, and may change.
            if waits.read_flight_recorder()[0]:
                return False
        return not self._devices.busy()

    def _send_heartbeat(self) -> None:
        waiting = None
        if steady_time.now() - self._moved > STUCK_SECONDS:
            with suppress(Exception):  # The format of the flight recorder is internal to torch, and may change.
                open_ones, _ = waits.read_flight_recorder()
                waiting = min(open_ones, key=lambda collective: collective.since, default=None)
        self._agent.sink.emit(HeartbeatEvent(self._moved, waiting))

    def _queue(
        self,
        serve: Callable[[FrameType | None, str], None],
        refuse: Callable[[str], None] | None = None,
        *,
        key: object = None,
        at_step: bool = False,
    ) -> None:
        # If the main thread has not moved for BOUNDARY_SECONDS, it will not reach a step boundary soon.
        patience = 0.0 if steady_time.now() - self._moved > BOUNDARY_SECONDS else BOUNDARY_SECONDS
        with self._lock:
            self._pending.append(_Pending(serve, refuse, key=key, at_step=at_step, patience=patience))
        self._agent.sink.on_step = self._at_boundary
        step_time.at_end.add(self._at_step)

    def _on_stacks(self, request: Request) -> None:
        waiting, last = waits.read_flight_recorder()
        threads = stacks.all_stacks()
        if self._traceback is not None:
            threads["MainThread"] = stacks.traceback_stack(self._traceback)
        paused = self._paused or breakpoints.stopped_at() or self.exit_watch.text
        self._agent.sink.send(StacksReply(request.number, threads, self._moved, waiting, last, paused, self._by_user))

    def _on_sample(self, request: SampleRequest) -> None:
        start_sampling(request, self._agent.sink.emit)  # Only queue the reply here. The agent's thread sends it.

    def _on_profile(self, request: ProfileRequest) -> None:
        from notebook_accelerate.worker import step_profiler

        stopped = self._paused or breakpoints.stopped_at() or self.exit_watch.text
        if "torch" not in sys.modules:
            stopped = stopped or "it has not imported torch"
        if self._profiler is not None:
            stopped = stopped or "it is already being profiled"
        if stopped:
            self._agent.sink.send(ProfileReply(request.number, error=stopped))
            return
        self._profiler = step_profiler.StepProfiler(request, self._agent.sink.emit, self._end_profile)
        self._agent.sink.on_step = self._at_boundary

    def _on_memory(self, request: MemoryRequest) -> None:
        if "torch" not in sys.modules:
            self._agent.sink.send(MemoryReply(request.number, error="it has not imported torch"))
            return
        emit = self._agent.sink.emit
        self._in_frame(
            lambda _frame, _note: emit(_memory_reply(request)),
            lambda error: emit(MemoryReply(request.number, error=error)),
            MemoryRequest,
        )

    def _end_profile(self) -> None:
        self._profiler = None

    def _on_ask(self, request: AskRequest) -> None:
        self._in_frame(
            lambda frame, note: self._answer(request, frame, note),
            lambda error: self._agent.sink.emit(AskReply(request.number, error)),
            (request.expression, request.frame),
        )

    def _on_complete(self, request: CompleteRequest) -> None:
        self._in_frame(
            lambda frame, _: self._complete(request, self._find(request.frame, frame)),
            lambda _: self._agent.sink.emit(CompleteReply(request.number, [])),
            (request.text, request.frame),
        )

    def _complete(self, request: CompleteRequest, frame: FrameType | None) -> None:
        found: list[str] = []
        with suppress(Exception):  # Completion reads attributes, and a property may raise any error.
            found = stacks.completions(breakpoints.variables(frame), request.text) if frame is not None else []
        self._agent.sink.emit(CompleteReply(request.number, found))

    def _in_frame(
        self, serve: Callable[[FrameType | None, str], None], refuse: Callable[[str], None], key: object
    ) -> None:
        """Serve a request now if the main thread is paused for the user, and otherwise at a step boundary."""
        if breakpoints.stopped_frame() is not None or self._traceback is not None or self._paused:
            serve(main_frame(), "")
        else:
            self._queue(serve, refuse, key=key)

    def _find(self, name: str, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame of the function ``name``, or None if it is not running.

        Without a name, return the frame where the debugger has stopped, the frame that failed, or the frame of the
        launched function.
        """
        stopped = breakpoints.stopped_frame()
        if stopped is not None:
            return stopped if not name else stacks.find_frame(stopped, name, self._code)
        if self._traceback is not None:
            return stacks.frame_in_traceback(self._traceback, name)
        return stacks.find_frame(frame, name, self._code)

    def _answer(self, request: AskRequest, frame: FrameType | None, note: str) -> None:
        found = self._find(request.frame, frame)
        if found is None:
            running = ", ".join(dict.fromkeys(stacks.function_names(frame)))
            error = f"frame={request.frame!r} is not a running function; the running ones are: {running}"
            self._agent.sink.emit(AskReply(request.number, error))
            return
        self._agent.sink.emit(evaluate(request, found, note))

    def _on_pause(self, request: Request) -> None:
        self._unpaused.clear()
        # Read the count now, because a resume may follow the reply before the rank starts to wait.
        unpauses = self._unpauses

        def pause(frame: FrameType | None, _note: str) -> None:
            place = stacks.stack(stacks.find_frame(frame, "", self._code))
            self._agent.sink.emit(PausedEvent(True))  # Emit this first, so that the run is paused when pause() returns.
            self._agent.sink.emit(DoneReply(request.number, "paused"))
            self._wait(f"paused at line {place[-1].lineno}" if place else "paused", frame, unpauses)

        self._queue(pause, at_step=True)

    def _on_unpause(self, request: Request) -> None:
        self._unpauses += 1
        self._unpaused.set()
        with self._lock:
            self._pending = [pending for pending in self._pending if pending.refuse is not None]
        self._agent.sink.send(DoneReply(request.number, "unpaused"))

    def _on_break(self, request: Request) -> None:
        if self._traceback is not None:
            self._commands.put(lambda: self._post_mortem(request))
            return

        def stop_here(frame: FrameType | None, _note: str) -> None:
            self._agent.sink.emit(DoneReply(request.number, "stopped"))
            where = stacks.user_frame(frame, self._code)
            breakpoints.inspect_frame(where) if self._paused else breakpoints.stop_in(where)

        self._queue(stop_here)

    def _on_debugpy(self, request: Request) -> None:
        try:
            import debugpy  # noqa: T100 - the user asked for it
        except ImportError:
            self._agent.sink.send(DoneReply(request.number, error="debugpy is not installed; run: pip install debugpy"))
            return
        try:
            host, port = debugpy.listen(("127.0.0.1", 0))  # noqa: T100 - the user asked for it
            self._agent.sink.send(DoneReply(request.number, f"{host}:{port}"))
        except Exception as error:  # noqa: BLE001 - the kernel shows debugpy's error
            self._agent.sink.send(DoneReply(request.number, error=f"{type(error).__name__}: {error}"))


def _memory_reply(request: MemoryRequest) -> MemoryReply:
    from notebook_accelerate.worker.memory_report import take_memory_report

    try:
        return MemoryReply(request.number, take_memory_report())
    except Exception as error:  # noqa: BLE001 - objects of any class are inspected, and may raise any error
        return MemoryReply(request.number, error=f"its memory was not counted ({describe_error(error, 300)})")


def evaluate(request: AskRequest, frame: FrameType, note: str) -> AskReply:
    """Evaluate the request's expression in ``frame`` and return the reply."""
    try:
        value = eval(request.expression, breakpoints.variables(frame))  # noqa: S307 - the user's own expression
    except BaseException as error:  # noqa: BLE001 - errors must not reach the running function
        return AskReply(request.number, f"{type(error).__name__}: {error}")
    text = value_text(value)
    payload = dump_answer(value)
    return AskReply(request.number, "", f"{text}  ({note})" if note else text, payload)


def value_text(value: object) -> str:
    """Return the ``repr`` of a value, at most 2,000 characters."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - a broken __repr__
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    return text if len(text) <= 2000 else text[:2000] + " …"


# In a rank that is not forked from the kernel, a ``!command`` in a cell's function calls this shell.


class RankShell:
    """The part of IPython's shell that needs no kernel: running system commands."""

    def system(self, command: str) -> None:
        """Run a system command, whose output becomes part of the rank's output."""
        flush()
        subprocess.run(_expanded(command), shell=True, check=False)  # noqa: S602 - the user's own command

    system_piped = system_raw = system

    def getoutput(self, command: str, **_: Any) -> list[str]:
        """Run a system command and return the lines that it prints."""
        flush()
        done = subprocess.run(_expanded(command), shell=True, check=False, stdout=subprocess.PIPE, text=True)  # noqa: S602
        return done.stdout.splitlines()

    def run_line_magic(self, name: str, *_: Any, **__: Any) -> NoReturn:
        """Raise an error, because magics need the kernel's shell."""
        raise RuntimeError(
            f"%{name} needs the kernel, but this rank is a separate process; write the same in Python, or launch "
            "with start_method='fork'"
        )

    run_cell_magic = magic = run_line_magic


def _expanded(command: str) -> str:
    """Replace {names} and $names by the values of the calling function's variables, as IPython does."""
    from IPython.utils.text import DollarFormatter

    caller = sys._getframe(2)
    names = {**caller.f_globals, **caller.f_locals}
    try:
        return str(DollarFormatter().vformat(command, args=[], kwargs=names))
    except Exception:  # noqa: BLE001 - like IPython, run a command unchanged if it cannot be expanded
        return command


_shell = RankShell()


def get_ipython() -> RankShell:
    """Return the replacement for IPython's shell. Functions of the user's cells call this by IPython's name."""
    return _shell
