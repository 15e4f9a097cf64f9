"""What many ranks cost the kernel: the real supervisor, store and run panel, fed by simulated ranks."""

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
"""The hosts deliver at first what their ranks have said while the others were started."""
Backend = SimulatedBackend | LinkedBackend
LIMIT, LINKED_LIMIT = 12.0, 20.0
"""Percent of one core that 512 ranks may cost: local ones, and ranks on 64 hosts."""


@dataclass
class Cost:
    """What a number of ranks cost while they were watched.

    Attributes:
        events: Events per second that the store took in.
        supervisor: Percent of one core that the supervisor's thread used.
        panel: The same of the panels' thread.
        whole: The same of the whole process.
        memory: Bytes by which the process has grown since before the launch.
        sent: Bytes per second to the browser, of the panel's widgets.
        printed: Bytes per second to the browser, of the ranks' text under the cell.
        report: Seconds that the static form takes.
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
    """Shows nothing, and counts what it would."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def _write(self, stream: str, text: str) -> None:
        self.sent += len(text)

    def display(self, event: DisplayEvent, label: str) -> None:
        """See ``Publisher.display``."""


class Traffic:
    """Counts what the widgets below one send to the browser."""

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
    """A group of simulated ranks, its supervisor's thread and its panel.

    Args:
        ranks: How many.
        backend: What starts them.
    """

    def __init__(self, ranks: int, backend: Backend) -> None:
        self.run, self.backend = plan_run(ranks, method="spawn", started=time.time()), backend
        self.publisher = _Counting()
        self._supervisor = supervisor_of(self.run, self.publisher)
        assert self.run.plan is not None
        self.run.journal.append(AttemptStarted(0))
        self.group = RankGroup(self._supervisor, self.run.plan)
        self.group.start(backend, 0, capture_inherited_state())
        self.thread = threading.Thread(target=self.group.supervise, name="supervisor")
        self.thread.start()
        self.events = 0
        self.run.journal.subscribe(self._note)
        self.panel = RunPanel(self.run)
        self.traffic = Traffic(self.panel.widget)
        ticker.add(self.panel.schedule)

    def _note(self, records: Sequence[Record]) -> None:
        self.events += len(records)

    def wait_until_all_run(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while any(info.state != "running" for info in self.run.ranks):
            assert time.monotonic() < deadline, "the ranks did not start"
            time.sleep(0.1)

    def readings(self) -> tuple[float, ...]:
        """Return the clock, the events, the processor seconds of both threads and of all, and the bytes so far."""
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
    """Watch simulated ranks for a while."""
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
    """Yield what a number of ranks costs; linear or better means: an event costs no more than the first's."""
    expected = EVENTS_PER_SECOND * ranks
    yield Figure(what=f"{ranks} ranks: events/s", unit="", ours=cost.events, goal=f"≥ {0.9 * expected:,.0f}",
                 met=cost.events >= 0.9 * expected)  # fmt: skip
    yield Figure(what=f"{ranks} ranks: kernel CPU, of one core", unit="%", ours=cost.whole,
                 goal=f"≤ {limit:g} %" if ranks == COUNTS[-1] else "",
                 met=cost.whole <= limit if ranks == COUNTS[-1] else None,
                 note=f"supervisor {cost.supervisor:.1f} %, panel {cost.panel:.1f} %")  # fmt: skip
    each, base = 1e4 * cost.whole / cost.events, 1e4 * first.whole / first.events
    yield Figure(what=f"{ranks} ranks: CPU per event", unit="µs", ours=each, goal="" if cost is first else "≤ first",
                 met=None if cost is first else each <= base)  # fmt: skip
    yield Figure(what=f"{ranks} ranks: memory", unit="MiB", ours=cost.memory / 2**20)
    yield Figure(what=f"{ranks} ranks: the panel's messages", unit="kB/s", ours=cost.sent / 1000,
                 note=f"and {cost.printed / 1000:.1f} kB/s of text under the cell")  # fmt: skip
    yield Figure(what=f"{ranks} ranks: the report", unit="ms", ours=1e3 * cost.report)


@row("scale", "many ranks by socket pairs")
def direct() -> Iterator[Figure]:
    """Watch ranks as local ones are: a socket pair and two pipes each."""
    yield from _each(SimulatedBackend, LIMIT)


@row("scale", "many ranks through links")
def linked() -> Iterator[Figure]:
    """Watch ranks on machines of eight each: one authenticated stream per machine."""
    yield from _each(LinkedBackend, LINKED_LIMIT)


def _each(backend: Callable[[], Backend], limit: float) -> Iterator[Figure]:
    first: Cost | None = None
    for ranks in COUNTS:
        cost = watch(ranks, backend())
        first = first or cost
        yield from figures(ranks, cost, first, limit)
