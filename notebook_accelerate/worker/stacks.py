"""Frames of a rank's threads: as data, and as places to evaluate in."""

from __future__ import annotations

import linecache
import re
import rlcompleter
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.telemetry.tracebacks import is_user_code

MAX_FRAMES = 50
LAUNCHERS = tuple(str(Path(__file__).with_name(name)) for name in ("entry.py", "warm_cells.py"))
"""Files whose frames call the user's function, or cell."""


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread, from whichever thread this is."""
    identity = threading.main_thread().ident
    return sys._current_frames().get(identity) if identity is not None else None


def stack(frame: FrameType | None) -> tuple[FrameInfo, ...]:
    """Return ``frame`` and its callers, the outermost first, without those that launched the function."""
    found: list[FrameInfo] = []
    while frame is not None and len(found) < MAX_FRAMES and frame.f_code.co_filename not in LAUNCHERS:
        name, line = frame.f_code.co_filename, frame.f_lineno or 0
        found.append(FrameInfo(name, line, frame.f_code.co_name, linecache.getline(name, line).strip()))
        frame = frame.f_back
    return tuple(reversed(found))


def all_stacks() -> dict[str, tuple[FrameInfo, ...]]:
    """Return the stacks of all Python threads by name, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    order = sorted(frames, key=lambda identity: identity != main)
    return {names.get(identity, f"thread {identity}"): stack(frames[identity]) for identity in order}


def code_of(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of a function behind partials, wrappers and methods; None for other callables."""
    seen = 0
    target: Any = function
    while seen < 20:
        seen += 1
        inner = getattr(target, "__wrapped__", None) or getattr(target, "func", None)
        if inner is None:
            break
        target = inner
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None) or getattr(getattr(target, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


def find(frame: FrameType | None, name: str, default: CodeType | None) -> FrameType | None:
    """Return the innermost frame of the function ``name``, or of ``default`` when no name is given."""
    current = frame
    while current is not None:
        if current.f_code.co_name == name if name else current.f_code is default:
            return current
        current = current.f_back
    return frame if not name else None


def users(frame: FrameType | None, default: CodeType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code; the launched function's where there is none."""
    current = frame
    while current is not None and current.f_code.co_filename not in LAUNCHERS:
        if is_user_code(current.f_code.co_filename):
            return current
        current = current.f_back
    return find(frame, "", default)


def variables(frame: FrameType) -> dict[str, Any]:
    """Return what an expression in ``frame`` can name; in one dictionary, so that comprehensions see the locals."""
    return {**frame.f_globals, **frame.f_locals}


def completions(names: dict[str, Any], text: str) -> list[str]:
    """Return ``text`` with each of ``names`` that completes its last dotted part, as "model.head.weight"."""
    found = re.search(r"[A-Za-z_][\w.]*$", text)
    part = found.group() if found else ""
    if not part:
        return []
    completer = rlcompleter.Completer(names)
    matches = completer.attr_matches(part) if "." in part else completer.global_matches(part)
    return [text[: len(text) - len(part)] + name.rstrip("() :") for name in dict.fromkeys(matches)]


def names(frame: FrameType | None) -> list[str]:
    """Return the names of the functions on the stack, the innermost first."""
    found: list[str] = []
    while frame is not None:
        found.append(frame.f_code.co_name)
        frame = frame.f_back
    return found


def innermost(traceback: TracebackType | None) -> FrameType | None:
    """Return the frame in which an exception was raised."""
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame if traceback is not None else None


def in_traceback(traceback: TracebackType | None, name: str) -> FrameType | None:
    """Return the innermost frame of the function ``name`` that an exception passed; of any where no name is given."""
    found = None
    while traceback is not None:
        if not name or traceback.tb_frame.f_code.co_name == name:
            found = traceback.tb_frame
        traceback = traceback.tb_next
    return found


def of_traceback(traceback: TracebackType | None) -> tuple[FrameInfo, ...]:
    """Return where an exception passed, the outermost frame first."""
    found: list[FrameInfo] = []
    while traceback is not None and traceback.tb_frame.f_code.co_filename in LAUNCHERS:
        traceback = traceback.tb_next
    while traceback is not None:
        name, line = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
        found.append(FrameInfo(name, line, traceback.tb_frame.f_code.co_name, linecache.getline(name, line).strip()))
        traceback = traceback.tb_next
    return tuple(found)
