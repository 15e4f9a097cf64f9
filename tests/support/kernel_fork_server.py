"""The process that forks kernels; see ``kernel_forks``.

``python kernel_fork_server.py DESCRIPTOR`` exits when the other end of the socket is closed. It is a separate program,
because each kernel inherits its imports.

A kernel's zygote would import torch again. Instead, each kernel begins by forking spare processes: one becomes its
zygote, the others the processes of its detached runs. If a test itself launches a detached run or a command that joins
a run, that process is forked, too, and forks a spare process for its zygote.
"""

from __future__ import annotations

import ctypes
import fcntl
import inspect
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, NoReturn

from tests.support.forked_imports import import_for_forks

PRELOADED = (
    "ipykernel.ipkernel",
    "ipykernel.kernelapp",
    "anywidget",
    "torch",
    "torch._dynamo",  # Otherwise, each forked rank would import this with its first optimizer.
    "notebook_accelerate.accelerator",
    "notebook_accelerate.launch.processes.fork",
    "notebook_accelerate.launch.processes.zygote_server",
    "notebook_accelerate.launch.starting",
)
"""Modules to import before forking. The launchers are not among them, because their import registers a hook in IPython.

Tests of what is imported, or of when, start a kernel with ``forked=False``.
"""
DETACHED = "notebook_accelerate.launch.detached_process"
SPARES = "TEST_SPARES"
"""The environment variable that sets the number of a kernel's spare processes. The default is one, for the zygote."""
READ_AT_START = ("PYTHON", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "LD_", "MALLOC_", "TORCH", "CUDA", "XLA", "PJRT")
"""Prefixes of variables that the interpreter or torch reads at its start. A forked process would ignore changes."""
_LONGEST = 1 << 17
_UNUSED = 300
"""A number above those of all descriptors that an interpreter inherits."""
FIRST = ("XDG_STATE_HOME",)
"""The variables to show first in `show`."""
ROOM = 1 << 13
"""The number of characters of the last argument, and of the variable ``TEST_ROOM``, that give `show` room."""
_ARGUMENTS, _VARIABLES = (45, 46), (47, 48)
"""The positions in ``/proc/self/stat``, after the name, of the addresses of the arguments and of the variables."""
_DESCRIPTORS = 50
_LIMITS = 16
"""The number of resource limits on Linux."""
_PR_SET_PDEATHSIG = 1
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def serve(channel: socket.socket) -> list[str]:
    """Answer requests until the socket is closed. In a forked process, return the kernel's arguments."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _LONGEST, _DESCRIPTORS)
        if not message:
            sys.exit(0)
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            channel.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            channel.close()
            if "code" in request:
                run_code(request, descriptors)
            become(request, *descriptors)
            for _ in range(int(os.environ.pop(SPARES, "1"))):
                keep_spare()
            return list(request["argv"])
        for each in descriptors:
            os.close(each)
        channel.send(str(pid).encode())


def become(request: dict[str, Any], out: int, err: int) -> None:
    """Make this process look like an interpreter that has just been started to run a kernel."""
    parent = os.getppid()
    os.setsid()
    nothing, writer = os.pipe()
    os.close(writer)
    for each, standard in ((nothing, 0), (out, 1), (err, 2)):
        os.dup2(each, standard)
        os.close(each)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"], JPY_PARENT_PID=str(parent))
    launcher = find_spec("ipykernel_launcher")
    sys.argv = [str(launcher and launcher.origin), *request["argv"]]


class Spare(NamedTuple):
    """A spare process of a kernel."""

    pid: int
    channel: socket.socket
    variables: dict[str, str]


def start_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read at the start of an interpreter, or during the import of torch."""
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}


def keep_spare() -> None:
    """Fork a spare process, and make `subprocess.Popen` use it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        # Forked ranks have copies of the kernel's end of the socket, so its closing does not tell the kernel's end.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Without a process group of its own, this process also gets the interrupts of the kernel.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.getppid() == parent:
            wait_as_spare(theirs)
        os._exit(0)
    theirs.close()
    SparePopen.spares.append(Spare(pid, ours, start_variables(os.environ)))
    subprocess.Popen = SparePopen  # type: ignore[misc]


def wait_as_spare(channel: socket.socket) -> None:
    """Wait for the request to become an interpreter, run its code, and exit. Return if there is no request."""
    message, descriptors, _, _ = socket.recv_fds(channel, _LONGEST, _DESCRIPTORS)
    channel.close()
    if message:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
        run_code(json.loads(message), descriptors)


def run_code(request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Make this process look like an interpreter that has just been started to run code, and run it."""
    os.setsid()
    SparePopen.spares.clear()
    for limit in range(_LIMITS):
        resource.setrlimit(limit, resource.prlimit(os.getppid(), limit))
    above = [fcntl.fcntl(each, fcntl.F_DUPFD, _UNUSED) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(above, request["numbers"], strict=True):
        os.dup2(each, number)
        os.close(each)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request.get("spare"):
        keep_spare()
    show(["-c", request["code"]], request["env"])
    if module_name := request.get("module"):
        import_module(module_name)
        keep_spare_after_fork()
    sys.argv = ["-c"]
    module: Any = ModuleType("__main__")
    sys.modules["__main__"] = module
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    exec(request["code"], vars(module))
    sys.exit(0)


def show(arguments: list[str], environment: Mapping[str, str]) -> None:
    """Make ``/proc`` show other arguments and variables of this process, as far as the memory for them suffices."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    variables = [
        f"{name}={value}" for name, value in sorted(environment.items(), key=lambda item: item[0] not in FIRST)
    ]
    for words, place in ((arguments, _ARGUMENTS), (variables, _VARIABLES)):
        begin, end = (int(fields[index]) for index in place)
        text = b"".join(os.fsencode(word) + bytes(1) for word in words)[: end - begin - 1]
        ctypes.memmove(begin, text.ljust(end - begin, bytes(1)), end - begin)


def keep_spare_after_fork() -> None:
    """Call `keep_spare` in the next process that this one forks, when it has been forked."""
    pending = [True]

    def forked() -> None:
        if not pending:
            return
        pending.clear()
        own, code = os.getpid(), 1
        try:
            keep_spare()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            if os.getpid() != own:  # Python ignores exceptions in this function.
                os._exit(code)

    os.register_at_fork(after_in_child=forked)


class SparePopen(subprocess.Popen[Any]):
    """Starts processes as usual, but each spare becomes one of the first interpreters that import the package."""

    spares: ClassVar[list[Spare]] = []

    def _execute_child(self, *given: Any) -> None:
        start: Any = super()._execute_child  # type: ignore[misc]
        options = inspect.signature(start).bind(*given).arguments
        code = str(options["args"][-1])
        if not (self.spares and options["start_new_session"] and "from notebook_accelerate" in code):
            start(*given)
            return
        spare = self.spares.pop()
        with spare.channel:
            if start_variables(options["env"]) != spare.variables:
                os.kill(spare.pid, signal.SIGKILL)
                os.waitpid(spare.pid, 0)
                start(*given)
                return
            standard = [
                number if options[name] == -1 else options[name]  # By default, the process has this one's files.
                for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))
            ]
            request = {
                "code": code,
                "module": DETACHED if f"from {DETACHED}" in code else None,
                "cwd": options["cwd"] or str(Path.cwd()),
                "env": dict(options["env"]),
                "numbers": [0, 1, 2, *options["pass_fds"]],
                "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            }
            socket.send_fds(spare.channel, [json.dumps(request).encode()], [*standard, *options["pass_fds"]])
        self.pid = spare.pid
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in _PIPES))  # type: ignore[attr-defined]


def main() -> NoReturn:
    """Import the modules that kernels need, fork kernels, and run as one in each forked process."""
    del sys.path[0]  # Remove the folder of this program.
    # The launch of a detached run, which may have started this process, blocks SIGINT. Kernels would inherit this.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    import_for_forks(PRELOADED)
    assert "notebook_accelerate.launchers" not in sys.modules
    import_module("ipywidgets").register_comm_target()  # In a kernel, the import of ipywidgets does this.
    channel = socket.socket(fileno=int(sys.argv[1]))
    # The kernel ends with its parent. Pass the parent's id, because ipykernel read the environment before the fork.
    arguments = [*serve(channel), f"--IPKernelApp.parent_handle={os.getppid()}"]
    import_module("ipykernel.kernelapp").IPKernelApp.launch_instance(argv=arguments)
    sys.exit(0)


if __name__ == "__main__":
    main()
