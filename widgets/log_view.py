"""The output of the ranks in the browser, with tabs per rank and a search that work while the kernel is busy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_accelerate.widgets.assets import script
from notebook_accelerate.widgets.feed import Feed

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.telemetry.store import LogLine

FIRST_LINES = 500
"""Lines per rank in a message with everything."""
NEW_LINES = 200
"""Lines per rank in one update: the last ones."""
ALL_FIRST_LINES, ALL_NEW_LINES = 8_000, 1_600
"""The same over all ranks: the more ranks, the fewer lines of each."""
MAX_LINE = 4_000
"""Characters of a line that are shown."""


class LogView(Feed):
    """The lines of all ranks, newest at the end.

    Args:
        run: The run.
    """

    _esm = script("feed.js", "logs.js")

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self._sent = 0
        self._cursors: dict[int, int] = {}

    def update(self, now: float) -> None:
        """Send the new lines, or the latest lines of all ranks if a view asked for them or may have missed some."""
        total = self.run.store.log_total
        # The first lines are sent as everything: a view could not ask a busy kernel for the message they continue.
        first = not self.full and total > 0
        if self._full_due(now) or first:
            self._send_lines("full", min(FIRST_LINES, self._per_rank(ALL_FIRST_LINES)))
        elif total != self._sent:
            self._send_lines("delta", min(NEW_LINES, self._per_rank(ALL_NEW_LINES)))

    def _per_rank(self, lines: int) -> int:
        return max(1, lines // max(1, len(self.run.journal.state.ranks)))

    def _send_lines(self, kind: str, limit: int) -> None:
        lines: list[tuple[int, float, str, str]] = []
        skipped: dict[str, int] = {}
        everything, ranks = kind == "full", self.run.journal.state.ranks
        self._sent = self.run.store.log_total
        for info in ranks:
            since = 0 if everything else self._cursors.get(info.rank, 0)
            found, self._cursors[info.rank], left_out = self.run.store.log_tail(info.rank, since, limit)
            lines += [(info.rank, line.time, line.stream, _cut(line)) for line in found]
            if left_out:
                skipped[str(info.rank)] = left_out
        if not lines:
            return
        lines.sort(key=lambda line: line[1])
        nodes: dict[str, Any] = {str(info.rank): info.node for info in ranks} if everything else {}
        if len(set(nodes.values())) < 2:
            nodes = {}
        self._send_message(kind, {"lines": lines, "skipped": skipped, "nodes": nodes})


def _cut(line: LogLine) -> str:
    return line.text if len(line.text) <= MAX_LINE else line.text[:MAX_LINE] + " …"
