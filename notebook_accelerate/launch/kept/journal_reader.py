"""Read journals: decode a file or frames into `JournalContents`, and merge a run's records from file and process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from notebook_accelerate.errors import BrokenRunError, SerializationError
from notebook_accelerate.files import guarded_files
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
from notebook_accelerate.telemetry import DroppedEvent, EpochEvent, LogEvent, ProgressEvent, Store
from notebook_accelerate.telemetry.store import Record, SeriesTail
from notebook_accelerate.telemetry.tracebacks import describe_error

MAX_READ_BYTES = 512 << 20
"""Maximum size of a file in bytes. This package does not write larger journals, so larger files are refused."""
MAX_WORK = 1_500_000_000
"""Maximum number of references to copy while reading a run's own events. Copying this many takes about five seconds.

Each event copies the references to the run's ranks, notes and attempts. A run with 16,000 ranks needs two thirds of the
limit.
"""
_RANK_WORK = 600
"""The cost of creating a rank's state, measured in copied references."""
_WARNING_WORK = 6
"""The cost of comparing two warnings, measured in copied references."""
_SECTIONS = frozenset({"code"})
"""The sections to keep, in addition to the header and the curves. Others, from newer versions, are ignored."""
MAX_LATEST = 20_000
"""Maximum number of ranks' events, other than metrics and output, that a thinned journal keeps. The newest are kept."""
_MAX_NAME_CHARS = 1000
_LAST_BYTES = 256
_POINT_BYTES = 24
PROBLEM_SECONDS = 1.0
"""Seconds to wait until the process reports why a result was not saved."""

ResultLoader = Callable[[int, Any], RankResult]
"""A function that returns a rank's result, given the rank and the description of the result's file in the event.

The description is None if there is no file, and `...` if the event does not contain one.
"""


# ---- a file


def read_journal(path: Path, contents: JournalContents | None = None) -> JournalContents:
    """Read a journal. An incomplete last frame is ignored.

    Args:
        path: The path of the journal's file.
        contents: Empty contents to fill. If None, contents without results are created.

    Raises:
        FileNotFoundError: The file does not exist.
        BrokenRunError: The file is damaged, too large, or not a journal.
    """
    contents = JournalContents() if contents is None else contents
    with _open_journal(path) as file:
        contents.identity = _identity(file)
        data = _frames_in(file, path)
    with _reading(str(path)):
        contents.feed(data)
    contents.end += len(journal_format.MAGIC)
    if not contents.header:
        raise _no_header(path)
    return contents


def _frames_in(file: BinaryIO, path: Path) -> memoryview:
    data = memoryview(file.read(MAX_READ_BYTES))
    if bytes(data[: len(journal_format.MAGIC)]) != journal_format.MAGIC:
        raise BrokenRunError(
            f"{path} is not a journal of a run: it does not start with {journal_format.MAGIC.decode()}"
        )
    return data[len(journal_format.MAGIC) :]


def _no_header(path: Path) -> BrokenRunError:
    return BrokenRunError(f"{path} has no header: the process that wrote it ended before it had written one")


def _open_journal(path: Path) -> BinaryIO:
    """Open the file of a journal for reading.

    Raises:
        FileNotFoundError: The file does not exist.
        BrokenRunError: The file is too large, or not a regular file.
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
            f"{path} is not a journal of a run: it has {size:,} bytes; at most {MAX_READ_BYTES:,} are allowed"
        )
    return file


def _identity(stream: BinaryIO) -> tuple[int, int]:
    status = os.fstat(stream.fileno())
    return status.st_dev, status.st_ino


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Convert the errors that invalid data causes to `BrokenRunError`."""
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


# ---- the frames of a file


@dataclass
class JournalContents:
    """The contents of a journal, as far as it has been read.

    Attributes:
        load_result: A function that returns a rank's result; see `ResultLoader`.
        journal: The journal to which the events are added.
        header: The section about the launch, which is empty until it has been read.
        sections: The sections in `_SECTIONS`, by kind.
        stored: The description of each rank's result file, from the rank's event.
        latest: For events of ranks that supersede each other, the latest one by `replacement_key`.
        run_events: How many of the run's own events have been read.
        known: How many of the run's own events the journal has, including those received from the run's process.
        work: The cost of the run's own events so far, which is limited to `MAX_WORK`.
        end: How many bytes of the file have been read.
        identity: The file's device and inode.
        last: The last bytes that were read. They help to recognise the file, because a new file may have the inode of a
            deleted one.
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
        """Return whether an open file is the one that has been read."""
        # There may be fewer bytes after a disk error in the writing process, so compare only those that exist.
        found = os.pread(stream.fileno(), len(self.last), self.end - len(self.last))
        return _identity(stream) == self.identity and self.last.startswith(found)

    def feed(self, data: bytes | memoryview) -> None:
        """Add the complete frames in ``data``, which continues the data of earlier calls.

        Raises:
            ValueError: The bytes are not frames of a journal.
        """
        start = self.end
        for frame, end in journal_format.read_frames(data):
            self.end = start + end
            self.last = bytes(data[max(0, end - _LAST_BYTES) : end])
            self.add_frame(frame)

    def take_frames(self, data: bytes | memoryview) -> None:
        """Add frames that come from the run's process rather than from the file.

        Raises:
            ValueError: The data does not consist of complete frames of a journal.
        """
        read = 0
        for frame, end in journal_format.read_frames(data):
            self.add_frame(frame)
            read = end
        if read != len(data):
            raise ValueError("the last frame is incomplete")

    def add_frame(self, frame: Frame) -> None:
        """Add a frame with events, or one with a section."""
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
            raise ValueError("it does not start with a header")
        points: Points = {}
        waiting: list[Record] = []
        for row in rows:
            if journal_format.take_points(row, points):
                continue
            record = journal_format.record_of(row)
            if record is None:
                if row[1] == RUN:  # Count the event, which comes from a newer version.
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
        """Add points and records to the journal, and clear both collections."""
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
            raise ValueError("it has too many ranks and events for a run")
        if isinstance(event, RankReturned):
            stored = values.get("stored", ...)
            if stored is not ...:
                self.stored[event.rank] = stored
            event.result = self.load_result(event.rank, stored)
        if self._count_run_event():
            self.journal.append(event, record.time)

    def _count_run_event(self) -> bool:
        """Count one of the run's own events. Return whether the journal does not have this event yet."""
        self.run_events += 1
        if self.run_events <= self.known:
            return False
        self.known = self.run_events
        return True

    def note(self, record: Record) -> None:
        """Keep an event of a rank in place of the event that it supersedes, if any."""
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
    """Return how many references are copied to apply an event.

    The total must be limited, because otherwise reading a small file could take hours.
    """
    if isinstance(event, RunPlanned):
        if not 0 <= event.count <= journal_format.MAX_RANKS:
            raise ValueError(f"it has {event.count:,} ranks; at most {journal_format.MAX_RANKS:,} are allowed")
        return _RANK_WORK * event.count
    parts = (state.ranks, state.notes, state.warnings, state.diagnoses, state.attempts, state.prompts, state.paused)
    copied = sum(map(len, parts))
    if isinstance(event, WarningAdded):
        return copied + _WARNING_WORK * len(state.warnings)
    return _RANK_WORK * copied if isinstance(event, (AttemptStarted, RunLost)) else copied


def replacement_key(record: Record) -> tuple[Any, ...] | None:
    """Return the key of an event that newer events with the same key replace, or None if nothing replaces the event."""
    event, names = record.event, type(record.event).latest_by
    return None if names is None else (type(event), record.rank, *(getattr(event, name) for name in names))


def _check_header(section: dict[str, Any]) -> None:
    version = section.get("format")
    if section.get("kind") != "header" or type(version) is not int:
        raise ValueError("it does not start with a header")
    if version > journal_format.FORMAT:
        raise ValueError(
            f"it has format {version}, but this version reads formats up to {journal_format.FORMAT}; upgrade it: "
            "pip install -U notebook-accelerate"
        )
    for name, kind in {"name": str, "function": str, "config": dict, "process": dict, "arguments": dict}.items():
        if not isinstance(section.get(name), kind):
            raise ValueError(f"its header has no {name}")
    for name in ("name", "function"):
        if len(section[name]) > _MAX_NAME_CHARS:
            raise ValueError(f"its header has a {name} of {len(section[name]):,} characters, which is too long")


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
    if not ((columns[1] >= 0) & (columns[1] <= journal_format.LATEST_TIME)).all():  # This also rejects NaN.
        raise ValueError(f"the curve {name[:80]!r} has a point without a time")
    return name, rank, SeriesTail(columns[0], columns[1], columns[2], (0, 0), whole=True)


# ---- a run, from its file and from its process


class JournalReader:
    """Adds each record of a run to a journal once, even if it comes both from the file and from the run's process.

    Args:
        file: The path of the journal's file.
        load_result: A function that returns a rank's result; see `ResultLoader`.
        is_kept: Whether the run is kept in a file. Otherwise, its results cannot be read.

    Attributes:
        contents: The journal, and how far it has been read.
        position: The position after the last record from the process, or 0 until the process has sent the history.
    """

    def __init__(self, file: Path, load_result: ResultLoader, *, is_kept: bool = True) -> None:
        self.file, self._load_result, self._is_kept = file, load_result, is_kept
        self.contents = JournalContents(self._result_of)
        self.position = 0
        self._history: JournalContents | None = None
        self._stored: dict[int, Any] = {}
        self._lock = threading.RLock()

    @property
    def journal(self) -> Journal:
        """The journal to which the records are added."""
        return self.contents.journal

    # ---- records from the process

    def restart(self) -> int:
        """Prepare for a new connection. Return the position from which to receive records."""
        with self._lock:
            self._history = None
            return self.position

    def take_history(self, position: int, data: bytes) -> None:
        """Take a part of the history. ``position`` is 0, or for the last part, the position after the history.

        Raises:
            BrokenRunError: The data does not consist of frames of a journal.
        """
        with self._lock, _reading("the data sent by the run's process"):
            if self._history is None:
                self._history = JournalContents(self._result_of)
            self._history.take_frames(data)
            if position:
                self._merge(self._history)
                self.position, self._history = position, None

    def take_records(self, position: int, data: bytes) -> None:
        """Add the records that follow the history. ``position`` is the position after these records.

        Raises:
            BrokenRunError: The data does not consist of frames of a journal.
        """
        with self._lock, _reading("the data sent by the run's process"):
            if self.position:
                self.contents.take_frames(data)
                self.position = position

    # ---- records from the file

    def read_file(self) -> None:
        """Add the new records in the file, which may have been replaced since the last call.

        Raises:
            BrokenRunError: The contents of the file are damaged.
            OSError: The file cannot be read.
        """
        with self._lock:
            contents = self.contents
            with _open_journal(self.file) as stream:
                # After a disk error in the writing process, the file may briefly be shorter than what was read.
                if contents.same_file(stream):
                    stream.seek(contents.end)
                    with _reading(str(self.file)):
                        contents.feed(stream.read(MAX_READ_BYTES))
                    return
            if not contents.header:
                read_journal(self.file, contents)
                return
            again = read_journal(self.file, JournalContents(self._result_of))
            self._merge(again)
            # With a connection, continue reading from the beginning, because the file may later receive records that
            # the process has already sent.
            if not self.position:
                contents.end, contents.identity, contents.last = again.end, again.identity, again.last

    def _merge(self, again: JournalContents) -> None:
        """Add the new records of a journal that was read again from the beginning."""
        contents = self.contents
        _add_new_records(contents, again)
        contents.header = contents.header or again.header
        contents.sections.update(again.sections)
        contents.run_events, contents.latest = again.run_events, again.latest
        contents.known = max(contents.known, again.run_events)
        contents.stored.update(again.stored)

    # ---- results

    def _result_of(self, rank: int, stored: Any) -> RankResult:
        if stored is not ... or not self._is_kept:
            return self._load_result(rank, stored)
        return RankResult(lambda: self._read_result(rank), rank=rank)

    def _read_result(self, rank: int) -> Any:
        """Read a result that the run's process has announced. The journal's file describes the file of the result."""
        if rank not in self._stored:
            try:
                self._stored = read_journal(self.file).stored
            except (BrokenRunError, OSError):
                self._stored = {}
        if rank not in self._stored:
            # The process may not report a full disk until just after the end of the run.
            deadline = time.monotonic() + PROBLEM_SECONDS
            while not (problem := self.journal.state.unsaved) and time.monotonic() < deadline:
                time.sleep(0.02)
            problem = problem or "its file is missing"
            raise SerializationError(f"the result of rank {rank} was not saved: {problem}")
        return self._load_result(rank, self._stored[rank]).read()


def _add_new_records(contents: JournalContents, again: JournalContents) -> None:
    journal, other = contents.journal, again.journal
    # Start at `contents.known`, because this process may have added its own events to the journal.
    for record in other.records[contents.known :]:
        journal.append(record.event, record.time)  # type: ignore[arg-type]
    _add_points(journal.store, other.store)
    _add_points(journal.store.automatic, other.store.automatic)
    known = {rank: max(line.time for line in journal.store.log_chunks(rank)) for rank in journal.store.log_ranks()}
    lines = [
        Record(rank, line.time, LogEvent(line.stream, line.text))
        for rank in other.store.log_ranks()
        for line in other.store.log_chunks(rank)
        if line.time > known.get(rank, 0.0)
    ]
    journal.add([*lines, *_newer(contents.latest, again.latest)])


def _add_points(store: Store, other: Store) -> None:
    for name in other.metric_names():
        for rank in other.ranks_of(name):
            tail = other.tail(name, rank)
            known = store.tail(name, rank).times[-1] if rank in store.ranks_of(name) else 0.0
            store.add_points(name, rank, tail.where(tail.times > known), thinned=other.is_thinned(name, rank))


def _newer(known: Mapping[tuple[Any, ...], Record], latest: Mapping[tuple[Any, ...], Record]) -> list[Record]:
    """Return the records that are new since the last read. Counts of dropped events are returned as increments."""
    found = []
    for key, record in latest.items():
        before = known.get(key)
        if before == record:
            continue
        if isinstance(record.event, DroppedEvent) and before is not None:
            assert isinstance(before.event, DroppedEvent)
            found.append(record._replace(event=DroppedEvent(record.event.count - before.event.count)))
        else:
            found.append(record)
    return found
