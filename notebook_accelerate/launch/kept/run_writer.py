"""Write the journal of a kept run on a thread while the run continues."""

from __future__ import annotations

import json
import math
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.launch.detached.run_directory import is_gone
from notebook_accelerate.launch.kept import journal_format, run_folder
from notebook_accelerate.launch.kept.journal_file import (
    KEPT_LOG_BYTES,
    JournalFile,
    last_lines,
    replace_file,
    thinned_frames,
)
from notebook_accelerate.launch.kept.journal_format import JOURNAL_NAME
from notebook_accelerate.launch.kept.journal_reader import JournalContents, replacement_key
from notebook_accelerate.launch.run import add_ending_callback
from notebook_accelerate.launch.state.run_events import RankReturned, RunEvent, SavingChanged, WarningAdded
from notebook_accelerate.telemetry import (
    CheckpointEvent,
    DroppedEvent,
    EpochEvent,
    Event,
    LogEvent,
    ProgressEvent,
    TraceEvent,
)
from notebook_accelerate.telemetry.sink import drop_key, thin
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.telemetry.tracebacks import describe_error

if TYPE_CHECKING:
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.launch.state.journal import Journal
    from notebook_accelerate.launch.state.rank_result import RankResult

PERIOD = 0.5
"""Seconds between two writes. If the kernel is killed, no more than this time and the duration of a write are lost."""
SYNC_SECONDS = 10.0
"""Seconds between two flushes of the file to the disk."""
RETRY_SECONDS = 10.0
"""Seconds until the next attempt to write after a disk error."""
MAX_WAITING = 300_000
"""Maximum number of events queued for a slow disk. If there are more, every second droppable event of the older half is
dropped."""
MAX_WAITING_CHARS = 64 << 20
"""Maximum characters of output queued for a slow disk. If there are more, the oldest lines are dropped."""
MAX_RESULT_BYTES = 64_000_000
"""Maximum size in bytes of a pickled result of a run whose kernel has the result too."""
MAX_DETACHED_RESULT_BYTES = 1 << 40
"""Maximum size in bytes of a pickled result of a detached run. In practice, the size of the disk is the limit."""
END_SECONDS = 60.0
"""Seconds to wait for a slow disk at the end of a run."""
DETACHED_END_SECONDS = 3600.0
"""Seconds to wait for space on a full disk at the end of a detached run, to write the results and the last events."""
STOPPED_END_SECONDS = 10.0
"""Seconds to wait for space on a full disk at the end of a detached run that the user has stopped."""
END_PERIOD = 2.0
"""Seconds between two attempts to write while waiting for space."""
_WRITTEN: tuple[type[Event], ...] = (RunEvent, *journal_format.RANK_EVENTS)
"""The events that a journal contains."""
_ALL_OF = frozenset({CheckpointEvent, DroppedEvent, EpochEvent, TraceEvent})
"""Kinds of events that are all written. Of other events that supersede each other, one per write is enough."""
_WRITE_BYTES = 1 << 20


class RunWriter:
    """Writes the journal of a run to a folder, on a separate thread.

    A thread that appends an event to the journal only adds it to a list, and does not wait for the disk.

    Args:
        folder: The run's folder, which must exist and be empty.
        header: The journal's first section.
        journal: The run's journal, which must not contain events yet.
        detached: Whether the run is detached, so that no other process has the results. In this case, results of any
            size are kept, and the end of the run waits for space on a full disk.

    Raises:
        OSError: The file cannot be created.

    Attributes:
        folder: The run's folder.
        file: The path of the journal's file.
    """

    def __init__(self, folder: Path, header: dict[str, Any], journal: Journal, *, detached: bool = False) -> None:
        self.folder, self._header, self._journal = folder, header, journal
        self._detached, self._patient_until = detached, float("inf") if detached else 0.0
        self._stopping: Callable[[], bool] = lambda: False
        self._was_stopped = False
        self.file = folder / JOURNAL_NAME
        self._contents = JournalContents(journal=journal, header=header)
        self._file = JournalFile(self.file)
        self._file.append(journal_format.encode_frame(header))
        self._lock = threading.Lock()
        self._waiting: list[Record] = []
        self._waiting_chars = self._run_events = 0
        self._results: dict[int, RankResult] = {}
        self._stored: dict[int, dict[str, Any] | None] = {}
        self._dropped: dict[int, int] = {}
        self._wake, self._over = threading.Event(), False
        self._code: dict[str, Any] = {}
        self._code_written = False
        self._code_thread = threading.Thread(target=self._find_code, name="notebook-accelerate-code", daemon=True)
        self._unwritten: list[bytes] = []
        self._problem, self._retry_at, self._sync_at = "", 0.0, time.monotonic() + SYNC_SECONDS
        self._unsubscribe = journal.subscribe(self._on_records)
        self._thread = threading.Thread(target=self._main, name="notebook-accelerate-save", daemon=True)

    def start(self, run: Run, history: Sequence[bytes] = (), stopping: Callable[[], bool] = lambda: False) -> None:
        """Start the thread, which ends with the run.

        Args:
            run: The run whose journal to write.
            history: Frames with the history of the earlier run that this run continues.
            stopping: A function that returns whether the user has stopped the run, even after the run's end.
        """
        self._unwritten += history
        self._stopping = stopping
        self._thread.start()
        add_ending_callback(run, self._end)

    # ---- on the threads that append

    def _on_records(self, records: Sequence[Record]) -> None:
        with self._lock:
            self._waiting.extend(records)
            for record in records:
                if type(record.event) is LogEvent:
                    self._waiting_chars += len(record.event.text)
                self._run_events += isinstance(record.event, RunEvent)
                if isinstance(record.event, RankReturned):
                    self._results[record.event.rank] = record.event.result
            if len(self._waiting) > MAX_WAITING:
                half = len(self._waiting) // 2
                self._keep(thin(self._waiting[:half], _drop_key) + self._waiting[half:])
            if self._waiting_chars > MAX_WAITING_CHARS:
                self._keep(_without_old_lines(self._waiting, self._waiting_chars - MAX_WAITING_CHARS // 2))

    def _keep(self, kept: list[Record]) -> None:
        """Drop all queued records except those in ``kept``, and count the dropped ones."""
        for rank, count in (Counter(each.rank for each in self._waiting) - Counter(each.rank for each in kept)).items():
            self._dropped[rank] = self._dropped.get(rank, 0) + count
        self._waiting = kept
        self._waiting_chars = sum(len(each.event.text) for each in kept if type(each.event) is LogEvent)

    def _end(self, run: Run) -> None:
        """Write everything that has been recorded, before the cell that waits for the run continues."""
        patience, self._was_stopped = 0.0, self._stopping() or self._journal.state.status == "stopped"
        if self._detached:
            patience = STOPPED_END_SECONDS if self._was_stopped else DETACHED_END_SECONDS
        self._patient_until = time.monotonic() + patience
        self._over = True
        self._wake.set()
        self._thread.join(END_SECONDS + patience)
        self._unsubscribe()

    # ---- on the writer's thread

    def _main(self) -> None:
        self._code_thread.start()  # Run git on another thread, because it takes seconds in a large repository.
        while True:
            over = self._over
            if over:
                self._code_thread.join(END_SECONDS / 2)
            self._write(last=over)
            if over and not (self._problem and self._is_patient() and not is_gone(self.folder)):
                return
            if over:
                time.sleep(END_PERIOD)
            else:
                self._wake.wait(PERIOD)

    def _is_patient(self) -> bool:
        """Return whether to wait for space on a full disk. If the user stops the run after its end, return False."""
        stopped_later = self._over and not self._was_stopped and self._stopping()
        return not stopped_later and time.monotonic() < self._patient_until

    def _find_code(self) -> None:
        with suppress(Exception):  # After an error, keep the run without the version of the code.
            self._code = run_folder.code_version(Path.cwd())

    def _write(self, *, last: bool) -> None:
        if not last and time.monotonic() < self._retry_at:
            return
        try:
            if self._file.is_lost:
                self._restore()
            self._append()
            self._encode_waiting()
            self._append()
            self._tidy(last)
            if self._problem and not last:
                self._journal.append(SavingChanged(""))
            self._problem = ""
        except Exception as error:  # noqa: BLE001 - the run must continue without the disk
            self._retry_at = time.monotonic() + RETRY_SECONDS
            if not self._problem:
                self._problem = describe_error(error)
                self._journal.append(SavingChanged(self._problem))
                text = f"Cannot save the run to {self.folder}: {self._problem}. Retrying."
                self._journal.append(WarningAdded(text))

    def _take_waiting(self) -> tuple[list[Record], dict[int, int], int]:
        """Store the queued results, and empty the queue of records.

        Return the queued records, the number of dropped records of each rank, and the number of the run's own events.
        """
        while True:
            with self._lock:
                new = {rank: result for rank, result in self._results.items() if id(result) not in self._stored}
                if not new:
                    records, self._waiting, self._waiting_chars = self._waiting, [], 0
                    dropped, self._dropped, self._results = self._dropped, {}, {}
                    return records, dropped, self._run_events
            # Store results before writing the events that describe their files. If the disk is full, an error may occur
            # here.
            for rank, result in new.items():
                self._stored[id(result)] = self._contents.stored[rank] = self._store_result(rank, result)

    def _restore(self) -> None:
        """Write the whole journal again from memory, because another process has deleted or truncated the file.

        Raises:
            OSError: The file cannot be written, for example because the folder was deleted too, or the disk is full.
        """
        records, dropped, count = self._take_waiting()
        for record in records:
            self._note(record)
        if self._code:
            self._contents.sections["code"] = self._code
        frames = thinned_frames(self._contents, last_lines(self._journal, KEPT_LOG_BYTES), count)
        with self._lock:
            for rank, lost in dropped.items():
                self._dropped[rank] = self._dropped.get(rank, 0) + lost
        self._file.replace(frames)
        self._unwritten.clear()
        self._code_written = bool(self._contents.sections)

    def _note(self, record: Record) -> None:
        if not isinstance(record.event, RunEvent):
            self._contents.note(record)

    def _row_of(self, record: Record) -> list[Any]:
        row = journal_format.row_of(record)
        if isinstance(record.event, RankReturned):
            row[3]["stored"] = self._stored.get(id(record.event.result))
        return row

    def _encode_waiting(self) -> None:
        records, dropped, _ = self._take_waiting()
        now = records[-1].time if records else 0.0
        kept = _worth_keeping(records) + [Record(rank, now, DroppedEvent(count)) for rank, count in dropped.items()]
        for record in kept:
            self._note(record)
        rows = [self._row_of(record) for record in kept]
        self._unwritten += journal_format.encode_rows(rows)
        if self._code and not self._code_written:
            self._unwritten.append(journal_format.encode_frame(self._code))
            self._code_written = True

    def _store_result(self, rank: int, result: RankResult) -> dict[str, Any] | None:
        try:
            pickled = result.pickled(MAX_DETACHED_RESULT_BYTES if self._detached else MAX_RESULT_BYTES)
        except Exception as error:  # noqa: BLE001 - for example too little memory
            self._journal.append(WarningAdded(f"the result of rank {rank} is not kept: {describe_error(error)}"))
            return None
        if pickled is None:
            return None
        try:
            replace_file(self.folder / run_folder.result_name(rank), pickled)
        except OSError:
            if self._is_patient():
                raise
            return None  # Go on without the result, because the events are more important.
        return {"bytes": len(pickled), "crc32": zlib.crc32(pickled)}

    def _append(self) -> None:
        while self._unwritten:
            count, size = 0, 0
            while count < len(self._unwritten) and (not count or size + len(self._unwritten[count]) <= _WRITE_BYTES):
                size += len(self._unwritten[count])
                count += 1
            self._file.append(b"".join(self._unwritten[:count]))
            del self._unwritten[:count]

    def _tidy(self, last: bool) -> None:
        if self._file.is_long:
            self._file.thin()
        if last or time.monotonic() >= self._sync_at:
            self._file.sync()
            self._sync_at = time.monotonic() + SYNC_SECONDS
        if last:
            summary = summary_of(self._header, self._code, self._journal)
            replace_file(self.folder / run_folder.SUMMARY_NAME, json.dumps(summary, indent=1).encode())


def _drop_key(record: Record) -> Hashable | None:
    key = drop_key(record.event)
    return None if key is None else (record.rank, key)


def _without_old_lines(records: Sequence[Record], excess: int) -> list[Record]:
    """Return the records without the oldest lines of output, dropping at least ``excess`` characters."""
    kept = []
    for record in records:
        if type(record.event) is LogEvent and excess > 0:
            excess -= len(record.event.text)
        else:
            kept.append(record)
    return kept


def _worth_keeping(records: Sequence[Record]) -> list[Record]:
    """Return the events to write. Of events that supersede each other, such as progress, only the latest is kept."""
    kept: list[Record] = []
    seen: set[tuple[Any, ...]] = set()
    for record in reversed(records):
        kind, key = type(record.event), replacement_key(record)
        if not isinstance(record.event, _WRITTEN):
            continue
        if key is None or kind in _ALL_OF:
            kept.append(record)
        elif key not in seen:
            seen.add(key)
            kept.append(record)
        if kind is EpochEvent:  # Also keep the last step before this event, which belongs to an earlier epoch.
            seen.discard((ProgressEvent, record.rank, True))
    return kept[::-1]


def summary_of(header: dict[str, Any], code: dict[str, Any], journal: Journal) -> dict[str, Any]:
    """Return the summary of a run, for the table of runs, from its journal."""
    state, store = journal.state, journal.store
    last = {}
    for name in store.metric_names():
        ranks = store.ranks_of(name)
        value = store.last_value(name, ranks[0]) if ranks else None
        if value is not None:
            last[name] = value if math.isfinite(value) else str(value)
    return {
        "format": journal_format.FORMAT,
        "name": header["name"],
        "function": header["function"],
        "status": state.status,
        "started": state.started,
        "ended": state.ended,
        "ranks": len(state.ranks),
        "config": header["config"],
        "arguments": header["arguments"],
        "commit": code.get("commit", ""),
        "dirty": code.get("dirty"),
        "metrics": last,
        "message": state.message,
        "continues": [each.name for each in state.resume_points],
    }
