"""The bounded store: what a run's ranks said, kept for panels, reports and ``run.metrics``.

Bounds: ``max_points`` points per metric and rank (a fuller series is thinned by keeping the smallest and the largest
of every four neighbours, so that extremes survive), ``MAX_TOTAL_POINTS`` over all of them (the more series there are,
the fewer points each may have; each may have ``MIN_POINTS``), ``max_series`` metrics, ``max_log_bytes`` of text per
rank. A point weighs 24 bytes in an array with an eighth to spare, so a run of any length holds at most 108 MB of curves
and 8 MB of text per rank; a band over more than eight ranks (``telemetry.bands``) adds 24 KB per metric. Failures and
results are never dropped.
"""

from __future__ import annotations

import threading
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_accelerate.telemetry.envelope import BAND_FROM, EnvelopeTail, MetricEnvelope
from notebook_accelerate.telemetry.events import (
    DroppedEvent,
    Event,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    ResourceEvent,
    ShardingEvent,
    TraceEvent,
)
from notebook_accelerate.telemetry.sharding_events import ShardReport, read
from notebook_accelerate.telemetry.step_time import StepTimeEvent

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

MAX_POINTS = 50_000
MAX_SERIES = 2_000
MAX_LOG_BYTES = 8 << 20
MAX_TOTAL_POINTS = 4_000_000
MIN_POINTS = 64
"""What every series may keep, however many there are."""
MAX_TRACES = 1_000
"""Traces that are listed; of more, the latest."""
RECENT_STEP_TIMES = 10
"""Step times kept per rank: about as many seconds."""


class Record(NamedTuple):
    """One event of one rank, as subscribers see it."""

    rank: int
    time: float
    event: Event


class LogLine(NamedTuple):
    """One line a rank wrote."""

    time: float
    stream: str
    text: str


class Tail(NamedTuple):
    """What one rank logged of one metric since the last look.

    Attributes:
        steps: int64, shape (n,); -1 where no step was given.
        times: Seconds since the epoch, float64, shape (n,).
        values: float64, shape (n,).
        cursor: What to pass next time.
        whole: Whether these are all points there are, in place of what earlier looks returned.
    """

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray
    cursor: tuple[int, int]
    whole: bool


class _Points:
    """The points of one metric on one rank."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("q"), array("d"), array("d")
        self.thinned = 0

    def append(self, step: int, time: float, value: float, limit: int) -> int:
        """Keep a point; return by how much the number of points has changed."""
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)
        count = len(self.values)
        if count < limit:
            return 1
        self._thin()
        return len(self.values) - count + 1

    def thin_to(self, limit: int) -> None:
        """Thin until there are no more than ``limit`` points."""
        while len(self.values) > max(4, limit):
            self._thin()

    def since(self, cursor: tuple[int, int]) -> Tail:
        import numpy as np

        # Thinning moves points, so that an index from before it means nothing.
        begin = cursor[1] if cursor[0] == self.thinned else 0
        return Tail(
            np.array(self.steps[begin:], dtype=np.int64),
            np.array(self.times[begin:], dtype=float),
            np.array(self.values[begin:], dtype=float),
            (self.thinned, len(self.values)),
            begin == 0,
        )

    def _thin(self) -> None:
        import numpy as np

        values = np.frombuffer(self.values, dtype=float)
        groups = values[: len(values) // 4 * 4].reshape(-1, 4)
        finite = np.where(np.isnan(groups), np.inf, groups), np.where(np.isnan(groups), -np.inf, groups)
        base = np.arange(len(groups)) * 4
        picked = np.concatenate([base + finite[0].argmin(axis=1), base + finite[1].argmax(axis=1)])
        # A group with NaN keeps one NaN: that is what the reader looks for.
        nan_rows = np.isnan(groups).any(axis=1)
        picked = np.concatenate([picked, base[nan_rows] + np.isnan(groups[nan_rows]).argmax(axis=1)])
        keep = np.unique(np.concatenate([picked, np.arange(len(base) * 4, len(values))]))
        del values, groups
        self.steps = array("q", np.frombuffer(self.steps, dtype=np.int64)[keep].tobytes())
        self.times = array("d", np.frombuffer(self.times, dtype=float)[keep].tobytes())
        self.values = array("d", np.frombuffer(self.values, dtype=float)[keep].tobytes())
        self.thinned += 1


class MetricSeries(NamedTuple):
    """One metric over all ranks, in order of time.

    Attributes:
        name: The metric.
        steps: int64, shape (n,); -1 where no step was given.
        times: Seconds since the epoch, float64, shape (n,).
        ranks: int64, shape (n,).
        values: float64, shape (n,).
        thinned: Whether points were left out to stay within the store's bound (extremes are kept).
    """

    name: str
    steps: np.ndarray
    times: np.ndarray
    ranks: np.ndarray
    values: np.ndarray
    thinned: bool

    def rank(self, rank: int) -> MetricSeries:
        """Return the part that ``rank`` logged."""
        mask = self.ranks == rank
        return MetricSeries(
            self.name, self.steps[mask], self.times[mask], self.ranks[mask], self.values[mask], self.thinned
        )

    def to_pandas(self) -> pd.DataFrame:
        """Return a frame with the columns step, time, rank, value (needs pandas)."""
        import pandas as pd

        columns = {"step": self.steps, "time": self.times, "rank": self.ranks, "value": self.values}
        return pd.DataFrame(columns)


class Metrics(Mapping[str, MetricSeries]):
    """A live, read-only view from metric name to series."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def __getitem__(self, name: str) -> MetricSeries:
        return self._store.series(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._store.metric_names())

    def __len__(self) -> int:
        return len(self._store.metric_names())

    def __repr__(self) -> str:
        return f"<metrics: {', '.join(self) or 'none yet'}>"

    def to_pandas(self) -> pd.DataFrame:
        """Return all metrics in one long frame: name, step, time, rank, value (needs pandas)."""
        import pandas as pd

        frames = [series.to_pandas().assign(name=series.name) for series in self.values()]
        columns = ["name", "step", "time", "rank", "value"]
        return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)


def _band_of(ranks: Mapping[int, _Points]) -> MetricEnvelope:
    band = MetricEnvelope()
    for points in ranks.values():
        for step, time, value in zip(points.steps, points.times, points.values, strict=True):
            band.add(step, time, value)
    return band


def _whole(value: object) -> int | None:
    """Return a step as a number of 64 bits; None for what is none: a rank may send anything."""
    try:
        step = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return step if -(2**63) <= step < 2**63 else None


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


class Store:
    """Everything a run's ranks said, within bounds; safe from any thread."""

    def __init__(
        self, max_points: int = MAX_POINTS, max_series: int = MAX_SERIES, max_log_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self._lock = threading.RLock()
        self._max_points, self._max_series, self._max_log_bytes = max_points, max_series, max_log_bytes
        self._metrics: dict[str, dict[int, _Points]] = {}
        self._bands: dict[str, MetricEnvelope] = {}
        self._series_count = 0
        self._points_count = 0
        self._most_points = max_points
        self._logs: dict[int, deque[LogLine]] = {}
        self._log_bytes: dict[int, int] = {}
        self._log_count: dict[int, int] = {}
        self.log_total = 0
        self._step_times: dict[int, deque[StepTimeEvent]] = {}
        self._counted: set[int] = set()
        self._subscribers: list[Callable[[list[Record]], None]] = []
        self.progress: dict[int, ProgressEvent] = {}
        self.loops: dict[int, ProgressEvent] = {}
        self.resources: dict[int, ResourceEvent] = {}
        self.peak_memory: dict[int, int] = {}
        self.shard_reports: dict[int, ShardReport] = {}
        self._traces: dict[tuple[int, str], int] = {}
        self.last_step: dict[int, int] = {}
        self.dropped: dict[int, int] = {}
        self.last_activity: dict[int, float] = {}
        self._handlers: dict[type[Event], Callable[[Record], None]] = {
            MetricEvent: self._add_metric,
            ProgressEvent: self._add_progress,
            LogEvent: self._add_log,
            ResourceEvent: self._add_resource,
            DroppedEvent: self._add_dropped,
            StepTimeEvent: self._add_step_time,
            TraceEvent: self._add_trace,
            ShardingEvent: self._add_sharding,
        }

    def add(self, records: list[Record]) -> None:
        """Keep ``records`` and tell the subscribers."""
        with self._lock:
            for record in records:
                if not isinstance(record.event, ResourceEvent):
                    self.last_activity[record.rank] = record.time
                handler = self._handlers.get(type(record.event))
                if handler is not None:
                    handler(record)
            subscribers = list(self._subscribers)
        for subscriber in subscribers:
            self._tell(subscriber, records)

    def _tell(self, subscriber: Callable[[list[Record]], None], records: list[Record]) -> None:
        try:
            subscriber(records)
        except Exception as error:  # noqa: BLE001 - a view must never change a run by failing
            self._unsubscribe(subscriber)
            warnings.warn(f"a subscriber failed and was dropped: {type(error).__name__}: {error}", stacklevel=2)

    def subscribe(self, callback: Callable[[list[Record]], None]) -> Callable[[], None]:
        """Call ``callback(records)`` for all that comes from now on, on the supervisor's thread.

        Returns:
            A function that ends the subscription.
        """
        with self._lock:
            self._subscribers.append(callback)
        return lambda: self._unsubscribe(callback)

    def _unsubscribe(self, callback: Callable[[list[Record]], None]) -> None:
        with self._lock:
            if callback in self._subscribers:
                self._subscribers.remove(callback)

    # ---- one handler per kind of event, called with the lock held

    def _add_metric(self, record: Record) -> None:
        event: Any = record.event
        step = self.last_step.get(record.rank, -1) if event.step is None else _whole(event.step)
        if step is not None:
            self.last_step[record.rank] = step
        limit = self._most_points
        for name, value in event.values.items():
            number = value if type(value) is float else _number(value)
            ranks = self._metrics.get(name)
            if step is None or number is None or (ranks is None and len(self._metrics) >= self._max_series):
                self.dropped[record.rank] = self.dropped.get(record.rank, 0) + 1
                continue
            if ranks is None:
                ranks = self._metrics[name] = {}
            points = ranks.get(record.rank)
            if points is None:
                points = ranks[record.rank] = _Points()
                self._series_count += 1
                limit = self._most_points = self._limit()
                if len(ranks) == BAND_FROM + 1:
                    self._bands[name] = _band_of(ranks)
            self._points_count += points.append(step, record.time, number, limit)
            if (band := self._bands.get(name)) is not None:
                band.add(step, record.time, number)
        if self._points_count > MAX_TOTAL_POINTS and self._points_count > MIN_POINTS * self._series_count:
            self._thin_all()

    def _limit(self) -> int:
        """Return how many points a series may have now."""
        share = max(MIN_POINTS, MAX_TOTAL_POINTS // max(1, self._series_count))
        return min(self._max_points, share)

    def _thin_all(self) -> None:
        """Bring series that grew when there were fewer of them down to what each may have now."""
        series = [points for ranks in self._metrics.values() for points in ranks.values()]
        for points in series:
            points.thin_to(self._limit())
        self._points_count = sum(len(points.values) for points in series)

    def _add_progress(self, record: Record) -> None:
        event: Any = record.event
        self.progress[record.rank] = event
        if event.total is None:
            self._counted.add(record.rank)
        else:
            self.loops[record.rank] = event
        # A progress bar counts what it likes; where the optimizer counts steps, it knows better.
        if event.total is None or record.rank not in self._counted:
            self.last_step[record.rank] = event.step

    def _add_step_time(self, record: Record) -> None:
        event: Any = record.event
        if isinstance(event.parts, dict) and all(_number(seconds) is not None for seconds in event.parts.values()):
            self._step_times.setdefault(record.rank, deque(maxlen=RECENT_STEP_TIMES)).append(event)

    def _add_resource(self, record: Record) -> None:
        event: Any = record.event
        self.resources[record.rank] = event
        self.peak_memory[record.rank] = max(self.peak_memory.get(record.rank, 0), event.memory_bytes)

    def _add_trace(self, record: Record) -> None:
        event: Any = record.event
        size = _whole(event.size)
        if size is None:
            return
        file = record.rank, str(event.path)
        self._traces.pop(file, None)  # a trace that is written again is the latest
        self._traces[file] = size
        if len(self._traces) > MAX_TRACES:
            del self._traces[next(iter(self._traces))]

    def _add_sharding(self, record: Record) -> None:
        event: Any = record.event
        if (report := read(event)) is not None:
            self.shard_reports[record.rank] = report

    def _add_dropped(self, record: Record) -> None:
        event: Any = record.event
        self.dropped[record.rank] = self.dropped.get(record.rank, 0) + event.count

    def _add_log(self, record: Record) -> None:
        event: Any = record.event
        lines = self._logs.setdefault(record.rank, deque())
        self._log_count[record.rank] = self._log_count.get(record.rank, 0) + 1
        self.log_total += 1
        size = self._log_bytes.get(record.rank, 0)
        # Many lines come as one text and stay one until they are read: a flood must not cost an object per line.
        lines.append(LogLine(record.time, event.stream, event.text))
        size += len(event.text) + 200  # the tuple and its parts weigh about that much
        while size > self._max_log_bytes and len(lines) > 1:
            size -= len(lines.popleft().text) + 200
        self._log_bytes[record.rank] = size

    # ---- reading

    def metric_names(self) -> list[str]:
        """Return the names of the metrics, in order of first appearance."""
        with self._lock:
            return list(self._metrics)

    def series(self, name: str) -> MetricSeries:
        """Return one metric over all ranks.

        Raises:
            KeyError: No such metric; the message lists those there are.
        """
        import numpy as np

        with self._lock:
            if name not in self._metrics:
                raise KeyError(f"no metric {name!r}; there are: {', '.join(self._metrics) or 'none yet'}")
            columns = [
                (
                    np.array(points.steps, dtype=np.int64),
                    np.array(points.times, dtype=float),
                    np.full(len(points.values), rank, dtype=np.int64),
                    np.array(points.values, dtype=float),
                )
                for rank, points in self._metrics[name].items()
            ]
            thinned = any(points.thinned > 0 for points in self._metrics[name].values())
        steps, times, ranks, values = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(times, kind="stable")
        return MetricSeries(name, steps[order], times[order], ranks[order], values[order], thinned)

    def ranks_of(self, name: str) -> list[int]:
        """Return the ranks that logged ``name``, in order."""
        with self._lock:
            return sorted(self._metrics.get(name, ()))

    def last_value(self, name: str, rank: int) -> float | None:
        """Return the last value that ``rank`` logged of ``name``; None when it logged none."""
        with self._lock:
            points = self._metrics.get(name, {}).get(rank)
            return points.values[-1] if points is not None and points.values else None

    def tail(self, name: str, rank: int, cursor: tuple[int, int] = (0, 0)) -> Tail:
        """Return what ``rank`` logged of ``name`` since ``cursor``; thinning makes it start again.

        Raises:
            KeyError: The rank has logged no such metric.
        """
        with self._lock:
            return self._metrics[name][rank].since(cursor)

    def band(self, name: str, cursor: tuple[int, int] = (0, 0)) -> EnvelopeTail | None:
        """Return what is new of the band of all ranks since ``cursor``; None where few ranks have logged ``name``."""
        with self._lock:
            band = self._bands.get(name)
            return None if band is None else band.since(cursor)

    def traces(self) -> list[tuple[int, str, int]]:
        """Return the profilers' traces that were written: rank, path and size in bytes, by rank."""
        with self._lock:
            return sorted((rank, path, size) for (rank, path), size in self._traces.items())

    def latest_step_time(self, rank: int) -> StepTimeEvent | None:
        """Return the last of ``step_times``; None where nothing was measured."""
        with self._lock:
            events = self._step_times.get(rank)
            return events[-1] if events else None

    def step_times(self, rank: int) -> list[StepTimeEvent]:
        """Return where the rank's time of the last seconds went, the oldest first."""
        with self._lock:
            return list(self._step_times.get(rank, ()))

    def log_tail(self, rank: int, cursor: int = 0, limit: int = 500) -> tuple[list[LogLine], int, int]:
        """Return what ``rank`` wrote since ``cursor``.

        Args:
            rank: Whose lines.
            cursor: What the last call returned.
            limit: At most so many lines, the newest ones.

        Returns:
            The lines, the cursor for the next call, and how many lines were left out (those that the store no longer
            has are not counted).
        """
        with self._lock:
            count = self._log_count.get(rank, 0)
            chunks = list(islice(reversed(self._logs.get(rank, ())), count - cursor))
        lines: list[LogLine] = []
        skipped = 0
        for chunk in chunks:
            room = limit - len(lines)
            if room <= 0:
                skipped += chunk.text.count("\n") + 1
                continue
            texts = chunk.text.split("\n")
            skipped += max(0, len(texts) - room)
            lines += [LogLine(chunk.time, chunk.stream, text) for text in reversed(texts[max(0, len(texts) - room) :])]
        return lines[::-1], count, skipped

    def log_lines(self, rank: int) -> list[LogLine]:
        """Return the kept lines of ``rank``, oldest first."""
        with self._lock:
            chunks = list(self._logs.get(rank, ()))
        return [LogLine(chunk.time, chunk.stream, text) for chunk in chunks for text in chunk.text.split("\n")]
