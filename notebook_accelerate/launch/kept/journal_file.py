"""The file of a kept run's journal: appends whole frames, and reads them into a `Journal`."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from notebook_accelerate.errors import BrokenRunError
from notebook_accelerate.hardware import guarded_files
from notebook_accelerate.launch.kept import journal_format
from notebook_accelerate.launch.kept.journal_format import Frame, Points
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.launch.state.run_events import (
    RUN,
    AttemptStarted,
    RankReturned,
    RunEvent,
    RunLost,
    RunPlanned,
    WarningAdded,
)
from notebook_accelerate.launch.state.run_state import RunState
from notebook_accelerate.telemetry import DroppedEvent, EpochEvent, LogEvent, ProgressEvent
from notebook_accelerate.telemetry.curves import m4
from notebook_accelerate.telemetry.store import Record, SeriesTail
from notebook_accelerate.telemetry.tracebacks import describe_error

JOURNAL_NAME = "journal.nbac"
MAX_JOURNAL_BYTES = 64 << 20
"""A larger journal is thinned: its curves to `KEPT_POINTS`, its output to `KEPT_LOG_BYTES`."""
KEPT_POINTS = 700_000
"""Points that stay of all curves of a run when its journal is thinned: 16 MiB."""
KEPT_LOG_BYTES = 8 << 20
"""Bytes of output that stay of all ranks together when a journal is thinned; the newest ones."""
MAX_READ_BYTES = 512 << 20
"""A larger file is not read: no journal of this package is."""
MAX_WORK = 1_500_000_000
"""References that may be copied to read the events of a run: each copies those to its ranks, notes and attempts. Takes
five seconds; a run of 16,000 ranks needs two thirds of it."""
_RANK_WORK = 600
"""Cost of creating a rank's state, in copied references."""
_WARNING_WORK = 6
"""Cost of comparing two warnings, in copied references."""
_SECTIONS = frozenset({"code"})
"""The sections that are kept, in addition to the header and the curves. Others, of a newer version, are left out."""
MAX_LATEST = 20_000
"""Events of ranks, other than metrics and output, that stay when a journal is thinned; the newest ones."""
_MAX_NAME_CHARS = 1000
_LAST_BYTES = 256
_POINT_BYTES = 24
_POINTS_PER_FRAME = 100_000

ResultLoader = Callable[[int, Any], RankResult]
"""Returns the result of a rank from what its event says about its file: None means no file, `...` nothing."""


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


@dataclass
class JournalContents:
    """A journal that was read, or is being followed.

    Attributes:
        load_result: Returns the results of ranks.
        journal: The events.
        header: The section about the launch; empty before it was read.
        sections: The other sections of `_SECTIONS`, by kind.
        stored: By rank, what its event says about the file of its result.
        latest: The latest events of ranks that newer ones replace, by `replacement_key`.
        run_events: Number of the events of the run itself that were read.
        known: Number of those that the journal has, also from the process that writes the file.
        work: What reading them took, which is limited to `MAX_WORK`.
        end: Bytes of the file that were read.
        identity: Device and inode of the file.
        last: Its last bytes that were read: the inode of a file that was deleted may be given to the next one.
    """

    load_result: ResultLoader = field(default=lambda _rank, _stored: RankResult(int))
    journal: Journal = field(default_factory=Journal)
    header: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    stored: dict[int, Any] = field(default_factory=dict)
    latest: dict[tuple[Any, ...], Record] = field(default_factory=dict)
    run_events: int = 0
    known: int = 0
    work: int = 0
    end: int = 0
    identity: tuple[int, int] = (0, 0)
    last: bytes = b""

    def same_file(self, stream: BinaryIO) -> bool:
        """Whether an open file is the one that was read."""
        found = os.pread(stream.fileno(), len(self.last), self.end - len(self.last))  # fewer after an error of the disk
        return _identity(stream) == self.identity and self.last.startswith(found)

    def feed(self, data: bytes | memoryview) -> None:
        """Add the complete frames of bytes that follow those of the calls before.

        Raises:
            ValueError: They are no frames of a journal.
        """
        start = self.end
        for frame, end in journal_format.read_frames(data):
            self.end = start + end
            self.last = bytes(data[max(0, end - _LAST_BYTES) : end])
            self._take(frame)

    def take_frames(self, data: bytes | memoryview) -> None:
        """Add frames that do not come from the file.

        Raises:
            ValueError: They are no complete frames of a journal.
        """
        read = 0
        for frame, end in journal_format.read_frames(data):
            self._take(frame)
            read = end
        if read != len(data):
            raise ValueError("a frame is not complete")

    def _take(self, frame: Frame) -> None:
        content = frame.content
        if isinstance(content, list):
            self._take_rows(content)
        elif isinstance(content, dict):
            self._take_section(content, frame.payload)
        else:
            raise ValueError("a frame has neither events nor a section")

    def _take_section(self, section: dict[str, Any], payload: bytes) -> None:
        kind = section.get("kind")
        if not self.header:
            guarded_files.check_depth(section)
            _check_header(section)
            self.header = section
        elif kind == "points":
            name, rank, tail = _points_of(section, payload)
            store = self.journal.store.automatic if section.get("automatic") is True else self.journal.store
            store.add_points(name, rank, tail, thinned=section.get("thinned") is True)
        elif kind in _SECTIONS:
            guarded_files.check_depth(section)
            self.sections[kind] = section

    def _take_rows(self, rows: list[Any]) -> None:
        if not self.header:
            raise ValueError("it does not begin with a header")
        points: Points = {}
        waiting: list[Record] = []
        for row in rows:
            if journal_format.take_points(row, points):
                continue
            record = journal_format.record_of(row)
            if record is None:
                if row[1] == RUN:  # of a newer version
                    self._count_run_event()
                continue
            if isinstance(record.event, RunEvent):
                self._add(points, waiting)
                self._take_run_event(record, row[3])
            else:
                self.note(record)
                waiting.append(record)
        self._add(points, waiting)

    def _add(self, points: Points, records: list[Record]) -> None:
        """Add what was collected, and empty the collections."""
        import numpy as np

        for (name, rank), (steps, times, values) in points.items():
            columns = np.array(steps, "<i8"), np.array(times, "<f8"), np.array(values, "<f8")
            self.journal.store.add_points(name, rank, SeriesTail(*columns, (0, 0), whole=False))
        self.journal.add(list(records))
        points.clear()
        records.clear()

    def _take_run_event(self, record: Record, values: dict[str, Any]) -> None:
        event = record.event
        assert isinstance(event, RunEvent)
        self.work += _work_of(event, self.journal.state)
        if self.work > MAX_WORK:
            raise ValueError("it has more ranks and events than any run")
        if isinstance(event, RankReturned):
            stored = values.get("stored", ...)
            if stored is not ...:
                self.stored[event.rank] = stored
            event.result = self.load_result(event.rank, stored)
        if self._count_run_event():
            self.journal.append(event, record.time)

    def _count_run_event(self) -> bool:
        """Count an event of the run itself; return whether the journal does not have it yet."""
        self.run_events += 1
        if self.run_events <= self.known:
            return False
        self.known = self.run_events
        return True

    def note(self, record: Record) -> None:
        """Keep an event of a rank in place of the one that it replaces."""
        event, key = record.event, replacement_key(record)
        if key is None:
            return
        if isinstance(event, DroppedEvent) and (before := self.latest.get(key)) is not None:
            assert isinstance(before.event, DroppedEvent)
            record = record._replace(event=DroppedEvent(before.event.count + event.count))
        self.latest.pop(key, None)
        if isinstance(event, EpochEvent) and (before := self.latest.pop((ProgressEvent, record.rank, True), None)):
            self.latest.pop(("step before", record.rank), None)
            self.latest["step before", record.rank] = before
        self.latest[key] = record
        if len(self.latest) > MAX_LATEST:
            del self.latest[next(iter(self.latest))]


def _work_of(event: RunEvent, state: RunState) -> int:
    """Return how many references applying an event to a state copies; a small file could take hours otherwise."""
    if isinstance(event, RunPlanned):
        if not 0 <= event.count <= journal_format.MAX_RANKS:
            raise ValueError(f"it has {event.count:,} ranks, at most {journal_format.MAX_RANKS:,} are read")
        return _RANK_WORK * event.count
    parts = (state.ranks, state.notes, state.warnings, state.diagnoses, state.attempts, state.prompts, state.paused)
    copied = sum(map(len, parts))
    if isinstance(event, WarningAdded):
        return copied + _WARNING_WORK * len(state.warnings)
    return _RANK_WORK * copied if isinstance(event, (AttemptStarted, RunLost)) else copied


def replacement_key(record: Record) -> tuple[Any, ...] | None:
    """Return the key by which a newer event of a rank replaces an older one; None if every event counts."""
    event, names = record.event, type(record.event).latest_by
    return None if names is None else (type(event), record.rank, *(getattr(event, name) for name in names))


def _check_header(section: dict[str, Any]) -> None:
    version = section.get("format")
    if section.get("kind") != "header" or type(version) is not int:
        raise ValueError("it does not begin with a header")
    if version > journal_format.FORMAT:
        raise ValueError(
            f"it has format {version}, and this version reads formats up to {journal_format.FORMAT}: "
            "pip install -U notebook-accelerate"
        )
    for name, kind in {"name": str, "function": str, "config": dict, "process": dict, "arguments": dict}.items():
        if not isinstance(section.get(name), kind):
            raise ValueError(f"its header has no {name}")
    for name in ("name", "function"):
        if len(section[name]) > _MAX_NAME_CHARS:
            raise ValueError(f"its header has a {name} of {len(section[name]):,} characters")


def _points_of(section: dict[str, Any], payload: bytes) -> tuple[str, int, SeriesTail]:
    import numpy as np

    name, rank, count = section.get("name"), section.get("rank"), section.get("count")
    if not (isinstance(name, str) and type(rank) is int and 0 <= rank < journal_format.MAX_RANKS):
        raise ValueError("a curve has no name or no rank")
    if type(count) is not int or count * _POINT_BYTES != len(payload):
        raise ValueError(f"the curve {name[:80]!r} does not have {count} points")
    columns = [
        np.frombuffer(payload, dtype=kind, count=count, offset=8 * count * index)
        for index, kind in enumerate(("<i8", "<f8", "<f8"))
    ]
    if not ((columns[1] >= 0) & (columns[1] <= journal_format.LATEST_TIME)).all():  # nor NaN
        raise ValueError(f"the curve {name[:80]!r} has a point without a time")
    return name, rank, SeriesTail(columns[0], columns[1], columns[2], (0, 0), whole=True)


def read_journal(path: Path, contents: JournalContents | None = None) -> JournalContents:
    """Read a journal; a last event that was not written completely is left out.

    Args:
        path: The file.
        contents: Empty contents to add it to; None creates them, without results.

    Raises:
        FileNotFoundError: There is no such file.
        BrokenRunError: The file is damaged, too large, or no journal.
    """
    contents = JournalContents() if contents is None else contents
    with open_journal(path) as file:
        contents.identity = _identity(file)
        data = memoryview(file.read(MAX_READ_BYTES))
    if bytes(data[: len(journal_format.MAGIC)]) != journal_format.MAGIC:
        raise BrokenRunError(
            f"{path} is not a journal of a run: it does not begin with {journal_format.MAGIC.decode()}"
        )
    feed(contents, data[len(journal_format.MAGIC) :], path)
    contents.end += len(journal_format.MAGIC)
    if not contents.header:
        raise BrokenRunError(f"{path} has no header: the process that wrote it ended before it had begun")
    return contents


def open_journal(path: Path) -> BinaryIO:
    """Open the file of a journal for reading.

    Raises:
        FileNotFoundError: There is no such file.
        BrokenRunError: It is not a regular file, or too large.
    """
    try:
        file = os.fdopen(guarded_files.open_regular(path), "rb")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise BrokenRunError(f"{path} is not a journal of a run: {error.strerror}") from None
    size = os.fstat(file.fileno()).st_size
    if size > MAX_READ_BYTES:
        file.close()
        raise BrokenRunError(
            f"{path} is not a journal of a run: it has {size:,} bytes, at most {MAX_READ_BYTES:,} are read"
        )
    return file


def _identity(stream: BinaryIO) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino


def feed(contents: JournalContents, data: bytes | memoryview, path: Path) -> None:
    """Add frames to contents; see ``JournalContents.feed``.

    Raises:
        BrokenRunError: They are no frames of a journal.
    """
    with reading(str(path)):
        contents.feed(data)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise `BrokenRunError` for the errors of reading what is no journal."""
    try:
        yield
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        AssertionError,
        ArithmeticError,
        RecursionError,
        MemoryError,
    ) as error:
        raise BrokenRunError(f"{what} is damaged: {describe_error(error)}") from error


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
