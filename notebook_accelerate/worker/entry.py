"""The main function of a rank's process. Every start method calls it.

``main`` has five steps: detach from the parent process, connect to the kernel, apply the order, run the function, and
report the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import traceback

# The public signal.pthread_sigmask converts each of 60 signals into an enum member, which takes 0.1 ms.
from _signal import pthread_sigmask  # type: ignore[import-not-found]
from bdb import BdbQuit
from collections.abc import Callable, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from notebook_accelerate.config import environ
from notebook_accelerate.config.environ import KERNEL_ONLY
from notebook_accelerate.config.launch_config import set_launch_arguments
from notebook_accelerate.errors import SerializationError
from notebook_accelerate.hardware.addresses import listen
from notebook_accelerate.integrations import accelerate_alias, reporting
from notebook_accelerate.telemetry import (
    Channel,
    Event,
    FailureEvent,
    ImportedEvent,
    ResultEvent,
    Sink,
    StatusEvent,
    cells,
    install_sink,
    steady_time,
    step_time,
    tracebacks,
)
from notebook_accelerate.telemetry.automatic_metrics import sampler
from notebook_accelerate.telemetry.inherited_state import apply_inherited_state, reset_inherited_state
from notebook_accelerate.telemetry.notebook_settings import apply_notebook_settings
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes
from notebook_accelerate.telemetry.results import advice, dump_result
from notebook_accelerate.telemetry.sink import require_sink
from notebook_accelerate.telemetry.tracebacks import built_in_attribute, class_name, describe_error, install_sources
from notebook_accelerate.telemetry.worker_order import OPTIMIZER_MODULE, WorkerOrder
from notebook_accelerate.worker import console, exit_handlers, plain_process
from notebook_accelerate.worker.agent import Agent
from notebook_accelerate.worker.debug_agent import DebugAgent
from notebook_accelerate.worker.device_reports import DeviceReports
from notebook_accelerate.worker.exit_handlers import run_exit_handlers

Function = Callable[..., Any]
Loader = Callable[[], tuple[Function, tuple[Any, ...]]]

PR_SET_PDEATHSIG = 1
_stores: list[Any] = []
"""The store that this process serves, kept here until the process ends."""
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class Outcome(NamedTuple):
    """The event that reports how a rank's function ended, and the descriptors to send with it."""

    event: Event
    descriptors: Sequence[int] = ()


@dataclass
class RankDescriptors:
    """The descriptors that a rank keeps, and the process id of its parent. The rank ends when its parent does."""

    channel: int
    stdout: int
    stderr: int
    parent: int


def main(
    order: WorkerOrder,
    descriptors: RankDescriptors,
    load: Loader,
    kernel_descriptors: AbstractSet[int] | None,
    *,
    forked: bool = True,
) -> NoReturn:
    """Run a rank, and end the process.

    Args:
        order: The settings that the rank runs with.
        descriptors: Descriptors of the channel and the two output streams.
        load: Returns the function and its arguments.
        kernel_descriptors: The kernel's descriptors, which a process forked from the kernel redirects to /dev/null.
            None in other processes.
        forked: Whether the process was forked, from the kernel or from another process.
    """
    code = 1
    try:
        exit_handlers.set_mark(order.mark)
        if forked:
            exit_handlers.forget_inherited()
        if kernel_descriptors is None:
            cells.renew_main()
        # This takes constant time. From now on, the collector only sees the rank's own objects, and does not cause
        # copies of shared memory.
        gc.freeze()
        detach(descriptors, kernel_descriptors)
        agent, debugging, devices = connect(descriptors)
        shared = OPTIMIZER_MODULE in sys.modules
        outcome = run_function(order, load, debugging)
        if not shared and OPTIMIZER_MODULE in sys.modules:
            agent.sink.emit(ImportedEvent(OPTIMIZER_MODULE))
        debugging.exit_watch.begin()
        devices.send()  # Report the last peak, which is the only report of a short run.
        step_time.end_run()
        code = report(outcome, agent)
    except KeyboardInterrupt:  # The run was stopped after the function had returned.
        pass
    except BaseException:  # noqa: BLE001 - no caller could handle it
        with contextlib.suppress(Exception):
            text = f"notebook_accelerate: a rank failed outside the function\n{traceback.format_exc()}"
            os.write(2, text.encode())
    finally:
        os._exit(code)


def prepare_forks() -> None:
    """Prepare a process that forks ranks, so that ranks neither repeat this work nor copy memory pages for it."""
    if _LIBC is not None:
        _ = _LIBC.prctl  # ctypes looks up the function at the first access.
    reporting.preload()
    plain_process.look_for_notebook()
    exit_handlers.note_inherited()
    cells.note_classes()


# ---- 1. detach


def detach(descriptors: RankDescriptors, kernel_descriptors: AbstractSet[int] | None) -> None:
    """Leave the parent's process group, and drop its handlers, event loop and sockets.

    SIGINT stays blocked until the order is applied.
    """
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if kernel_descriptors is not None:
        discard_interrupt(descriptors.parent)
    die_with_parent(descriptors.parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pthread_sigmask(signal.SIG_SETMASK, [signal.SIGINT])
    threading.current_thread().name = "MainThread"  # A rank is forked from the run's thread, and inherits its name.
    asyncio.set_event_loop(None)  # The inherited event loop shares its epoll with the kernel.
    # The run's thread is a daemon. Threads started by the function would inherit that flag and would not be joined.
    threading.current_thread()._daemonic = False  # type: ignore[attr-defined]
    if kernel_descriptors is not None:
        redirect_descriptors(
            keep={descriptors.channel, descriptors.stdout, descriptors.stderr}, known=kernel_descriptors
        )


def discard_interrupt(kernel: int) -> None:
    """Discard a pending interrupt that was meant for the kernel, whose process group this process starts in (Linux)."""
    if sys.platform == "linux":
        pending = signal.sigtimedwait([signal.SIGINT], 0)
        if pending is not None and pending.si_pid == kernel:  # The kernel sent this interrupt to stop the rank.
            signal.raise_signal(signal.SIGINT)


def die_with_parent(parent: int) -> None:
    """Make Linux kill this process when the thread that forked it ends. On other systems, the agent kills it."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # The parent exited before the call to prctl.
            os._exit(1)


def redirect_descriptors(keep: AbstractSet[int], known: AbstractSet[int]) -> None:
    """Redirect the kernel's sockets, event queues, history file and ``known`` pipes to /dev/null in this process.

    They are not closed, because new files would reuse their numbers, and the destructors of inherited objects would
    then close those files.
    """
    null = os.open(os.devnull, os.O_RDWR)
    folder = "/proc/self/fd"
    for name in os.listdir(folder) if os.path.isdir(folder) else ():  # noqa: PTH112, PTH208 - twice as fast as Path
        descriptor = int(name)
        if descriptor in keep or descriptor in (0, 1, 2, null):
            continue
        with contextlib.suppress(OSError):
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - twice as fast as Path
            shared = target.startswith(("socket:", "anon_inode:[event")) or "history.sqlite" in target
            if shared or descriptor in known:
                os.dup2(null, descriptor, inheritable=False)
    os.dup2(null, 0)
    os.close(null)


# ---- 2. connect


def connect(descriptors: RankDescriptors) -> tuple[Agent, DebugAgent, DeviceReports]:
    """Connect the rank's output streams to the kernel's pipes, and its agent, input and display to the channel."""
    os.dup2(descriptors.stdout, 1)
    os.dup2(descriptors.stderr, 2)
    faulthandler.enable(2)  # Write the stack of a native crash to stderr, because ipykernel has chosen another file.
    for descriptor in {descriptors.stdout, descriptors.stderr} - {1, 2}:
        os.close(descriptor)
    sink = Sink(Channel(socket.socket(fileno=descriptors.channel)))
    install_sink(sink)
    agent = Agent(sink)
    debugging = DebugAgent(agent)
    devices = DeviceReports(agent)
    agent.start()
    console.install(agent)
    return agent, debugging, devices


# ---- 3. apply the order, and 4. run


def run_function(order: WorkerOrder, load: Loader, debugging: DebugAgent) -> Outcome:
    """Run the function as this rank and return its outcome."""
    try:
        pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        apply_order(order)
        function, arguments = load()
        if order.notebook_settings:  # Apply them again, because the function's imports may have changed the settings.
            apply_notebook_settings(order.notebook_settings)
        debugging.install(function)
        sink = require_sink()
        sink.send(StatusEvent("running"))
        value = call(function, arguments)
    except SystemExit as stop:
        code = built_in_attribute(stop, "code", SystemExit)
        if code is None or (type(code) in (int, bool) and not code):
            return returned(None, order.result_bytes)
        return Outcome(failure_event(stop, "exit"))
    except BdbQuit as stop:
        return Outcome(failure_event(stop, "quit"))
    except KeyboardInterrupt as stop:
        return Outcome(failure_event(stop, "interrupted"))
    except BaseException as error:  # noqa: BLE001 - the kernel handles errors of the user's function
        note_memory(error)
        cells.explain_omitted(error)
        event = failure_event(error, "exception")
        if order.hold and (place := built_in_attribute(error, "__traceback__")) is not None:
            require_sink().send(event)
            debugging.hold(place)
        return Outcome(event)
    return returned(value, order.result_bytes)


def call(function: Function, arguments: tuple[Any, ...]) -> Any:
    """Call the function of the launch.

    If a process that the function has forked also returns from the function, end it, because it is not the rank.
    """
    rank = os.getpid()
    try:
        value = function(*arguments)
    except BaseException as error:
        if os.getpid() != rank:
            end_child(error)
        raise
    if os.getpid() != rank:
        end_child(None)
    return value


def end_child(error: BaseException | None) -> NoReturn:
    """End a process that the rank has forked, without running the rank's exit handlers."""
    code = 0
    try:
        if issubclass(type(error), SystemExit):
            given = built_in_attribute(error, "code", SystemExit)
            code = given if issubclass(type(given), int) else int(given is not None)
        elif error is not None:
            code = 1
            traceback.print_exception(error)
        console.flush()
    finally:
        os._exit(code)


def apply_order(order: WorkerOrder) -> None:
    """Set the rank's environment, paths, threads and inherited state."""
    if order.base_environment is not None:
        os.environ.clear()
        os.environ.update(order.base_environment)
    os.environ.update(order.environment)
    for name in KERNEL_ONLY:
        os.environ.pop(name, None)
    if environ.CORES in order.environment and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # The cores may have been taken away from this container since the launch.
            os.sched_setaffinity(0, map(int, order.environment[environ.CORES].split(",")))
    if order.time_offset is not None:
        steady_time.set_offset(order.time_offset)
    if order.cwd is not None:
        with contextlib.suppress(OSError):  # The kernel's working directory may have been deleted.
            os.chdir(order.cwd)
    if order.sys_path is not None:
        sys.path[:] = order.sys_path
    if order.as_accelerate:
        accelerate_alias.install()
    else:
        # The server process may have been started while the alias was installed in the kernel.
        accelerate_alias.remove()
    install_sources(order.sources)
    plain_process.fork_children()
    reset_inherited_state()
    given = order.accelerator
    set_launch_arguments(load_bytes(given) if isinstance(given, bytes) else given)
    apply_inherited_state(order.inherited)
    if order.notebook_settings:
        apply_notebook_settings(order.notebook_settings)
    reporting.connect_libraries(order.report_from)
    sampler.start(enabled=order.automatic_metrics)
    torch: Any = sys.modules.get("torch")
    if order.threads is not None and hasattr(torch, "set_num_threads"):
        # OMP_NUM_THREADS has no effect if torch was already imported.
        torch.set_num_threads(order.threads)
    serve_group_store()


def serve_group_store() -> None:
    """In a run on several machines, serve the store of its process groups if this is the rank that must do so.

    The store exists until the process ends. A store that torch itself starts on rank 0 would listen on all interfaces,
    whatever MASTER_ADDR is. This one listens only on MASTER_ADDR.

    Raises:
        OSError: The address or the port is not available.
    """
    where = os.environ.pop(environ.SERVED_STORE, "")
    if not where:
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address, _, port = where.rpartition(":")
    try:
        listener = listen(address, int(port))
    except OSError:  # The address is not one of this machine's, because a router translates it (NAT).
        listener = listen("", int(port))
    _stores.append(
        TCPStore(
            address, int(port), is_master=True, wait_for_workers=False, multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    )  # fmt: skip


def returned(value: object, in_channel: int | None) -> Outcome:
    """Return the outcome of a function that has returned ``value``, or of a failure if ``value`` cannot be sent."""
    what = f"the return value (a {type(value).__name__})"
    try:
        found = dump_result(value, what, in_channel)
    except SerializationError as error:
        return Outcome(ResultEvent(b"", error=str(error)))
    return Outcome(ResultEvent(found.payload, found.sizes, advice=advice(value)), found.descriptors)


def note_memory(error: BaseException) -> None:
    """Add a memory report to an out-of-memory error, while the frames still hold the memory."""
    # Don't use isinstance, which would run code of the error's class. That code may fail.
    if issubclass(type(error), (MemoryError, RuntimeError)):
        from notebook_accelerate.worker import memory_report

        memory_report.note_failure(error)


def failure_event(error: BaseException, kind: str) -> FailureEvent:
    """Return the event that reports ``error``."""
    now = steady_time.now()
    chain = tracebacks.chain_of(error)
    note, payload = "", b""
    try:
        payload = dump_bytes(error, f"the exception (a {class_name(error)})")
    except BaseException as problem:  # noqa: BLE001 - pickling may run any code of the user
        note = str(problem) if issubclass(type(problem), SerializationError) else describe_error(problem)
    return FailureEvent(chain, now, kind, note, payload)


# ---- 5. report


def report(outcome: Outcome, agent: Agent) -> int:
    """Clean up as an interpreter does at exit, send the outcome, and return the exit code."""
    event = outcome.event
    failed = isinstance(event, FailureEvent)
    wait = True
    if isinstance(event, FailureEvent):
        # Report the failure before cleaning up, because other ranks fail too when this rank closes its sockets.
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # The function has ended, so there is nothing to interrupt.
        console.flush()
        agent.sink.send(event)
        wait = event.kind not in ("interrupted", "quit")
    if wait:
        exit_handlers.join_threads()
    if not failed:
        sampler.start(enabled=False)  # This sends the numbers that have arrived from devices.
        leave_process_group()
    run_exit_handlers(wait=wait)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    console.flush()
    if not failed:
        agent.sink.send_with(outcome.descriptors, outcome.event)
    agent.stop()
    return int(failed)


def leave_process_group() -> None:
    """Destroy a process group that the function left open. Otherwise NCCL would warn about it at exit.

    Gloo does not warn, and destroying its group can hang: the destructor holds the GIL while it joins a thread that may
    need the GIL. The end of the process closes its sockets anyway.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        with contextlib.suppress(Exception):
            if distributed.get_backend() != "gloo":
                distributed.destroy_process_group()
