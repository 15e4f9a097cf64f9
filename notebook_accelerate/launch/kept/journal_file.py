"""Write the journal file of a kept run, by appending whole frames and by replacing a long file with a thinned one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from notebook_accelerate.launch.kept import journal_format
from notebook_accelerate.launch.kept.journal_reader import JournalContents, read_journal
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.telemetry import LogEvent
from notebook_accelerate.telemetry.curves import m4
from notebook_accelerate.telemetry.store import Record

MAX_JOURNAL_BYTES = 64_000_000
"""The size in bytes above which a journal is thinned: curves to `KEPT_POINTS`, and output to `KEPT_LOG_BYTES`."""
KEPT_POINTS = 700_000
"""Total number of points that all curves keep when a journal is thinned. The points take 16 MB."""
KEPT_LOG_BYTES = 8 << 20
"""Total bytes of output that all ranks keep when a journal is thinned. The newest output is kept."""
_POINTS_PER_FRAME = 100_000


class JournalFile:
    """Appends to a journal file. Each write opens the file, so that forked ranks inherit no open descriptor.

    Args:
        path: Where to create the file.

    Attributes:
        path: The path of the file.
        size: The size of the file in bytes, counting only whole frames.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._thinned_size = path, 0, 0
        _write_new(path, journal_format.MAGIC)
        self.size = len(journal_format.MAGIC)

    @property
    def is_lost(self) -> bool:
        """Whether another process has deleted or truncated the file."""
        try:
            return self.path.stat().st_size < self.size
        except FileNotFoundError:
            return True

    def append(self, data: bytes) -> None:
        """Append frames to the file. After an error, the file is the same as before.

        Raises:
            OSError: The frames cannot be written.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            # Remove incomplete data that an earlier error left behind and that could not be removed at that time.
            if os.fstat(descriptor).st_size > self.size:
                os.ftruncate(descriptor, self.size)
            _write_all(descriptor, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, self.size)
            raise
        finally:
            os.close(descriptor)
        self.size += len(data)

    def sync(self) -> None:
        """Flush the file to disk, and update its modification time, which shows that the writer is alive."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.utime(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @property
    def is_long(self) -> bool:
        """Whether the file should be thinned. A file that is long even after thinning must first grow by half."""
        return self.size > max(MAX_JOURNAL_BYTES, self._thinned_size * 3 // 2)

    def thin(self) -> None:
        """Replace the file atomically with a smaller one, which keeps a bounded part of the curves and the output."""
        contents = read_journal(self.path)
        self.replace(thinned_frames(contents, last_lines(contents.journal, KEPT_LOG_BYTES)))

    def replace(self, frames: Iterable[bytes]) -> None:
        """Replace the contents of the file.

        Raises:
            OSError: The file cannot be written.
        """
        data = b"".join([journal_format.MAGIC, *frames])
        replace_file(self.path, data)
        self.size = self._thinned_size = len(data)


def replace_file(path: Path, data: bytes) -> None:
    """Create or replace a file atomically, so that it is always either complete or unchanged."""
    part = path.with_name(path.name + ".new")
    with suppress(FileNotFoundError):
        part.unlink()
    try:
        _write_new(part, data, sync=True)
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise


def _write_new(path: Path, data: bytes, *, sync: bool = False) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, data)
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def thinned_frames(contents: JournalContents, lines: Sequence[Record], run_events: int | None = None) -> list[bytes]:
    """Return the frames of a journal with ``contents``, with the curves thinned to a bounded number of points.

    Args:
        contents: The contents of the journal to thin.
        lines: The lines of output to include.
        run_events: How many of the run's own events to include, or None for all.
    """
    journal = contents.journal
    frames = [journal_format.encode_frame(section) for section in (contents.header, *contents.sections.values())]
    rows = [journal_format.row_of(record) for record in journal.records[:run_events]]
    for row in rows:
        if row[0] == "RankReturned" and row[3]["rank"] in contents.stored:
            row[3]["stored"] = contents.stored[row[3]["rank"]]
    frames += journal_format.encode_rows(rows)
    frames += points_frames(journal)
    frames += journal_format.encode_records(lines)
    frames += journal_format.encode_records(contents.latest.values())
    return frames


def points_frames(journal: Journal, until: float | None = None) -> list[bytes]:
    """Return the frames of the curves, thinned to `KEPT_POINTS`.

    Args:
        journal: The journal with the curves.
        until: The time of the last point to include, in seconds since the epoch, or None for all points.
    """
    stores = (journal.store, journal.store.automatic)
    series = [(store, name, rank) for store in stores for name in store.metric_names() for rank in store.ranks_of(name)]
    limit = max(4, KEPT_POINTS // max(1, len(series)))
    frames = []
    for store, name, rank in series:
        tail, thinned = store.tail(name, rank), store.is_thinned(name, rank)
        columns = (tail if until is None else tail.where(tail.times <= until))[:3]
        kept = m4(columns[2], limit)
        thinned = thinned or len(kept) < len(columns[2])
        for start in range(0, len(kept), _POINTS_PER_FRAME):
            part = kept[start : start + _POINTS_PER_FRAME]
            section = {"kind": "points", "name": name, "rank": rank, "count": len(part), "thinned": thinned}
            if store is journal.store.automatic:
                section["automatic"] = True
            kinds = ("<i8", "<f8", "<f8")
            payload = b"".join(column[part].astype(kind).tobytes() for column, kind in zip(columns, kinds, strict=True))
            frames.append(journal_format.encode_frame(section, payload))
    return frames


def last_lines(journal: Journal, most_bytes: int | None = None) -> Sequence[Record]:
    """Return the newest lines of all ranks, ordered by time and limited to ``most_bytes`` in total, if given."""
    store = journal.store
    found = [
        Record(rank, line.time, LogEvent(line.stream, line.text))
        for rank in store.log_ranks()
        for line in store.log_chunks(rank)
    ]
    found.sort(key=lambda record: record.time)
    if most_bytes is None:
        return found
    left = most_bytes
    for index in range(len(found) - 1, -1, -1):
        event = found[index].event
        assert isinstance(event, LogEvent)
        left -= len(json.dumps(event.text)) + 100  # The rest of the event's JSON takes about 100 bytes.
        if left < 0:
            return found[index + 1 :]
    return found
