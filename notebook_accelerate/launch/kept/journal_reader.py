"""Reads the records of a run into one journal: from its file, and from the process that runs it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from notebook_accelerate.errors import BrokenRunError, SerializationError
from notebook_accelerate.launch.kept.journal_file import (
    MAX_READ_BYTES,
    JournalContents,
    ResultLoader,
    feed,
    open_journal,
    read_journal,
    reading,
)
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.telemetry import DroppedEvent, LogEvent, Store
from notebook_accelerate.telemetry.store import Record

PROBLEM_SECONDS = 1.0
"""Seconds to wait for the reason why a result is not saved."""


class JournalReader:
    """Adds each record of a run to a journal once, whether it comes from the file or from the process of the run.

    Args:
        file: The file of the journal.
        load_result: Returns the result of a rank; see `journal_file.ResultLoader`.

    Attributes:
        contents: The journal, and the state of reading it.
        position: The position after the last record that the process has sent; 0 before it has sent its history.
    """

    def __init__(self, file: Path, load_result: ResultLoader) -> None:
        self.file, self._load_result = file, load_result
        self.contents = JournalContents(self._result_of)
        self.position = 0
        self._history: JournalContents | None = None
        self._stored: dict[int, Any] = {}
        self._lock = threading.RLock()

    @property
    def journal(self) -> Journal:
        """The journal."""
        return self.contents.journal

    # ---- from the process

    def restart(self) -> int:
        """Return the position from which to receive records over a new connection."""
        with self._lock:
            self._history = None
            return self.position

    def take_history(self, position: int, data: bytes) -> None:
        """Add a part of a journal with all records before ``position``; 0 means that more parts follow.

        Raises:
            BrokenRunError: It is no part of a journal.
        """
        with self._lock, reading("what the process of the run sends"):
            if self._history is None:
                self._history = JournalContents(self._result_of)
            self._history.take_frames(data)
            if position:
                self._merge(self._history)
                self.position, self._history = position, None

    def take_records(self, position: int, data: bytes) -> None:
        """Add the next records; the reader is at ``position`` then.

        Raises:
            BrokenRunError: They are no frames of a journal.
        """
        with self._lock, reading("what the process of the run sends"):
            if self.position:
                self.contents.take_frames(data)
                self.position = position

    # ---- from the file

    def read_file(self) -> None:
        """Add the new records of the file, which may have been replaced since the last call.

        Raises:
            BrokenRunError: The file is damaged.
            OSError: It cannot be read.
        """
        with self._lock:
            contents = self.contents
            with open_journal(self.file) as stream:
                # For a moment, the file may be shorter than what was read, after an error of the writer's disk.
                if contents.same_file(stream):
                    stream.seek(contents.end)
                    feed(contents, stream.read(MAX_READ_BYTES), self.file)
                    return
            if not contents.header:
                read_journal(self.file, contents)
                return
            again = read_journal(self.file, JournalContents(self._result_of))
            self._merge(again)
            if not self.position:  # otherwise the file may get records later that the process has already sent
                contents.end, contents.identity, contents.last = again.end, again.identity, again.last

    def _merge(self, again: JournalContents) -> None:
        """Add what is new in a journal that was read from its beginning."""
        contents = self.contents
        _add_news(contents, again)
        contents.header = contents.header or again.header
        contents.sections.update(again.sections)
        contents.run_events, contents.latest = again.run_events, again.latest
        contents.known = max(contents.known, again.run_events)
        contents.stored.update(again.stored)

    # ---- results

    def _result_of(self, rank: int, stored: Any) -> RankResult:
        if stored is not ...:
            return self._load_result(rank, stored)
        return RankResult(lambda: self._read_result(rank), rank=rank)

    def _read_result(self, rank: int) -> Any:
        """Read a result that the process of the run has announced; the journal's file names its file."""
        if rank not in self._stored:
            try:
                self._stored = read_journal(self.file).stored
            except (BrokenRunError, OSError):
                self._stored = {}
        if rank not in self._stored:
            # The process reports a full disk just after the run's end.
            deadline = time.monotonic() + PROBLEM_SECONDS
            while not (problem := self.journal.state.unsaved) and time.monotonic() < deadline:
                time.sleep(0.02)
            problem = problem or "its file is missing"
            raise SerializationError(f"the result of rank {rank} is not saved: {problem}")
        return self._load_result(rank, self._stored[rank]).read()


def _add_news(contents: JournalContents, again: JournalContents) -> None:
    journal, other = contents.journal, again.journal
    for record in other.records[contents.known :]:  # the journal may also have events that were added here
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
    """Return the records of ``latest`` that are not known; of counts, the difference."""
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
