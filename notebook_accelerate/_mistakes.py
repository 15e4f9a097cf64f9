"""Show a user's mistake as the user's line and one sentence, without this package's frames in between.

A mistake is an exception that this package raises on purpose: its innermost frame is in this package, and stopped at a
``raise`` statement. Any other exception is a fault, either of this package or of code that it calls, and keeps its
traceback. Public functions and methods are the boundary: they raise mistakes again, without the frames below them.
IPython also leaves out the frame of the boundary itself.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import iscoroutinefunction
from opcode import opmap
from types import FrameType, FunctionType, TracebackType
from typing import Any, ParamSpec, TypeVar

from notebook_accelerate.errors import ipython_shell

WHOLE_TRACEBACKS = "NOTEBOOK_ACCELERATE_WHOLE_TRACEBACKS"
"""If this variable is set, tracebacks of mistakes show all frames."""
_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_RAISE = opmap["RAISE_VARARGS"]
_P = ParamSpec("_P")
_R = TypeVar("_R")
_Class = TypeVar("_Class", bound="type[Any]")


def reports_mistakes(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a public function raise a user's mistake from the caller's line."""

    @wraps(function)
    def boundary(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        __tracebackhide__ = True  # IPython's debugger and pytest skip the frame.
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if os.environ.get(WHOLE_TRACEBACKS) or not _is_mistake(error):
                raise
            # NOTEBOOK_ACCELERATE_WHOLE_TRACEBACKS=1 shows the frames below.
            raise _prepared(error).with_traceback(None) from error.__cause__

    return boundary


def reports_mistakes_of_methods(cls: _Class) -> _Class:
    """Make the constructor, the public methods and the properties of a class raise mistakes from the caller's line."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if isinstance(member, FunctionType) and not iscoroutinefunction(member):
            setattr(cls, name, reports_mistakes(member))
        elif isinstance(member, classmethod):
            setattr(cls, name, classmethod(reports_mistakes(member.__func__)))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, property(reports_mistakes(member.fget), member.fset, member.fdel, member.__doc__))
    return cls


def _is_mistake(error: Exception) -> bool:
    """Return whether this package raised the error on purpose, or was called with arguments that do not fit.

    An error that has passed through the user's code, such as a callback, keeps its traceback, which shows the user's
    lines.
    """
    entries = list(_entries_of(error.__traceback__))
    frames = [each.tb_frame for each in entries]
    if not frames or isinstance(error, AssertionError) or not all(map(_is_internal, frames)):
        return False
    if isinstance(error, TypeError) and all(frame.f_locals.get("__tracebackhide__") for frame in frames):
        return True  # The call in the boundary failed, because the arguments do not fit the signature.
    return _is_own(frames[-1]) and frames[-1].f_code.co_code[entries[-1].tb_lasti] == _RAISE


def _entries_of(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _is_own(frame: FrameType) -> bool:
    """Return whether a frame belongs to this package, even if a dataclass has generated its function."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == __package__


def _is_internal(frame: FrameType) -> bool:
    """Return whether a frame belongs to this package or to Python's standard library."""
    filename = frame.f_code.co_filename
    return _is_own(frame) or (filename.startswith(_LIBRARY) and "site-packages" not in filename)


def _prepared(error: Exception) -> Exception:
    """Return the error itself, prepared so that IPython shows it without this package's frames."""
    if ipython_shell() is not None and not hasattr(type(error), "_render_traceback_"):
        error._render_traceback_ = render_mistake  # type: ignore[attr-defined]
    return error


def render_mistake() -> list[str]:
    """Return the lines that IPython shows for the mistake that it is handling.

    IPython calls this function as an attribute of the exception. If it were a bound method, the exception would refer
    to itself, and the local variables in its frames would stay alive until the next garbage collection.
    """
    error = sys.exc_info()[1] or sys.last_value
    assert error is not None, "IPython calls this function to show an exception"
    lines: list[str] = ipython_shell().InteractiveTB.structured_traceback(
        type(error), error, without_own_frames(error.__traceback__), tb_offset=1
    )
    return lines


def without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the last frames, if they belong to this package or to IPython, which calls magics."""
    entries = list(_entries_of(traceback))
    while len(entries) > 1 and _is_own_or_ipython(entries[-1].tb_frame):
        entries.pop()
    found = None
    for each in reversed(entries):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found


def _is_own_or_ipython(frame: FrameType) -> bool:
    return _is_own(frame) or f"{os.sep}IPython{os.sep}" in frame.f_code.co_filename
