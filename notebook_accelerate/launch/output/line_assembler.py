"""Split a stream of bytes into complete lines, and recognise progress bars that are redrawn in place."""

from __future__ import annotations

import re

MAX_LINE_BYTES = 1 << 20
"""Longer lines are split, so that a rank that writes no line breaks cannot fill the kernel's memory."""
MAX_BARS = 20
"""Maximum number of progress bars below each other that are redrawn in place.

With more, the upper ones become lines.
"""
UP = b"\x1b[A"
FULL = b"100%|"
_WIPED = b"\r "
_TOKENS = re.compile(rb"\n|\r+|\x1b\[A|(?:(?!\x1b\[A)[^\n\r])+")


class LineAssembler:
    """Splits a byte stream into complete lines. A carriage return restarts its line, as on a terminal.

    Nested bars, such as tqdm's, move down with a line break and up again with an escape sequence. Their rows are kept
    until something else is written below them.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._above: list[bytes] = []
        self._below: list[bytes] = []
        self._escape = b""  # The start of an escape sequence that a later write completes.
        # How often the row was drawn since a line break led to it, or None if no line break led to it.
        self._draws: int | None = None

    def feed(self, data: bytes) -> str | None:
        """Return the newly completed lines, joined by line breaks, or None if no line is complete."""
        data, self._escape = self._escape + data, b""
        if data.endswith((UP[:1], UP[:2])):
            start = data.rindex(UP[:1])
            data, self._escape = data[:start], data[start:]
        if self._above or self._below or UP in data or b"\n\r" in data or self._may_go_down(data):
            return self._feed_bars(data)
        lines, newline, rest = (self._rest + data).rpartition(b"\n")
        rest = _last_redraw(rest)
        if not newline and len(rest) > MAX_LINE_BYTES:
            cut = _character_start(rest)
            lines, newline, rest = rest[:cut], b"\n", rest[cut:]
        self._rest = rest
        return _text(lines) if newline else None

    def finish(self) -> str | None:
        """Return the unfinished lines at the end of the stream, or None if there are no such lines."""
        rows = [*self._above, self._rest + self._escape, *self._below]
        self._rest, self._escape, self._above, self._below = b"", b"", [], []
        left = [row for row in rows if row and not _is_wiped(row)]
        return _text(b"\n".join(left)) if left else None

    @property
    def redrawn(self) -> str:
        """The unfinished lines that a carriage return has redrawn, such as progress bars, joined by line breaks."""
        rows = (*self._above, self._rest, *self._below)
        return "\n".join(_text(row) for row in rows if b"\r" in row and row.strip())

    # ---- progress bars below each other

    def _may_go_down(self, data: bytes) -> bool:
        """Return whether ``data`` is the line break that tqdm writes separately to move to an inner bar."""
        return data == b"\n" and b"\r" in self._rest and b"%|" in self._rest and FULL not in self._rest

    def _feed_bars(self, data: bytes) -> str | None:
        done: list[bytes] = []
        for token in _TOKENS.findall(data):
            if token == b"\n":
                self._go_down(done)
            elif token == UP:
                self._go_up()
            elif token.startswith(b"\r"):
                self._redraw(token, done)
            else:
                self._add(token, done)
        while self._below and _is_wiped(self._below[-1]):
            self._below.pop()
        while len(self._above) + len(self._below) >= MAX_BARS:
            done.append(self._above.pop(0) if self._above else self._below.pop())
        lines = [row for row in done if not _is_wiped(row)]
        return _text(b"\n".join(lines)) if lines else None

    def _go_down(self, done: list[bytes]) -> None:
        row = self._rest
        is_bar = b"\r" in row.rstrip(b"\r")  # Do not count an ordinary line that ends with \r\n.
        self._above.append(row)
        self._rest = self._below.pop(0) if self._below else b""
        self._draws = 0
        if not is_bar or (FULL in row and len(self._above) == 1):
            self._complete_above(done)

    def _go_up(self) -> None:
        self._below.insert(0, self._rest)
        self._rest = self._above.pop() if self._above else _WIPED
        self._draws = None

    def _redraw(self, token: bytes, done: list[bytes]) -> None:
        if self._draws is not None:
            # The row is redrawn without having gone up, so it follows the bar above it.
            if self._draws and not _is_wiped(self._rest):
                self._complete_above(done)
            else:
                self._draws += 1
        self._rest += token

    def _add(self, token: bytes, done: list[bytes]) -> None:
        if self._draws == 0:  # This is an ordinary line below the bars.
            if self._rest:
                self._above.append(self._rest)
            self._rest = b""
            self._complete_above(done)
        elif _is_wiped(self._rest):
            self._rest = b"\r"
        self._rest = _last_redraw(self._rest + token)
        if len(self._rest) > MAX_LINE_BYTES:
            cut = _character_start(self._rest)
            done.append(self._rest[:cut])
            self._rest = self._rest[cut:]

    def _complete_above(self, done: list[bytes]) -> None:
        """Complete the rows above the current one, because the following output is not drawn over them."""
        done += self._above
        self._above.clear()
        self._draws = None


def _text(data: bytes) -> str:
    text = data.decode("utf-8", errors="replace")
    if "\r" not in text:
        return text
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _is_wiped(row: bytes) -> bool:
    """Return whether a bar has been overwritten with blanks."""
    return row.startswith(b"\r") and row.strip(b"\r").isspace()


def _last_redraw(rest: bytes) -> bytes:
    """Return a line without the states that it has overwritten. It keeps the carriage return, which marks a bar."""
    start = rest.rstrip(b"\r").rfind(b"\r")
    return rest[start:] if start > 0 else rest


def _character_start(data: bytes) -> int:
    """Return the start of the last, perhaps unfinished, UTF-8 character. A cut there does not split a character."""
    start = len(data) - 1
    while start > len(data) - 4 and data[start] & 0xC0 == 0x80:  # 10xxxxxx is a continuation byte within a character.
        start -= 1
    return start if data[start] & 0xC0 == 0xC0 else len(data)
