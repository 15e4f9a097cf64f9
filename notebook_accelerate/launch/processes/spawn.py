"""Ranks as fresh interpreters, for platforms that cannot fork: slow to start, safe everywhere."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from notebook_accelerate.config.environ import inheritable
from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch.processes.pickled_start import PickledBackend, interpreter_command, uninterrupted
from notebook_accelerate.launch.processes.rank_process import Ends, OwnChild, RankProcess, pidfd_of

if TYPE_CHECKING:
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


class SpawnBackend(PickledBackend):
    """Starts one interpreter per rank."""

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        """See ``ProcessBackend.start_rank``."""
        ends = Ends()
        channel = ends.rank_channel.fileno()
        wires = (channel, ends.rank_stdout, ends.rank_stderr, self._payload)
        call = (
            "from notebook_accelerate.launch.processes.spawn import rank_main; "
            f"rank_main({channel}, {ends.rank_stdout}, {ends.rank_stderr}, {self._payload}, {os.getpid()})"
        )
        try:
            with uninterrupted():
                process = subprocess.Popen(
                    interpreter_command(call),
                    pass_fds=wires,
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                    env=inheritable(),
                )
        except OSError as error:
            ends.close_rank_side()
            ends.close_kernel_side()
            raise LaunchError(f"rank {order.rank} could not be started: {error}") from error
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # the supervisor reports the end of a rank that has died already
            process.stdin.write(pickle.dumps(self.complete(order)))
        process.returncode = 0  # the supervisor reaps it, to read its resource usage
        ends.close_rank_side()
        return OwnChild(order.rank, process.pid, ends, pidfd_of(process.pid))


def rank_main(channel: int, stdout: int, stderr: int, payload: int, parent: int) -> NoReturn:
    """Run a rank in a fresh interpreter; reads the order from standard input."""
    from notebook_accelerate.telemetry.pickling import load_file
    from notebook_accelerate.worker import entry

    entry.discard_interrupt(parent)
    order = pickle.load(sys.stdin.buffer)  # not until its end: a rank forked meanwhile may hold the other end open
    entry.main(order, entry.Wiring(channel, stdout, stderr, parent), lambda: load_file(payload), inherited=None)
