"""Convert exceptions to data in a rank, and to text with the lines of notebook cells in the kernel."""

from __future__ import annotations

import linecache
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeGuard

from notebook_accelerate._collection import gc_paused
from notebook_accelerate.errors import ExceptionInfo, FrameInfo

MAX_FRAMES = 60
"""Maximum number of frames kept per exception. If there are more, half of this number is kept at each end."""
SHOWN_REPETITIONS = 3
"""Number of repetitions of a recursion that a traceback shows."""
LONGEST_CYCLE = 8
"""Maximum length of a cycle of calls, in frames, that is recognised as a recursion."""
MAX_MEMBERS = 50
"""Maximum number of exceptions in an exception group that are shown."""
_OWN = tuple(
    str(Path(__file__).parents[1] / room) + "/" for room in ("launch", "worker", "debug", "telemetry", "commands")
)

_LIBRARY = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "notebook_accelerate/")


@lru_cache(maxsize=1000)
def is_user_code(filename: str) -> bool:
    """Return whether a file contains the user's code: a cell, or a file outside the installed libraries."""
    return not any(part in filename for part in _LIBRARY)


def chain_of(error: BaseException) -> tuple[ExceptionInfo, ...]:
    """Return ``error`` and its causes, root first, without the launcher's frames."""
    chain: list[ExceptionInfo] = []
    seen: set[int] = set()
    link, current = "", error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        chain.append(ExceptionInfo(_type_name(current), _message(current), _frames(current), link))
        cause, context = built_in_attribute(current, "__cause__"), built_in_attribute(current, "__context__")
        if cause is not None:
            link, current = "cause", cause
        elif context is not None and not built_in_attribute(current, "__suppress_context__"):
            link, current = "context", context
        else:
            break
    return tuple(reversed(chain))


def _type_name(error: BaseException) -> str:
    name = type.__dict__["__qualname__"].__get__(type(error))
    try:
        module = type.__dict__["__module__"].__get__(type(error))
    except AttributeError:  # The code that created the class may have no module.
        module = None
    return name if type(module) is not str or module in ("builtins", "__main__") else f"{module}.{name}"


def _message(error: BaseException) -> str:
    """Return an exception's text, the members of its group and its notes. The class may override each of these."""
    members: list[Any] = [part for part in _items(error, "exceptions") if issubclass(type(part), BaseException)]
    text = built_in_attribute(error, "msg", SyntaxError) if _is_located(error) else _text(error)
    lines = [text, *(f"  {_type_name(part)}: {_message(part)}" for part in members[:MAX_MEMBERS])]
    if len(members) > MAX_MEMBERS:
        lines.append(f"  … {len(members) - MAX_MEMBERS:,} more exceptions …")
    return "\n".join([*lines, *map(_text, _items(error, "__notes__"))])


def _text(value: object) -> str:
    try:
        return str(value)
    except BaseException as problem:  # noqa: BLE001 - a broken __str__, even one that exits, must not hide the error
        return f"<its message cannot be shown: {class_name(problem)}>"


def _items(error: BaseException, name: str) -> Sequence[object]:
    try:
        found = getattr(error, name, ())
    except BaseException:  # noqa: BLE001 - a broken attribute must not hide the error
        return ()
    return found if issubclass(type(found), (tuple, list)) else ()


def _is_located(error: BaseException) -> TypeGuard[SyntaxError]:
    """Return whether an error is a SyntaxError with a source location, which does not appear among its frames."""
    if not issubclass(type(error), SyntaxError):  # Don't use isinstance, which would run code of the class.
        return False
    places = built_in_attribute(error, "filename", SyntaxError), built_in_attribute(error, "lineno", SyntaxError)
    return type(places[0]) is str and type(places[1]) is int


def _frames(error: BaseException) -> tuple[FrameInfo, ...]:
    frames = [
        FrameInfo(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame in traceback.extract_tb(built_in_attribute(error, "__traceback__"))
    ]
    while frames and frames[0].filename.startswith(_OWN):
        frames.pop(0)
    if _is_located(error):
        filename, line, text = (built_in_attribute(error, name, SyntaxError) for name in ("filename", "lineno", "text"))
        frames.append(FrameInfo(filename, line, "<module>", text.strip() if type(text) is str else ""))
    frames = _folded(frames)
    if len(frames) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        skipped = FrameInfo("", 0, f"… {len(frames) - 2 * half} more frames …", "")
        frames = [*frames[:half], skipped, *frames[-half:]]
    return tuple(frames)


def _folded(frames: list[FrameInfo]) -> list[FrameInfo]:
    """Return the frames of a traceback, with the repetitions of a recursion replaced by their number.

    The first two and the last of the repetitions remain, so that the last frame is still where the error occurred.
    """
    found: list[FrameInfo] = []
    start = 0
    while start < len(frames):
        length, times = _repetition(frames, start)
        end = start + length * times
        if times > SHOWN_REPETITIONS:
            what = "the frame above repeats" if length == 1 else f"the {length} frames above repeat"
            more = FrameInfo("", 0, f"… {what} {times - SHOWN_REPETITIONS} more times …", "")
            found += [*frames[start : start + length * (SHOWN_REPETITIONS - 1)], more, *frames[end - length : end]]
            start = end
        else:
            found.append(frames[start])
            start += 1
    return found


def _repetition(frames: list[FrameInfo], start: int) -> tuple[int, int]:
    """Return the length and the number of the repetitions that start at a position, or (1, 1)."""
    for length in range(1, LONGEST_CYCLE + 1):
        cycle, times = frames[start : start + length], 1
        while frames[start + length * times : start + length * (times + 1)] == cycle:
            times += 1
        if times > SHOWN_REPETITIONS:
            return length, times
    return 1, 1


# ---- in the kernel

_foreign_cells: dict[str, str] = {}
"""The names of cells that other kernels have run, by file name."""


def name_foreign_cells(names: Mapping[str, str]) -> None:
    """Register the names of cells that another kernel has run.

    Args:
        names: The name of each cell, such as "Cell In[7]", by the file name of its code.
    """
    _foreign_cells.update(names)


def frame_location(frame: FrameInfo) -> str:
    """Return the file and line of a frame, or for a cell its name and line, such as "Cell In[7], line 3"."""
    return f"{cell_name(frame.filename) or frame.filename}, line {frame.lineno}"


def cell_name(filename: str) -> str:
    """Return a name such as "Cell In[7]" for the file name of a cell that this kernel ran, or "" for other files."""
    if not is_cell(filename):
        return ""
    if filename.startswith(NAMED_CELL):
        return filename
    if filename in _foreign_cells:
        return _foreign_cells[filename]
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    compiler = getattr(shell, "compile", None)
    number = getattr(compiler, "_filename_map", {}).get(filename)
    if number is None:
        found = re.search(r"ipython-input-(\d+)", filename)
        number = found.group(1) if found else _number_in_history(shell, filename)
    return "Cell" if number is None else f"Cell In[{number}]"


def _number_in_history(shell: Any, filename: str) -> int | None:
    """Return the number of the last cell with the file's source, because IPython 7 has no table of these numbers."""
    source = "".join(linecache.getlines(filename)).strip()
    history = getattr(shell, "history_manager", None)
    if not source or history is None:
        return None
    for number in range(len(history.input_hist_raw) - 1, 0, -1):
        raw = history.input_hist_raw[number]
        # Compare with the source as it ran or, for a cell magic, with the lines below the first.
        if source in (history.input_hist_parsed[number].strip(), raw.partition("\n")[2].strip()):
            return number
    return None


def with_named_cells(chain: tuple[ExceptionInfo, ...], where: str) -> tuple[ExceptionInfo, ...]:
    """Return ``chain`` with the file names of this notebook's cells replaced by names that another notebook can show.

    Args:
        chain: Exceptions whose frames refer to cells by file name.
        where: The suffix to add to the names of cells, such as " of node 1".
    """
    return tuple(
        info._replace(
            frames=tuple(
                frame._replace(filename=_of_notebook(name, where)) if (name := cell_name(frame.filename)) else frame
                for frame in info.frames
            )
        )
        for info in chain
    )


def _of_notebook(name: str, where: str) -> str:
    return name if " of node " in name else name + where


def name_cells(text: str) -> str:
    """Return ``text`` with the file names of cells replaced by names such as "Cell In[7]"."""
    for filename in set(_CELL_FILE.findall(text)):
        text = text.replace(filename, cell_name(filename) or filename)
    return text


def name_cells_of(chain: tuple[ExceptionInfo, ...]) -> tuple[ExceptionInfo, ...]:
    """Return ``chain`` with the file names of cells replaced in the messages, but not in the frames."""
    return tuple(info._replace(message=name_cells(info.message)) for info in chain)


_CELL_FILE = re.compile(r"/[^\s\x1b\"'>]*ipykernel_\d+/\d+\.py|<ipython-input[^>]*>")


def format_chain(chain: tuple[ExceptionInfo, ...]) -> list[str]:
    """Return the lines of a traceback for ``chain``."""
    lines: list[str] = []
    for position, info in enumerate(chain):
        for frame in info.frames:
            lines += format_frame(frame)
        lines += f"{info.type}: {info.message}".rstrip(": ").split("\n")
        if position < len(chain) - 1:
            lines += ["", _LINKS.get(info.link, _LINKS["context"]), ""]
    return lines


_LINKS = {
    "cause": "The above exception was the direct cause of the following exception:",
    "context": "During handling of the above exception, another exception occurred:",
}


def format_frame(frame: FrameInfo) -> list[str]:
    """Return the lines that show a frame: its location and, if known, its source line."""
    if not frame.filename:
        return [f"  {frame.function}"]
    source = frame.source or linecache.getline(frame.filename, frame.lineno).strip()
    head = f"  {frame_location(frame)}, in {frame.function}"
    return [head, f"    {source}"] if source else [head]


# ---- frames of threads that are running
#
# Python 3.11 creates a frame's object only when something asks for it, and this may start a garbage collection. A
# finalizer may then let the frame's thread continue. If the frame's function returns, the new object refers to memory
# that other frames use, and reading the object crashes the process with a segmentation fault. Garbage collection is
# therefore off while frames are read. Python 3.10 has an object for each frame from the beginning, and since Python
# 3.12, collections start only between bytecodes.

_FRAMES_ARE_MADE = sys.version_info[:2] == (3, 11)


def reading() -> AbstractContextManager[None]:
    """Return a context manager that makes it safe to read the frames of other threads and their ``f_back``."""
    return gc_paused() if _FRAMES_ARE_MADE else nullcontext()


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each running thread, by the thread's identity."""
    with reading():
        return sys._current_frames()


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Return a thread's innermost frame, or None if the thread is not running."""
    return current_frames().get(thread.ident or 0)


def main_frame() -> FrameType | None:
    """Return the innermost frame of the main thread."""
    return frame_of(threading.main_thread())


def callers(frame: FrameType | None) -> Iterator[FrameType]:
    """Return ``frame`` and its callers, innermost first. The frame may belong to any thread."""
    found = []
    with reading():
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
    return iter(found)


# ---- descriptions of exceptions, even if their attributes or ``__str__`` raise errors

MAX_TEXT = 2000
"""Maximum number of characters of an exception's text in an error about this exception."""


def class_name(error: BaseException) -> str:
    """Return the name of an exception's class, whatever its metaclass does."""
    return str(type.__dict__["__name__"].__get__(type(error)))


def built_in_attribute(error: BaseException | None, name: str, base: type[BaseException] = BaseException) -> Any:
    """Return an attribute that an exception inherits from a built-in class, whatever its own class does.

    Args:
        error: The exception, which must be an instance of ``base``.
        name: The name of the attribute, such as "__cause__".
        base: The built-in class that defines the attribute.
    """
    return base.__dict__[name].__get__(error)


def describe_error(error: BaseException, limit: int = MAX_TEXT) -> str:
    """Return an exception's class and the start of its text, or only the class if producing the text fails.

    Args:
        error: The exception to describe.
        limit: The maximum number of characters of its text.
    """
    try:
        text = f"{class_name(error)}: {error}"
    except BaseException:  # noqa: BLE001 - the user's class may even exit
        return class_name(error)
    return text if len(text) <= limit else text[:limit] + " …"


def exit_code(error: BaseException | None) -> str:
    """Return the ``repr`` of a ``SystemExit``'s code, which may be any object."""
    code = built_in_attribute(error, "code", SystemExit)
    try:
        return repr(code)
    except BaseException:  # noqa: BLE001 - the user's class may even exit
        return f"<{type(code).__name__}>"


# ---- the sources of cells, which a launch sends to its ranks

MAX_SOURCE_BYTES = 8 << 20
"""Maximum size of all cell sources together. Beyond it, the oldest sources are omitted."""


def cell_sources() -> dict[str, str]:
    """Return the sources of notebook cells by file name, so that tracebacks in other processes show their lines."""
    found: dict[str, str] = {}
    size = 0
    for name, entry in reversed(list(linecache.cache.items())):
        if not is_cell(name) or len(entry) < 3:
            continue
        source = "".join(entry[2])
        size += len(source)
        if size > MAX_SOURCE_BYTES:
            break
        found[name] = source
    return found


NAMED_CELL = "Cell In["
"""The prefix of the file names of other notebooks' cells, for which this kernel has no files."""


def is_cell(filename: str) -> bool:
    """Return whether a code object's file name belongs to a notebook cell or a prompt."""
    return "ipykernel_" in filename or filename.startswith(("<ipython-input", "<python-input", "<stdin", NAMED_CELL))


def install_sources(sources: dict[str, str]) -> None:
    """Add ``sources`` to this process's linecache, for tracebacks."""
    for name, source in sources.items():
        # Without a loader and a modification time, linecache.checkcache leaves these entries unchanged.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
