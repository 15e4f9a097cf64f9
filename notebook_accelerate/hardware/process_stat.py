"""Reads the state of processes and threads from /proc."""

from __future__ import annotations

from pathlib import Path

STATE, FLAGS, STARTED = 0, 6, 19
"""Indices of fields of `read_stat`: proc_pid_stat(5) counts from 1 and has two fields before them."""


def read_stat(folder: Path) -> list[str]:
    """Return the fields of a process or thread after its name; [] where it has ended or cannot be read.

    Args:
        folder: ``/proc/PID``, or ``/proc/PID/task/TID``.
    """
    try:
        text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # also without /proc
        return []
    fields = text.rpartition(")")[2].split()  # its name, in parentheses, may contain anything
    return fields if len(fields) > STARTED else []


__all__ = ["FLAGS", "STARTED", "STATE", "read_stat"]
