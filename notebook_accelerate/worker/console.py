"""Standard streams, input, breakpoints and rich display of a rank."""

from __future__ import annotations

import base64
import builtins
import contextlib
import functools
import getpass
import io
import sys
from typing import Any

from notebook_accelerate.hardware.detection import ipython_shell
from notebook_accelerate.telemetry import DisplayEvent, emit
from notebook_accelerate.worker import breakpoints
from notebook_accelerate.worker.agent import Agent


def install(agent: Agent) -> None:
    """Connect this rank's streams, ``input``, ``breakpoint`` and ``display`` to the notebook.

    Replaces those of the interpreter, and of IPython where it is loaded.
    """

    def rank_input(prompt: object = "", /) -> str:
        flush()
        return agent.ask(str(prompt))

    def rank_getpass(prompt: str = "Password: ", stream: object = None) -> str:  # noqa: ARG001 - getpass has it
        flush()
        return agent.ask(prompt, password=True)

    streams = {"stdin": StandardInput(agent), "stdout": _stream(1), "stderr": _stream(2)}
    for name, stream in streams.items():
        _redirect(getattr(sys, name), stream)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    builtins.input = rank_input
    getpass.getpass = rank_getpass
    breakpoints.install(agent)
    install_display()
    plain_progress_bars()


def flush() -> None:
    """Write all buffered output to the pipes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by the function, or the kernel is gone
            stream.flush()


def _redirect(old: Any, new: Any) -> None:
    """Redirect the kernel's stream, which a logging handler or a default argument may hold, to the rank's.

    In a forked rank ipykernel's stream would open a socket for each write and publish the text without a label.
    """
    if type(old).__module__.startswith("ipykernel") and hasattr(old, "write"):
        old.write, old.flush = new.write, new.flush


def _stream(descriptor: int) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw, 1 << 16), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


class StandardInput(io.TextIOBase):
    """Standard input: the user types its lines in the notebook."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def readable(self) -> bool:  # noqa: D102 - io's interface
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # noqa: D102 - io's interface
        sys.stdout.flush()
        try:
            return self._agent.ask("") + "\n"
        except EOFError:
            return ""


# ---- rich display


def install_display() -> None:
    """Send the output of ``IPython.display.display`` to the kernel, which owns the front end.

    In a forked rank IPython's publisher would write to a session that refuses messages from a fork; in other ranks
    there is no shell, and ``display`` would only print.
    """
    shell = ipython_shell()
    if shell is not None:
        shell.display_pub.publish = publish
        # Libraries look at this to choose widgets, which only the kernel can own.
        shell.config.pop("IPKernelApp", None)
        return
    # IPython 7, which Colab has, keeps them in the older module.
    functions: Any = sys.modules.get("IPython.core.display_functions") or sys.modules.get("IPython.core.display")
    if functions is not None:
        _install_bare_display(functions)


def publish(
    data: dict[str, Any],
    metadata: dict[str, Any] | None = None,
    *_: object,
    transient: dict[str, Any] | None = None,
    update: bool = False,
    **__: object,
) -> None:
    """Replace IPython's ``DisplayPublisher.publish``."""
    clean = {kind: _text(value) for kind, value in data.items()}
    emit(DisplayEvent(clean, metadata or {}, (transient or {}).get("display_id"), update))


def _text(value: object) -> object:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


@functools.cache
def _bare_formatter() -> Any:
    """Return the formatter of MIME bundles; created at the first display, because that takes longer than a fork."""
    from IPython.core.formatters import DisplayFormatter

    formatter: Any = DisplayFormatter()
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _figure_png)
    return formatter


def _install_bare_display(functions: Any) -> None:
    def display(*objects: object, display_id: object = None, update: bool = False, **_: object) -> object:
        identity = _display_identity(functions, display_id)
        for value in objects:
            data, metadata = _bare_formatter().format(value)
            publish(data, metadata, transient={"display_id": identity}, update=update)
        return functions.DisplayHandle(identity) if identity and not update else None

    functions.display = display
    functions.publish_display_data = publish
    public: Any = sys.modules.get("IPython.display")
    if public is not None:
        public.display, public.publish_display_data = display, publish


def _display_identity(functions: Any, display_id: object) -> str | None:
    if display_id is True:
        return str(functions._new_id())
    return None if display_id is None else str(display_id)


def _figure_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()


def plain_progress_bars() -> None:
    """Make an imported ``tqdm.notebook`` write text: a rank has no front end for widgets."""
    notebook: Any = sys.modules.get("tqdm.notebook")
    standard: Any = sys.modules.get("tqdm.std")
    if notebook is None or standard is None:
        return
    kind = notebook.tqdm_notebook
    for name in ("__init__", "__iter__", "display", "update", "close", "clear", "reset", "status_printer", "colour"):
        if name in vars(kind) and hasattr(standard.tqdm, name):
            setattr(kind, name, vars(standard.tqdm).get(name) or getattr(standard.tqdm, name))
