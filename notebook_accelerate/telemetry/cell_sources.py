"""The sources of notebook cells, which a launch sends to its ranks for tracebacks."""

from __future__ import annotations

import linecache

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
