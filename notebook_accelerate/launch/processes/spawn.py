"""Start ranks as fresh interpreters, for platforms that cannot fork. This is slow, but works on all systems."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NoReturn

from notebook_accelerate.config.environ import inheritable
from notebook_accelerate.errors import LaunchError
from notebook_accelerate.launch.processes.interpreters import (
    existing_folder,
    interpreter_command,
    isolated_variables,
    uninterrupted,
)
from notebook_accelerate.launch.processes.pickled import PickledBackend
from notebook_accelerate.launch.processes.rank_pipes import RankPipes
from notebook_accelerate.launch.processes.rank_process import OwnChild, RankProcess, pidfd_of

if TYPE_CHECKING:
    from notebook_accelerate.telemetry.worker_order import WorkerOrder


class SpawnBackend(PickledBackend):
    """Starts a fresh interpreter for each rank."""

    def start_rank(self, order: WorkerOrder) -> RankProcess:
        body = pickle.dumps(self.complete(order))
        with ExitStack() as rank_side, ExitStack() as undo:
            ends = RankPipes()
            rank_side.callback(ends.close_rank_side)
            undo.callback(ends.close_kernel_side)
            try:
                process = self._start_interpreter(ends)
            except OSError as error:
                raise LaunchError(f"rank {order.rank} could not be started: {error}") from error
            undo.pop_all()
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # If the rank has already died, the supervisor reports that.
            process.stdin.write(body)
        process.returncode = 0  # Popen must not reap the process, because the supervisor reads its resource usage.
        return OwnChild(order.rank, process.pid, ends, pidfd_of(process.pid))

    def _start_interpreter(self, ends: RankPipes) -> subprocess.Popen[bytes]:
        channel = ends.rank_channel.fileno()
        wires = (channel, ends.rank_stdout, ends.rank_stderr, self._payload)
        call = (
            "from notebook_accelerate.launch.processes.spawn import rank_main; "
            f"rank_main({channel}, {ends.rank_stdout}, {ends.rank_stderr}, {self._payload}, {os.getpid()}, {_loaded()})"
        )
        with uninterrupted():
            return subprocess.Popen(
                interpreter_command(call),
                pass_fds=wires,
                stdin=subprocess.PIPE,
                start_new_session=True,
                env=isolated_variables(inheritable()),
                cwd=existing_folder(),
            )


def _loaded() -> list[str]:
    """Return the modules to import first, before a file such as the user's torch.py can replace one of them."""
    return [name for name in ("numpy", "torch") if name in sys.modules]


def rank_main(channel: int, stdout: int, stderr: int, payload: int, parent: int, preloaded: list[str]) -> NoReturn:
    """Run a rank in a fresh interpreter. Its order is read from standard input."""
    from notebook_accelerate.telemetry.pickling import load_file
    from notebook_accelerate.worker import entry

    entry.discard_interrupt(parent)
    for name in preloaded:
        importlib.import_module(name)
    # Don't read to end-of-file, because a rank that was forked in the meantime may hold the other end open.
    order = pickle.load(sys.stdin.buffer)
    descriptors = entry.RankDescriptors(channel, stdout, stderr, parent)
    entry.main(order, descriptors, lambda: load_file(payload), None, forked=False)
