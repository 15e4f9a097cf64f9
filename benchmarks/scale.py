"""The cost of many ranks for the kernel: simulated ranks feed the real supervisor, store and run panel."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bench import Figure, row
from notebook_accelerate.launch.output.publisher import Publisher
from notebook_accelerate.launch.state.run_events import AttemptStarted
from notebook_accelerate.launch.supervisor.rank_group import RankGroup
from notebook_accelerate.telemetry import DisplayEvent
from notebook_accelerate.telemetry.inherited_state import capture_inherited_state
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.widgets.render_schedule import ticker
from notebook_accelerate.widgets.run_panel import RunPanel
from tests.support.runs import plan_run, supervisor_of
from tests.support.simulated import EVENTS_PER_SECOND, LinkedBackend, SimulatedBackend

COUNTS = (1, 8, 64, 512)
SETTLE_SECONDS, SECONDS = 15.0, 15.0
"""The seconds to wait first, because hosts initially send a backlog of events, and the seconds to measure."""
Backend = SimulatedBackend | LinkedBackend
LIMIT, LINKED_LIMIT = 12.0, 20.0
"""The goals for 512 ranks that are local, or on 64 hosts, as percentages of one core."""


@dataclass
class Cost:
    """The cost of monitoring a number of ranks.

    Attributes:
        events: The number of events per second that reached the journal.
        supervisor: The percentage of one core that the supervisor thread used.
        panel: The percentage of one core that the panel thread used.
        whole: The percentage of one core that the whole process used.
        memory: The growth of the process in bytes since before the launch.
        sent: The number of bytes per second that the panel's widgets sent to the browser.
        printed: The number of bytes per second of the ranks' output below the cell.
        report: The CPU seconds that building the report takes.
    """

    events: float
    supervisor: float
    panel: float
    whole: float
    memory: int
    sent: float
    printed: float
    report: float


class _Counting(Publisher):
    """Counts the characters of the output instead of showing them."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def _write(self, stream: str, text: str) -> None:
        self.sent += len(text)

    def display(self, event: DisplayEvent, label: str) -> None:
        """Ignore displays."""


class Traffic:
    """Counts the bytes that a widget and the widgets inside it send to the browser."""

    def __init__(self, widget: Any) -> None:
        self.sent = 0
        self._count(widget)

    def _count(self, widget: Any) -> None:
        widget.comm.publish_msg = self._publish
        for child in getattr(widget, "children", ()):
            self._count(child)

    def _publish(self, kind: str, data: Any = None, metadata: Any = None, buffers: Any = None, **_: Any) -> None:
        self.sent += len(json.dumps(data, default=str)) + sum(len(buffer) for buffer in buffers or ())


class WatchedGroup:
    """A group of simulated ranks, with a supervisor's thread and a panel."""

    def __init__(self, ranks: int, backend: Backend) -> None:
        self.run, self.backend = plan_run(ranks, method="spawn", started=time.time()), backend
        self.publisher = _Counting()
        self._supervisor = supervisor_of(self.run, self.publisher)
        assert self.run.plan is not None
        self.run._internals.journal.append(AttemptStarted(0))
        self.group = RankGroup(self._supervisor, self.run.plan)
        self.group.start(backend, 0, capture_inherited_state())
        self.thread = threading.Thread(target=self.group.supervise, name="supervisor")
        self.thread.start()
        self.events = 0
        self.run._internals.journal.subscribe(self._count_events)
        self.panel = RunPanel(self.run)
        self.traffic = Traffic(self.panel.widget)
        ticker.add(self.panel.schedule)

    def _count_events(self, records: Sequence[Record]) -> None:
        self.events += len(records)

    def wait_until_all_run(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while any(info.state != "running" for info in self.run.ranks):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.1)

    def readings(self) -> tuple[float, ...]:
        """Return the time, and the totals so far: events, CPU seconds of both threads and of the process, and bytes."""
        panels = ticker._thread
        return (
            time.monotonic(), self.events, _thread_seconds(self.thread), _thread_seconds(panels), time.process_time(),
            self.traffic.sent, self.publisher.sent,
        )  # fmt: skip

    def close(self) -> None:
        ticker.remove(self.panel.schedule)
        self._supervisor.commands.stop(1.0)
        self.thread.join(60)
        self.backend.wait()
        self._supervisor.commands.close()


def _thread_seconds(thread: threading.Thread | None) -> float:
    if thread is None:
        return 0.0
    fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def watch(ranks: int, backend: Backend, seconds: float = SECONDS) -> Cost:
    """Monitor simulated ranks for some seconds, and return the cost."""
    gc.collect()
    memory = _memory()
    watched = WatchedGroup(ranks, backend)
    try:
        watched.wait_until_all_run()
        time.sleep(SETTLE_SECONDS)
        before = watched.readings()
        time.sleep(seconds)
        lasted, events, supervisor, panel, whole, sent, printed = (
            b - a for a, b in zip(before, watched.readings(), strict=True)
        )
        grown = _memory() - memory
        begin = time.thread_time()
        _ = watched.run.report().bundle
        report = time.thread_time() - begin
    finally:
        watched.close()
    share = 100 / lasted
    return Cost(
        events / lasted,
        supervisor * share,
        panel * share,
        whole * share,
        grown,
        sent / lasted,
        printed / lasted,
        report,
    )


def figures(ranks: int, cost: Cost, first: Cost, limit: float) -> Iterator[Figure]:
    """Yield the figures for this many ranks. The goal is linear scaling: an event costs no more than with one rank."""
    expected, who = EVENTS_PER_SECOND * ranks, f"{ranks} rank{'s' * (ranks > 1)}"
    yield Figure(what=f"{who}: events/s", unit="", ours=cost.events, goal=f"≥ {0.9 * expected:,.0f}",
                 met=cost.events >= 0.9 * expected)  # fmt: skip
    yield Figure(what=f"{who}: kernel CPU, share of one core", unit="%", ours=cost.whole,
                 goal=f"≤ {limit:g} %" if ranks == COUNTS[-1] else "",
                 met=cost.whole <= limit if ranks == COUNTS[-1] else None,
                 note=f"supervisor {cost.supervisor:.1f} %, panel {cost.panel:.1f} %")  # fmt: skip
    each, base = 1e4 * cost.whole / cost.events, 1e4 * first.whole / first.events
    yield Figure(what=f"{who}: CPU per event", unit="µs", ours=each, goal="" if cost is first else "≤ 1 rank",
                 met=None if cost is first else each <= base)  # fmt: skip
    yield Figure(what=f"{who}: memory", unit="MiB", ours=cost.memory / 2**20)
    yield Figure(what=f"{who}: panel messages", unit="kB/s", ours=cost.sent / 1000,
                 note=f"and {cost.printed / 1000:.1f} kB/s of text below the cell")  # fmt: skip
    yield Figure(what=f"{who}: building the report", unit="ms", ours=1e3 * cost.report)


@row("scale", "many ranks over socket pairs")
def direct() -> Iterator[Figure]:
    """Monitor ranks that are connected like local ones, each by a socket pair and two pipes."""
    yield from _all_counts(SimulatedBackend, LIMIT)


@row("scale", "many ranks over host links")
def linked() -> Iterator[Figure]:
    """Monitor ranks on hosts of eight ranks each, with one authenticated connection per host."""
    yield from _all_counts(LinkedBackend, LINKED_LIMIT)


def _all_counts(backend: Callable[[], Backend], limit: float) -> Iterator[Figure]:
    first: Cost | None = None
    for ranks in COUNTS:
        cost = watch(ranks, backend())
        first = first or cost
        yield from figures(ranks, cost, first, limit)
