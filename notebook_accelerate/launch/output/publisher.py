"""Publish the labelled lines and displays of ranks under the launching cell."""

from __future__ import annotations

import itertools
import operator
import string
import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.output.output_budget import HeadAndTail, OutputBudget, WaitingDisplays, display_size
from notebook_accelerate.launch.output.running_cell import parent_message, running_kernel
from notebook_accelerate.launch.output.standard_streams import StandardStream
from notebook_accelerate.telemetry.tracebacks import describe_error

if TYPE_CHECKING:
    from notebook_accelerate.telemetry import DisplayEvent

FLUSH_SECONDS = 0.1
"""Minimum seconds between two messages to the front end, because it redraws the page for each message."""
MAX_BAR_CHARS = 1_000
"""Maximum length of a progress bar. Longer ones are truncated, because a change in one bar sends all bars again."""
TAIL_SECONDS = 0.5
"""Minimum seconds between two redraws of the last lines of long output."""
PROGRESS_SECONDS = 0.2
"""Minimum seconds between two redraws of progress bars."""


def line_label(template: str | None, rank: int, local_rank: int) -> str:
    """Return the prefix of a rank's lines, such as "[rank 1] ", or the prefix that the user's template yields."""
    if template is None:
        return f"[rank {rank}] "
    return string.Template(template).safe_substitute(role_name="default", rank=rank, local_rank=local_rank)


class Publisher(ABC):
    """Shows the labelled lines, rich outputs and progress bars of a run. Not thread-safe.

    Attributes:
        redraws: Whether later output can replace earlier output.
    """

    redraws = False

    def __init__(self) -> None:
        self._pending: list[tuple[str, str]] = []
        self._last_label = ""
        self._due = 0.0
        self._bars: dict[int, str] = {}
        self._bars_changed = False
        self._bars_due = 0.0
        self._cleared: dict[int, str] = {}  # Hold the changes that are still to be drawn.

    @abstractmethod
    def _write(self, stream: str, text: str) -> None:
        """Write text to a stream, "stdout" or "stderr"."""

    def show_under(self, cell: Any) -> None:
        """Show later output under another cell, given by its execute request. This has no effect outside a notebook."""
        return

    @abstractmethod
    def display(self, event: DisplayEvent, label: str) -> None:
        """Show a rich output of a rank."""

    def _draw_bars(self, text: str) -> None:
        """Show all ranks' progress bars in one output that is redrawn. This has no effect outside a notebook."""
        return

    def _draw_cleared(self, rank: int, text: str) -> None:
        """Show a rank's lines since ``clear_output`` in one output that is redrawn."""
        return

    def cleared_lines(self, rank: int, text: str, label: str) -> None:
        """Show all of a rank's lines since its last ``clear_output``, replacing earlier ones. "" removes the lines."""
        self._last_label = ""
        self._cleared[rank] = label + text.replace("\n", "\n" + label) if text else ""

    def line(self, stream: str, text: str) -> None:
        """Show a line from the launcher itself."""
        self._last_label = ""
        self._pending.append((stream, text + "\n"))

    def lines(self, stream: str, text: str, label: str) -> None:
        """Show lines of a rank, each prefixed with ``label``. In ``text``, they are joined by line breaks."""
        self._last_label = label
        self._pending.append((stream, label + text.replace("\n", "\n" + label) + "\n"))

    def bar(self, rank: int, text: str, label: str) -> None:
        """Show the lines of ``text`` as the progress bars of ``rank``. If ``text`` is empty, remove the bars."""
        if text:
            bars = [bar if len(bar) <= MAX_BAR_CHARS else bar[:MAX_BAR_CHARS] + " …" for bar in text.split("\n")]
            self._bars[rank] = "\n".join(label + bar for bar in bars)
        elif self._bars.pop(rank, None) is None:
            return
        self._bars_changed = True

    def seconds_until_due(self) -> float | None:
        """Return the seconds until ``flush`` is due, or None if nothing is pending."""
        due = [self._due] if self._pending else []
        if self._bars_changed or self._cleared:
            due.append(self._bars_due)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def flush(self, *, force: bool = False) -> None:
        """Send pending output that is due. With ``force``, send all pending output."""
        now = time.monotonic()
        if self._pending and (force or now >= self._due):
            self._due = now + FLUSH_SECONDS
            pending, self._pending = self._pending, []
            for stream, group in itertools.groupby(pending, key=operator.itemgetter(0)):
                self._write(stream, "".join(text for _, text in group))
        if not (self._bars_changed or self._cleared) or not (force or now >= self._bars_due):
            return
        self._bars_due = now + PROGRESS_SECONDS
        cleared, self._cleared = self._cleared, {}
        for rank in sorted(cleared):
            self._draw_cleared(rank, cleared[rank])
        if self._bars_changed:
            self._bars_changed = False
            self._draw_bars("\n".join(self._bars[rank] for rank in sorted(self._bars)))


class TextPublisher(Publisher):
    """Writes to the ``sys.stdout`` and ``sys.stderr`` of the launch, such as a terminal, a file or a capture."""

    def __init__(self) -> None:
        super().__init__()
        streams = {"stdout": sys.stdout, "stderr": sys.stderr}
        self._streams = {name: StandardStream(stream, name) for name, stream in streams.items()}

    def _write(self, stream: str, text: str) -> None:
        self._streams[stream].write(text)

    def display(self, event: DisplayEvent, label: str) -> None:
        self.lines("stdout", str(event.data.get("text/plain", "<display>")), label)


class NotebookPublisher(Publisher):
    """Publishes under the launching cell, from any thread and even after that cell has finished.

    If there is a lot of text, the cell shows the first lines, and below them the last lines in an output that is
    redrawn.

    Args:
        kernel: The ipykernel that runs in this process.
        run_id: The run's number.
        text: Whether to show the ranks' text in the cell. Their displays are always shown.
    """

    redraws = True

    def __init__(self, kernel: Any, run_id: int, *, text: bool = True) -> None:
        super().__init__()
        self._kernel = kernel
        self._parent = parent_message(kernel)
        self._bars_shown = False
        self._cleared_shown: set[int] = set()
        self._bars_id = f"notebook-accelerate-{run_id}-progress"
        self._budget, self._waiting = OutputBudget(), WaitingDisplays()
        self._shows_text = text
        self._text = HeadAndTail()
        self._tail_due = 0.0
        self._tail_shown = False
        self._tail_id = f"notebook-accelerate-{run_id}-tail"

    def lines(self, stream: str, text: str, label: str) -> None:
        if self._shows_text:
            super().lines(stream, text, label)

    def cleared_lines(self, rank: int, text: str, label: str) -> None:
        if self._shows_text:
            super().cleared_lines(rank, text, label)

    def bar(self, rank: int, text: str, label: str) -> None:
        if self._shows_text:
            super().bar(rank, text, label)

    def show_under(self, cell: Any) -> None:
        self._parent = cell
        self._bars_shown = self._tail_shown = False
        self._cleared_shown.clear()

    def _send(self, kind: str, content: dict[str, Any], topic: str) -> None:
        # Send through the session, because an OutStream would add the text to the cell that is running now.
        socket, ident = self._kernel.iopub_socket, topic.encode()
        self._kernel.session.send(socket, kind, content, parent=self._parent, ident=ident)

    def _write(self, stream: str, text: str) -> None:
        if shown := self._text.head(text):
            self._budget.spend(len(shown))
            self._send("stream", {"name": stream, "text": shown}, f"stream.{stream}")

    def display(self, event: DisplayEvent, label: str) -> None:
        """Show a rich output. If the output above it has another label, print the rank's label first."""
        if not event.update and label.strip() and label != self._last_label:
            super().lines("stdout", "", label)
        super().flush(force=True)
        event = self._waiting.first_shown(event)
        if self._budget.left <= 0 or self._waiting.waits(event):
            self._waiting.put(event)
        else:
            self._show(event, label)

    def _show(self, event: DisplayEvent, label: str = "") -> None:
        self._budget.spend(display_size(event))
        try:
            self._send_display(event.data, event.metadata, event.display_id, update=event.update)
        except Exception as error:  # noqa: BLE001 - a front end's encoder may raise any error for a user's value
            self.lines("stderr", f"a display cannot be shown: {describe_error(error, 200)}", label)

    def _send_display(self, data: Any, metadata: Any, display_id: str | None, *, update: bool) -> None:
        transient = {} if display_id is None else {"display_id": display_id}
        kind = "update_display_data" if update else "display_data"
        self._send(kind, {"data": data, "metadata": metadata, "transient": transient}, kind)

    def _draw_bars(self, text: str) -> None:
        if text and self._budget.left <= 0:
            self._bars_changed = True  # Draw the bars later. Only their removal is shown immediately.
            return
        self._budget.spend(len(text))
        self._send_display({"text/plain": text}, {}, self._bars_id, update=self._bars_shown)
        self._bars_shown = True

    def _draw_cleared(self, rank: int, text: str) -> None:
        if text and self._budget.left <= 0:
            self._cleared.setdefault(rank, text)  # Draw the lines later.
            return
        self._budget.spend(len(text))
        identity = f"{self._bars_id}-cleared-{rank}"
        self._send_display({"text/plain": text}, {}, identity, update=rank in self._cleared_shown)
        self._cleared_shown.add(rank)

    def seconds_until_due(self) -> float | None:
        due = super().seconds_until_due()
        if not self._text.changed:
            return due
        left = max(0.0, self._tail_due - time.monotonic())
        return left if due is None else min(due, left)

    def _draw_tail(self) -> None:
        self._tail_due = time.monotonic() + TAIL_SECONDS
        text = self._text.tail()
        self._budget.spend(len(text))
        self._send_display({"text/plain": text}, {}, self._tail_id, update=self._tail_shown)
        self._tail_shown = True

    def flush(self, *, force: bool = False) -> None:
        """Show pending output that is due. With ``force``, show all of it and report how many displays were dropped."""
        super().flush(force=force)
        if self._text.changed and (force or time.monotonic() >= self._tail_due):
            self._draw_tail()
        while self._waiting and (force or self._budget.left > 0):
            self._show(self._waiting.pop())
        if force:
            self._note_left_out()

    def _note_left_out(self) -> None:
        left_out, self._waiting.left_out = self._waiting.left_out, 0
        if left_out:
            text = f"… {left_out:,} displays not shown here: there were too many at once\n"
            self._send("stream", {"name": "stderr", "text": text}, "stream.stderr")


def publisher_for(run_id: int, *, text: bool = True) -> Publisher:
    """Create the publisher for a run that is being launched.

    Args:
        run_id: The run's number.
        text: Whether a notebook's cell shows the ranks' text. Outside a notebook, the text is always shown.
    """
    kernel = running_kernel()
    if kernel is not None and type(sys.stdout).__module__.startswith("ipykernel"):
        return NotebookPublisher(kernel, run_id, text=text)
    return TextPublisher()  # A kernel whose sys.stdout is captured also gets this one.
