"""The output of one rank: its lines and rich displays, in the order in which the rank made them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from notebook_accelerate.telemetry import events
from notebook_accelerate.telemetry.events import split_at_mark

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accelerate.launch.output.rank_lines import Publisher
    from notebook_accelerate.telemetry import DisplayEvent


MAX_CLEARED_CHARS = 10_000
"""Longer text after ``clear_output`` is not replaced by the next call: each line that comes sends all of it again."""
MAX_HELD_BYTES = 4 << 20
"""Output behind a mark whose display does not arrive is held up to this size."""


class _Stream:
    """Output of one stream that has not been published.

    Attributes:
        unread: The bytes behind the mark.
        mark: The number of the mark that is reached; None: the next one has not been read.
        ended: Whether nothing follows.
    """

    def __init__(self) -> None:
        self.assembler = LineAssembler()
        self.unread = b""
        self.mark: int | None = None
        self.ended = False


class RankOutput:
    """Passes the lines of a rank to the store, and lines, bars and displays to the publisher.

    Lines arrive by pipes, and displays by the rank's channel. For each display there is a mark in both streams: the
    display is shown when both are there, and what follows the marks after the display.

    Args:
        rank: Global index.
        label: The prefix of its lines.
        keep: Called with rank, stream and lines, joined by line breaks.
        publisher: Shows them.
    """

    def __init__(self, rank: int, label: str, keep: Callable[[int, str, str], None], publisher: Publisher) -> None:
        self._rank, self._label, self._keep, self._publisher = rank, label, keep, publisher
        self._streams = {name: _Stream() for name in ("stdout", "stderr")}
        self._displays: dict[int, DisplayEvent] = {}
        self._last_shown = 0
        self._displays_arrive = True
        self._cleared: list[str] | None = None  # the lines since clear_output; None: it has not been called
        self._replaces = False  # whether the next output replaces them

    def feed(self, name: str, data: bytes) -> None:
        """Process bytes received from a stream."""
        stream = self._streams[name]
        if stream.unread or stream.mark is not None or events.BEGIN[:1] in data:
            stream.unread += data
            self._read(wait=self._displays_arrive and len(stream.unread) < MAX_HELD_BYTES)
        else:
            self._publish(name, stream.assembler.feed(data))
        self._draw_bars()

    def display(self, event: DisplayEvent) -> None:
        """Show a display, as soon as its marks are reached."""
        if not event.mark or not self._streams:
            self._show(event)
            return
        self._displays[event.mark] = event
        self._read(wait=True)
        self._draw_bars()

    def settle(self) -> None:
        """Show what waits for a mark, or for a display, that has been lost."""
        self._read(wait=False)
        self._show_displays(max(self._displays, default=0))

    def expect_no_displays(self) -> None:
        """Wait for no display any more: the channel by which they arrive cannot be read."""
        self._displays_arrive = False
        self.settle()

    def finish(self, name: str | None = None) -> None:
        """Process the end of a stream, or of all: its last line is complete without a line break."""
        for each, stream in self._streams.items():
            stream.ended = stream.ended or name in (None, each)
        if name is None:
            self.settle()
            self._keep = _ignore  # a cycle of references, which would keep the results of the run
        else:
            self._read(wait=self._displays_arrive)
        self._draw_bars()

    def _read(self, *, wait: bool) -> None:
        """Publish up to the next mark of each stream, then the display, and so on."""
        while True:
            for name, stream in list(self._streams.items()):
                if stream.mark is None:
                    complete = stream.ended or not wait
                    text, stream.mark, stream.unread = split_at_mark(stream.unread, complete=complete)
                    self._publish(name, stream.assembler.feed(text))
                    if stream.ended and stream.mark is None:
                        self._publish(name, stream.assembler.finish())
                        del self._streams[name]
            marks = [stream.mark for stream in self._streams.values() if stream.mark is not None]
            if not marks or (wait and len(marks) < len(self._streams)):
                return
            reached = min(marks)
            self._show_displays(reached)
            if wait and reached > self._last_shown:
                return
            for stream in self._streams.values():
                if stream.mark == reached:
                    stream.mark = None

    def _show_displays(self, mark: int) -> None:
        for number in sorted(number for number in self._displays if number <= mark):
            self._last_shown, event = number, self._displays.pop(number)
            self._show(event)

    def _show(self, event: DisplayEvent) -> None:
        if event.clear:
            self._clear(wait=event.clear == "wait")
        elif event.data:  # otherwise it could not be sent
            if self._replaces and not event.update:
                self._clear(wait=False)
            self._publisher.display(event, self._label)

    def _publish(self, name: str, text: str | None) -> None:
        if text is None:
            return
        self._keep(self._rank, name, text)
        if self._cleared is None:
            self._publisher.lines(name, text, self._label)
            return
        lines = [text] if self._replaces else [*self._cleared, text]
        if sum(map(len, lines)) > MAX_CLEARED_CHARS:
            self._cleared, self._replaces = None, False  # it stays
            self._publisher.lines(name, text, self._label)
            return
        self._cleared, self._replaces = lines, False
        self._publisher.cleared_lines(self._rank, "\n".join(lines), self._label)

    def _clear(self, *, wait: bool) -> None:
        """Let what follows replace the lines since the last call: the next output if ``wait``, else at once."""
        if not self._publisher.redraws:
            return
        self._replaces = wait
        if self._cleared and not wait:
            self._publisher.cleared_lines(self._rank, "", self._label)
        if self._cleared is None or not wait:
            self._cleared = []

    def _draw_bars(self) -> None:
        bars = [stream.assembler.redrawn for stream in self._streams.values()]
        self._publisher.bar(self._rank, "\n".join(bar for bar in bars if bar), self._label)


def _ignore(_rank: int, _stream: str, _text: str) -> None:
    """Takes the place of what keeps the lines of a rank that has ended."""


# ---- complete lines, and progress bars that are redrawn in place

MAX_LINE_BYTES = 1 << 20
"""Longer lines are broken, so that a rank that writes no line breaks cannot fill the kernel's memory."""
MAX_BARS = 20
"""The most bars below each other that are redrawn in place; the upper ones of more become lines."""
UP = b"\x1b[A"
FULL = b"100%|"
_WIPED = b"\r "
_TOKENS = re.compile(rb"\n|\r+|\x1b\[A|(?:(?!\x1b\[A)[^\n\r])+")


class LineAssembler:
    """Splits a byte stream into complete lines; a carriage return restarts its line, as on a terminal.

    Nested bars, as of tqdm, move down with a line break and up again with an escape sequence. Their rows are kept until
    something else is written below them.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._above: list[bytes] = []
        self._below: list[bytes] = []
        self._escape = b""  # the start of an escape sequence that another write completes
        self._draws: int | None = None  # how often the row was drawn since a line break led to it; None: not by one

    def feed(self, data: bytes) -> str | None:
        """Return the newly completed lines, joined by line breaks; None: no line is complete."""
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
        """Return the unfinished lines at the end; None: there are none."""
        rows = [*self._above, self._rest + self._escape, *self._below]
        self._rest, self._escape, self._above, self._below = b"", b"", [], []
        left = [row for row in rows if row and not _is_wiped(row)]
        return _text(b"\n".join(left)) if left else None

    @property
    def redrawn(self) -> str:
        """The unfinished lines that a carriage return has redrawn, as in progress bars, joined by line breaks."""
        rows = (*self._above, self._rest, *self._below)
        return "\n".join(_text(row) for row in rows if b"\r" in row and row.strip())

    # ---- bars below each other

    def _may_go_down(self, data: bytes) -> bool:
        """Whether ``data`` is the line break with which tqdm moves to an inner bar, in a write of its own."""
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
        is_bar = b"\r" in row.rstrip(b"\r")  # not an ordinary line that ends with \r\n
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
            if self._draws and not _is_wiped(self._rest):  # again, without having gone up: it follows the bar above
                self._complete_above(done)
            else:
                self._draws += 1
        self._rest += token

    def _add(self, token: bytes, done: list[bytes]) -> None:
        if self._draws == 0:  # an ordinary line below the bars
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
        """Complete the rows above the current one: what follows is not drawn over them."""
        done += self._above
        self._above.clear()
        self._draws = None


def _text(data: bytes) -> str:
    text = data.decode("utf-8", errors="replace")
    if "\r" not in text:
        return text
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


def _is_wiped(row: bytes) -> bool:
    """Whether a bar has been overwritten with blanks."""
    return row.startswith(b"\r") and row.strip(b"\r").isspace()


def _last_redraw(rest: bytes) -> bytes:
    """Return a line without the states that it has overwritten; the carriage return stays and marks a progress bar."""
    start = rest.rstrip(b"\r").rfind(b"\r")
    return rest[start:] if start > 0 else rest


def _character_start(data: bytes) -> int:
    """Return the start of the last, perhaps unfinished, UTF-8 character: a cut there splits no character."""
    start = len(data) - 1
    while start > len(data) - 4 and data[start] & 0xC0 == 0x80:  # 10xxxxxx: inside a character
        start -= 1
    return start if data[start] & 0xC0 == 0xC0 else len(data)
