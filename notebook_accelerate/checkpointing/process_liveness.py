"""Identifies a rank's process so that another process can find out whether it has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process as other processes can find it."""

    machine: str
    """Identifies its machine and PID namespace; empty where the system provides no identifier."""
    pid: int
    """Its process ID in that namespace."""

    def has_ended(self) -> bool:
        """Tell whether the process is known to have ended; False also where this process cannot look.

        A zombie, whose parent has not read its exit status yet, has ended.
        """
        if not self.machine or self.machine != _machine_identity():
            return False
        try:
            return psutil.Process(self.pid).status() in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    return ProcessIdentity(machine=_machine_identity(), pid=os.getpid())


def _machine_identity() -> str:
    """Return the boot ID of this machine and its PID namespace (a container has its own); "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""
