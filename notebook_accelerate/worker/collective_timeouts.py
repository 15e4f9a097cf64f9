"""Time limits for collectives. The kernel enforces them, so that it can pause the clock while it prompts the user."""

from __future__ import annotations

import operator
import sys
import threading
import weakref
from datetime import timedelta
from typing import Any

from notebook_accelerate.torch_internals import group_timeouts, process_groups, set_group_timeout

TORCH_LIMIT = timedelta(days=7)
"""The limit that ranks set in torch. It must be long from the start, because a waiting operation keeps its limit."""
NCCL_FACTOR = 3
"""The limit that ranks set for NCCL, as a multiple of the requested limit.

The kernel detects a rank that waits for NCCL through torch's flight recorder. If that fails, NCCL's own limit ends
the ranks, which would otherwise occupy their devices for a week.
"""
_replaced: weakref.WeakSet[Any] = weakref.WeakSet()
"""Groups whose limit has been replaced."""
_replacing = threading.Lock()
"""Guards the replacement: the agent may find a group while the thread that created it is replacing its limit."""


class GroupTimeouts:
    """Finds new process groups, however they were created, and replaces torch's limit with a long one.

    The limit of the default group then applies to all groups. A new group is found within 50 ms, and collectives that
    start earlier keep torch's own limit.
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def poll(self) -> float | None:
        """Return a new default group's limit in seconds, once for each group, or else None. This takes about 1 µs."""
        found = process_groups()
        if not found:
            self._seen.clear()
            return None
        if len(found) == len(self._seen) and all(map(operator.is_, found, self._seen)):
            return None
        default = sys.modules["torch.distributed"].group.WORLD
        requested = None
        for group in found:
            if not any(group is known for known in self._seen):
                limit = lengthen(group)
                requested = limit if group is default else requested
        self._seen = found
        return requested


def lengthen(group: Any) -> float | None:
    """Increase a group's limit. Return the previous limit in seconds, or None if it was not changed.

    Args:
        group: A process group of this rank.
    """
    with _replacing:
        if group in _replaced:
            return None
        try:
            limits = group_timeouts(group)
            if not limits.keys() <= {"gloo", "nccl"}:
                return None  # Keep torch's limit for other backends, which have no flight recorder.
            requested = min(limits.values())
            set_group_timeout(NCCL_FACTOR * requested if "nccl" in limits else TORCH_LIMIT, group)
        except Exception:  # noqa: BLE001 - torch's limit stays if the backend has no such option, or the rank is not in the group
            return None
        _replaced.add(group)
        return requested.total_seconds()
