"""How the process of a rank ended."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Exit:
    """How a process ended.

    Attributes:
        code: Exit status; None when a signal ended it, or when it is not known.
        signal: Number of the signal that ended it; None otherwise.
        max_rss: Peak resident memory in bytes; 0 when not known.
        lost: Why nothing is known of its end, as "node 1 (c3-n07) was lost"; "" when it is known.
    """

    code: int | None = None
    signal: int | None = None
    max_rss: int = 0
    lost: str = ""

    @classmethod
    def from_status(cls, status: int, max_rss_kib: int) -> Exit:
        """Read what ``os.wait4`` returns."""
        code = os.waitstatus_to_exitcode(status)
        return cls(code if code >= 0 else None, -code if code < 0 else None, max_rss_kib * 1024)


__all__ = ["Exit"]
