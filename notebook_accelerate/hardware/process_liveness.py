"""Identify a process, so that other processes can find out whether it has exited."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PROC = Path("/proc")
_ENDED = {"Z", "X", "x"}
"""The states of a zombie, whose parent has not read its exit status, and of a process that is being removed."""
KILL_SECONDS = 10.0
"""Seconds to wait for the exit of a killed process, which may be blocked on disk access."""


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """The identity of a process, which lets other processes find it."""

    machine: str
    """The identity of the process's machine and PID namespace, or "" if the system does not provide one."""
    pid: int
    """The process ID in the process's PID namespace."""
    started: int = 0
    """Its start in clock ticks since the machine started, or 0 if unknown. Process IDs alone are reused."""
    host: str = ""
    """The machine's name, for messages."""

    def has_ended(self) -> bool:
        """Return whether the process has exited, or False if the calling process cannot find out."""
        if not self.machine or self.machine != _machine_identity():
            return False
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:  # The process exists, but belongs to another user.
            pass
        fields = read_stat(_PROC / str(self.pid))
        if not fields:  # /proc may hide the processes of other users.
            return False
        return fields[STATE] in _ENDED or self.started not in {0, int(fields[STARTED])}

    def is_suspended(self) -> bool:
        """Return whether the process is on this machine and suspended."""
        return self._runs_here() and is_stopped(self.pid)

    def kill_tree(self) -> None:
        """Kill the process and its descendants, even if they are suspended. Do nothing on another machine."""
        import psutil

        if not self._runs_here():
            return
        with suppress(psutil.Error, OSError):
            process = psutil.Process(self.pid)
            descendants = process.children(recursive=True)
            for each in (process, *descendants):
                with suppress(psutil.Error):
                    each.kill()
            process.wait(KILL_SECONDS)

    def _runs_here(self) -> bool:
        return self.machine == _machine_identity() and not self.has_ended()

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        return f"process {self.pid}" + (f" on {self.host}" if self.host else "")


UNKNOWN = ProcessIdentity(machine="", pid=0)
"""A process that cannot be identified, and therefore counts as alive."""


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    fields = read_stat(_PROC / str(pid))
    started = int(fields[STARTED]) if fields else 0
    return ProcessIdentity(machine=_machine_identity(), pid=pid, started=started, host=socket.gethostname())


def parse_identity(content: Any) -> ProcessIdentity | None:
    """Return the identity recorded in a file, or None if the record is invalid.

    Args:
        content: The fields of a `ProcessIdentity`, from JSON.
    """
    try:
        identity = ProcessIdentity(**content)
    except TypeError:
        return None
    texts = isinstance(identity.machine, str) and isinstance(identity.host, str)
    numbers = isinstance(identity.pid, int) and isinstance(identity.started, int) and identity.pid > 0
    return identity if texts and numbers else None


def _machine_identity() -> str:
    """Return the boot ID of this machine and its PID namespace (a container has a separate one), or "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""


# ---- the state of processes and threads

STATE, FLAGS, STARTED = 0, 6, 19
"""Indices into the result of `read_stat`. proc_pid_stat(5) counts from 1, and two fields precede these."""


def read_stat(folder: Path) -> list[str]:
    """Return the fields of a process or thread after its name, or [] if it has exited or cannot be read.

    Args:
        folder: ``/proc/PID``, or ``/proc/PID/task/TID``.
    """
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # This is also raised on systems without /proc.
        return []
    fields = text.rpartition(")")[2].split()  # The name, in parentheses, may contain anything.
    return fields if len(fields) > STARTED else []


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped (SIGSTOP)."""
    if fields := read_stat(_PROC / str(pid)):  # This takes a third of psutil's time.
        return fields[STATE] in ("T", "t")
    import psutil

    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (psutil.Error, OSError):  # The process has exited, or this process has no free descriptor.
        return False
