"""A launch's payload: the function with its arguments, and the sources of notebook cells for tracebacks."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from notebook_accelerate.telemetry.pickling import Payload, dump, dump_bytes, load_bytes, load_file

MAX_SOURCE_BYTES = 8 << 20
"""Cell sources beyond this are omitted, the oldest first."""


def cell_sources() -> dict[str, str]:
    """Return the sources of notebook cells by file name, so that tracebacks elsewhere show their lines."""
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
"""Prefix of the file name of another notebook's cell, of which this kernel has no file."""


def is_cell(filename: str) -> bool:
    """Whether a code object's file name is that of a notebook cell or a prompt."""
    return "ipykernel_" in filename or filename.startswith(("<ipython-input", "<python-input", "<stdin", NAMED_CELL))


def install_sources(sources: dict[str, str]) -> None:
    """Add ``sources`` to this process's linecache, for tracebacks."""
    for name, source in sources.items():
        # No loader and no modification time: linecache.checkcache leaves such entries alone.
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


def loader(descriptor: int) -> Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Return a function that loads (function, arguments) from a payload's file."""
    return lambda: load_file(descriptor)


__all__ = [
    "Payload",
    "cell_sources",
    "dump",
    "dump_bytes",
    "install_sources",
    "is_cell",
    "load_bytes",
    "load_file",
    "loader",
]
