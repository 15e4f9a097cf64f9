"""Which process a rank is, for another one that waits for it: alive, ended, or on a machine that cannot be asked."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """A process, as other processes find it."""

    machine: str
    """What tells its machine, and its space of process numbers, from others; empty where the system does not say."""
    pid: int
    """Its number there."""

    def ended(self) -> bool:
        """Tell whether the process is known to have ended; False also where it cannot be asked.

        A process that ended counts as such before its parent has fetched its exit status.
        """
        if not self.machine or self.machine != _machine():
            return False
        try:
            line = (_PROC / str(self.pid) / "stat").read_text(encoding="ascii", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:
            return False
        return line.rpartition(")")[2].split()[0] in {"Z", "X"}  # the name before may hold anything


def this_process() -> ProcessIdentity:
    """Return what other processes can find this one by."""
    return ProcessIdentity(machine=_machine(), pid=os.getpid())


def _machine() -> str:
    """Return the boot of this machine and its space of process numbers (a container has its own); "" if unknown."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return ""
