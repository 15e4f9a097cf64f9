"""The process that forks kernels; see ``kernel_forks``.

``python kernel_fork_server.py DESCRIPTOR`` exits when the other end of the socket is closed. It is a separate program,
because each kernel inherits its imports.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

PRELOADED = ("ipykernel.ipkernel", "ipykernel.kernelapp", "torch", "torch._dynamo")
"""Modules to import before forking. Otherwise, forked ranks would import torch._dynamo with their first optimizer."""
_LONGEST = 1 << 20


def serve(channel: socket.socket) -> list[str]:
    """Answer requests until the socket is closed. In a forked process, return the kernel's arguments."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _LONGEST, 2)
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
            become(request, *descriptors)
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


def main() -> NoReturn:
    """Import the modules that kernels need, fork kernels, and run as one in each forked process."""
    del sys.path[0]  # Remove the folder of this program.
    for name in PRELOADED:
        import_module(name)
    gc.freeze()  # Otherwise, garbage collection in a kernel would copy the pages of all objects.
    channel = socket.socket(fileno=int(sys.argv[1]))
    # The kernel ends with its parent. Pass the parent's id, because ipykernel read the environment before the fork.
    arguments = [*serve(channel), f"--IPKernelApp.parent_handle={os.getppid()}"]
    import_module("ipykernel.kernelapp").IPKernelApp.launch_instance(argv=arguments)
    sys.exit(0)


if __name__ == "__main__":
    main()
