"""Exceptions as data in the worker, and as text at notebook cell lines in the kernel."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from pathlib import Path
from typing import Any

from notebook_accelerate.telemetry import ExceptionInfo, FrameInfo
from notebook_accelerate.telemetry.payload import NAMED_CELL, is_cell

MAX_FRAMES = 60
"""Frames kept of one exception: the first and the last half of a deeper one."""
_OWN = tuple(str(Path(__file__).parents[1] / room) + "/" for room in ("launch", "worker", "debug", "telemetry"))

_LIBRARY = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "notebook_accelerate/")


def is_user_code(filename: str) -> bool:
    """Whether a code object's file is the user's: a cell, or a file outside the installed libraries."""
    return not any(part in filename for part in _LIBRARY)


def chain_of(error: BaseException) -> tuple[ExceptionInfo, ...]:
    """Return ``error`` and what led to it, the root first, without this package's own launching frames."""
    chain: list[ExceptionInfo] = []
    seen: set[int] = set()
    link, current = "", error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        chain.append(ExceptionInfo(_type_name(current), _message(current), _frames(current), link))
        if current.__cause__ is not None:
            link, current = "cause", current.__cause__
        elif current.__context__ is not None and not current.__suppress_context__:
            link, current = "context", current.__context__
        else:
            break
    return tuple(reversed(chain))


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001 - a broken __str__ must not hide the error
        text = f"<its message cannot be shown: {type(problem).__name__}>"
    parts = getattr(error, "exceptions", ())  # of an exception group
    inside = [f"  {_type_name(part)}: {_message(part)}" for part in parts if isinstance(part, BaseException)]
    return "\n".join([text, *inside, *getattr(error, "__notes__", [])])


def _frames(error: BaseException) -> tuple[FrameInfo, ...]:
    frames = [
        FrameInfo(frame.filename, frame.lineno or 0, frame.name, frame.line or "")
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    while frames and frames[0].filename.startswith(_OWN):
        frames.pop(0)
    if len(frames) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        skipped = FrameInfo("", 0, f"… {len(frames) - 2 * half} more frames …", "")
        frames = [*frames[:half], skipped, *frames[-half:]]
    return tuple(frames)


# ---- in the kernel


def place(frame: FrameInfo) -> str:
    """Return where a frame is, as "Cell In[7], line 3" where it is in a cell."""
    return f"{cell_name(frame.filename) or frame.filename}, line {frame.lineno}"


def cell_name(filename: str) -> str:
    """Return "Cell In[7]" for the file name of a cell this kernel ran; "" for other files."""
    if not is_cell(filename):
        return ""
    if filename.startswith(NAMED_CELL):
        return filename
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    compiler = getattr(shell, "compile", None)
    number = getattr(compiler, "_filename_map", {}).get(filename)
    if number is None:
        found = re.search(r"ipython-input-(\d+)", filename)
        number = found.group(1) if found else _number_in_history(shell, filename)
    return "Cell" if number is None else f"Cell In[{number}]"


def _number_in_history(shell: Any, filename: str) -> int | None:
    """Return the number of the last cell with the source that this name stands for: IPython 7 keeps no other table."""
    source = "".join(linecache.getlines(filename)).strip()
    history = getattr(shell, "history_manager", None)
    if not source or history is None:
        return None
    for number in range(len(history.input_hist_raw) - 1, 0, -1):
        raw = history.input_hist_raw[number]
        # As it ran, or, for a cell magic, what stands below its first line.
        if source in (history.input_hist_parsed[number].strip(), raw.partition("\n")[2].strip()):
            return number
    return None


def with_named_cells(chain: tuple[ExceptionInfo, ...], where: str) -> tuple[ExceptionInfo, ...]:
    """Return ``chain`` for another notebook, which does not have this one's cells.

    Args:
        chain: Exceptions whose frames name the files of cells.
        where: Put behind the names of cells, as " of node 1".
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
    """Return ``text`` with the file names of cells as "Cell In[7]"."""
    for filename in set(_CELL_FILE.findall(text)):
        text = text.replace(filename, cell_name(filename) or filename)
    return text


def name_cells_of(chain: tuple[ExceptionInfo, ...]) -> tuple[ExceptionInfo, ...]:
    """Return ``chain`` with cells named in what the exceptions say; their frames keep the files' names."""
    return tuple(info._replace(message=name_cells(info.message)) for info in chain)


_CELL_FILE = re.compile(r"/[^\s\x1b\"'>]*ipykernel_\d+/\d+\.py|<ipython-input[^>]*>")


def format_chain(chain: tuple[ExceptionInfo, ...]) -> list[str]:
    """Return the lines that tell of ``chain``, each frame with its source line."""
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
    """Return one frame as its place and, where there is one, its source line."""
    if not frame.filename:
        return [f"  {frame.function}"]
    source = frame.source or linecache.getline(frame.filename, frame.lineno).strip()
    head = f"  {place(frame)}, in {frame.function}"
    return [head, f"    {source}"] if source else [head]
