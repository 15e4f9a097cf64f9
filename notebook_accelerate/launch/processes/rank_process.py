"""The small interface behind which every start method lives: how ranks are started, heard and ended."""

from __future__ import annotations

import os
import selectors
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from notebook_accelerate.debug.process_inspection import Look, Outside
from notebook_accelerate.errors import ChannelClosedError
from notebook_accelerate.telemetry import Channel, Stamped
from notebook_accelerate.telemetry.channel import Sender

if TYPE_CHECKING:
    from notebook_accelerate.config.launch_config import LaunchConfig
    from notebook_accelerate.telemetry.worker_order import WorkerOrder

PIPE_BYTES = 1 << 20
"""Asked-for size of an output pipe: a rank that writes in bursts does not wait for the kernel."""
READ_BYTES = 1 << 18


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        code: Exit status; None when a signal ended it, or when it is not known.
        signal: Number of the signal that ended it; None otherwise.
        max_rss: Peak resident memory in bytes; 0 when not known.
        lost: Why nothing is known of its end, as "node 1 (c3-n07) was lost"; "" when it is known.
    """

    code: int | None = None
    signal: int | None = None
    max_rss: int = 0
    lost: str = ""

    @classmethod
    def from_status(cls, status: int, max_rss_kib: int) -> Exit:
        """Read what ``os.wait4`` returns."""
        code = os.waitstatus_to_exitcode(status)
        return cls(code if code >= 0 else None, -code if code < 0 else None, max_rss_kib * 1024)


class Ends:
    """The kernel's and the rank's ends of one rank's channel and output pipes."""

    kernel_side: set[int] = set()  # noqa: RUF012 - all runs of this process share it on purpose
    """Descriptors of this process that no forked rank may keep open."""

    def __init__(self) -> None:
        self.channel, self.rank_channel = Channel.pair()
        self.stdout, self.rank_stdout = _pipe()
        self.stderr, self.rank_stderr = _pipe()
        self.kernel_side |= {self.stdout, self.stderr}

    def close_rank_side(self) -> None:
        """Close, in the kernel, what belongs to the rank, so that its end is seen."""
        self.rank_channel.close()
        os.close(self.rank_stdout)
        os.close(self.rank_stderr)

    def close_kernel_side(self) -> None:
        """Close what belongs to the kernel."""
        self.channel.close()
        for descriptor in (self.stdout, self.stderr):
            self.kernel_side.discard(descriptor)
            os.close(descriptor)


def _pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    with suppress(ImportError, AttributeError, OSError):
        import fcntl

        fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return reader, writer


class RankListener(Protocol):
    """Who hears the ranks; called on the thread that waits on the selector."""

    def take_output(self, rank: int, stream: str, data: bytes) -> None:
        """A rank has written ``data``; ``b""`` is the end of the stream."""

    def take_frames(self, rank: int, data: bytes) -> None:
        """Bytes of a rank's channel have come."""

    def take_aside(self, rank: int, data: bytes) -> None:
        """Whole frames have come that another one says in the rank's name."""

    def take_end(self, rank: int) -> None:
        """A rank may have ended: ``poll`` tells."""


class RankProcess(ABC):
    """One started rank, as its supervisor sees it, wherever it runs.

    Attributes:
        rank: Global index.
        local_rank: Index on its machine.
        pid: Its process, which leads a process group of its own.
        node: Index of its machine in the run.
        host: Name of its machine; "" for this one.
        channel: The way down to it.
        asks_here: Whether its questions are for this notebook's user, and not another's.
    """

    channel: Sender
    asks_here: bool = True

    def __init__(self, rank: int, pid: int, *, local_rank: int = 0, node: int = 0, host: str = "") -> None:
        self.rank, self.pid, self.local_rank, self.node, self.host = rank, pid, local_rank, node, host

    @property
    def must_be_asked(self) -> bool:
        """Whether nothing tells of its end, so that ``poll`` must be called now and then."""
        return False

    @abstractmethod
    def poll(self) -> Exit | None:
        """Return how it ended, reaping it; None while it runs."""

    @abstractmethod
    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Signal the rank, or everything in its process group."""

    @abstractmethod
    def connect(self, selector: selectors.BaseSelector, hearing: RankListener) -> None:
        """Register what the rank is heard by; the data of each registration is called when it is ready."""

    @abstractmethod
    def drain(self, hearing: RankListener, *, channel: bool) -> None:
        """Take in all output that is there now, and what the channel holds too."""

    @abstractmethod
    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """Take back the registrations that are left."""

    def dated(self, messages: list[Stamped]) -> list[Stamped]:
        """Return what has come by this machine's clock."""
        return messages

    def await_end(self, timeout: float) -> None:
        """Wait for the end of a rank that was killed, so that it is reaped."""
        deadline = time.monotonic() + timeout
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)

    @abstractmethod
    def open_dump(self, path: str) -> None:
        """The rank's stacks will appear in ``path`` on its machine."""

    @abstractmethod
    def pass_on(self, data: bytes) -> None:
        """Send the rank frames that somebody else has encoded; a rank that is gone needs none."""

    @abstractmethod
    def look(self) -> Look:
        """Look at the rank without its help; safe from any thread."""

    @abstractmethod
    def close(self) -> None:
        """End what the rank left running in its group, and close the kernel's descriptors."""


class LocalRank(RankProcess):
    """A rank on this machine.

    Args:
        rank: Global index.
        pid: Its process.
        ends: The kernel's ends of its channel and pipes.
        exit_descriptor: Becomes readable when it ends; None where the system has no such thing.
    """

    def __init__(self, rank: int, pid: int, ends: Ends, exit_descriptor: int | None) -> None:
        super().__init__(rank, pid)
        self.ends, self.exit_descriptor = ends, exit_descriptor
        self.channel: Channel = ends.channel
        self._outside = Outside(pid)
        self._open = {"stdout": ends.stdout, "stderr": ends.stderr}
        self._selector: selectors.BaseSelector | None = None

    @property
    def must_be_asked(self) -> bool:
        """See ``RankProcess.must_be_asked``."""
        return self.exit_descriptor is None

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """See ``RankProcess.send_signal``."""
        with suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def connect(self, selector: selectors.BaseSelector, hearing: RankListener) -> None:
        """See ``RankProcess.connect``."""
        self._selector = selector
        for stream, descriptor in self._open.items():
            selector.register(descriptor, selectors.EVENT_READ, partial(self._read_output, hearing, stream))
        selector.register(self.channel, selectors.EVENT_READ, partial(self._read_channel, hearing))
        if self.exit_descriptor is not None:
            selector.register(self.exit_descriptor, selectors.EVENT_READ, partial(hearing.take_end, self.rank))

    def _read_output(self, hearing: RankListener, stream: str) -> int:
        """Read once; return how many bytes there were."""
        descriptor = self._open[stream]
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            del self._open[stream]
            self._unregister(descriptor)
        hearing.take_output(self.rank, stream, data)
        return len(data)

    def _read_channel(self, hearing: RankListener) -> bool:
        try:
            data = self.channel.receive_bytes()
        except ChannelClosedError:
            self._unregister(self.channel)
            return False
        hearing.take_frames(self.rank, data)
        return True

    def drain(self, hearing: RankListener, *, channel: bool) -> None:
        """See ``RankProcess.drain``."""
        for stream in list(self._open):
            left = PIPE_BYTES  # no more can be there now: a process that the rank left behind may write without end
            while left > 0 and (count := self._read_output(hearing, stream)):
                left -= count
        # Not until its end: a process that the rank left behind, as a DataLoader's worker, may hold it open.
        while channel and self.channel.readable() and self._read_channel(hearing):
            pass

    def disconnect(self, selector: selectors.BaseSelector) -> None:
        """See ``RankProcess.disconnect``."""
        for source in (*self._open.values(), self.channel, self.exit_descriptor):
            if source is not None:
                self._unregister(source)

    def _unregister(self, source: int | Channel) -> None:
        if self._selector is not None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(source)

    def open_dump(self, path: str) -> None:
        """See ``RankProcess.open_dump``."""
        self._outside.open_dump(path)

    def pass_on(self, data: bytes) -> None:
        """See ``RankProcess.pass_on``."""
        with suppress(ChannelClosedError):
            self.channel.send_bytes(data)

    def look(self) -> Look:
        """See ``RankProcess.look``."""
        return self._outside.look(self.send_signal)

    def close(self) -> None:
        """See ``RankProcess.close``."""
        self.send_signal(signal.SIGKILL, group=True)
        self.ends.close_kernel_side()
        self._outside.close()
        if self.exit_descriptor is not None:
            os.close(self.exit_descriptor)
            self.exit_descriptor = None


class ProcessBackend(ABC):
    """Starts ranks as processes. One object serves one attempt of one launch.

    Args:
        function: What every rank runs.
        arguments: Its positional arguments.

    Raises:
        SerializationError: The function or its arguments cannot travel to such a process.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.function, self.arguments = function, arguments

    def hear(self, config: LaunchConfig, note: Callable[[str], None], stopping: Callable[[], bool]) -> None:
        """Be told of the launch, before anything is started; most methods need not know.

        Args:
            config: What was asked for.
            note: Shows the user a line while the start takes its time.
            stopping: Whether the run is to be stopped before its ranks have started.
        """
        return

    def start_ranks(self, orders: Sequence[WorkerOrder], started: Callable[[RankProcess], None]) -> None:
        """Start the ranks of an attempt.

        Args:
            orders: One for each rank, in order.
            started: Called with each rank as soon as it has started, so that it is ended if a later one does not.

        Raises:
            LaunchError: One could not be started.
        """
        for local_rank, order in enumerate(orders):
            process = self.start_rank(order)
            process.local_rank = local_rank
            started(process)

    @abstractmethod
    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """Start one rank.

        Raises:
            LaunchError: The process could not be started.
        """

    def close(self) -> None:
        """Let go of what was needed for starting; the ranks go on."""
        return


def pidfd_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when ``pid`` ends, where the system has such."""
    if not hasattr(os, "pidfd_open"):
        return None
    with suppress(OSError):
        return os.pidfd_open(pid)
    return None


class OwnChild(LocalRank):
    """A rank that is this process's own child."""

    def poll(self) -> Exit | None:
        """See ``RankProcess.poll``."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        return Exit.from_status(status, usage.ru_maxrss) if pid else None


__all__ = ["Ends", "Exit", "LocalRank", "OwnChild", "ProcessBackend", "RankListener", "RankProcess", "pidfd_of"]
