"""Run code as in a new interpreter that has imported torch. It is forked from a server, which saves two seconds.

Only torch and numpy are imported. Code that depends on the start of an interpreter (its flags, ``sitecustomize``, or
variables that torch reads during its import), or on the destructors of C++ libraries at its exit, needs a real one.
"""

from __future__ import annotations

import json
import multiprocessing.process
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.support.forked_imports import import_for_forks

_ROOT = Path(__file__).resolve().parents[2]
_SERVER = "import sys; from tests.support.interpreters import main, serve; serve(int(sys.argv[1])) and main()"
_MESSAGE = 1 << 17
"""The maximum size of a request in bytes. Most of a request is the environment."""


class InterpreterServer:
    """A server that forks interpreters, one at a time."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
            command = [sys.executable, "-c", _SERVER, str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=environment, cwd=_ROOT, pass_fds=[theirs.fileno()])

    def run(
        self, *arguments: str, cwd: Path = _ROOT, env: Mapping[str, str], answers: str = "", timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python`` with arguments that start with ``-c`` or ``-m``, and return its output.

        Args:
            arguments: The command line after ``python``.
            cwd: The working directory.
            env: All environment variables.
            answers: The input on stdin.
            timeout: The time limit in seconds, after which the process is killed.

        Raises:
            TimeoutError: The process exceeded the time limit.
        """
        request = json.dumps([arguments, str(cwd), dict(env)]).encode()
        with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            stdin.write(answers.encode())
            stdin.seek(0)
            socket.send_fds(self._connection, [request], [stdin.fileno(), out.fileno(), err.fileno()])
            self._connection.settimeout(timeout)
            try:
                code = int(self._connection.recv(_MESSAGE))
            except TimeoutError:
                self._kill()
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(["python", *arguments], code, *texts)

    def close(self) -> None:
        """End the server process."""
        self._connection.close()
        self._process.wait(60)

    def _kill(self) -> None:
        server = psutil.Process(self._process.pid)
        for process in [server, *server.children(recursive=True)]:
            process.kill()


@pytest.fixture(scope="session")
def interpreters() -> Iterator[InterpreterServer]:
    """Yield the interpreter server of the test session."""
    server = InterpreterServer()
    yield server
    server.close()


def serve(descriptor: int) -> bool:
    """Fork an interpreter for each request until the test session closes the connection.

    Returns:
        True in a forked process, which must call `main`, and False in the server when it ends.
    """
    import_for_forks(["numpy", "torch"])
    connection = socket.socket(fileno=descriptor)
    while True:
        request, files, _, _ = socket.recv_fds(connection, _MESSAGE, 3)
        if not request:
            return False
        child = os.fork()
        if not child:
            connection.close()
            _become(files, *json.loads(request))
            return True
        for file in files:
            os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(str(code).encode())


def _become(files: Sequence[int], arguments: list[str], cwd: str, environment: dict[str, str]) -> None:
    """Take over the files, arguments, working directory and variables from a request."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    # Spawned processes look for the main module here.
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(environment)
    first = "" if arguments[0] == "-c" else cwd
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [first, *given, *(path for path in sys.path[1:] if path not in (str(_ROOT), *given))]
    sys.path_importer_cache.clear()
    sys.argv[:] = arguments


def main() -> None:
    """Execute the code or the module that ``sys.argv`` names, as the main module."""
    flag, what, *_ = sys.argv
    del sys.argv[0 if flag == "-m" else 1]
    if flag == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    module: Any = ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(what, "<string>", "exec"), vars(module))
