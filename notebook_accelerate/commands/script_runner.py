"""Runs a script in a rank as the interpreter runs it: as ``__main__``, with its own ``sys.argv`` and ``sys.path``."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


def run_script(script: str, arguments: list[str]) -> None:
    """Run a Python file.

    Args:
        script: Its path.
        arguments: Its command line arguments.
    """
    with io.open_code(str(Path(script).resolve())) as file:
        code = compile(file.read(), script, "exec")
    main = ModuleType("__main__")
    main.__file__ = script
    main.__dict__["__builtins__"] = __builtins__
    with _as_program(script, arguments, str(Path(script).resolve().parent)):
        sys.modules["__main__"] = main
        exec(code, main.__dict__)  # noqa: S102 - the user's own script


def run_module(module: str, arguments: list[str]) -> None:
    """Run a module, as ``python -m`` does.

    Args:
        module: Its dotted name.
        arguments: Its command line arguments.
    """
    with _as_program(module, arguments, str(Path.cwd())):
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_program(program: str, arguments: list[str]) -> None:
    """Run a program that is not a Python script, with this rank's environment.

    Args:
        program: Its path, or its name on the PATH.
        arguments: Its command line arguments.

    Raises:
        SystemExit: It ended with another exit code than 0.
    """
    code = subprocess.run([program, *arguments], check=False).returncode
    if code:
        sys.exit(code)


@contextmanager
def _as_program(name: str, arguments: list[str], folder: str) -> Iterator[None]:
    """Set ``sys.argv`` and the first entry of ``sys.path``; restore both and ``__main__``, which one process needs."""
    argv, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    sys.argv = [name, *arguments]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if not sys.exc_info()[0]:  # after an error, frames and debuggers still need the script's module
            sys.modules["__main__"] = main
        sys.argv, sys.path[:] = argv, path
