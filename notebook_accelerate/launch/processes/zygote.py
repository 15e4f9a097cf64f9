"""Ranks forked from a clean server process that has torch imported and nothing initialised.

The server outlives launches: a kernel starts it once, after the cell that imports the launcher.
It ends with the kernel, when its control socket closes, or by ``shutdown()``.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch.processes.openmp_spin import is_crowded
from notebook_accelerate.launch.processes.pickled_start import (
    PickledBackend,
    log_tail,
    start_interpreter,
    uninterrupted,
)
from notebook_accelerate.launch.processes.rank_process import Ends, LocalRank, RankProcess
from notebook_accelerate.launch.state.rank_exit import Exit

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!qq")
"""Written by the server when a rank has ended: its wait status, and its peak resident memory in KiB."""
GUARD = 1 << 31
"""Set in a request's length: the other bits are a process group to end, or no longer to end, with the kernel."""
HELPER = 1 << 30
"""Set in a request's length: the request names a function for a helper process, in place of a rank."""
CROWDED = 1 << 29
"""Set in a request's length: the ranks have more threads than there are processors."""
READY = b"\1"
"""Written by the server once, when it has imported what ranks need first."""
START_SECONDS = 120.0
"""How long the server may take to import torch."""


class Zygote:
    """The server process, as the kernel controls it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._control = ours
        self._lock = threading.Lock()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - kept as long as the server
        self._owner = os.getpid()
        self._ready = False
        call = f"from notebook_accelerate.launch.processes.zygote_server import serve; serve({theirs.fileno()})"
        with uninterrupted():
            self._process = start_interpreter(call, [theirs.fileno()], self._log.fileno())
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it runs and this process has started it."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ready(self) -> bool:
        """Whether it serves requests at once; otherwise it is still importing torch."""
        with self._lock, suppress(BlockingIOError):
            if not self._ready:
                self._ready = self._control.recv(len(READY), socket.MSG_DONTWAIT) == READY
        return self._ready

    def fork(self, order: bytes, descriptors: list[int], kind: int = 0) -> int:
        """Have the server fork a rank and return the rank's process id.

        Args:
            order: The rank's order, pickled; or with `HELPER` "module:function", called with the first descriptor.
            descriptors: Channel, standard output and error, payload, and the pipe for the status.
            kind: `HELPER` for a process that outlives the server, to act for a kernel that has died; `CROWDED` for a
                rank of a launch with more threads than processors; else 0.

        Raises:
            LaunchError: The server has ended.
        """
        with self._lock:
            try:
                self._control.settimeout(START_SECONDS)
                if not self._ready:
                    self._ready = self._control.recv(len(READY)) == READY
                socket.send_fds(self._control, [LENGTH.pack(len(order) | kind)], descriptors)
                self._control.sendall(order)
                answer = self._control.recv(LENGTH.size, socket.MSG_WAITALL)
            except OSError as error:
                # A late reply would be taken for the reply to the next request.
                self._process.kill()
                self._process.wait()
                raise LaunchError(f"the server process did not reply: {error}{self.log_tail()}") from error
            if len(answer) < LENGTH.size:
                raise LaunchError(f"the server process has ended{self.log_tail()}")
            return int(LENGTH.unpack(answer)[0])

    def guard(self, pid: int) -> None:
        """Let the server end the process group ``pid`` when this process dies; a second call cancels that.

        The system ends a rank with its kernel, but not the processes that the rank has started.
        """
        with self._lock, suppress(OSError):  # the server has ended
            self._control.sendall(LENGTH.pack(GUARD | pid))

    def log_tail(self) -> str:
        """Return the end of the server's output, for an error message."""
        return log_tail(self._log)

    def close(self) -> None:
        """End the server and all its ranks; does nothing in a process that has inherited this object."""
        if self._owner != os.getpid():
            return
        self._control.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it is still importing torch
            self._process.kill()
            self._process.wait()
        self._log.close()


_lock = threading.Lock()
_zygote: Zygote | None = None


def ensure_zygote() -> Zygote:
    """Return the server; start it if it does not run."""
    global _zygote  # noqa: PLW0603 - one kernel, one server
    with _lock:
        if _zygote is None or not _zygote.alive():
            if _zygote is not None:
                _zygote.close()
            _zygote = Zygote()
        return _zygote


def running_zygote() -> Zygote | None:
    """Return the server; None if it does not run."""
    return _zygote if _zygote is not None and _zygote.alive() else None


def close_zygote() -> None:
    """End the server, if it runs."""
    global _zygote  # noqa: PLW0603 - the same
    with _lock:
        if (ended := _zygote) is not None:
            _zygote = None  # first: after an interrupt of close(), the next launch must not use it
            ended.close()


class ZygoteRank(LocalRank):
    """A rank that the server has forked; the server reports its end."""

    def poll(self) -> Exit | None:
        """See ``RankProcess.poll``."""
        assert self.exit_descriptor is not None
        try:
            data = os.read(self.exit_descriptor, STATUS.size)
        except BlockingIOError:
            return None
        if len(data) < STATUS.size:  # the server died, and its ranks with it
            return Exit(signal=9)
        return Exit.from_status(*STATUS.unpack(data))

    def close(self) -> None:
        """See ``RankProcess.close``."""
        if self.exit_descriptor is not None:
            Ends.kernel_side.discard(self.exit_descriptor)
        super().close()


class ZygoteBackend(PickledBackend):
    """Requests each rank from the server."""

    _kind = 0

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        """See ``ProcessBackend.configure``."""
        with suppress(OSError):  # starting the first rank reports it
            if not ensure_zygote().ready():
                note("waiting for the process that ranks are forked from to import torch, once per kernel")

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """See ``ProcessBackend.start_ranks``."""
        self._kind = CROWDED if is_crowded(orders) else 0
        super().start_ranks(orders, started)

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        ends = Ends()
        status_reader, status_writer = os.pipe()
        os.set_blocking(status_reader, False)
        wires = [ends.rank_channel.fileno(), ends.rank_stdout, ends.rank_stderr, self._payload, status_writer]
        try:
            pid = ensure_zygote().fork(pickle.dumps(self.complete(order)), wires, self._kind)
        except LaunchError:
            ends.close_kernel_side()
            os.close(status_reader)
            raise
        finally:
            ends.close_rank_side()
            os.close(status_writer)
        Ends.kernel_side.add(status_reader)
        return ZygoteRank(order.rank, pid, ends, status_reader)


def warm_up() -> None:
    """Start the server in the background; the launch that needs it reports a failure."""
    with suppress(OSError):
        ensure_zygote()
