"""``join`` commands as processes, and replacements for programs that start them on other machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tests.support import kernel_forks
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 120.0
"""The time limit in seconds for steps in which interpreters import torch, which takes seconds on an idle machine."""
JOIN = (sys.executable, "-m", "notebook_accelerate", "join")
"""The start of the command line. ADDRESS:PORT and options follow."""
SRUN = """
# As `srun`: one task per node, with the caller's environment; SIGTERM reaches all; the exit code is one that is not 0.
nodes=$1; shift; pids=()
trap 'kill -TERM "${pids[@]}"' TERM
export SLURM_JOB_ID=7 SLURM_JOB_NUM_NODES=$nodes SLURM_NTASKS=$nodes SLURM_LOCALID=0
for ((node = 0; node < nodes; node++)); do
  SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
"""A bash script that acts like `srun`. Its arguments are the number of nodes and a command line."""
SSH = """
umask 077
trap 'rm -f "$1"' EXIT
cat > "$1"
stat -c 'mode %a' "$1" >&2
"$2" -m notebook_accelerate join "$3" --secret_file "$1"
"""
"""The command for a shell at the other end of `ssh`. Its arguments are the path of a file, Python and ADDRESS:PORT."""


_AS_COMMAND = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = {arguments!r}
runpy.run_module("notebook_accelerate", run_name="__main__", alter_sys=True)
"""


class JoinCommand:
    """A process, its child processes, and their output. They are killed at the end of a ``with`` block.

    A command that starts with `JOIN` is forked from a process that has imported torch, and so is its zygote. Programs
    that start such commands start interpreters.

    Args:
        command: The command line.
        env: All environment variables.
        sent: The input on the stdin of the process.
        forked: Whether the command may be forked.
    """

    def __init__(self, *command: str, env: Mapping[str, str], sent: str = "", forked: bool = True) -> None:
        self.command = command
        self._in, self._out, self._err = (tempfile.TemporaryFile() for _ in range(3))  # noqa: SIM115 - closed in close
        self._in.write(sent.encode())
        self._in.seek(0)
        found = self._fork(env) if forked and command[: len(JOIN)] == JOIN else None
        self.process = found or self._start(env)

    def _fork(self, env: Mapping[str, str]) -> kernel_forks.ForkedKernel | None:
        request = {
            "code": _AS_COMMAND.format(arguments=[*self.command[len(JOIN) - 1 :]]),
            "cwd": str(ROOT),
            "env": dict(env),
            "numbers": [0, 1, 2],
            "blocked": [],
            "spare": True,
        }
        return kernel_forks.fork_interpreter(request, *(file.fileno() for file in (self._in, self._out, self._err)))

    def _start(self, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # If a shell runs the tests in the background, they ignore SIGINT, which the child process would inherit.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return subprocess.Popen(
                self.command, cwd=ROOT, env=dict(env), stdin=self._in, stdout=self._out, stderr=self._err
            )
        finally:
            signal.signal(signal.SIGINT, before)

    @property
    def out(self) -> str:
        """The text that the process has written to stdout so far."""
        return os.pread(self._out.fileno(), 1 << 20, 0).decode()

    @property
    def err(self) -> str:
        """The text that the process has written to stderr so far."""
        return os.pread(self._err.fileno(), 1 << 20, 0).decode()

    @property
    def processes(self) -> list[psutil.Process]:
        """The process and its descendants."""
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def exit_code(self) -> int:
        """Wait for the process to exit, and return its exit code, which is negative if a signal killed it."""
        return self.process.wait(LIMIT)

    def wait_until_it_prints(self, text: str) -> None:
        """Wait until stderr contains ``text``."""
        until(lambda: text in self.err or self.process.poll() is not None, LIMIT)
        assert text in self.err

    def close(self) -> None:
        """Kill the process and its child processes."""
        if self.process.poll() is None:
            for process in reversed(self.processes):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()
        for file in (self._in, self._out, self._err):
            file.close()


__all__ = ["JOIN", "LIMIT", "SRUN", "SSH", "JoinCommand"]
