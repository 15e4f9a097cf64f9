"""The records of a run by position, for the kernels that follow it: the latest ones in memory, and a history."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from notebook_accelerate.launch.kept import journal_format
from notebook_accelerate.launch.kept.journal_file import JournalContents, last_lines, read_journal, thinned_frames
from notebook_accelerate.launch.state.run_events import RunEnded, RunEvent

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry.store import Record

MAX_HELD_BYTES = 16 << 20
"""Most bytes of encoded records that are held for kernels; one that is further behind receives the history."""
PART_BYTES = 1 << 20
"""Bytes of a part of the history."""


class RecordStream:
    """Numbers the records of a run from its start, and encodes them as a journal has them.

    Any thread may append to the run's journal; one thread reads the stream.

    Args:
        run: The run.
        wake: Called when records arrive and all earlier ones were read.

    Attributes:
        end: The position after the last record that was read from the journal.
    """

    def __init__(self, run: Run, wake: Callable[[], None]) -> None:
        self._run, self._wake = run, wake
        header = {} if run.journal_file is None else read_journal(run.journal_file).header
        self._contents = JournalContents(journal=run.journal, header=header)
        self._waiting: list[Record] = []
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        with run.journal.locked():
            self._run_events = len(run.journal.records)
            self.end = self._begin = self._run_events + 1
            self.close = run.journal.subscribe(self._on_records, ordered=True)

    def _on_records(self, records: Sequence[Record]) -> None:
        if not self._waiting:
            self._wake()
        self._waiting.extend(records)

    @property
    def has_waiting(self) -> bool:
        """Whether there are records to read from the journal."""
        return bool(self._waiting)

    def advance(self, *, hold: bool) -> None:
        """Read what the journal has now.

        Args:
            hold: Whether to hold the records for kernels.
        """
        with self._run.journal.locked():
            count = self._readable()
            records = self._waiting[:count]
            del self._waiting[:count]
        if not records:
            return
        for record in records:
            if isinstance(record.event, RunEvent):
                self._run_events += 1
            else:
                self._contents.note(record)
        self.end += len(records)
        if hold:
            self._hold(b"".join(journal_format.encode_records(records)))
        else:
            self._held.clear()
            self._held_bytes, self._begin = 0, self.end

    def _readable(self) -> int:
        """Return how many waiting records may be sent: kernels learn of the run's end when it is saved.

        A kernel that reads the run's folder then finds its end and its results there.
        """
        if self._run.done or self._run.journal.state.unsaved:
            return len(self._waiting)
        ends = (index for index, record in enumerate(self._waiting) if isinstance(record.event, RunEnded))
        return next(ends, len(self._waiting))

    def _hold(self, data: bytes) -> None:
        self._held.append((self.end, data))
        self._held_bytes += len(data)
        while self._held_bytes > MAX_HELD_BYTES and len(self._held) > 1:
            self._begin, dropped = self._held.popleft()
            self._held_bytes -= len(dropped)

    def holds(self, position: int) -> bool:
        """Whether all records from a position on are held."""
        return self._begin <= position <= self.end

    def after(self, position: int) -> tuple[int, bytes] | None:
        """Return the next held records after a position, and the position after them; None at the end."""
        found = None
        for part in reversed(self._held):  # most kernels are near the end
            if part[0] <= position:
                break
            found = part
        return found

    def history(self) -> tuple[int, Iterator[bytes]] | None:
        """Return a position and all records before it, as parts of a journal; None while the run's end is saved."""
        with self._run.journal.locked():
            self.advance(hold=True)
            if self._waiting:
                return None
            lines = last_lines(self._run.journal)
            frames = thinned_frames(self._contents, (), self._run_events)
            return self.end, _parts(frames, lines)


def _parts(frames: Sequence[bytes], lines: Sequence[Record]) -> Iterator[bytes]:
    """Yield frames, then the frames of lines, in parts of about `PART_BYTES`."""
    part: list[bytes] = []
    size = 0
    for source in (frames, journal_format.encode_records(lines)):
        for frame in source:
            part.append(frame)
            size += len(frame)
            if size >= PART_BYTES:
                yield b"".join(part)
                part, size = [], 0
    yield b"".join(part)
