"""What the ranks wrote, in the browser: tabs per rank and a search that work while the kernel is busy."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from notebook_accelerate.widgets.assets import script
from notebook_accelerate.widgets.plot import REFRESH_AGES

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.telemetry.store import LogLine

FIRST_LINES = 500
"""Lines per rank that a view begins with."""
NEW_LINES = 200
"""Lines per rank in one update: of a flood, the end."""
ALL_FIRST_LINES, ALL_NEW_LINES = 8_000, 1_600
"""The same over all ranks: the more there are, the fewer of each."""
MAX_LINE = 4_000
"""Characters of a line that are shown."""
TAIL = 50


class LogView(anywidget.AnyWidget):
    """The lines of all ranks, newest at the end.

    Args:
        run: Whose lines.
    """

    _esm = script("feed.js", "logs.js")
    full: Any = traitlets.Dict().tag(sync=True)
    delta: Any = traitlets.Dict().tag(sync=True)

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self._seq = 0
        self._seen = 0
        self._cursors: dict[int, int] = {}
        self._asked = True
        self._born: float | None = None
        self._refreshes = 0
        self.on_msg(self._heard)

    def _heard(self, _: Any, content: Any, __: Any) -> None:
        if isinstance(content, dict) and content.get("kind") == "hello":
            self._asked = True

    def update(self, now: float) -> None:
        """Send the lines that are new; the latest ones of all ranks where a view asked for them."""
        self._born = now if self._born is None else self._born
        missed = self._refreshes < len(REFRESH_AGES) and now >= self._born + REFRESH_AGES[self._refreshes]
        if missed:
            self._refreshes += 1
        # A view would have to ask for the beginning of what it gets in parts, and a kernel that is busy would not hear.
        begins = not self.full and self._run.store.log_total > 0
        if self._asked or missed or begins:
            self._asked = False
            self._send_lines(min(FIRST_LINES, self._share(ALL_FIRST_LINES)), whole=True)
        elif self._run.store.log_total != self._seen:
            self._send_lines(min(NEW_LINES, self._share(ALL_NEW_LINES)), whole=False)

    def _share(self, lines: int) -> int:
        return max(1, lines // max(1, len(self._run.ranks)))

    def _send_lines(self, limit: int, *, whole: bool) -> None:
        lines: list[tuple[int, float, str, str]] = []
        skipped: dict[str, int] = {}
        self._seen = self._run.store.log_total
        for info in self._run.ranks:
            since = 0 if whole else self._cursors.get(info.rank, 0)
            found, self._cursors[info.rank], left_out = self._run.store.log_tail(info.rank, since, limit)
            lines += [(info.rank, line.time, line.stream, _cut(line)) for line in found]
            if left_out:
                skipped[str(info.rank)] = left_out
        if not lines:
            return
        lines.sort(key=lambda line: line[1])
        self._seq += 1
        places = {str(info.rank): info.node for info in self._run.ranks}
        nodes = places if whole and len(set(places.values())) > 1 else {}
        message = {"seq": self._seq, "prev": self._seq - 1, "lines": lines, "skipped": skipped, "nodes": nodes}
        if whole:
            self.full = message
        else:
            self.delta = message

    @property
    def text(self) -> str:
        """The last lines of all ranks."""
        return "\n".join(self._run.logs(tail=TAIL))

    @property
    def html(self) -> str:
        """The last lines of all ranks, preformatted."""
        return f"<pre>{escape(self.text)}</pre>"


def _cut(line: LogLine) -> str:
    return line.text if len(line.text) <= MAX_LINE else line.text[:MAX_LINE] + " …"


__all__ = ["LogView"]
