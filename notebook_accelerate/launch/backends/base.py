"""The small interface behind which every start method lives, and the row table that names them."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from notebook_accelerate.telemetry import Channel

if TYPE_CHECKING:
    from notebook_accelerate.launch.worker import WorkerOrder

PIPE_BYTES = 1 << 20
"""Asked-for size of an output pipe: a rank that writes in bursts does not wait for the kernel."""


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        code: Exit status; None when a signal ended it, or when it is not known.
        signal: Number of the signal that ended it; None otherwise.
        max_rss: Peak resident memory in bytes; 0 when not known.
    """

    code: int | None = None
    signal: int | None = None
    max_rss: int = 0

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


class RankProcess(ABC):
    """One started rank, as its supervisor sees it.

    Attributes:
        rank: Global index.
        pid: Its process, which leads a process group of its own.
        ends: The kernel's ends of its channel and pipes.
        exit_descriptor: Becomes readable when it ends; None where the system has no such thing.
    """

    def __init__(self, rank: int, pid: int, ends: Ends, exit_descriptor: int | None) -> None:
        self.rank, self.pid, self.ends, self.exit_descriptor = rank, pid, ends, exit_descriptor

    @abstractmethod
    def poll(self) -> Exit | None:
        """Return how it ended, reaping it; None while it runs."""

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Signal the rank, or everything in its process group."""
        with suppress(ProcessLookupError, PermissionError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def close(self) -> None:
        """End what the rank left running in its group, and close the kernel's descriptors."""
        self.send_signal(signal.SIGKILL, group=True)
        self.ends.close_kernel_side()
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


class OwnChild(RankProcess):
    """A rank that is this process's own child."""

    def poll(self) -> Exit | None:
        """See ``RankProcess.poll``."""
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        return Exit.from_status(status, usage.ru_maxrss) if pid else None


__all__ = ["Ends", "Exit", "OwnChild", "ProcessBackend", "RankProcess", "pidfd_of"]
