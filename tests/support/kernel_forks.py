"""Kernels forked from a process that has imported torch and this package, instead of starting an interpreter for each.

A kernel started in the usual way takes 1.8 s of CPU time to import ipykernel and torch, half a second to import this
package and ipywidgets, and each rank forked from it takes another second for the imports of the first optimizer: half
of the time of the tests in kernels. A forked kernel runs ipykernel's own application, with its own process, session,
folder, environment and output.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

from tests.support import leaks
from tests.support.kernel_fork_server import READ_AT_START, ROOM, start_variables

PROVISIONER = "forked-for-tests"
ROOT = Path(__file__).resolve().parents[2]
SERVER = Path(__file__).with_name("kernel_fork_server.py")
_OWN_INTERPRETERS = ("TEST_NIGHTLY", "TEST_KERNEL_PATH", "TEST_HOSTED")
"""If one of these variables is set, every kernel starts its own interpreter."""
_environment = dict(os.environ)
"""The environment of the process that forks kernels, without the variables that tests set for child processes."""


def can_fork(changes: Mapping[str, str | None]) -> bool:
    """Return whether a forked kernel behaves the same with these changes to the environment.

    In nightly runs, with other versions of ipykernel, in hosted environments and on systems other than Linux, kernels
    are started in the usual way.
    """
    if not hasattr(os, "pidfd_open") or any(os.environ.get(name) for name in _OWN_INTERPRETERS):
        return False
    changed = [name for name, value in changes.items() if os.environ.get(name) != value]
    return not any(name.startswith(READ_AT_START) for name in changed)


class ForkedKernel:
    """A kernel's process, with the part of ``subprocess.Popen`` that `jupyter_client` uses."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, forks: KernelForks) -> None:
        self.pid, self._forks = pid, forks
        self._ended = os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None if the process is still running. This call also reaps an exited process."""
        if self._code is None and select.select([self._ended], [], [], 0)[0]:
            self._code = self._forks.ask({"reap": self.pid})
            os.close(self._ended)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code."""
        if self._code is None:
            select.select([self._ended], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the process to end."""
        self.send_signal(signal.SIGTERM)


class KernelForks:
    """The process that forks kernels."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, str(SERVER), str(theirs.fileno()), " " * ROOM]
        env = {**_environment, **started_with(), "TEST_ROOM": " " * ROOM}
        fds = (theirs.fileno(),)
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=fds, start_new_session=True)
        theirs.close()
        leaks.LASTING |= {self.process.pid, str(Path(f"/proc/self/fd/{self._socket.fileno()}").readlink())}

    def ask(self, request: dict[str, Any], *descriptors: int) -> int:
        """Send a request, and return the answer, which is a number."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        answer = self._socket.recv(100)
        if not answer:
            raise RuntimeError("the process that forks kernels exited")
        return int(answer)

    def start(self, argv: list[str], env: Mapping[str, str], cwd: str, out: int, err: int) -> ForkedKernel:
        """Fork a kernel."""
        return ForkedKernel(self.ask({"argv": argv, "env": dict(env), "cwd": cwd}, out, err), self)

    def close(self) -> None:
        """End the process, and with it the remaining kernels."""
        self._socket.close()
        self.process.wait()


def write_spec(folder: Path, command: Sequence[str] = (sys.executable,), *, forked: bool = True) -> None:
    """Write the specification of a kernel named ``python3`` into an empty folder of that name.

    Args:
        folder: The folder to write to.
        command: The command that starts the kernel's interpreter.
        forked: Whether the kernel is forked.
    """
    folder.mkdir(parents=True)
    argv = [*command, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    provisioner = {"metadata": {"kernel_provisioner": {"provisioner_name": PROVISIONER}}} if forked else {}
    contents = {"argv": argv, "display_name": "test", "language": "python", **provisioner}
    (folder / "kernel.json").write_text(json.dumps(contents))


def started_with() -> dict[str, str]:
    """Return the variables for every kernel's interpreter.

    ``TEST_KERNEL_PATH`` is a folder with another ipykernel, for the tests with several versions.
    """
    places = os.environ.get("TEST_KERNEL_PATH"), str(ROOT), os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, places))
    return {"PYTHONPATH": path, "PYDEVD_DISABLE_FILE_VALIDATION": "1", "PYTHONFAULTHANDLER": "1"}


@cache
def _forks(_process: int) -> KernelForks:
    forks = KernelForks()
    atexit.register(forks.close)
    return forks


def fork_interpreter(request: dict[str, Any], *descriptors: int) -> ForkedKernel | None:
    """Fork an interpreter that runs code. Return None if its environment is different from that of forked processes."""
    if not can_fork({}) or start_variables(request["env"]) != start_variables(_environment):
        return None
    forks = _forks(os.getpid())
    return ForkedKernel(forks.ask(request, *descriptors), forks)


class ForkingProvisioner(LocalProvisioner):
    """Forks a kernel where jupyter_client would otherwise start an interpreter."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Fork a kernel whose command is equivalent to ``ipykernel_launcher``."""
        arguments = cmd[cmd.index("ipykernel_launcher") + 1 :]
        out, err = ((kwargs.get(name) or getattr(sys, name)).fileno() for name in ("stdout", "stderr"))
        cwd = kwargs["cwd"]
        self.process: Any = _forks(os.getpid()).start(arguments, kwargs["env"], cwd, out, err)
        self.pid = self.pgid = self.process.pid
        self.cwd = cwd
        return self.connection_info


KernelProvisionerFactory.instance().provisioners[PROVISIONER] = EntryPoint(
    PROVISIONER, f"{__name__}:{ForkingProvisioner.__name__}", KernelProvisionerFactory.GROUP_NAME
)
