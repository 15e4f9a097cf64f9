"""The interface of the start methods: how to start ranks, read from them and end them."""

from __future__ import annotations

import os
import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from notebook_accelerate.debugging.process_stacks import ProcessInspector, ProcessStacks
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.launch.processes.orphan_guard import orphan_guard
from notebook_accelerate.launch.processes.rank_pipes import PIPE_BYTES, RankPipes
from notebook_accelerate.launch.state.rank_result import Exit
from notebook_accelerate.telemetry import Channel, Stamped
from notebook_accelerate.telemetry.channel import READ_BYTES, Sender

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


class RankListener(Protocol):
    """Handles what ranks send. Its methods are called on the thread that waits on the selector."""

    def on_output(self, rank: int, stream: str, data: bytes) -> None:
        """Handle output of a rank. Empty ``data`` means the end of the stream."""

    def on_frames(self, rank: int, data: bytes) -> None:
        """Handle bytes from a rank's channel."""

    def on_host_frames(self, rank: int, data: bytes) -> None:
        """Handle complete frames that another process, such as a host, sends on behalf of a rank."""

    def on_end(self, rank: int) -> None:
        """Check with ``poll`` whether a rank has exited, and handle the exit."""


class RankProcess(ABC):
    """A rank that has started, on this machine or another one.

    Attributes:
        rank: The rank's global index.
        local_rank: The rank's index on its machine.
        pid: The id of the rank's process, which leads its own process group.
        node: Index of the rank's machine in the run.
        host: Name of that machine, or "" for this one.
        channel: Sends events to the rank.
    """

    channel: Sender

    def __init__(self, rank: int, pid: int, *, local_rank: int = 0, node: int = 0, host: str = "") -> None:
        self.rank, self.pid, self.local_rank, self.node, self.host = rank, pid, local_rank, node, host

    @property
    def needs_polling(self) -> bool:
        """Whether ``poll`` must be called regularly, because nothing reports the exit of the rank."""
        return False

    @abstractmethod
    def poll(self) -> Exit | None:
        """Reap the rank and return how it ended, or None if it is still running."""

    @abstractmethod
    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the rank, or to its whole process group."""

    @abstractmethod
    def connect(self, selector: selectors.BaseSelector, listener: RankListener) -> None:
        """Register the rank's streams, each with a callback that reads the stream and calls ``listener``."""

    @abstractmethod
    def drain(self, listener: RankListener, *, channel: bool) -> None:
        """Read all available output and, if ``channel`` is set, all available frames."""

    @abstractmethod
    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Remove the registrations that the rank still has."""

    def in_local_time(self, messages: list[Stamped]) -> list[Stamped]:
        """Convert the times of messages to this machine's clock."""
        return messages

    def await_end(self, timeout: float) -> None:
        """Wait until a killed rank has exited, for at most ``timeout`` seconds, and reap it."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    def take_descriptors(self, count: int) -> tuple[int, ...]:
        """Return the next descriptors that the rank has sent. The caller owns them.

        A rank on another machine cannot send descriptors, so the result is empty.
        """
        return ()

    @abstractmethod
    def open_dump(self, path: str) -> None:
        """Open the file to which the rank writes its stacks, on the rank's machine."""

    @abstractmethod
    def send_frames(self, data: bytes) -> None:
        """Send encoded frames to the rank, or do nothing if the rank has ended."""

    @abstractmethod
    def capture_stacks(self) -> ProcessStacks:
        """Read the rank's stacks from outside its process. Safe to call from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Kill the processes that are still running in the rank's group, and close the kernel's descriptors."""


class LocalRank(RankProcess):
    """A rank on this machine.

    Args:
        rank: The rank's global index.
        pid: The id of the rank's process.
        ends: The rank's channel and output pipes. This object uses the kernel's ends.
        exit_descriptor: A descriptor that becomes readable when the rank exits, or None if the system provides none.
    """

    def __init__(self, rank: int, pid: int, ends: RankPipes, exit_descriptor: int | None) -> None:
        super().__init__(rank, pid)
        self.ends, self.exit_descriptor = ends, exit_descriptor
        self.channel: Channel = ends.channel
        self._inspector = ProcessInspector(pid)
        self._open = {"stdout": ends.stdout, "stderr": ends.stderr}
        self._selector: selectors.BaseSelector | None = None
        orphan_guard.add_rank()

    @property
    def needs_polling(self) -> bool:
        return self.exit_descriptor is None

    def send_signal(self, number: int, *, group: bool = False) -> None:
        if group:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)
        with suppress(ProcessLookupError, PermissionError):  # The rank may have left its process group.
            self._signal_process(number)

    def _signal_process(self, number: int) -> None:
        os.kill(self.pid, number)

    def connect(self, selector: selectors.BaseSelector, listener: RankListener) -> None:
        self._selector = selector
        for stream, descriptor in self._open.items():
            selector.register(descriptor, selectors.EVENT_READ, partial(self._read_output, listener, stream))
        selector.register(self.channel, selectors.EVENT_READ, partial(self._read_channel, listener))
        if self.exit_descriptor is not None:
            selector.register(self.exit_descriptor, selectors.EVENT_READ, partial(listener.on_end, self.rank))

    def _read_output(self, listener: RankListener, stream: str) -> int:
        """Read from a stream once, pass the data on, and return the number of bytes."""
        descriptor = self._open[stream]
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            del self._open[stream]
            self._unregister(descriptor)
        listener.on_output(self.rank, stream, data)
        return len(data)

    def _read_channel(self, listener: RankListener) -> bool:
        try:
            data = self.channel.receive_bytes()
        except ChannelClosedError:
            self._unregister(self.channel)
            return False
        listener.on_frames(self.rank, data)
        return True

    def drain(self, listener: RankListener, *, channel: bool) -> None:
        for stream in list(self._open):
            # Read no more than a pipe can hold, because a process started by the rank may outlive it and keep writing.
            left = PIPE_BYTES
            while left > 0 and (count := self._read_output(listener, stream)):
                left -= count
        # Don't wait for end-of-file, because a process that outlives the rank, such as a DataLoader worker, may keep
        # the channel open.
        while channel and self.channel.readable() and self._read_channel(listener):
            pass

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        for source in (*self._open.values(), self.channel, self.exit_descriptor):
            if source is not None:
                self._unregister(source)

    def _unregister(self, source: int | Channel) -> None:
        if self._selector is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(source)

    def take_descriptors(self, count: int) -> tuple[int, ...]:
        received = self.channel.descriptors
        return tuple(received.popleft() for _ in range(count)) if received and len(received) >= count else ()

    def open_dump(self, path: str) -> None:
        self._inspector.open_dump(path)

    def send_frames(self, data: bytes) -> None:
        with suppress(ChannelClosedError):
            self.channel.send_bytes(data)

    def capture_stacks(self) -> ProcessStacks:
        return self._inspector.read_stacks(self.send_signal)

    def close(self) -> None:
        # Signal only the group, because the rank's own process id may have been reused.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.ends.close_kernel_side()
        self._inspector.close()
        if self.exit_descriptor is not None:
            os.close(self.exit_descriptor)
            self.exit_descriptor = None
        orphan_guard.remove_rank()


# ---- starting ranks


class ProcessBackend(ABC):
    """Starts the ranks of one attempt as processes.

    Args:
        function: The function that every rank runs.
        arguments: The function's positional arguments.

    Raises:
        SerializationError: The function or its arguments cannot be sent to the ranks.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def configure(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        """Receive the launch configuration before ranks start. Most start methods ignore it.

        Args:
            config: The launch configuration.
            note: A function that shows the user a line, for a slow start.
            stopping: A function that returns whether the user has stopped the run, for a slow start.
        """
        return

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """Start the ranks of an attempt.

        Args:
            orders: One order per rank, sorted by rank.
            started: A function to call with each rank once the rank has started, so that the caller can end it if a
                later rank fails to start.

        Raises:
            LaunchError: A rank could not be started.
        """
        for local_rank, order in enumerate(orders):
            process = self.start_rank(order)
            process.local_rank = local_rank
            started(process)
        orphan_guard.ensure()

    @abstractmethod
    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """Start one rank.

        Raises:
            LaunchError: The process could not be started.
        """

    def close(self) -> None:
        """Release what was needed to start the ranks, such as the function and its arguments, but keep the ranks."""
        self.function, self.arguments = _released, ()

    def prepare_next(self) -> None:
        """Prepare for the next launch. Called in the background after a run."""
        return


def _released() -> None:
    """A placeholder for the function once the ranks have started."""


def pidfd_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process exits, or None if the system has no such descriptors."""
    if not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):
        return os.pidfd_open(pid)
    return None


class OwnChild(LocalRank):
    """A rank that is a child of this process."""

    def poll(self) -> Exit | None:
        """Reap the rank and return how it ended, or None if it is still running.

        User code may have reaped the process already, by calling ``os.wait`` in a thread or by ignoring SIGCHLD. How
        the process ended is then unknown.
        """
        try:
            if self.exit_descriptor is not None and not _has_ended(self.exit_descriptor):
                return None
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:
            return Exit()
        return Exit.from_status(status, usage.ru_maxrss) if pid else None

    def _signal_process(self, number: int) -> None:
        if self.exit_descriptor is None:
            super()._signal_process(number)
        # Use the descriptor, because the process id may have been reused if user code has reaped the rank.
        else:
            signal.pidfd_send_signal(self.exit_descriptor, number)


def _has_ended(pidfd: int) -> bool:
    """Return whether a child has exited and waits to be reaped, or True if the system cannot tell.

    Raises:
        ChildProcessError: The child has already been reaped.
    """
    by_pidfd = getattr(os, "P_PIDFD", None)  # The constant is missing if Python was built with an older libc.
    if by_pidfd is None:
        return True
    try:
        return os.waitid(by_pidfd, pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        raise
    except OSError:  # Linux 5.3 supports pidfds, but not this call.
        return True
