"""The server process, which imports what ranks need, then forks one rank per request until the kernel exits."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import select
import selectors
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from notebook_accelerate._collection import gc_paused
from notebook_accelerate.launch.processes.fork_costs import BriefSpins, collapse_memory
from notebook_accelerate.launch.processes.fork_probe import fork_quietly
from notebook_accelerate.launch.processes.zygote import CROWDED, LENGTH, READY, STATUS, TRAINS
from notebook_accelerate.telemetry.pickling import load_file
from notebook_accelerate.telemetry.worker_order import OPTIMIZER_MODULE
from notebook_accelerate.worker import entry

PRELOADED = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "numpy",
    "psutil",
    "IPython.core.display_functions",
    "IPython.display",
    "notebook_accelerate.accelerator",
    "notebook_accelerate.data_loader",
)
"""Modules to import once for all ranks. None of them initialises a device or starts a thread pool."""
PRELOADED_WHEN_IDLE = (OPTIMIZER_MODULE,)
"""Modules to import before the first rank that trains is forked, or earlier, while the server is idle."""
PRELOAD_AFTER = 1.0
"""Idle seconds before `PRELOADED_WHEN_IDLE` is imported. A request that arrives during the import is delayed."""
COLLAPSE_AFTER = 0.01
"""Idle seconds before memory is moved into huge pages, which stops when a request arrives."""
COLLAPSE_SECONDS = 1.0


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, int] = {}  # Map each rank's process id to the pipe for its status.
        self._preloaded = self._collapsed = False
        self._spins = BriefSpins()
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        for descriptor in (self._wake_reader, self._wake_writer):
            os.set_blocking(descriptor, False)
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)

    def run(self) -> None:
        """Serve requests until the kernel closes the control socket, then kill all ranks."""
        with suppress(OSError):  # The kernel may have exited.
            self._control.sendall(READY)
        while True:
            ready = self._selector.select(self._select_timeout())
            if not ready:
                self._use_idle_time()
            for key, _ in ready:
                if key.fileobj is self._control:
                    if not self._serve_one():
                        self._end_all()
                        return
                else:
                    with suppress(BlockingIOError):
                        os.read(self._wake_reader, 4096)
            self._reap()

    def _select_timeout(self) -> float | None:
        """Return how many seconds to wait for a request before using idle time, or None if there is nothing to do."""
        if self._children or (self._collapsed and self._preloaded):
            return None
        return PRELOAD_AFTER if self._collapsed else COLLAPSE_AFTER

    def _use_idle_time(self) -> None:
        """Move memory into huge pages, which forks split. If that was done before, first import modules for later."""
        self._spins.release()
        if self._collapsed:
            self._preload()
        collapse_memory(COLLAPSE_SECONDS, stop=lambda: bool(self._selector.select(0)))
        self._collapsed = True

    def _preload(self) -> None:
        self._preloaded = True
        with suppress(Exception):  # A rank that needs the module reports the error.
            preload(PRELOADED_WHEN_IDLE)

    def _serve_one(self) -> bool:
        """Serve the next request. Return False if the kernel has exited."""
        try:
            header, descriptors, _, _ = socket.recv_fds(self._control, LENGTH.size, 5)
            if len(header) < LENGTH.size:
                return False
            length = LENGTH.unpack(header)[0]
            size = length & ~(CROWDED | TRAINS)
            body = self._receive(size)
            if len(body) < size:
                return False
            if length & CROWDED:
                self._spins.hold()
            else:
                self._spins.release()
            # Don't import while there are ranks, because the import would delay the report that one has ended.
            if length & TRAINS and not (self._preloaded or self._children):
                self._preload()
            self._control.sendall(LENGTH.pack(self._fork(body, descriptors)))
        except ConnectionError:  # The kernel died before it read the last reply or this one.
            return False
        return True

    def _receive(self, size: int) -> bytes:
        """Receive the next ``size`` bytes, or fewer if the kernel has exited."""
        # Don't use MSG_WAITALL, which returns fewer bytes after a signal, for example when a rank exits.
        parts: list[bytes] = []
        while size and (part := self._control.recv(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _fork(self, body: bytes, descriptors: list[int]) -> int:
        channel, stdout, stderr, payload, status = descriptors
        if not _has_reader(status):  # This process was suspended, and the kernel no longer wants the rank.
            for descriptor in descriptors:
                os.close(descriptor)
            return 0
        parent = os.getpid()
        pid = fork_quietly()
        if pid == 0:
            self._become_rank()
            os.close(status)
            rank_descriptors = entry.RankDescriptors(channel, stdout, stderr, parent)
            entry.main(pickle.loads(body), rank_descriptors, lambda: load_file(payload), None)
        with suppress(OSError):
            os.setpgid(pid, pid)
        for descriptor in (channel, stdout, stderr, payload):
            os.close(descriptor)
        self._children[pid] = status
        self._collapsed = False
        return pid

    def _become_rank(self) -> None:
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._control.close()
        for descriptor in (self._wake_reader, self._wake_writer, *self._children.values()):
            os.close(descriptor)

    def _reap(self) -> None:
        for pid, pipe in list(self._children.items()):
            found, status, usage = os.wait4(pid, os.WNOHANG)
            if found:
                with suppress(OSError):  # The kernel may have closed the pipe.
                    os.write(pipe, STATUS.pack(status, usage.ru_maxrss))
                os.close(pipe)
                del self._children[pid]

    def _end_all(self) -> None:
        for pid in self._children:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):  # The rank may have left its process group.
                os.kill(pid, signal.SIGKILL)


def _has_reader(pipe: int) -> bool:
    """Return whether the reading end of a pipe is open."""
    waiter = select.poll()
    waiter.register(pipe, 0)
    return not waiter.poll(0)


def preload(names: Sequence[str]) -> None:
    """Import modules before ranks are forked, so that all ranks share them."""
    with gc_paused():
        for name in names:
            with suppress(ImportError):  # IPython may be missing outside notebooks.
                importlib.import_module(name)
        entry.prepare_forks()
        # Otherwise, a garbage collection in a rank would write to every page that contains an object, and so copy it.
        gc.freeze()


def serve(descriptor: int) -> NoReturn:
    """Run the server process until the kernel closes the control socket, then exit.

    Args:
        descriptor: The server's end of the control socket.
    """
    preload(PRELOADED)
    _Server(socket.socket(fileno=descriptor)).run()
    os._exit(0)  # Otherwise, the kernel would wait a few tenths of a second while torch's objects are destroyed.
