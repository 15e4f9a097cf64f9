"""Let other processes of the user find and attach to the live runs of this kernel."""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accelerate.launch.detached import control_protocol as protocol, run_directory
from notebook_accelerate.launch.detached.control_service import ControlService, RecordStream
from notebook_accelerate.launch.run import add_ending_callback
from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.launch.supervisor.command_queue import CommandQueue

if TYPE_CHECKING:
    from notebook_accelerate.launch.detached.run_directory import DirectoryEntry
    from notebook_accelerate.launch.run import Run
    from notebook_accelerate.telemetry.store import Record

_ending: weakref.WeakSet[ControlService] = weakref.WeakSet()


class ServedRun:
    """A live run that other processes can reach, from the launch until its ranks have ended and are not held.

    The run's event loop waits for connections, so the run needs no additional thread until a process attaches to it. An
    inline run has no event loop, so a thread waits instead.

    Args:
        run: The run to serve.
        entry: The run's entry, with the path of a new socket.

    Raises:
        LaunchError: The user has no folder for entries.
        OSError: The socket or the entry cannot be created.
    """

    def __init__(self, run: Run, entry: DirectoryEntry) -> None:
        self._run, self._path, self._lock = run, Path(entry.socket), threading.Lock()
        self._file: Path | None = None
        self._service: ControlService | None = None
        self._listener: socket.socket | None = None
        self._is_closed = False
        self._stream = RecordStream(run)
        self._unsubscribe = internals(run).journal.subscribe(self._on_records)
        commands = internals(run).commands
        try:
            if isinstance(commands, CommandQueue):
                self._listener = protocol.listen(self._path)
            else:
                self._service = ControlService(run, self._path, self._stream)
            self._file = run_directory.add_entry(entry)
        except BaseException:
            self.close()
            raise
        if isinstance(commands, CommandQueue) and self._listener is not None:
            commands.listener = self._listener, partial(self._admit, self._listener)
        add_ending_callback(run, lambda _: None if internals(run).journal.state.held else self._remove())

    def _admit(self, listener: socket.socket) -> None:
        """Accept a connection on the run's thread. The first connection starts the service."""
        with suppress(OSError, RuntimeError):  # This process may have too many open files or threads.
            self._service = self._service or ControlService(self._run, stream=self._stream)
            self._service.admit(listener)

    def _on_records(self, _records: Sequence[Record]) -> None:
        state = internals(self._run).journal.state
        if state.ended is not None and not state.held:
            self.close()

    def _remove(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)
        if self._listener is not None:
            protocol.stop_listening(self._listener, self._path)

    def close(self) -> None:
        """Remove the entry and the socket. The service sends attached processes the end of the run, then it ends."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._unsubscribe()
        del self._unsubscribe  # The function refers to this object, which refers to the run.
        self._remove()
        if isinstance(commands := internals(self._run).commands, CommandQueue):
            commands.listener = None  # The function refers to the run, which its user may drop.
        if self._service is None:
            self._stream.close()
        else:
            _ending.add(self._service)
            self._service.close(wait=False)


def finish_services() -> None:
    """Wait for the services of ended runs, which takes a few seconds at most if an attached process does not read."""
    for service in list(_ending):
        service.close()
