"""Opens kept runs: the same `Run`, read-only, and going on while its writer does."""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_accelerate.config.plain_values import given_folder
from notebook_accelerate.errors import BrokenRunError, NotebookAccelerateError, SerializationError
from notebook_accelerate.hardware.guarded_files import ForeignFileError, read_file
from notebook_accelerate.hardware.process_liveness import UNKNOWN, parse_identity, this_process
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.control_client import ControlClient, warn
from notebook_accelerate.launch.kept import journal_format
from notebook_accelerate.launch.kept.journal_file import (
    JOURNAL_NAME,
    MAX_READ_BYTES,
    JournalContents,
    feed,
    open_journal,
    read_journal,
)
from notebook_accelerate.launch.kept.run_folder import config_from, delete, environment_of, result_name
from notebook_accelerate.launch.kept.run_writer import MAX_DETACHED_RESULT_BYTES, MAX_RESULT_BYTES
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.launch.state.run_events import (
    NoCommands,
    RankReturned,
    RanksReleased,
    RunLost,
    SavingChanged,
    WarningAdded,
)
from notebook_accelerate.telemetry import DroppedEvent, LogEvent, tracebacks
from notebook_accelerate.telemetry.pickling import load_bytes
from notebook_accelerate.telemetry.store import Record

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.journal import Journal
    from notebook_accelerate.telemetry import Store

FOLLOW_SECONDS = 0.25
"""Seconds between two looks at the journal of a run that goes on."""
MAX_CELLS = 10_000
MAX_CELL_CHARS = 1000
"""Most names of cells that are taken from a journal, and the longest: they are kept until the kernel ends."""
STALE_SECONDS = 60.0
"""Seconds without a write after which a run of another machine, whose processes cannot be seen here, is lost."""


def open_run(path: str | PathLike[str]) -> Run:
    """Open a kept run, also one that another kernel runs or has run.

    Opening runs no code of the run: metrics, output, failures and states are plain data. The results are pickled;
    reading ``run.results`` unpickles them, which can run any code of whoever wrote the files.

    Args:
        path: The run's folder, or the journal in it.

    Returns:
        The run: read-only, with its panel, metrics, logs and report. While the process that runs it lives, it follows
        the journal; when that process is gone without an end, its status is "lost".

    Raises:
        FileNotFoundError: There is no kept run.
        BrokenRunError: The journal is damaged, or not of this package.
    """
    file = journal_path(path)
    contents = read_journal(file, partial(_stored_result, file.parent))
    header, journal = contents.header, contents.journal
    commands, sent = _commands(contents, file.parent), None
    if isinstance(commands, ControlClient):
        sent = _SentRecords(contents, commands)
        commands.report = partial(_report, journal)
    if sent is not None and not journal.state.started:  # the disk is full
        sent.append_missing()
    if not journal.state.started:
        commands.close()
        raise BrokenRunError(f"{file} has no events: the process that wrote it ended before the run had begun")
    if journal.state.held and _has_ended(contents, file):
        journal.append(RanksReleased(), journal.last_time)
    if journal.state.ended is None and _has_ended(contents, file):
        _read_on(contents, file)  # it may have ended in an orderly way since it was read
        _lose(contents)
    tracebacks.name_foreign_cells(_cells_of(header))
    run = Run(config_from(header["config"]), header["function"], journal, commands, name=header["name"])
    run.folder, run.journal_file, run.environment = file.parent, file, environment_of(header)
    run.delete_files = delete
    if run.ended is None or run.held:
        follower = _Follower(contents, file, sent)
        weakref.finalize(run, follower.over.set)
        weakref.finalize(run, commands.close)
        threading.Thread(target=follower.main, name="notebook-accelerate-follow", daemon=True).start()
    return run


def _report(journal: Journal, text: str) -> None:
    journal.append(WarningAdded(text))
    warn(text)


def _cells_of(header: dict[str, Any]) -> dict[str, str]:
    """Return the names of the cells of the writer's kernel, by file name."""
    cells = header.get("cells")
    found = islice(cells.items(), MAX_CELLS) if isinstance(cells, dict) else ()
    return {
        filename: name[:MAX_CELL_CHARS]
        for filename, name in found
        if isinstance(name, str) and len(filename) <= MAX_CELL_CHARS and tracebacks.is_cell(filename)
    }


def _commands(contents: JournalContents, folder: Path) -> ControlClient | _ReadOnly:
    """Return the commands of a run that goes on: of a detached one, over the socket of its process."""
    if contents.journal.state.ended is None or contents.journal.state.held:
        for entry in run_directory.entries():
            if entry.folder == str(folder):
                try:
                    return ControlClient(Path(entry.socket), parse_identity(entry.process), entry.version)
                except BlockingIOError:
                    return _ReadOnly(
                        f"{_writer_of(contents)}, which supervises run {entry.name}, accepts no connections; "
                        "notebook_accelerate.shutdown(all=True) kills it"
                    )
                except OSError:
                    break
    name, writer = contents.header["name"], _writer_of(contents)
    return _ReadOnly(f"run {name} is read-only here: it was opened from {folder}, {writer} runs it")


def journal_path(path: str | PathLike[str]) -> Path:
    """Return the file of the journal in a run's folder.

    Raises:
        FileNotFoundError: There is none.
    """
    given = given_folder(path)
    file = given / JOURNAL_NAME if given.is_dir() else given
    if not file.is_file():
        raise FileNotFoundError(
            f"{given} is no kept run: it has no {JOURNAL_NAME}; notebook_accelerate.runs('runs') lists a folder of runs"
        )
    return file


def finished(contents: JournalContents, file: Path) -> None:
    """End the journal of a run whose writer is gone, as it is read for a table."""
    if contents.journal.state.started and contents.journal.state.ended is None and _has_ended(contents, file):
        _lose(contents)


def _lose(contents: JournalContents) -> None:
    journal = contents.journal
    if journal.state.ended is None:
        text = f"run {contents.header['name']} was lost: {_writer_of(contents)} is gone and has recorded no end"
        journal.append(RunLost(text), journal.last_time)


def _writer_of(contents: JournalContents) -> str:
    return str(parse_identity(contents.header["process"]) or UNKNOWN)


def _has_ended(contents: JournalContents, file: Path) -> bool:
    """Whether the process that writes the journal is gone, as far as can be seen from here."""
    writer = parse_identity(contents.header["process"])
    here = this_process()
    if writer is not None and writer.machine and writer.machine == here.machine:
        return writer.has_ended()
    with suppress(OSError):
        return time.time() - file.stat().st_mtime > STALE_SECONDS
    return True


def _stored_result(folder: Path, rank: int, stored: object) -> RankResult:
    values = stored if isinstance(stored, dict) else {}
    size = values.get("bytes")
    if type(size) is not int or not 0 <= size <= MAX_DETACHED_RESULT_BYTES:
        missing = RankResult(int, rank=rank)
        missing.free(
            f"the result of rank {rank} was not kept: none above {MAX_RESULT_BYTES >> 20} MiB is, and none of "
            "start_method='inline'"
        )
        return missing
    return RankResult(partial(_load_result, folder / result_name(rank), size, values.get("crc32")), size, rank=rank)


def _load_result(path: Path, size: int, checksum: object) -> Any:
    try:
        data = read_file(path, size, own=True)
    except ForeignFileError as error:
        raise SerializationError(
            f"{path} cannot be read: {error}. A result is a pickle, and its author can run "
            f"any code when it is read. If you trust that user, open a copy of your own: cp -r {path.parent} mine"
        ) from error
    except OSError as error:
        raise SerializationError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError:
        data = b""
    if len(data) != size or zlib.crc32(data) != checksum:
        raise SerializationError(f"{path} is not the result that the run's journal names: it was changed or is damaged")
    return load_bytes(data)


class _ReadOnly(NoCommands):
    """The commands of a run that another process runs.

    Args:
        text: The error of every command.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refusal = self.requests.elsewhere = text

    def _refuse(self) -> NoReturn:
        raise NotebookAccelerateError(self.refusal)

    def close(self) -> None:
        """Do nothing."""

    def stop(self, grace: float) -> None:
        """Raise an error."""
        self._refuse()

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raise an error."""
        self._refuse()


class _SentRecords:
    """Run events received from the supervisor that are not in the journal file yet.

    Args:
        contents: The contents of the file.
        client: The connection to the process.
    """

    def __init__(self, contents: JournalContents, client: ControlClient) -> None:
        self._contents, self._client = contents, client
        self._waiting: dict[int, Record | None] = {}
        self._unsaved = ""

    @property
    def connected(self) -> bool:
        """Whether the process sends what happens."""
        return self._client.connected

    @property
    def unsaved(self) -> str:
        """Why the process cannot write the file now; "" if it can."""
        self._receive()
        return self._unsaved

    def _receive(self) -> None:
        while self._client.records:
            position, data = self._client.records.popleft()
            for record in _records_in(data):
                if record is not None and isinstance(record.event, SavingChanged):
                    self._unsaved = record.event.problem
                self._waiting[position] = record
                position += 1
        self._waiting = {key: record for key, record in self._waiting.items() if key >= self._contents.known}

    def append_missing(self) -> None:
        """Append what the file does not have."""
        self._receive()
        contents = self._contents
        while contents.known in self._waiting:
            record = self._waiting.pop(contents.known)
            contents.known += 1
            if record is None:  # of a newer version
                continue
            if isinstance(record.event, RankReturned):
                record.event.result = RankResult(partial(self._result, record.event.rank), rank=record.event.rank)
            contents.journal.append(record.event, record.time)  # type: ignore[arg-type]

    def _result(self, rank: int) -> Any:
        stored = self._contents.stored
        if rank not in stored:
            raise SerializationError(
                f"the result of rank {rank} is not saved: {self._unsaved or 'its file is missing'}"
            )
        return self._contents.load_result(rank, stored[rank]).read()


def _records_in(data: bytes) -> list[Record | None]:
    """Return the records that a supervisor has sent; none if it has sent something else."""
    try:
        rows = [row for frame, _ in journal_format.read_frames(data) for row in frame.content]
        return [journal_format.record_of(row) for row in rows]
    except (ValueError, TypeError):
        return []


class _Follower:
    """Adds what the writer of a journal appends to it, until the run has ended or nobody refers to it.

    Args:
        contents: The contents of the journal.
        file: The journal.
        sent: The events that the process of a detached run has sent; None for other runs.

    Attributes:
        over: Set when nobody refers to the run.
    """

    def __init__(self, contents: JournalContents, file: Path, sent: _SentRecords | None) -> None:
        self._contents, self._file, self._sent = contents, file, sent
        self.over = threading.Event()

    def main(self) -> None:
        """Follow the journal."""
        gone = False
        while not gone and self._expects_more() and not self.over.wait(FOLLOW_SECONDS):
            gone = _has_ended(self._contents, self._file)  # before reading: what it wrote last is read
            self._follow(gone)

    def _expects_more(self) -> bool:
        """Whether the file may grow: after the end of a run, too, if the file lacks the end and the results."""
        contents, state = self._contents, self._contents.journal.state
        return state.ended is None or state.held or contents.run_events < contents.known

    def _follow(self, gone: bool) -> None:
        journal, sent = self._contents.journal, self._sent
        lasting, problem = False, ""
        try:
            _read_on(self._contents, self._file)
        except (BrokenRunError, OSError) as error:  # a disk may not answer for a while
            problem = f"Cannot read the journal: {error}"
            lasting = isinstance(error, BrokenRunError) or run_directory.is_gone(self._file.parent)
        if sent is not None and (problem or gone or sent.unsaved):
            sent.append_missing()
        if lasting and journal.state.ended is None:
            if sent is None or not sent.connected:
                journal.append(RunLost(problem), journal.last_time)
            elif problem not in journal.state.warnings:
                journal.append(WarningAdded(problem))
        if gone:
            _lose(self._contents)
            if journal.state.held:
                journal.append(RanksReleased(), journal.last_time)


def _read_on(contents: JournalContents, file: Path) -> None:
    """Add what was appended since the last call; where the file was replaced by a thinned one, what is new in it."""
    with open_journal(file) as stream:
        if contents.same_file(stream):  # for a moment shorter than what was read, after an error of the writer's disk
            stream.seek(contents.end)
            feed(contents, stream.read(MAX_READ_BYTES), file)
            return
    again = read_journal(file, contents.load_result)
    _add_news(contents, again)
    contents.end, contents.identity, contents.last = again.end, again.identity, again.last
    contents.run_events, contents.latest = again.run_events, again.latest
    contents.known = max(contents.known, again.run_events)
    contents.stored.update(again.stored)


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
            store.add_points(name, rank, tail.where(tail.times > known))


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
