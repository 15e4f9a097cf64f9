"""The output of one rank: lines and rich displays, in the order that the rank produced them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate.launch.output.line_assembler import LineAssembler
from notebook_accelerate.telemetry import events
from notebook_accelerate.telemetry.events import split_at_mark

if TYPE_CHECKING:
    from collections.abc import Callable

    from notebook_accelerate.launch.output.publisher import Publisher
    from notebook_accelerate.telemetry import DisplayEvent


MAX_CLEARED_CHARS = 10_000
"""Maximum length of the text that ``clear_output`` can replace. Every new line sends all of this text again."""
MAX_HELD_BYTES = 4 << 20
"""Maximum number of bytes to hold back after a mark whose display does not arrive."""


class _Stream:
    """The part of a stream's output that has not been published.

    Attributes:
        unread: The bytes after the mark.
        mark: The number of the mark that was reached, or None while there is none.
        ended: Whether the stream has reached its end.
    """

    def __init__(self) -> None:
        self.assembler = LineAssembler()
        self.unread = b""
        self.mark: int | None = None
        self.ended = False


class RankOutput:
    """Passes the lines of a rank to the store, and lines, bars and displays to the publisher.

    Lines arrive over pipes, and displays over the rank's channel. For each display, the rank writes a mark to both
    output streams. The display is shown when both marks have arrived, followed by the output after the marks.

    Args:
        rank: The rank's global index.
        label: The prefix of the rank's lines.
        keep: A function to call with the rank, the stream and the lines, joined by line breaks.
        publisher: Shows the lines, the bars and the displays.
    """

    def __init__(self, rank: int, label: str, keep: Callable[[int, str, str], None], publisher: Publisher) -> None:
        self._rank, self._label, self._keep, self._publisher = rank, label, keep, publisher
        self._streams = {name: _Stream() for name in ("stdout", "stderr")}
        self._displays: dict[int, DisplayEvent] = {}
        self._last_shown = 0
        self._displays_arrive = True
        # Hold the lines since clear_output was called, or None before the first call.
        self._cleared: list[str] | None = None
        self._replaces = False  # This is True if the next output replaces these lines.

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
        """Show a display as soon as both streams have reached its mark."""
        if not event.mark or not self._streams:
            self._show(event)
            return
        self._displays[event.mark] = event
        self._read(wait=True)
        self._draw_bars()

    def settle(self) -> None:
        """Show all output that is still waiting for a mark or a display."""
        self._read(wait=False)
        self._show_displays(max(self._displays, default=0))

    def expect_no_displays(self) -> None:
        """Stop waiting for displays, because the channel that transmits them cannot be read."""
        self._displays_arrive = False
        self.settle()

    def finish(self, name: str | None = None) -> None:
        """Process the end of one stream, or of all. The last line then counts as complete without a line break."""
        for each, stream in self._streams.items():
            stream.ended = stream.ended or name in (None, each)
        if name is None:
            self.settle()
            self._keep = _ignore  # Break a reference cycle that would keep the run's results alive.
        else:
            self._read(wait=self._displays_arrive)
        self._draw_bars()

    def _read(self, *, wait: bool) -> None:
        """Publish each stream's output up to the next mark, then the display, and so on."""
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
        elif event.data:  # An event without data is for a display that the rank could not send.
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
            self._cleared, self._replaces = None, False  # Leave the text as it is, and no longer replace it.
            self._publisher.lines(name, text, self._label)
            return
        self._cleared, self._replaces = lines, False
        self._publisher.cleared_lines(self._rank, "\n".join(lines), self._label)

    def _clear(self, *, wait: bool) -> None:
        """Remove the lines since ``clear_output``, immediately or, if ``wait`` is set, when the next output arrives."""
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
    """Do nothing. Once the rank has ended, this replaces the callback that keeps lines."""
