"""Read the frames of a rank's threads, to send them to the kernel and to evaluate expressions in them."""

from __future__ import annotations

import linecache
import re
import rlcompleter
import threading
import time
from collections.abc import Callable
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any

from notebook_accelerate.errors import FrameInfo
from notebook_accelerate.telemetry import Event
from notebook_accelerate.telemetry.debug_protocol import SampleReply, SampleRequest
from notebook_accelerate.telemetry.tracebacks import callers, current_frames, is_user_code, main_frame

MAX_FRAMES = 50
LAUNCHERS = tuple(str(Path(__file__).with_name(name)) for name in ("entry.py", "warm_cells.py"))
"""Files whose frames call the user's function or cell."""


def in_function(frame: FrameType) -> bool:
    """Return whether a frame is inside the launched function or a warm rank's cell."""
    return frame.f_code.co_filename not in LAUNCHERS


def stack(frame: FrameType | None) -> tuple[FrameInfo, ...]:
    """Return ``frame`` and its callers up to the launched function, outermost first."""
    frames = islice(takewhile(in_function, callers(frame)), MAX_FRAMES)
    return tuple(reversed([_frame_info(each, each.f_lineno or 0) for each in frames]))


def _frame_info(frame: FrameType, line: int) -> FrameInfo:
    name = frame.f_code.co_filename
    return FrameInfo(name, line, frame.f_code.co_name, linecache.getline(name, line).strip())


def all_stacks() -> dict[str, tuple[FrameInfo, ...]]:
    """Return the stacks of all Python threads by thread name, starting with the main thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = current_frames()
    order = sorted(frames, key=lambda identity: identity != main)
    return {names.get(identity, f"thread {identity}"): stack(frames[identity]) for identity in order}


def function_code(function: Callable[..., Any]) -> CodeType | None:
    """Return the code of the function that partials, wrappers and methods call, or None for other callables."""
    target: Any = function
    for _ in range(20):
        inner = getattr(target, "__wrapped__", None) or getattr(target, "func", None)
        if inner is None:
            break
        target = inner
    target = getattr(target, "__func__", target)
    code = getattr(target, "__code__", None) or getattr(getattr(target, "__call__", None), "__code__", None)  # noqa: B004
    return code if isinstance(code, CodeType) else None


def find_frame(frame: FrameType | None, name: str, default: CodeType | None) -> FrameType | None:
    """Return the innermost frame of the function ``name``, or None if it is not running.

    Without a name, return the innermost frame of ``default``, or else ``frame``.
    """
    for caller in callers(frame):
        if caller.f_code.co_name == name if name else caller.f_code is default:
            return caller
    return frame if not name else None


def user_frame(frame: FrameType | None, default: CodeType | None) -> FrameType | None:
    """Return the innermost frame of the user's own code, or else the launched function's frame."""
    for caller in takewhile(in_function, callers(frame)):
        if is_user_code(caller.f_code.co_filename):
            return caller
    return find_frame(frame, "", default)


def frame_variables(frame: FrameType) -> dict[str, Any]:
    """Return the variables of ``frame`` in one dictionary, so that comprehensions see the locals."""
    return {**frame.f_globals, **frame.f_locals}


def completions(names: dict[str, Any], text: str) -> list[str]:
    """Return ``text`` completed by each of ``names`` that matches its last dotted part, such as "model.head.weight"."""
    found = re.search(r"[A-Za-z_][\w.]*$", text)
    part = found.group() if found else ""
    if not part:
        return []
    completer = rlcompleter.Completer(names)
    matches = completer.attr_matches(part) if "." in part else completer.global_matches(part)
    return [text[: len(text) - len(part)] + name.rstrip("() :") for name in dict.fromkeys(matches)]


def function_names(frame: FrameType | None) -> list[str]:
    """Return the names of the functions on the stack, innermost first."""
    return [caller.f_code.co_name for caller in callers(frame)]


def frame_in_traceback(traceback: TracebackType | None, name: str = "") -> FrameType | None:
    """Return the innermost frame of a traceback. With a name, return the innermost frame of that function."""
    frames = [frame for frame, _ in walk_tb(traceback) if not name or frame.f_code.co_name == name]
    return frames[-1] if frames else None


def traceback_stack(traceback: TracebackType | None) -> tuple[FrameInfo, ...]:
    """Return the frames of a traceback from the launched function on, outermost first."""
    frames = dropwhile(lambda entry: not in_function(entry[0]), walk_tb(traceback))
    return tuple(_frame_info(frame, line) for frame, line in frames)


# The rest of this module samples the stack of a rank's main thread, from a temporary thread.

MAX_DEPTH = 100
"""Maximum number of frames in a stack. The innermost ones are kept."""
MAX_STACKS = 20_000
"""Maximum number of different stacks that are counted. The time of all others is counted for the outermost frame."""

Key = tuple[tuple[CodeType, int], ...]


def start_sampling(request: SampleRequest, reply: Callable[[Event], None]) -> None:
    """Sample the main thread on a new thread for the requested time, and then reply."""
    threading.Thread(target=_sample, args=(request, reply), name="notebook-accelerate-sample", daemon=True).start()


def _sample(request: SampleRequest, reply: Callable[[Event], None]) -> None:
    """Sample the main thread. Each sample counts for the time since the previous one, because the GIL may delay it."""
    found: dict[Key, list[float]] = {}
    begin = last = time.perf_counter()
    period = 1 / request.rate
    due = begin + period
    while last - begin < request.seconds:
        time.sleep(max(0.0, due - time.perf_counter()))
        key = _stack()
        now = time.perf_counter()
        if key not in found and len(found) >= MAX_STACKS:
            key = key[:1]
        entry = found.setdefault(key, [0.0, 0])
        entry[0] += now - last
        entry[1] += 1
        last = now
        due = max(due + period, now)
    reply(_folded(request.number, found, last - begin))


def _stack() -> Key:
    """Return the main thread's frames up to the launched function, outermost first."""
    inside = takewhile(in_function, callers(main_frame()))
    return tuple((frame.f_code, frame.f_lineno or 0) for frame in islice(inside, MAX_DEPTH))[::-1]


def _folded(number: int, found: dict[Key, list[float]], seconds: float) -> SampleReply:
    places: dict[tuple[str, int, str], int] = {}
    rows = []
    for key, (weight, count) in found.items():
        indices = [
            places.setdefault((code.co_filename, line, getattr(code, "co_qualname", code.co_name)), len(places))
            for code, line in key
        ]
        rows.append((weight, int(count), indices))
    return SampleReply(number, list(places), rows, seconds)
