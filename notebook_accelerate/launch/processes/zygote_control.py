"""Sends to the server process and receives from it: waits only while it works and the run is not to be stopped."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from notebook_accelerate.errors import LaunchError, RunStoppedError
from notebook_accelerate.hardware.process_stat import STATE, read_stat

STUCK_SECONDS = 5.0
"""A server that has not served a request for this long is stuck, unless it waits for a processor or a disk."""
IDLE_SECONDS = 1.0
"""Seconds without processor time after which a server that sleeps does not work on the request."""
SLICE_SECONDS = 0.05
"""Seconds between two checks whether the run is to be stopped."""
MOST_PER_SLICE = 1.0
"""A check that comes later than that was delayed by a suspension of this process, which the server may have shared."""


class ServerStuckError(LaunchError):
    """The server process does not serve: it is stopped, hangs or takes too long."""


class Wait:
    """The waits of one request.

    Args:
        pid: The server.
        seconds: Maximum seconds of one wait.
        stopping: Returns whether the run is to be stopped.
    """

    def __init__(self, pid: int, seconds: float, stopping: Callable[[], bool]) -> None:
        self._pid, self._seconds, self._stopping = pid, seconds, stopping
        self._importing = True

    def begin_request(self) -> None:
        """Expect replies at once; until then the server may be importing torch, which may take long."""
        self._importing = False

    def check_stop(self) -> None:
        """Raise ``RunStoppedError`` if the run is to be stopped."""
        if self._stopping():
            raise RunStoppedError("the run was stopped while its ranks were started")

    def until(self, source: socket.socket, event: int) -> None:
        """Wait until a socket is ready.

        Raises:
            ServerStuckError: The server is stuck.
            RunStoppedError: The run is to be stopped.
        """
        waiter = select.poll()  # select has a limit of 1024 descriptors
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
    """Whether a process works on a request, by looking at it repeatedly."""

    def __init__(self, pid: int, *, importing: bool) -> None:
        self._pid, self._importing = pid, importing
        self._first = self._last = -1.0
        self._moved = 0.0

    def stuck(self, waited: float) -> str:
        """Return why the process does not work on a request that was sent ``waited`` seconds ago; "" while it does."""
        import psutil

        status, used = "", 0.0
        with suppress(psutil.Error):  # there is no /proc
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


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP)."""
    if fields := read_stat(Path(f"/proc/{pid}")):  # a third of psutil's time
        return fields[STATE] in ("T", "t")
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OSError):  # it has ended, or this process has no descriptor left
        return False


def receive(connection: socket.socket, size: int, wait: Wait) -> bytes:
    """Return the next ``size`` bytes of a socket; fewer where the server has ended."""
    data = b""
    while len(data) < size:
        wait.until(connection, select.POLLIN)
        part = connection.recv(size - len(data))
        if not part:
            break
        data += part
    return data


def send(connection: socket.socket, data: bytes, descriptors: list[int], wait: Wait) -> None:
    """Send bytes, the first of them with descriptors."""
    left = memoryview(data)
    while left:
        wait.until(connection, select.POLLOUT)
        try:
            sent = socket.send_fds(connection, [left], descriptors) if descriptors else connection.send(left)
        except BlockingIOError:  # there is room, but not for these
            time.sleep(SLICE_SECONDS)
            continue
        left, descriptors = left[sent:], []


__all__ = ["SLICE_SECONDS", "STUCK_SECONDS", "ServerStuckError", "Wait", "is_stopped", "receive", "send"]
