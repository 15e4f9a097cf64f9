"""Open kept runs, and live runs of other processes, as `Run` objects, which are updated while the run continues."""

from __future__ import annotations

import threading
import time
import weakref
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from notebook_accelerate._mistakes import reports_mistakes
from notebook_accelerate.config.plain_values import did_you_mean, given_folder, size_text
from notebook_accelerate.errors import BrokenRunError, NotebookAccelerateError, SerializationError
from notebook_accelerate.files.guarded_files import ForeignFileError, read_limited
from notebook_accelerate.hardware.process_liveness import UNKNOWN, parse_identity, this_process
from notebook_accelerate.launch.detached import run_directory
from notebook_accelerate.launch.detached.control_client import ControlClient, warn
from notebook_accelerate.launch.kept.journal_format import JOURNAL_NAME
from notebook_accelerate.launch.kept.journal_reader import JournalContents, JournalReader
from notebook_accelerate.launch.kept.run_folder import config_from, delete_run, environment_of, result_name
from notebook_accelerate.launch.kept.run_writer import MAX_DETACHED_RESULT_BYTES, MAX_RESULT_BYTES
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.launch.state.run_commands import NoCommands
from notebook_accelerate.launch.state.run_events import RanksReleased, RunLost, WarningAdded
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry import tracebacks
from notebook_accelerate.telemetry.pickling import load_bytes

if TYPE_CHECKING:
    from notebook_accelerate.launch.detached.run_directory import DirectoryEntry
    from notebook_accelerate.launch.state.journal import Journal

POLL_SECONDS = 0.25
"""Seconds between two reads of the file of a run that is still running."""
MAX_CELLS = 10_000
MAX_CELL_CHARS = 1000
"""Maximum number and length of cell names from a journal, which are limited because they are kept until the kernel
exits."""
STALE_SECONDS = 60.0
"""A run on another machine, whose processes are invisible here, counts as lost after this many seconds without a
write."""


@reports_mistakes
def open_run(path: str | PathLike[str]) -> Run:
    """Open a kept run, even one that another kernel is running or has run.

    Opening a run does not execute code from its files: metrics, output, failures and states are plain data. Only the
    results are pickled. Reading ``run.results`` unpickles them, which can run any code of the files' author.

    Args:
        path: The run's folder, or the journal in that folder.

    Returns:
        The run, which is read-only, with its panel, metrics, logs and report. While the run's process is alive, the run
        follows the journal. If that process exits without recording an end, the run's status is "lost".

    Raises:
        FileNotFoundError: There is no kept run at this path.
        BrokenRunError: The journal is damaged, or was not written by this package.
    """
    file = journal_path(path)
    reader = JournalReader(file, partial(_stored_result, file.parent))
    client, refusal = _connect(file.parent)
    poller = _FilePoller(reader, client)
    if client is not None:
        reader.journal.subscribe(client.on_records)
        client.report = partial(_report, reader.journal)
    try:
        if client is None or not client.follow(reader, poller.start):
            _read_whole_file(reader)
        if not reader.journal.state.started:
            raise BrokenRunError(f"{file} has no events: the process that wrote it ended before the run started")
    except BaseException:
        if client is not None:
            client.close()
        raise
    run = _run_of(reader, client or _ReadOnly(refusal or _read_only(reader.contents.header, file.parent)))
    run.folder, internals(run).journal_file, internals(run).delete_files = file.parent, file, delete_run
    weakref.finalize(run, poller.over.set)
    poller.opened = True
    if client is None or not client.is_following:
        poller.start()
    return run


def open_live(entry: DirectoryEntry) -> Run:
    """Attach to a live run of a kernel, which is not kept in a folder.

    Raises:
        NotebookAccelerateError: The run's process does not answer, or the run has just ended.
    """
    process = parse_identity(entry.process) or UNKNOWN
    problem = f"{process}, which supervises run {entry.name}, does not answer"
    if process.is_suspended():
        raise NotebookAccelerateError(f"{process}, which supervises run {entry.name}, is suspended")
    reader = JournalReader(Path(entry.socket), _result_elsewhere, is_kept=False)
    try:
        client = ControlClient(Path(entry.socket))
    except OSError as error:
        raise NotebookAccelerateError(f"{problem}: {error}") from error
    reader.journal.subscribe(client.on_records)
    client.report = partial(_report, reader.journal)
    if not client.follow(reader, partial(_end_if_open, reader.contents)) or not reader.journal.state.started:
        client.close()
        raise NotebookAccelerateError(problem)
    run = _run_of(reader, client)
    run.origin = str(entry.origin.get("notebook") or entry.origin.get("folder") or "")
    return run


def _end_if_open(contents: JournalContents) -> None:
    if _is_open(contents.journal):
        _close_journal(contents)


def _run_of(reader: JournalReader, commands: ControlClient | _ReadOnly) -> Run:
    header = reader.contents.header
    tracebacks.name_foreign_cells(_cells_of(header))
    run = Run(config_from(header["config"]), header["function"], reader.journal, commands, name=header["name"])
    internals(run).environment = environment_of(header)
    weakref.finalize(run, commands.close)
    return run


def _connect(folder: Path) -> tuple[ControlClient | None, str]:
    """Connect to the process of a run. Return the connection, or None and a reason, which may be ""."""
    for entry in run_directory.all_entries():
        if entry.folder == str(folder) and not entry.has_ended:
            process = parse_identity(entry.process)
            try:
                # Never kill a kernel that does not answer.
                return ControlClient(Path(entry.socket), process if entry.detached else None), ""
            except BlockingIOError:
                kills = "; notebook_accelerate.shutdown(all=True) kills it" if entry.detached else ""
                return None, (
                    f"{process or UNKNOWN}, which supervises run {entry.name}, does not accept connections{kills}"
                )
            except OSError:
                break
    return None, ""


def _read_only(header: dict[str, Any], folder: Path) -> str:
    name, writer = header["name"], _writer_of(header)
    return f"run {name} is read-only here: it was opened from {folder}, and {writer} runs it"


def _read_whole_file(reader: JournalReader) -> None:
    """Read the file of a run, and end the journal if the process that wrote the file is gone."""
    reader.read_file()
    if _is_open(reader.journal) and _has_ended(reader.contents, reader.file):
        reader.read_file()  # Read the file again, because the process may have recorded the end since the first read.
        _close_journal(reader.contents)


def _report(journal: Journal, text: str) -> None:
    journal.append(WarningAdded(text))
    warn(text)


def _cells_of(header: dict[str, Any]) -> dict[str, str]:
    """Return the names of the cells in the launching kernel, by file name."""
    cells = header.get("cells")
    found = islice(cells.items(), MAX_CELLS) if isinstance(cells, dict) else ()
    return {
        filename: name[:MAX_CELL_CHARS]
        for filename, name in found
        if isinstance(name, str) and len(filename) <= MAX_CELL_CHARS and tracebacks.is_cell(filename)
    }


def journal_path(path: str | PathLike[str]) -> Path:
    """Return the path of the journal in a run's folder.

    Raises:
        FileNotFoundError: The folder has no journal.
    """
    given = given_folder(path)
    file = given / JOURNAL_NAME if given.is_dir() else given
    if not file.is_file():
        raise FileNotFoundError(
            f"{given} is not a kept run: it has no {JOURNAL_NAME}{did_you_mean(given.name, _siblings(given))}; "
            "notebook_accelerate.runs('runs') lists the runs in a folder"
        )
    return file


def _siblings(folder: Path) -> list[str]:
    """Return the names of the kept runs next to a folder that does not exist, or [] if the folder exists."""
    with suppress(OSError):
        return [] if folder.exists() else [file.parent.name for file in folder.parent.glob(f"*/{JOURNAL_NAME}")]
    return []


def end_if_lost(contents: JournalContents, file: Path) -> None:
    """If the process of a run is gone and has not recorded an end, end the journal."""
    if _is_open(contents.journal) and _has_ended(contents, file):
        _close_journal(contents)


def _is_open(journal: Journal) -> bool:
    """Return whether more records may follow, because the run is still running or its ranks are held."""
    return journal.state.started > 0 and (journal.state.ended is None or journal.state.held)


def _close_journal(contents: JournalContents) -> None:
    """Append the events that the run's process would have recorded at the end."""
    journal = contents.journal
    if journal.state.ended is None:
        text = (
            f"run {contents.header['name']} was lost: {_writer_of(contents.header)} is gone and did not record an end"
        )
        journal.append(RunLost(text), journal.last_time)
    if journal.state.held:
        journal.append(RanksReleased(), journal.last_time)


def _writer_of(header: dict[str, Any]) -> str:
    return str(parse_identity(header["process"]) or UNKNOWN)


def _has_ended(contents: JournalContents, file: Path) -> bool:
    """Return whether the process that writes the journal is gone, as far as this machine can tell."""
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
            f"the result of rank {rank} was not kept: results above {size_text(MAX_RESULT_BYTES)}, and results of "
            "start_method='inline', are not kept"
        )
        return missing
    return RankResult(partial(_load_result, folder / result_name(rank), size, values.get("crc32")), size, rank=rank)


def _result_elsewhere(rank: int, _stored: object) -> RankResult:
    missing = RankResult(int, rank=rank)
    missing.free(
        f"the result of rank {rank} is in the process that launched the run; to read results from other processes, "
        "keep the run: notebook_launcher(..., save='runs')"
    )
    return missing


def _load_result(path: Path, size: int, checksum: object) -> Any:
    try:
        data = read_limited(path, size, own=True)
    except ForeignFileError as error:
        raise SerializationError(
            f"{path} cannot be read: {error}. A result is a pickle, and its author can run "
            f"any code when it is read. If you trust that user, open your own copy: cp -r {path.parent} mine"
        ) from error
    except OSError as error:
        raise SerializationError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError:
        data = b""
    if len(data) != size or zlib.crc32(data) != checksum:
        raise SerializationError(
            f"{path} is not the result that the run's journal describes: it was changed or is damaged"
        )
    return load_bytes(data)


class _ReadOnly(NoCommands):
    """The commands of a run that belongs to another process.

    Args:
        text: The message of the error that every command raises.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refusal = self.requests.elsewhere = text

    def _refuse(self) -> NoReturn:
        raise NotebookAccelerateError(self.refusal)

    def close(self) -> None:
        """Do nothing, because there is no connection to close."""

    def stop(self, grace: float) -> None:
        """Raise an error, because the run belongs to another process."""
        self._refuse()

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raise an error, because the run belongs to another process."""
        self._refuse()


class _FilePoller:
    """Reads new records from the file of a run whose process cannot be reached, until the run ends.

    Args:
        reader: Reads the journal's file.
        client: The connection to the process of a detached run, or None.

    Attributes:
        opened: Whether `open_run` has opened the run. Until then, `open_run` reads the file itself.
        over: An event that is set when the run is garbage-collected.
    """

    opened = False

    def __init__(self, reader: JournalReader, client: ControlClient | None) -> None:
        self._reader, self._client = reader, client
        self.over = threading.Event()
        self._lock, self._started = threading.Lock(), False

    def start(self) -> None:
        """Start a thread that polls the file, unless the run is not open yet or the thread has already been started."""
        with self._lock:
            if self._started or not self.opened or self.over.is_set() or not _is_open(self._reader.journal):
                return
            self._started = True
        threading.Thread(target=self._main, name="notebook-accelerate-poll", daemon=True).start()

    def _main(self) -> None:
        gone = False
        while not gone and _is_open(self._reader.journal) and not self.over.wait(POLL_SECONDS):
            # Check this before reading, because otherwise records written just before the exit would be missed.
            gone = _has_ended(self._reader.contents, self._reader.file)
            self._poll(gone)

    def _poll(self, gone: bool) -> None:
        reader = self._reader
        try:
            reader.read_file()
        except (BrokenRunError, OSError) as error:  # Ignore most errors, because a disk may be unreachable for a while.
            if isinstance(error, BrokenRunError) or run_directory.is_gone(reader.file.parent):
                self._note_problem(f"Cannot read the journal: {error}")
        if gone:
            _close_journal(reader.contents)

    def _note_problem(self, problem: str) -> None:
        journal = self._reader.journal
        if journal.state.ended is not None:
            return
        if self._client is None or not self._client.connected:
            journal.append(RunLost(problem), journal.last_time)
        elif problem not in journal.state.warnings:
            journal.append(WarningAdded(problem))
