"""Split a byte stream into complete lines, and recognise progress bars that are redrawn in place."""

from __future__ import annotations

import re

MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line. Longer ones are split, so that output without line breaks cannot fill the memory."""
MAX_BARS = 20
"""Maximum number of progress bars, one below the other, that are redrawn in place.

If there are more, the upper ones become ordinary lines.
"""
UP = b"\x1b[A"
FULL = b"100%|"
_WIPED = b"\r "
_TOKENS = re.compile(rb"\n|\r+|\x1b\[A|(?:(?!\x1b\[A)[^\n\r])+")


class LineAssembler:
    """Splits a byte stream into complete lines. As on a terminal, a carriage return starts the line over.

    Nested progress bars, such as tqdm's, move down with a line break and up again with an escape sequence. Their
    rows are kept until something else is written below them.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._above: list[bytes] = []
        self._below: list[bytes] = []
        self._escape = b""  # Keep the start of an escape sequence until a later write completes it.
        # Count how often the current row was drawn since a line break led to it. None means that no line break did.
        self._draws: int | None = None

    def feed(self, data: bytes) -> str | None:
        """Return the lines that ``data`` completes, joined by line breaks, or None if no line is complete."""
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
        """Return the unfinished lines at the end of the stream, joined by line breaks, or None if there are none."""
        rows = [*self._above, self._rest + self._escape, *self._below]
        self._rest, self._escape, self._above, self._below = b"", b"", [], []
        left = [row for row in rows if row and not _is_wiped(row)]
        return _text(b"\n".join(left)) if left else None

    @property
    def redrawn(self) -> str:
        """The unfinished lines with carriage returns, which are mostly progress bars, joined by line breaks."""
        rows = (*self._above, self._rest, *self._below)
        return "\n".join(_text(row) for row in rows if b"\r" in row and row.strip())

    # ---- progress bars that are one below the other

    def _may_go_down(self, data: bytes) -> bool:
        """Return whether ``data`` is the line break that tqdm writes on its own to move down to an inner bar."""
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
        is_bar = b"\r" in row.rstrip(b"\r")  # An ordinary line may end with \r\n, so ignore a \r at the end.
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
            # A bar that is redrawn without going up is not nested, so the bars above it are complete.
            if self._draws and not _is_wiped(self._rest):
                self._complete_above(done)
            else:
                self._draws += 1
        self._rest += token

    def _add(self, token: bytes, done: list[bytes]) -> None:
        if self._draws == 0:  # The text is an ordinary line below the bars.
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
        """Complete the rows above the current one, because the following output will not redraw them."""
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
    """Return a line without the text that it has overwritten. The carriage return that marks a bar is kept."""
    start = rest.rstrip(b"\r").rfind(b"\r")
    return rest[start:] if start > 0 else rest


def _character_start(data: bytes) -> int:
    """Return a position near the end where a cut does not split a UTF-8 character."""
    start = len(data) - 1
    while start > len(data) - 4 and data[start] & 0xC0 == 0x80:  # Bytes of the form 10xxxxxx continue a character.
        start -= 1
    return start if data[start] & 0xC0 == 0xC0 else len(data)
