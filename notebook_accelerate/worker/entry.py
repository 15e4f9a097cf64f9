"""The life of one rank, from its process's first line to its last.

``main`` reads as five paragraphs: cut the ties to the process this one was forked from, connect to the kernel, take
on the rank's environment, run the function, report. Every process start method ends here.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from bdb import BdbQuit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from notebook_accelerate.config.environ import KERNEL_ONLY
from notebook_accelerate.config.launch_arguments import set_launch_arguments
from notebook_accelerate.telemetry import (
    Channel,
    Event,
    FailureEvent,
    ResultEvent,
    Sink,
    StatusEvent,
    inherited_state,
    install_sink,
    tracebacks,
)
from notebook_accelerate.telemetry.payload import dump_bytes, install_sources, load_bytes
from notebook_accelerate.telemetry.worker_order import WorkerOrder
from notebook_accelerate.worker import shared_state
from notebook_accelerate.worker.agent import Agent
from notebook_accelerate.worker.console import Console
from notebook_accelerate.worker.debug_agent import DebugAgent

Function = Callable[..., Any]
Loader = Callable[[], tuple[Function, tuple[Any, ...]]]

PR_SET_PDEATHSIG = 1


@dataclass
class Wiring:
    """The descriptors a rank keeps, and the process whose end must be its own."""

    channel: int
    stdout: int
    stderr: int
    parent: int


def main(order: WorkerOrder, wiring: Wiring, load: Loader, inherited: set[int] | None) -> NoReturn:
    """Be a rank; never returns.

    Args:
        order: What to be.
        wiring: Descriptors for the channel and the two output streams.
        load: Returns the function and its arguments.
        inherited: The kernel's own descriptors, in a process that was forked from the kernel itself; None elsewhere.
    """
    code = 1
    try:
        isolate(wiring, inherited)
        agent, console, debugging = connect(wiring)
        outcome = run(order, load, debugging)
        code = report(outcome, agent, console)
    except KeyboardInterrupt:  # by whoever stops the run, after the function
        pass
    except BaseException:  # noqa: BLE001 - the last line of a process: nothing above it could handle anything
        with contextlib.suppress(Exception):
            os.write(2, ("notebook_accelerate: a worker failed outside the function\n" + _traceback()).encode())
    finally:
        os._exit(code)


def _traceback() -> str:
    import traceback

    return traceback.format_exc()


# ---- 1. cut the ties


def isolate(wiring: Wiring, inherited: set[int] | None) -> None:
    """Leave the parent's process group, handlers, event loop and sockets behind.

    From here until the function begins, an interrupt waits.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if inherited is not None:
        forget_interrupt(wiring.parent)
    die_with_parent(wiring.parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
    threading.current_thread().name = "MainThread"  # a rank forked from a run's thread has that thread's name
    asyncio.set_event_loop(None)  # the inherited one shares its epoll with the kernel
    atexit._clear()
    # A fork from the run's daemon thread: threads that the function starts would be daemons too, and not waited for.
    threading.current_thread()._daemonic = False  # type: ignore[attr-defined]
    if inherited is not None:
        silence_descriptors(keep={wiring.channel, wiring.stdout, wiring.stderr}, known=inherited)


def forget_interrupt(kernel: int) -> None:
    """Drop a pending interrupt that was for the kernel, in whose process group this process was forked (Linux)."""
    if sys.platform == "linux":
        pending = signal.sigtimedwait([signal.SIGINT], 0)
        if pending is not None and pending.si_pid == kernel:  # for this rank: the run is being stopped
            signal.raise_signal(signal.SIGINT)


def die_with_parent(parent: int) -> None:
    """Have the system kill this process when the thread that forked it ends (Linux); elsewhere the agent notices."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def silence_descriptors(keep: set[int], known: set[int]) -> None:
    """Point the kernel's sockets, event queues, history file and ``known`` pipes at /dev/null in this process.

    Closing them would free their numbers for new files, which the inherited objects' destructors would then close.
    """
    null = os.open(os.devnull, os.O_RDWR)
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():  # noqa: PTH112, PTH208 - twice as fast as Path
        descriptor = int(name)
        if descriptor in keep or descriptor in (0, 1, 2, null):
            continue
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - the same
            shared = target.startswith(("socket:", "anon_inode:[event")) or "history.sqlite" in target
            if shared or descriptor in known:
                os.dup2(null, descriptor, inheritable=False)
    os.dup2(null, 0)
    os.close(null)


# ---- 2. connect


def connect(wiring: Wiring) -> tuple[Agent, Console, DebugAgent]:
    """Send what is written to the kernel through pipes, and everything else through the channel."""
    import socket

    os.dup2(wiring.stdout, 1)
    os.dup2(wiring.stderr, 2)
    faulthandler.enable(2)  # a crash in native code leaves the Python stack; ipykernel's own default is not this file
    for descriptor in {wiring.stdout, wiring.stderr} - {1, 2}:
        os.close(descriptor)
    sink = Sink(Channel(socket.socket(fileno=wiring.channel)))
    install_sink(sink)
    agent = Agent(sink)
    debugging = DebugAgent(agent)
    agent.start()
    console = Console(agent)
    console.install()
    return agent, console, debugging


# ---- 3. and 4. become the rank, run


def run(order: WorkerOrder, load: Loader, debugging: DebugAgent) -> Event:
    """Run the function as this rank and return what became of it."""
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        take_on(order)
        function, arguments = load()
        debugging.install(function)
        sink = shared_state.require_sink()
        sink.send(StatusEvent("running"))
        value = function(*arguments)
    except SystemExit as stop:
        if stop.code in (None, 0):
            return result(None)
        return failure(stop, "exit")
    except BdbQuit as stop:
        return failure(stop, "quit")
    except KeyboardInterrupt as stop:
        return failure(stop, "interrupted")
    except BaseException as error:  # noqa: BLE001 - whatever the user's function raises belongs to the kernel
        event = failure(error, "exception")
        if order.hold and error.__traceback__ is not None:
            shared_state.require_sink().send(event)
            debugging.hold(error.__traceback__)
        return event
    return result(value)


def take_on(order: WorkerOrder) -> None:
    """Make environment, paths, threads and random numbers those of the rank."""
    if order.base_environment is not None:
        os.environ.clear()
        os.environ.update(order.base_environment)
    os.environ.update(order.environment)
    for name in KERNEL_ONLY:
        os.environ.pop(name, None)
    if order.cwd is not None:
        with contextlib.suppress(OSError):  # a folder deleted under the kernel is the kernel's state too
            os.chdir(order.cwd)
    if order.sys_path is not None:
        sys.path[:] = order.sys_path
    install_sources(order.sources)
    shared_state.reset()
    given = order.accelerator
    set_launch_arguments(load_bytes(given) if isinstance(given, bytes) else given)
    inherited_state.apply(order.state)
    torch: Any = sys.modules.get("torch")
    if order.threads is not None and hasattr(torch, "set_num_threads"):
        # OMP_NUM_THREADS has no effect on a torch that is already imported.
        torch.set_num_threads(order.threads)


def result(value: Any) -> Event:
    """Return the event that carries ``value``, or the failure to pickle it."""
    try:
        return ResultEvent(dump_bytes(value, f"the return value (a {type(value).__name__})"))
    except Exception as error:  # noqa: BLE001 - a __reduce__ may raise anything
        return failure(error, "unpicklable")


def failure(error: BaseException, kind: str) -> FailureEvent:
    """Return the event that tells the kernel of ``error``."""
    now = time.time()
    chain = tracebacks.chain_of(error)
    note, payload = "", b""
    try:
        payload = dump_bytes(error, f"the exception (a {type(error).__name__})")
    except Exception as problem:  # noqa: BLE001 - the same
        note = str(problem)
    return FailureEvent(chain, now, kind, note, payload)


# ---- 5. report


def report(outcome: Event, agent: Agent, console: Console) -> int:
    """Wind down as an interpreter does at its end, send the outcome, and return the exit code."""
    failed = isinstance(outcome, FailureEvent)
    if failed:
        # First of all: that this rank failed, before its closing sockets make others fail.
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the function is over: nothing is left to interrupt
        console.flush()
        agent.sink.send(outcome)
    else:
        join_threads()
        leave_process_group()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    console.flush()
    if not failed:
        agent.sink.send(outcome)
    agent.stop()
    return int(failed)


def join_threads() -> None:
    """Wait for the function's own non-daemon threads, and for those that these start, as the interpreter does."""
    for call in reversed(getattr(threading, "_threading_atexits", ())):  # ends the idle threads of executors
        with contextlib.suppress(Exception):
            call()
    while threads := [
        each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()
    ]:
        for thread in threads:
            thread.join()


def leave_process_group() -> None:
    """Close a process group that the function left open; at exit NCCL warns of it.

    gloo says nothing, and closing its group can wait for ever: the destructor holds the interpreter while it joins a
    thread that may need it. The end of the process closes its sockets as well.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(Exception):
            if distributed.get_backend() != "gloo":
                distributed.destroy_process_group()


__all__ = ["Function", "Loader", "Wiring", "WorkerOrder", "main"]
