"""Writes the file of a kept run's journal: appends whole frames, and replaces a long file with a thinned one."""

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

MAX_JOURNAL_BYTES = 64 << 20
"""A larger journal is thinned: its curves to `KEPT_POINTS`, its output to `KEPT_LOG_BYTES`."""
KEPT_POINTS = 700_000
"""Points that stay of all curves of a run when its journal is thinned: 16 MiB."""
KEPT_LOG_BYTES = 8 << 20
"""Bytes of output that stay of all ranks together when a journal is thinned; the newest ones."""
_POINTS_PER_FRAME = 100_000


class JournalFile:
    """Appends to a journal. No descriptor stays open: ranks that are forked meanwhile would inherit it.

    Args:
        path: The file, which is created.

    Attributes:
        path: The file.
        size: Its bytes, all of them of whole frames.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._thinned_size = path, 0, 0
        _write_new(path, journal_format.MAGIC)
        self.size = len(journal_format.MAGIC)

    @property
    def is_lost(self) -> bool:
        """Whether another process has deleted or shortened the file."""
        try:
            return self.path.stat().st_size < self.size
        except FileNotFoundError:
            return True

    def append(self, data: bytes) -> None:
        """Append frames; after an error the file is as it was before.

        Raises:
            OSError: They cannot be written.
        """
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_size > self.size:  # what an error left, and could not be removed then
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
        """Have the system write the file to the disk; its new time shows that the writer lives."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.utime(descriptor)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @property
    def is_long(self) -> bool:
        """Whether the file is to be thinned. Where what stays is long itself, not again before it has grown by half."""
        return self.size > max(MAX_JOURNAL_BYTES, self._thinned_size * 3 // 2)

    def thin(self) -> None:
        """Replace the file with a smaller one, at once: of its curves and its output, a bounded part stays."""
        contents = read_journal(self.path)
        self.replace(thinned_frames(contents, last_lines(contents.journal, KEPT_LOG_BYTES)))

    def replace(self, frames: Iterable[bytes]) -> None:
        """Write the file anew.

        Raises:
            OSError: It cannot be written.
        """
        data = b"".join([journal_format.MAGIC, *frames])
        replace_file(self.path, data)
        self.size = self._thinned_size = len(data)


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, or replace it: it is complete, or as it was."""
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
    """Return the frames of a journal with a bounded part of the curves of ``contents``.

    Args:
        contents: The contents.
        lines: The lines of output that the journal has.
        run_events: How many of the events of the run itself to take; None: all.
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
        journal: The journal.
        until: Seconds since the epoch; leave out later points.
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
    """Return the newest lines of all ranks, within ``most_bytes`` in all (None: all lines), in order of time."""
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
        left -= len(json.dumps(event.text)) + 100  # about the JSON around it
        if left < 0:
            return found[index + 1 :]
    return found
