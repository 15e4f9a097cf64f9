"""Run the exit handlers at the end of a rank, because a rank ends with ``os._exit``, which runs none.

A forked rank also inherits the handlers that the kernel registered for its own exit. They must not run in a rank, so
everything registered before the rank started is skipped.
"""

from __future__ import annotations

# The public classes of io are abstract, and checking an object against them may run code of the object's class.
import _io
import atexit
import ctypes
import logging
import resource
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from notebook_accelerate._collection import instances
from notebook_accelerate.hardware.process_liveness import STARTED, read_stat
from notebook_accelerate.telemetry.events import ExitWaitEvent
from notebook_accelerate.telemetry.tracebacks import frame_of, main_frame
from notebook_accelerate.worker import stacks
from notebook_accelerate.worker.agent import Agent

_PROCESS_PACKAGES = ("multiprocessing", "multiprocess")
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

_FLUSH = (_LIBC.fflush, ctypes.c_void_p.in_dll(_LIBC, "stdout")) if _LIBC is not None else None
_RESET_BY_IMPORTS = ("multiprocessing.resource_sharer", "torch.multiprocessing.reductions")
"""Modules with an object that replaces a lock after each fork. This is unnecessary, because nothing holds the lock."""

awaited: set[threading.Thread] = set()
"""Daemon threads that must complete their work before the rank exits."""
_inherited_handlers: list[Any] = []
"""References to the kernel's logging handlers. They are collected in the kernel, because reading them in a rank would
copy memory."""
_inherited_finalizers: list[Any] = []
"""The inherited finalizers, kept so that the rank does not delete any of them."""
_inherited_resets: list[Any] = []
"""Functions that reset the kernel's multiprocessing objects, such as queues, in a new process."""


def note_inherited() -> None:
    """List the handlers that ranks inherit. A process that forks ranks must call this before forking them."""
    _inherited_handlers[:] = logging._handlerList  # type: ignore[attr-defined]
    _inherited_resets[:] = [
        util._run_after_forkers
        for package in _PROCESS_PACKAGES
        if (util := _module(f"{package}.util")) is not None
        and any(type(each).__module__ not in _RESET_BY_IMPORTS for each in util._afterfork_registry.values())
    ]
    _flush_native()  # Flush the buffers, because each rank would otherwise write their contents too.


def forget_inherited() -> None:
    """Discard all handlers that were registered before this rank was forked. A new rank must call this first.

    The handlers that the standard library registers once per process are registered again.
    """
    atexit._clear()
    atexit.register(_shut_logging)
    for package in _PROCESS_PACKAGES:
        util = _module(f"{package}.util")
        if util is not None:  # Reset multiprocessing as it does in processes that it forks itself.
            for inherited in (util._finalizer_registry, _module(f"{package}.process")._children):
                if inherited:
                    inherited.clear()
            atexit.register(_end_children, package)
    for reset in _inherited_resets:
        reset()
    finalize: Any = weakref.finalize
    _inherited_finalizers.append(finalize._registry)
    finalize._registry, finalize._registered_with_atexit = {}, False


def _module(name: str) -> Any:
    return sys.modules.get(name)


def run_exit_handlers(*, wait: bool) -> None:
    """Run this rank's exit callbacks, and write the buffers of its files.

    Args:
        wait: Whether to wait for multiprocessing processes that are not daemons.
    """
    if not wait:
        _forget_children()
    with suppress(Exception, KeyboardInterrupt):
        atexit._run_exitfuncs()
    _close_files()
    _flush_native()


def join_threads() -> None:
    """Join the function's non-daemon threads, and the threads that they start, as the interpreter does.

    An interrupt, which stops the run, ends the wait. The exit callbacks still run.
    """
    with suppress(KeyboardInterrupt):
        _join_threads()


def _join_threads() -> None:
    # These callbacks end the idle worker threads of executors.
    for call in reversed(getattr(threading, "_threading_atexits", ())):
        with suppress(Exception):
            call()
    while threads := unfinished_threads():
        for thread in threads:
            thread.join()


def unfinished_threads() -> list[threading.Thread]:
    """Return the running threads that an interpreter would wait for at its exit, and those in ``awaited``."""
    main = threading.main_thread()
    return [each for each in threading.enumerate() if (not each.daemon or each in awaited) and each is not main]


def unfinished_children() -> list[Any]:
    """Return the running multiprocessing processes that an interpreter would wait for at its exit."""
    children = [child for package in _PROCESS_PACKAGES for child in _children(package)]
    return [child for child in children if not child.daemon and child._popen.returncode is None]


def _children(package: str) -> list[Any]:
    module = _module(f"{package}.process")
    return [] if module is None else list(module._children)


def _forget_children() -> None:
    """Make multiprocessing forget its child processes, which end with the rank's process group anyway."""
    for package in _PROCESS_PACKAGES:
        module = _module(f"{package}.process")
        if module is not None:
            module._children.clear()


def _end_children(package: str) -> None:
    """End multiprocessing's daemon processes, wait for its other processes, and run its finalizers."""
    util = _module(f"{package}.util")
    if util is not None and (util._finalizer_registry or _children(package)):
        util._exit_function()


def _shut_logging() -> None:
    """Flush and close the handlers that the rank has created."""
    handlers = logging._handlerList  # type: ignore[attr-defined]
    if len(handlers) == len(_inherited_handlers) and handlers[-1:] == _inherited_handlers[-1:]:
        return  # The rank has created no handlers, and reading the inherited ones would copy memory.
    inherited = {id(reference) for reference in _inherited_handlers}
    logging.shutdown([each for each in handlers if id(each) not in inherited])


def _close_files() -> None:
    """Write the buffers of the rank's open files. An interpreter would close the files when it deletes its modules.

    Files that wrap others come first: text files, then files that compress or upload, then the buffers of descriptors.
    """
    files = instances(_io._IOBase, *_other_files())  # Inherited objects are frozen, so only the rank's own are listed.
    _call([each for each in files if type(each) is _io.TextIOWrapper], "flush")
    _call([each for each in files if type(each).__module__ not in ("_io", "tempfile")], "close")
    _call([each for each in files if type(each) in (_io.BufferedWriter, _io.BufferedRandom)], "flush")
    _call([each for each in files if type(each).__module__ == "tempfile"], "close")


def _other_files() -> Iterator[type]:
    """Yield the imported classes whose objects are not files, but write or delete a file when they are closed."""
    for module, name in (("zipfile", "ZipFile"), ("tempfile", "_TemporaryFileCloser")):
        if isinstance(kind := getattr(_module(module), name, None), type):
            yield kind


def _call(objects: list[Any], method: str) -> None:
    for each in objects:
        with suppress(Exception):  # The object may be closed, or not completely initialised.
            getattr(each, method)()


def _flush_native() -> None:
    """Write the buffered output of native code, because the C library has its own buffers."""
    if _FLUSH is not None:
        function, stream = _FLUSH
        function(stream)


# The rest of this module reports which thread, process or callback keeps a rank from exiting after its function.

NOTE_SECONDS = 5.0
"""A rank whose exit takes longer than this reports what it is waiting for."""


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
        """Start watching the exit. Call this when the function has returned or failed."""
        self._since = time.monotonic()

    def _tick(self) -> None:
        if self._since is None or self._noted or time.monotonic() - self._since < NOTE_SECONDS:
            return
        self._noted = True
        self._agent.sink.emit(ExitWaitEvent(self.text))

    @property
    def text(self) -> str:
        """Why the rank has not exited yet, or "" while its function runs."""
        if self._since is None:
            return ""
        found = [_thread(each) for each in unfinished_threads()]
        found = found or [_child(each) for each in unfinished_children()]
        return f"its function has ended, and it waits for {', '.join(found) or _main_thread()}"


def _thread(thread: threading.Thread) -> str:
    frame = stacks.user_frame(frame_of(thread), None)
    target = _target(thread)
    place = _place(frame)
    return (
        f"the thread {thread.name!r}" + (f" with target {target}" if target else "") + (f", {place}" if place else "")
    )


def _child(child: Any) -> str:
    # The process object does not keep a reference to its target.
    return f"the process {child.name!r} (pid {child.pid})"


def _target(thread: threading.Thread) -> str:
    """Return the name of a thread's function, or of the thread's class if it overrides ``run``."""
    target = getattr(thread, "_target", None)
    if target is None:
        return "" if type(thread) is threading.Thread else f"{type(thread).__qualname__}.run"
    code = stacks.function_code(target)
    return str(getattr(target, "__qualname__", "")) or (code.co_name if code is not None else repr(target)[:200])


def _main_thread() -> str:
    place = _place(stacks.user_frame(main_frame(), None))
    return f"an exit callback, {place}" if place else "an exit callback"


def _place(frame: FrameType | None) -> str:
    return "" if frame is None else f"at {frame.f_code.co_filename}, line {frame.f_lineno}, in {frame.f_code.co_name}"


# The rest of this module marks the processes of a kernel's ranks, so that all of them can be found when the kernel is
# gone.
#
# A process that is started by a rank may leave the rank's process group and session, lose its parent and its
# environment, and execute another program, but it keeps its resource limits. Linux has not enforced the limit on file
# locks since 2.4.25, so the soft value of this limit serves as the mark. On other systems there are no marks.

_RLIMIT_LOCKS = 10


def mark_of(pid: int) -> int:
    """Return a kernel's mark, which combines its process id and start time, or 0 if the system has no marks."""
    fields = read_stat(Path(f"/proc/{pid}"))
    return (pid << 32) | (int(fields[STARTED]) & 0xFFFFFFFF) if fields else 0


def set_mark(mark: int, pid: int = 0) -> None:
    """Mark a process and all processes that it will start. Mark 0 removes the mark, and pid 0 is this process."""
    if sys.platform == "linux":
        with suppress(OSError, ValueError):  # The administrator may have restricted this limit.
            hard = resource.prlimit(pid, _RLIMIT_LOCKS)[1]
            resource.prlimit(pid, _RLIMIT_LOCKS, (mark or hard, hard))
