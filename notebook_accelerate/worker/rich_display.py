"""``IPython.display`` in a rank: send rich output to the kernel, which owns the front end."""

from __future__ import annotations

import base64
import functools
import importlib
import io
import itertools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType
from typing import Any

from notebook_accelerate.integrations.import_hooks import when_imported
from notebook_accelerate.telemetry import DisplayEvent, emit
from notebook_accelerate.telemetry.events import display_mark

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
_MODULES = (
    "IPython.core.display_functions",
    "IPython.core.display",
)  # IPython 7, which Colab uses, has only the second one.


class _Displays:
    """The rank's displays that have no display id. After ``clear_output``, later displays replace them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._shown: list[str] = []
        self._replaceable: list[str] = []

    def clear(self, *, wait: bool) -> None:
        """Let the next displays replace those shown since the last call. Without ``wait``, empty the old ones now.

        Displays that should have been replaced after the last call, but were not, are emptied in any case.
        """
        gone = self._replaceable if wait else [*self._replaceable, *self._shown]
        for identity in gone:
            _send(DisplayEvent({"text/plain": ""}, {}, identity, update=True))
        self._replaceable, self._shown = self._shown, []
        _send(DisplayEvent({}, clear="wait" if wait else "now"))

    def emit(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        """Show a MIME bundle, in place of a cleared display if there is one."""
        update = bool(self._replaceable)
        identity = self._replaceable.pop(0) if update else f"notebook-accelerate-{os.getpid()}-{next(self._numbers)}"
        self._shown.append(identity)
        _send(DisplayEvent(data, metadata, identity, update))


_displays = _Displays()


class _MarkedStreams:
    """The pipes of this rank's standard streams, into which displays write marks.

    Args:
        flush: Writes all buffered output to the pipes.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush, self._numbers, self._lock = flush, itertools.count(1), threading.RLock()
        self._identity = self._current()

    def send(self, event: DisplayEvent) -> None:
        """Send a display to the kernel, after the output printed before it."""
        with self._lock:
            self._flush()
            if self._identity is None or self._current() != self._identity:
                emit(event)  # This process was forked by the rank, or the function has redirected the rank's output.
                return
            event.mark = next(self._numbers)
            emit(event)
            with suppress(OSError):  # The kernel may have exited.
                for descriptor in (1, 2):
                    os.write(descriptor, display_mark(event.mark))

    @staticmethod
    def _current() -> tuple[int, ...] | None:
        with suppress(OSError):  # The function may have closed a descriptor.
            pipes = [os.fstat(descriptor) for descriptor in (1, 2)]
            return (os.getpid(), *(number for pipe in pipes for number in (pipe.st_dev, pipe.st_ino)))
        return None


_marked_streams: _MarkedStreams | None = None


def _send(event: DisplayEvent) -> None:
    if _marked_streams is None:
        emit(event)
    else:
        _marked_streams.send(event)


def install(formatter: Any, flush: Callable[[], None]) -> None:
    """Send everything that IPython's functions display to the kernel, even if IPython is imported later.

    Args:
        formatter: The shell's formatter of MIME bundles, with the user's registrations. If None, a new one is created.
        flush: Writes all buffered output to the rank's pipes.
    """
    global _marked_streams  # noqa: PLW0603 - one pair of streams per process
    _marked_streams = _MarkedStreams(flush)
    if formatter is not None:
        _formatter.chosen = formatter
    for name in _MODULES:
        when_imported(name, _redirect)


def _redirect(_: Any) -> None:
    """Change the functions of all loaded modules in place, because cells may have imported them by name.

    Without a shell, these functions would only print. With the kernel's shell, its session would refuse to send
    messages from a forked process. Marimo's own functions would write to the output of a cell that is not running here.
    """
    for module in filter(None, map(sys.modules.get, _MODULES)):
        for name, function in _FUNCTIONS.items():
            if name in vars(module):
                replace_function(module, name, function)


def replace_function(owner: Any, name: str, function: Any) -> None:
    """Make a function of a module or class run another function's code, wherever the function has been imported.

    Args:
        owner: The module or class.
        name: The name of the function in it.
        function: A function without free variables. It runs with the globals of the other function's module.
    """
    original = vars(owner)[name]
    if not isinstance(original, FunctionType):
        setattr(owner, name, function)
    while isinstance(original, FunctionType):
        # The new code must declare the same free variables, because a notebook's wrapper function may be a closure.
        original.__code__ = function.__code__.replace(co_freevars=original.__code__.co_freevars)
        original.__defaults__, original.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        original = getattr(original, "__wrapped__", None)


# The code of these functions runs with the globals of IPython's module, so it imports what it calls.


def _display(*objects: Any, **options: Any) -> Any:
    from notebook_accelerate.worker import rich_display  # noqa: PLW0406

    return rich_display.display(*objects, **options)


def _publish(data: Any, metadata: Any = None, *others: Any, **options: Any) -> Any:
    from notebook_accelerate.worker import rich_display  # noqa: PLW0406

    return rich_display.publish(data, metadata, *others, **options)


def _clear(wait: bool = False) -> None:
    from notebook_accelerate.worker import rich_display  # noqa: PLW0406

    rich_display.clear_output(wait)


def _update(value: Any, *, display_id: Any, **options: Any) -> None:
    from notebook_accelerate.worker import rich_display  # noqa: PLW0406

    rich_display.display(value, display_id=display_id, update=True, **options)


_FUNCTIONS = {"display": _display, "publish_display_data": _publish, "clear_output": _clear, "update_display": _update}
"""The functions to run instead of IPython's functions with these names."""


def display(
    *objects: Any,
    include: Any = None,
    exclude: Any = None,
    metadata: dict[str, Any] | None = None,
    transient: dict[str, Any] | None = None,
    display_id: Any = None,
    raw: bool = False,
    clear: bool = False,
    update: bool = False,
    **_: Any,
) -> Any:
    """Do the same as ``IPython.display.display``."""
    identity = os.urandom(16).hex() if display_id is True else display_id
    where = {**(transient or {}), **({} if identity is None else {"display_id": str(identity)})}
    if clear:
        clear_output(wait=True)
    for value in objects:
        if raw:
            data, found = value, {}
        else:
            data, found = _formatter().format(value, include=include, exclude=exclude)
        if data:  # An object with _ipython_display_ has already displayed itself.
            publish(data, {**found, **(metadata or {})}, transient=where, update=update)
    if identity is None or update:
        return None
    functions: Any = importlib.import_module("IPython.display")
    return functions.DisplayHandle(str(identity))


def publish(
    data: dict[str, Any],
    metadata: dict[str, Any] | None = None,
    *_: object,
    transient: dict[str, Any] | None = None,
    update: bool = False,
    **__: object,
) -> None:
    """Do the same as ``IPython.display.publish_display_data``.

    A widget of this rank has no model in the kernel, so its other representations are shown.
    """
    clean = {kind: _text(value) for kind, value in data.items() if kind != WIDGET_VIEW}
    identity = (transient or {}).get("display_id")
    if identity is None:
        _displays.emit(clean, metadata or {})
    else:
        _send(DisplayEvent(clean, metadata or {}, identity, update))


def clear_output(wait: bool = False) -> None:
    """Do the same as ``IPython.display.clear_output``, for everything that this rank has shown since the last call.

    Lines printed before the first call remain, because lines of other ranks are mixed in with them.
    """
    _displays.clear(wait=bool(wait))


def _text(value: object) -> object:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


class _Formatter:
    """The formatter of MIME bundles, created at the first display, because creating it takes longer than a fork."""

    def __init__(self) -> None:
        self.chosen: Any = None

    def __call__(self) -> Any:
        if self.chosen is None:
            from IPython.core.formatters import DisplayFormatter

            self.chosen = DisplayFormatter()
        return _with_figures(self.chosen)


_formatter = _Formatter()


@functools.cache
def _with_figures(formatter: Any) -> Any:
    """Make a formatter show matplotlib figures as images, unless the kernel's inline backend has already done so."""
    pictures = formatter.formatters["image/png"]
    if not any(getattr(kind, "__name__", "") == "Figure" for kind in pictures.type_printers):
        pictures.for_type_by_name("matplotlib.figure", "Figure", _figure_png)
    return formatter


def _figure_png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", bbox_inches="tight")
    return buffer.getvalue()
