"""Time limits of collectives: the kernel enforces them, so that they can stand still while a user is being asked."""

from __future__ import annotations

import operator
import sys
from datetime import timedelta
from typing import Any

NATIVE = timedelta(days=7)
"""What torch's own limit is put to. A waiting operation keeps the limit it began with, so that none may be near."""
_OWN_LIMIT = timedelta(days=1)
"""A group with a longer limit has been dealt with already."""


class Watch:
    """Finds the process groups that a function makes, by whatever means, and puts their native limits far away.

    Groups other than the default one are then held to the default group's limit. What a function calls within the 50 ms
    until a new group is found keeps torch's own limit.
    """

    def __init__(self) -> None:
        self._seen: list[Any] = []

    def look(self) -> float | None:
        """Return, once for each default group, the limit that was asked for, in seconds; about a microsecond."""
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        world = getattr(c10d, "_world", None)
        groups = getattr(world, "pg_map", None)
        if not groups:
            self._seen.clear()
            return None
        found = list(groups)
        if len(found) == len(self._seen) and all(map(operator.is_, found, self._seen)):
            return None
        default = c10d.GroupMember.WORLD
        asked = None
        for group in found:
            if not any(group is known for known in self._seen):
                limit = _lengthen(c10d, group)
                asked = limit if group is default else asked
        self._seen = found
        return asked


def _lengthen(c10d: Any, group: Any) -> float | None:
    """Put a group's native limit far away and return what it was, in seconds; None where it cannot or need not be."""
    try:
        limits = {group._get_backend(device).options._timeout for device in group._device_types}
        limit: timedelta = min(limits)
        if limit > _OWN_LIMIT:
            return None
        c10d._set_pg_timeout(NATIVE, group)
    except Exception:  # noqa: BLE001 - no such option in this backend, or not this rank's group: its own limit stays
        return None
    return limit.total_seconds()
