"""Connect a rank's standard streams, input and breakpoints to the kernel."""

from __future__ import annotations

import builtins
import contextlib
import getpass
import io
import logging
import sys
from collections.abc import Mapping
from typing import Any

from notebook_accelerate.worker import breakpoints, plain_process, rich_display
from notebook_accelerate.worker.agent import Agent


def install(agent: Agent) -> None:
    """Connect this rank's streams, ``input``, ``breakpoint`` and ``display`` to the kernel."""

    def rank_input(prompt: object = "", /) -> str:
        flush()
        return agent.ask(str(prompt))

    def rank_getpass(prompt: str = "Password: ", stream: object = None) -> str:  # noqa: ARG001 - required by getpass's signature
        flush()
        return agent.ask(prompt, password=True)

    streams = {"stdin": StandardInput(agent), "stdout": _stream(1), "stderr": _stream(2)}
    _redirect(streams)
    for name, stream in streams.items():
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    builtins.input = rank_input
    getpass.getpass = rank_getpass
    breakpoints.install(agent)
    rich_display.install(plain_process.leave_notebook(), flush)


def flush() -> None:
    """Write all buffered output to the pipes."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        # The function may have closed or replaced the stream, or the kernel may have exited.
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


def _redirect(streams: Mapping[str, Any]) -> None:
    """Redirect the kernel's streams, which logging handlers and variables may hold, to the rank's.

    In a forked rank, ipykernel's streams would open a socket for each write and publish the text without a label.
    Replacing them in ``sys`` is not enough: they are not there while a cell captures its output, and IPython keeps
    references to their methods while a cell runs. The code of their methods is therefore replaced. Logging handlers
    that write into the captured text get the rank's streams.
    """
    kind = getattr(sys.modules.get("ipykernel.iostream"), "OutStream", None)
    if kind is not None:
        rich_display.replace_function(kind, "write", _write)
        rich_display.replace_function(kind, "flush", _flush)
    old = {id(getattr(sys, name)): stream for name, stream in streams.items()}
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in getattr(logger, "handlers", ()):
            # Skip handlers whose stream is a property, such as logging.lastResort, because they already follow
            # sys.stderr.
            stream: Any = getattr(handler, "__dict__", {}).get("stream")
            # Otherwise IPython would keep every line that is written to this stream.
            if kind is not None and type(stream) is kind:
                handler.stream = streams.get(stream.name, streams["stderr"])
            elif id(stream) in old:
                handler.stream = old[id(stream)]


def _write(self: Any, string: str) -> Any:
    import sys  # Import it here, because the code runs with the globals of another module.

    return getattr(sys, f"__{self.name}__").write(string)


def _flush(self: Any) -> None:
    import sys

    getattr(sys, f"__{self.name}__").flush()


def _stream(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


class StandardInput(io.TextIOBase):
    """Standard input whose lines the user types in the notebook."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def readable(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        sys.stdout.flush()
        try:
            return self._agent.ask("") + "\n"
        except EOFError:
            return ""

    def _readline_with_prompt(self, prompt: object = "", *, password: bool = False) -> str:
        """Prompt the user. Called by marimo's ``input`` and ``getpass``, which functions in its cells use."""
        flush()
        return self._agent.ask(str(prompt), password=password)
