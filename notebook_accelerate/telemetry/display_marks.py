"""Marks in a rank's standard streams: where in them a rich display belongs, which travels by the rank's channel.

A mark is an operating system command of ECMA-48, which a terminal ignores.
"""

from __future__ import annotations

import re

BEGIN, END = b"\x1b]notebook_accelerate:", b"\x07"
_MARK = re.compile(re.escape(BEGIN) + rb"(\d{1,15})" + END)
_LONGEST = len(BEGIN) + 15


def mark(number: int) -> bytes:
    """Return the mark of a display."""
    return BEGIN + b"%d" % number + END


def split(data: bytes, *, complete: bool) -> tuple[bytes, int | None, bytes]:
    """Return the output before the next mark, the mark's number, and the output behind it.

    Args:
        data: Output of a rank.
        complete: Whether nothing follows ``data``. Otherwise what may be the start of a mark is left for later.

    Returns:
        Without a mark its number is None, and the last part holds what is left for later.
    """
    if (found := _MARK.search(data)) is not None:
        return data[: found.start()], int(found[1]), data[found.end() :]
    start = -1 if complete else data.rfind(BEGIN[:1], -_LONGEST)
    if start >= 0 and (data[start:].startswith(BEGIN) or BEGIN.startswith(data[start:])):
        return data[:start], None, data[start:]
    return data, None, b""


__all__ = ["BEGIN", "mark", "split"]
