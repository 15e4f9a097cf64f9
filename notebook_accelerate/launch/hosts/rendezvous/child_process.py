"""Starts the rendezvous process: forked from the server process that has imported torch, or a new interpreter."""

from __future__ import annotations

import os
import select
import subprocess
from contextlib import suppress

from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch.processes.pickled_start import start_interpreter
from notebook_accelerate.launch.processes.rank_process import Ends
from notebook_accelerate.launch.processes.zygote import HELPER, running_zygote

TARGET = "notebook_accelerate.launch.hosts.rendezvous.rendezvous_loop:main"


class ForkedChildProcess:
    """A child of the server process, which reports its end.

    Args:
        pid: Its process id.
        status: Descriptor of the pipe that the server reports to.
    """

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status = pid, status

    def ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for its end, and return whether it has ended; the server reaps it."""
        waiter = select.poll()
        waiter.register(self._status, select.POLLIN)
        return bool(waiter.poll(seconds * 1000))

    def close(self) -> None:
        """Release its descriptor."""
        Ends.kernel_side.discard(self._status)
        os.close(self._status)


class SpawnedChildProcess:
    """A child of this kernel: a new interpreter, which needs seconds to import torch.

    Args:
        channel: The descriptor of its channel to the kernel.
        log: The descriptor of a file for its output.
    """

    def __init__(self, channel: int, log: int) -> None:
        module, _, name = TARGET.partition(":")
        call = f"from {module} import {name}; {name}({channel})"
        self._process = start_interpreter(call, [channel], log, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
        self.pid = self._process.pid

    def ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for its end, reap it, and return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll() is not None

    def close(self) -> None:
        """Reap it."""
        self._process.poll()


def start(channel: int, log: int) -> ForkedChildProcess | SpawnedChildProcess:
    """Start the process.

    Args:
        channel: The descriptor of its channel to the kernel.
        log: The descriptor of a file for its output.
    """
    server = running_zygote()
    if server is None:
        return SpawnedChildProcess(channel, log)
    reader, writer = os.pipe()
    try:
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - replaces a rank's function
            pid = server.fork(TARGET.encode(), [channel, log, log, nothing.fileno(), writer], HELPER)
    except LaunchError:
        os.close(reader)
        return SpawnedChildProcess(channel, log)
    finally:
        os.close(writer)
    Ends.kernel_side.add(reader)
    return ForkedChildProcess(pid, reader)
