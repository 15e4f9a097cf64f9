"""Start ranks by forking a clean server process that has imported torch but not initialised anything.

The server outlives launches. A kernel starts it once, after the cell that imports the launcher, and a host without a
notebook starts it when it has connected to the kernel. It ends when its control socket closes, which happens when that
process exits or ``shutdown()`` is called.

Why not use ``multiprocessing``'s forkserver? On 2 processors, with Python 3.11 and with torch and this package
preloaded, a launch of 16 ranks returned after 0.73 s with the forkserver, and after 0.47 s with this server, whose
memory is in huge pages, so that forks are cheaper. The forkserver's ranks outlived a killed kernel. They stay in the
kernel's process group, so an interrupt of the cell reaches all of them immediately, before the stop sequence. They get
the server's environment rather than the launch's, and import ``__main__`` again, which fails for a program read from a
pipe. The kernel gets a rank's exit code but not its peak memory. If the forkserver is suspended, ``start()`` waits
forever, and the launch cannot be stopped.
"""

from __future__ import annotations

import os
import pickle
import select
import selectors
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import IO, TYPE_CHECKING

from notebook_accelerate.errors import LaunchError, RunStoppedError
from notebook_accelerate.hardware.process_liveness import is_stopped
from notebook_accelerate.launch.processes import kernel_descriptors
from notebook_accelerate.launch.processes.fork_costs import is_crowded
from notebook_accelerate.launch.processes.fork_probe import wait_readable
from notebook_accelerate.launch.processes.interpreters import log_tail, start_interpreter, uninterrupted
from notebook_accelerate.launch.processes.pickled import PickledBackend
from notebook_accelerate.launch.processes.rank_pipes import RankPipes
from notebook_accelerate.launch.processes.rank_process import LocalRank, RankListener, RankProcess, pidfd_of
from notebook_accelerate.launch.processes.shared_imports import import_variables, trains
from notebook_accelerate.launch.state.rank_result import Exit

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


LENGTH = struct.Struct("!I")
STATUS = struct.Struct("!qq")
"""The server's message about an exited rank: the wait status, and the peak resident memory in KiB."""
CROWDED = 1 << 31
"""A flag in the length of a request. It is set if the ranks have more threads than there are processors."""
TRAINS = 1 << 30
"""A flag in the length of a request. If it is set, the server imports what an optimizer needs before it forks the rank.

A server that has ranks does not import it, because the import would delay reports that a rank has ended.
"""
_READ_BY_TORCH = (
    "GOMP_", "OMP_", "PYTORCH_", "TORCH_CPP_LOG_LEVEL", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_TRACE",
)  # fmt: skip
"""The prefixes of the variables that the server's import of torch reads, in addition to `import_variables`."""
_SET_LATER = frozenset({"OMP_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"})
"""Variables that torch reads again after its import, so that they take effect in a rank. Lightning sets the second."""
READY = b"\1"
"""The server's first message, sent once it has imported the modules that ranks need when they start."""
START_SECONDS = 120.0
"""How many seconds the server may take to import torch."""
REPORT_SECONDS = 0.05
"""How many seconds the server may take to report a rank's exit status, which usually takes less than 1 ms."""


class Zygote:
    """The server process, as seen and controlled by the kernel.

    Attributes:
        ranks: The process ids of the server's running ranks, which end when the server ends.
        retired: Whether the server is no longer used, because it failed to serve a request or is outdated.
        variables: The server's values of the environment variables that an import of torch reads.

    Args:
        variables: Environment variables that override the kernel's.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._requests = threading.Lock()
        self._owner = os.getpid()
        self._ready = self._loaded = self.retired = False
        changed = server_variables(variables or {})
        self.variables = server_variables(os.environ) | changed
        self._unread = 0  # Count the replies that are still to be read, even if their run has been stopped.
        self.ranks: set[int] = set()
        with ExitStack() as undo:
            self._control, theirs = map(undo.enter_context, socket.socketpair())
            self._log: IO[bytes] = undo.enter_context(tempfile.TemporaryFile())
            call = f"from notebook_accelerate.launch.processes.zygote_server import serve; serve({theirs.fileno()})"
            with uninterrupted():
                self._process = start_interpreter(call, [theirs.fileno()], self._log.fileno(), **changed)
            undo.pop_all()
        theirs.close()
        self._control.setblocking(False)

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def alive(self) -> bool:
        """Return whether the server is running, is not retired, and was started by this process."""
        return self._owner == os.getpid() and not self.retired and self._process.poll() is None

    def ready(self) -> bool:
        """Return whether the server is ready for requests. If it is not, it is still importing torch."""
        if not self._ready and self._requests.acquire(blocking=False):
            try:
                self._ready = self._control.recv(len(READY), socket.MSG_DONTWAIT) == READY
            except BlockingIOError:
                pass
            finally:
                self._requests.release()
        return self._ready

    def fork(
        self,
        order: bytes,
        descriptors: list[int],
        *,
        crowded: bool = False,
        trains: bool = False,
        stopping: Callable[[], bool] = lambda: False,
    ) -> int:
        """Make the server fork a rank, and return the id of the rank's process.

        Args:
            order: The rank's pickled order.
            descriptors: The descriptors of the channel, standard output, standard error, the payload, and the pipe for
                the status.
            crowded: Whether the ranks of the launch together have more threads than there are processors.
            trains: Whether the ranks will probably train a model.
            stopping: A function that returns whether the user has stopped the run.

        Raises:
            ServerStuckError: The server did not serve the request, and will not be used again.
            LaunchError: The server has exited.
            RunStoppedError: The user stopped the run during the call.
        """
        wait = Wait(self.pid, START_SECONDS, stopping)
        while not self._requests.acquire(timeout=SLICE_SECONDS):
            wait.check_stop()
        try:
            if self.retired:
                raise ServerStuckError("the server process did not reply to another run")
            flags = (CROWDED if crowded else 0) | (TRAINS if trains else 0)
            loads = trains and not self._loaded and not self.ranks
            pid = self._request(LENGTH.pack(len(order) | flags) + order, descriptors, wait, loads=loads)
            self._loaded = self._loaded or loads
        finally:
            self._requests.release()
        return pid

    def _request(self, request: bytes, descriptors: list[int], wait: Wait, *, loads: bool) -> int:
        try:
            if not self._ready:
                self._ready = receive(self._control, len(READY), wait) == READY
            if not loads:
                wait.begin_request()
            self._send(request, descriptors, wait)
            self._unread += 1
            pid = self._last_reply(wait)
        except (OSError, ServerStuckError) as error:
            tail = self.log_tail()
            self.retire()
            raise ServerStuckError(f"the server process did not reply: {error}{tail}") from error
        self.ranks.add(pid)
        return pid

    def _last_reply(self, wait: Wait) -> int:
        while self._unread:  # Count each reply as it is read, because a stop may leave some for the next request.
            reply = receive(self._control, LENGTH.size, wait)
            if len(reply) < LENGTH.size:
                raise LaunchError(f"the server process has ended{self.log_tail()}")
            self._unread -= 1
        return int(LENGTH.unpack(reply)[0])

    def _send(self, request: bytes, descriptors: list[int], wait: Wait) -> None:
        try:
            send(self._control, request, descriptors, wait)
        except RunStoppedError:  # Retire the server, which would take the next request for the rest of this one.
            self.retire()
            raise

    def log_tail(self) -> str:
        """Return the last part of the server's output, for an error message."""
        with suppress(ValueError):  # Another thread may have retired the server, and closed the file.
            return log_tail(self._log)
        return ""

    def release(self, rank: int) -> None:
        """Record that the process of a rank has ended. If it was the last one of a retired server, end the server."""
        self.ranks.discard(rank)
        if self.retired and not self.ranks and self._owner == os.getpid():
            self._end()

    def retire(self) -> None:
        """Retire the server. It ends immediately if it has no ranks, or else when its last rank ends."""
        self.retired = True
        if not self.ranks:
            self._end()

    def _end(self) -> None:
        self._control.close()
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # The server may be blocked by a disk.
            self._process.wait(timeout=5)
        self._log.close()

    def close(self) -> None:
        """End the server and all its ranks. Do nothing in a process that inherited this object."""
        if self._owner != os.getpid():
            return
        if not (self.ranks or self.retired or self.ready()):  # It would notice only after it has imported torch.
            self._end()
            return
        self._control.close()
        try:
            self._process.wait(timeout=0 if is_stopped(self.pid) else 5)
        except subprocess.TimeoutExpired:  # The server is still importing modules, or is suspended.
            self._end()
        self._log.close()


def server_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in ``environment`` that the imports of the server may read."""
    by_torch = {
        name: value for name, value in environment.items() if name.startswith(_READ_BY_TORCH) and name not in _SET_LATER
    }
    return by_torch | import_variables(environment)


_lock = threading.Lock()
_zygote: Zygote | None = None


def _renew_lock() -> None:
    """Replace the lock in a forked process, where nothing releases it if another thread held it during the fork."""
    global _lock  # noqa: PLW0603 - a lock that another thread held cannot be released
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def ensure_zygote(variables: Mapping[str, str] | None = None) -> Zygote:
    """Return the server. Start it first if it is not running, or if its imports have read other variables.

    Args:
        variables: The environment variables that the launch sets.
    """
    global _zygote  # noqa: PLW0603 - one server per kernel
    wanted = server_variables({**os.environ, **(variables or {})})
    with _lock:
        if _zygote is not None and _zygote.alive() and _zygote.variables != wanted:
            _zygote.retire()
        if _zygote is None or not _zygote.alive():
            if _zygote is not None and not _zygote.retired:
                _zygote.close()
            _zygote = Zygote(variables)
        return _zygote


def close_zygote() -> None:
    """End the server if it is running."""
    global _zygote  # noqa: PLW0603 - one server per kernel
    with _lock:
        if (ended := _zygote) is not None:
            _zygote = None  # Clear the variable first, so that no launch uses this server if close() is interrupted.
            ended.close()


class ZygoteRank(LocalRank):
    """A rank that was forked by the server, which also reports the rank's exit.

    Args:
        rank: The rank's global index.
        pid: The id of the rank's process.
        ends: The rank's channel and output pipes. This object uses the kernel's ends.
        status: The descriptor of the pipe to which the server writes the wait status.
        server: The server that forked the rank.
    """

    def __init__(self, rank: int, pid: int, ends: RankPipes, status: int, server: Zygote) -> None:
        super().__init__(rank, pid, ends, status)
        self._server, self._process = server, pidfd_of(pid)
        self._ended_at: float | None = None

    def connect(self, selector: selectors.BaseSelector, listener: RankListener) -> None:
        super().connect(selector, listener)
        if self._process is not None:
            selector.register(self._process, selectors.EVENT_READ, partial(self._on_end, listener))

    @property
    def needs_polling(self) -> bool:
        """Whether the rank has exited but the server, which may be suspended, has not reported that yet."""
        return self._ended_at is not None

    def _on_end(self, listener: RankListener) -> None:
        if self._process is not None:
            self._unregister(self._process)
        listener.on_end(self.rank)

    def poll(self) -> Exit | None:
        assert self.exit_descriptor is not None
        try:
            data = os.read(self.exit_descriptor, STATUS.size)
        except BlockingIOError:
            return self._unreported_end()
        if len(data) < STATUS.size:  # The server has died, and its ranks with it.
            return Exit(signal=9)
        return Exit.from_status(*STATUS.unpack(data))

    def _unreported_end(self) -> Exit | None:
        """Return an unknown exit if the rank has exited but the server fails to report how. Otherwise, return None."""
        if self._process is None or not wait_readable(self._process, 0.0):
            return None
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        late = time.monotonic() - self._ended_at
        stuck = late > STUCK_SECONDS or (late > REPORT_SECONDS and is_stopped(self._server.pid))
        return Exit() if stuck else None

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        super().disconnect(selector)
        if self._process is not None:
            self._unregister(self._process)

    def close(self) -> None:
        if self.exit_descriptor is not None:
            kernel_descriptors.discard(self.exit_descriptor)
            if self._process is not None:
                os.close(self._process)
                self._process = None
        super().close()
        self._server.release(self.pid)


class ZygoteBackend(PickledBackend):
    """Starts ranks by asking the server to fork them one by one."""

    _crowded = _trains = False

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        self._note, self._stopping, self._variables = note, stopping, config.env
        with suppress(OSError, LaunchError):  # Starting the first rank will report the error.
            if not ensure_zygote(self._variables).ready():
                note("waiting for the process that ranks are forked from to import torch, once per kernel")

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        self._crowded = is_crowded(orders)
        self._trains = trains(self.function, self.arguments)
        super().start_ranks(orders, started)

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        body = pickle.dumps(self.complete(order))
        try:
            return self._start_rank(order.rank, body)
        except ServerStuckError as error:
            self._note(f"{error}; starting another one")
            return self._start_rank(order.rank, body)

    def _start_rank(self, rank: int, order: bytes) -> RankProcess:
        server = ensure_zygote(self._variables)
        with ExitStack() as rank_side, ExitStack() as undo:
            ends = RankPipes()
            rank_side.callback(ends.close_rank_side)
            undo.callback(ends.close_kernel_side)
            status_reader, status_writer = os.pipe()
            rank_side.callback(os.close, status_writer)
            # Close the reader on an error, so that a suspended server later sees that the rank is no longer wanted.
            undo.callback(os.close, status_reader)
            os.set_blocking(status_reader, False)
            wires = [ends.rank_channel.fileno(), ends.rank_stdout, ends.rank_stderr, self._payload, status_writer]
            pid = server.fork(order, wires, crowded=self._crowded, trains=self._trains, stopping=self._stopping)
            undo.pop_all()
        kernel_descriptors.add(status_reader)
        return ZygoteRank(rank, pid, ends, status_reader, server)


def warm_up() -> None:
    """Start the server in the background. A failure is reported by the launch that needs the server."""
    with suppress(OSError, LaunchError):
        ensure_zygote()


# ---- waiting for the server while it makes progress and the user does not stop the run

STUCK_SECONDS = 5.0
"""A server that takes longer than this for a request is stuck, unless it is waiting for a processor or a disk."""
IDLE_SECONDS = 1.0
"""A sleeping server that has used no CPU time for this many seconds is not working on the request."""
SLICE_SECONDS = 0.05
"""Seconds between two checks of whether the user has stopped the run."""
MOST_PER_SLICE = 1.0
"""The maximum number of seconds that count between two checks. If more have passed, this process was suspended, perhaps
together with the server."""


class ServerStuckError(LaunchError):
    """The server process does not serve requests, because it is suspended, hangs or takes too long."""


class Wait:
    """Waits for the server during one request.

    Args:
        pid: The server's process id.
        seconds: Maximum number of seconds of one wait.
        stopping: A function that returns whether the user has stopped the run.
    """

    def __init__(self, pid: int, seconds: float, stopping: Callable[[], bool]) -> None:
        self._pid, self._seconds, self._stopping = pid, seconds, stopping
        self._importing = True

    def begin_request(self) -> None:
        """Expect quick replies from now on. Until now, the server may have been importing torch, which takes longer."""
        self._importing = False

    def check_stop(self) -> None:
        """Raise ``RunStoppedError`` if the user has stopped the run."""
        if self._stopping():
            raise RunStoppedError("the run was stopped while its ranks were starting")

    def until(self, source: socket.socket, event: int) -> None:
        """Wait until a socket is ready.

        Raises:
            ServerStuckError: The server does not make progress, or takes too long.
            RunStoppedError: The user stopped the run during the wait.
        """
        waiter = select.poll()  # Unlike select, poll works with descriptors of 1024 and above.
        waiter.register(source, event)
        waited, progress = 0.0, _Progress(self._pid, importing=self._importing)
        begin = time.monotonic()
        while not waiter.poll(min(SLICE_SECONDS, self._seconds) * 1000):
            self.check_stop()
            begin, before = time.monotonic(), begin
            waited += min(begin - before, MOST_PER_SLICE)
            if waited >= self._seconds:
                raise ServerStuckError(f"it took longer than {self._seconds:g} s")
            if waited >= STUCK_SECONDS - IDLE_SECONDS and (reason := progress.stuck(waited)):
                raise ServerStuckError(reason)


class _Progress:
    """Samples a process repeatedly to find out whether it is working on a request."""

    def __init__(self, pid: int, *, importing: bool) -> None:
        self._pid, self._importing = pid, importing
        self._first = self._last = -1.0
        self._moved = 0.0

    def stuck(self, waited: float) -> str:
        """Return why the process is not working on a request sent ``waited`` seconds ago, or "" if it is."""
        import psutil

        status, used = "", 0.0
        with suppress(psutil.Error):  # The process may be gone, or the system may hide it.
            process = psutil.Process(self._pid)
            status, used = str(process.status()), sum(process.cpu_times()[:2])
        if used != self._last:
            self._first = used if self._first < 0 else self._first
            self._last, self._moved = used, waited
        if waited < STUCK_SECONDS:
            return ""
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return "it is stopped (SIGSTOP)"
        if self._importing:
            return ""
        idle = waited - self._moved >= IDLE_SECONDS
        if idle and status not in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP):
            return f"it has not replied for {waited:.0f} s"
        return f"it has computed for {STUCK_SECONDS:g} s" if used - self._first > STUCK_SECONDS else ""


def receive(connection: socket.socket, size: int, wait: Wait) -> bytes:
    """Receive the next ``size`` bytes from a socket, or fewer if the server has exited."""
    data = b""
    while len(data) < size:
        wait.until(connection, select.POLLIN)
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def send(connection: socket.socket, data: bytes, descriptors: list[int], wait: Wait) -> None:
    """Send bytes, and pass the descriptors along with the first part."""
    left = memoryview(data)
    while left:
        wait.until(connection, select.POLLOUT)
        try:
            sent = socket.send_fds(connection, [left], descriptors) if descriptors else connection.send(left)
        except BlockingIOError:  # The buffer has room, but not for these descriptors.
            time.sleep(SLICE_SECONDS)
            continue
        left, descriptors = left[sent:], []
