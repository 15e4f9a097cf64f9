"""The bounded store of a run's events, for panels, reports and ``run.metrics``.

The bounds are:

- ``max_points`` points per metric and rank. A full series is thinned: of every four neighbours, the smallest and the
largest are kept, so that extremes survive.
- ``MAX_TOTAL_POINTS`` in all series together. With more series, each may have fewer, but at least ``MIN_POINTS``.
- ``max_series`` metrics.
- ``RUN_LOG_BYTES`` of text. Each rank may use its share of this, and at least ``max_log_bytes``.

A point takes 24 bytes in an array with an eighth to spare, so a run of any length needs at most 108 MB for curves, and
64 MB of text for up to eight ranks. An envelope over more than eight ranks adds 24 KB per metric. Failures and results
are never dropped.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from notebook_accelerate.telemetry import automatic_metrics
from notebook_accelerate.telemetry.curves import (
    FEW_RANKS,
    EnvelopeTail,
    MetricEnvelope,
    MetricSeries,
    extremes,
    plot_series,
)
from notebook_accelerate.telemetry.events import (
    CheckpointEvent,
    DeviceMemoryEvent,
    DeviceUseEvent,
    DroppedEvent,
    EpochEvent,
    Event,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    ResourceEvent,
    ShardingEvent,
    TraceEvent,
)
from notebook_accelerate.telemetry.rank_devices import RankDevices
from notebook_accelerate.telemetry.sharding import ShardReport, to_report
from notebook_accelerate.telemetry.step_time import StepTimeEvent

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

MAX_POINTS = 50_000
MAX_SERIES = 2_000
MAX_LOG_BYTES = 8 << 20
RUN_LOG_BYTES = 64 << 20
MAX_TOTAL_POINTS = 4_000_000
AUTOMATIC_POINTS = 10_000
"""Maximum points per series of automatic metrics. Ranks send four points a second, and hosts send one."""
MIN_POINTS = 64
"""Number of points that each series may have in any case, however many series there are."""
MAX_TRACES = 1_000
"""Maximum number of listed traces. The latest ones are kept."""
MAX_CHECKPOINTS = 1_000
"""Maximum number of listed checkpoints. The latest ones are kept."""
RECENT_STEP_TIMES = 10
"""Number of step times kept per rank, which cover about as many seconds."""
_HOST_EVENTS = frozenset({ResourceEvent, DeviceUseEvent})
"""Events that a rank's host sends, which do not count as activity of the rank."""


class Record(NamedTuple):
    """An event, with the rank that sent it and its time."""

    rank: int
    time: float
    event: Event


class LogLine(NamedTuple):
    """A line that a rank wrote to one of its streams."""

    time: float
    stream: str
    text: str


class Epoch(NamedTuple):
    """A rank's current pass over a loader in training.

    Attributes:
        number: The number of the epoch, from 0.
        steps: The number of optimizer steps in the pass, or None if unknown.
        done: The number of steps taken so far.
    """

    number: int
    steps: int | None
    done: int


def to_int64(value: object) -> int | None:
    """Return a value as a 64-bit integer, or None if it cannot be converted. A rank may send anything."""
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -(2**63) <= number < 2**63 else None


def to_float(value: object) -> float | None:
    """Return a value as a float, or None if it cannot be converted."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _to_floats(values: object) -> dict[str, float] | None:
    """Return a dict with its values as floats, or None if it is not a dict of numbers."""
    if not isinstance(values, dict):
        return None
    numbers = {name: number for name, value in values.items() if (number := to_float(value)) is not None}
    return numbers if len(numbers) == len(values) else None


class SeriesTail(NamedTuple):
    """The points of one metric and rank since a cursor.

    Attributes:
        steps: The step of each point, or -1 for a point without a step. int64, shape (n,).
        times: The time of each point, in seconds since the epoch. float64, shape (n,).
        values: The value of each point. float64, shape (n,).
        cursor: The cursor to pass to the next call.
        whole: Whether these are all points of the series, so that they replace earlier results.
    """

    steps: np.ndarray
    times: np.ndarray
    values: np.ndarray
    cursor: tuple[int, int]
    whole: bool

    def where(self, mask: np.ndarray) -> SeriesTail:
        """Return the points at which ``mask``, an array of shape (n,), is true."""
        return self._replace(steps=self.steps[mask], times=self.times[mask], values=self.values[mask])


class _Points:
    """The points of one metric on one rank. Thinning keeps the smallest and the largest of every four neighbours."""

    def __init__(self) -> None:
        self.steps, self.times, self.values = array("q"), array("d"), array("d")
        self.thinned = 0

    def append(self, step: int, time: float, value: float, limit: int) -> int:
        """Add a point. Return by how much the number of points has changed."""
        self.steps.append(step)
        self.times.append(time)
        self.values.append(value)
        count = len(self.values)
        if count < limit:
            return 1
        self._thin()
        return len(self.values) - count + 1

    def extend(self, tail: SeriesTail, limit: int, *, thinned: bool) -> None:
        """Add the points of ``tail`` at the end."""
        self.steps.frombytes(tail.steps.astype("=i8").tobytes())
        self.times.frombytes(tail.times.astype("=f8").tobytes())
        self.values.frombytes(tail.values.astype("=f8").tobytes())
        self.thinned += thinned
        self.thin_to(limit)

    def thin_to(self, limit: int) -> None:
        """Thin the points until at most ``limit`` are left."""
        while len(self.values) > max(4, limit):
            self._thin()

    def since(self, cursor: tuple[int, int] = (0, 0)) -> SeriesTail:
        import numpy as np

        # Thinning moves points, which makes earlier indices invalid.
        begin = cursor[1] if cursor[0] == self.thinned else 0
        return SeriesTail(
            np.array(self.steps[begin:], dtype=np.int64),
            np.array(self.times[begin:], dtype=float),
            np.array(self.values[begin:], dtype=float),
            (self.thinned, len(self.values)),
            begin == 0,
        )

    def _thin(self) -> None:
        import numpy as np

        values = np.frombuffer(self.values, dtype=float)
        full = len(values) // 4 * 4
        keep = np.unique(np.concatenate([*extremes(values[:full], 4), np.arange(full, len(values))]))
        self.steps = array("q", np.frombuffer(self.steps, dtype=np.int64)[keep].tobytes())
        self.times = array("d", np.frombuffer(self.times, dtype=float)[keep].tobytes())
        self.values = array("d", np.frombuffer(self.values, dtype=float)[keep].tobytes())
        self.thinned += 1


def _rate(steps: int, seconds: float) -> float | None:
    return steps / seconds if steps > 0 and seconds > 0 else None


def _envelope_of(ranks: Mapping[int, _Points]) -> MetricEnvelope:
    envelope = MetricEnvelope()
    for points in ranks.values():
        for step, time, value in zip(points.steps, points.times, points.values, strict=True):
            envelope.add(step, time, value)
    return envelope


class Store:
    """The events of a run's ranks, within bounds. Safe to use from any thread.

    Attributes:
        changes: How many times something was added. Views compare this number at fixed intervals.
        metric_changes: How many times metrics were added.
    """

    def __init__(
        self, max_points: int = MAX_POINTS, max_series: int = MAX_SERIES, max_log_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self._lock = threading.RLock()
        self._max_points, self._max_series, self._max_log_bytes = max_points, max_series, max_log_bytes
        self._run_log_bytes = RUN_LOG_BYTES if max_log_bytes >= MAX_LOG_BYTES else 0
        self._metrics: dict[str, dict[int, _Points]] = {}
        self._envelopes: dict[str, MetricEnvelope] = {}
        self._series_count = 0
        self._points_count = 0
        self._most_points = max_points
        self._logs: dict[int, deque[LogLine]] = {}
        self._log_bytes: Counter[int] = Counter()
        self._log_count: Counter[int] = Counter()
        self.log_total = 0
        self.changes = self.metric_changes = 0
        self._step_times: dict[int, deque[StepTimeEvent]] = {}
        # The optimizer's latest step on each rank, kept separately because logged steps may be counted differently.
        self._counted: dict[int, int] = {}
        self._automatic: Store | None = None
        self._samples: list[Record] = []  # Samples for the automatic store, collected by the current call of `add`.
        self.progress: dict[int, ProgressEvent] = {}
        self.loops: dict[int, ProgressEvent] = {}
        self._loop_times: dict[int, tuple[int, float, float]] = {}  # First step, and times of the first and last one.
        self._passes: dict[int, EpochEvent] = {}
        self.epochs: dict[int, Epoch] = {}
        self.not_finite: dict[tuple[str, int], tuple[int, float]] = {}
        self.resources: dict[int, ResourceEvent] = {}
        self.peak_memory: dict[int, int] = {}
        self.devices = RankDevices()
        self.shard_reports: dict[int, ShardReport] = {}
        self._traces: dict[tuple[int, str], int] = {}
        self.checkpoints: deque[CheckpointEvent] = deque(maxlen=MAX_CHECKPOINTS)
        self.last_step: dict[int, int] = {}
        self.dropped: Counter[int] = Counter()
        self.last_activity: dict[int, float] = {}
        self._handlers: dict[type[Event], Callable[[Record, Any], None]] = {
            MetricEvent: self._add_metric,
            automatic_metrics.AutomaticMetricEvent: self._add_automatic,
            ProgressEvent: self._add_progress,
            EpochEvent: self._add_epoch,
            LogEvent: self._add_log,
            ResourceEvent: self._add_resource,
            DeviceMemoryEvent: self._add_device_memory,
            DeviceUseEvent: self._add_device_use,
            DroppedEvent: self._add_dropped,
            StepTimeEvent: self._add_step_time,
            TraceEvent: self._add_trace,
            ShardingEvent: self._add_sharding,
            CheckpointEvent: self._add_checkpoint,
        }

    def add(self, records: Sequence[Record]) -> None:
        """Store ``records``."""
        with self._lock:
            handlers, last_activity = self._handlers, self.last_activity
            for record in records:
                rank, time, event = record
                kind = type(event)
                if kind not in _HOST_EVENTS:
                    last_activity[rank] = time
                if (handler := handlers.get(kind)) is not None:
                    handler(record, event)
            if self._samples:
                samples, self._samples = self._samples, []
                self.automatic.add(samples)
            self.changes += 1

    # ---- one handler per kind of event, called with the lock held

    def _add_metric(self, record: Record, event: MetricEvent) -> None:
        rank, time, _ = record
        self.metric_changes += 1
        step = self.last_step.get(rank, -1) if event.step is None else to_int64(event.step)
        if step is not None:
            self.last_step[rank] = step
            if event.step is None:
                event.step = step  # A kept run's file has few of the events that count steps, so write the step itself.
        for name, value in event.values.items():
            number = value if type(value) is float else to_float(value)
            ranks = self._metrics.get(name)
            if step is None or number is None or (ranks is None and len(self._metrics) >= self._max_series):
                self.dropped[rank] += 1
                continue
            points = None if ranks is None else ranks.get(rank)
            if points is None:
                points = self._add_series(name, rank)
            self._points_count += points.append(step, time, number, self._most_points)
            if not isfinite(number):
                self.not_finite.setdefault((name, rank), (step, number))
            elif self.not_finite:
                self.not_finite.pop((name, rank), None)
            if (envelope := self._envelopes.get(name)) is not None:
                envelope.add(step, time, number)
        if self._points_count > MAX_TOTAL_POINTS and self._points_count > MIN_POINTS * self._series_count:
            self._thin_all()

    def _add_automatic(self, record: Record, event: automatic_metrics.AutomaticMetricEvent) -> None:
        self._samples.append(Record(record.rank, record.time, MetricEvent(event.values, event.step)))

    def _add_host_sample(self, rank: int, time: float, values: dict[str, float]) -> None:
        """Store measurements of a rank's host as curves over time."""
        self._samples.append(Record(rank, time, MetricEvent(values, -1)))

    def _add_device_memory(self, record: Record, event: DeviceMemoryEvent) -> None:
        self.devices.add_memory(record.rank, event)
        devices = self.devices.of_rank(record.rank)
        if devices and event.device == devices[0].device:  # Add only one point for all devices of the rank.
            reserved = sum(device.reserved for device in devices)
            self._add_host_sample(record.rank, record.time, {automatic_metrics.GPU_MEMORY: reserved / 1e9})

    def _add_device_use(self, record: Record, event: DeviceUseEvent) -> None:
        """Store a GPU's use, and add it to a curve for each rank that holds memory on that GPU."""
        self.devices.add_use(event)
        for rank in self.devices.ranks_on(event.uuid) if event.percent is not None else ():
            used = [device.percent for device in self.devices.of_rank(rank) if device.percent is not None]
            if used:
                self._add_host_sample(rank, record.time, {automatic_metrics.GPU: sum(used) / len(used)})

    def _add_series(self, name: str, rank: int) -> _Points:
        ranks = self._metrics.setdefault(name, {})
        points = ranks[rank] = _Points()
        self._series_count += 1
        self._most_points = self._limit()
        if len(ranks) == FEW_RANKS + 1:
            self._envelopes[name] = _envelope_of(ranks)
        return points

    def _limit(self) -> int:
        """Return the current limit on the number of points per series."""
        share = max(MIN_POINTS, MAX_TOTAL_POINTS // max(1, self._series_count))
        return min(self._max_points, share)

    def _thin_all(self) -> None:
        """Thin the series that exceed the current limit, which decreases as series are added."""
        series = [points for ranks in self._metrics.values() for points in ranks.values()]
        for points in series:
            points.thin_to(self._limit())
        self._points_count = sum(len(points.values) for points in series)

    def _add_progress(self, record: Record, event: ProgressEvent) -> None:
        self.progress[record.rank] = event
        if event.total is None:
            before = self._counted.get(record.rank, event.step)
            self._counted[record.rank] = event.step
            # A kept run does not have the events of all steps.
            self._count_steps(record.rank, max(1, event.step - before))
        else:
            self._add_loop(record, event)
        # The optimizer's count of steps takes precedence, because a progress bar may count something else.
        if event.total is None or record.rank not in self._counted:
            self.last_step[record.rank] = event.step

    def _add_loop(self, record: Record, event: ProgressEvent) -> None:
        before, self.loops[record.rank] = self.loops.get(record.rank), event
        is_new = before is None or event.step < before.step or event.label != before.label
        first, begun, _ = (event.step, record.time, 0.0) if is_new else self._loop_times[record.rank]
        self._loop_times[record.rank] = first, begun, record.time

    def _add_epoch(self, record: Record, event: EpochEvent) -> None:
        self._passes[record.rank] = event

    def _count_steps(self, rank: int, count: int) -> None:
        """Count optimizer steps in the latest pass. A pass without steps, such as an evaluation, is not an epoch."""
        begun = self._passes.pop(rank, None)
        epoch = self.epochs.get(rank) if begun is None else Epoch(begun.epoch, begun.steps, 0)
        if epoch is not None:
            self.epochs[rank] = epoch._replace(done=epoch.done + count)

    def _add_step_time(self, record: Record, event: StepTimeEvent) -> None:
        if (parts := _to_floats(event.parts)) is not None:
            event.parts = parts
            self._step_times.setdefault(record.rank, deque(maxlen=RECENT_STEP_TIMES)).append(event)

    def _add_resource(self, record: Record, event: ResourceEvent) -> None:
        self.resources[record.rank] = event
        self.peak_memory[record.rank] = max(self.peak_memory.get(record.rank, 0), event.memory_bytes)
        values = {automatic_metrics.CPU: event.cpu_percent, automatic_metrics.MEMORY: event.memory_bytes / 1e9}
        self._add_host_sample(record.rank, record.time, values)

    def _add_trace(self, record: Record, event: TraceEvent) -> None:
        size = to_int64(event.size)
        if size is None:
            return
        file = record.rank, str(event.path)
        self._traces.pop(file, None)  # Move a trace that was written again to the end, as the latest one.
        self._traces[file] = size
        if len(self._traces) > MAX_TRACES:
            del self._traces[next(iter(self._traces))]

    def _add_checkpoint(self, record: Record, event: CheckpointEvent) -> None:
        if isinstance(event.path, str) and to_float(event.time) is not None:
            self.checkpoints.append(event)

    def _add_sharding(self, record: Record, event: ShardingEvent) -> None:
        if (report := to_report(event)) is not None:
            self.shard_reports[record.rank] = report

    def _add_dropped(self, record: Record, event: DroppedEvent) -> None:
        self.dropped[record.rank] += event.count

    def _add_log(self, record: Record, event: LogEvent) -> None:
        lines = self._logs.setdefault(record.rank, deque())
        self._log_count[record.rank] += 1
        self.log_total += 1
        # Store text with many lines as one object until it is read, so that a flood of lines does not cost an object
        # per line.
        lines.append(LogLine(record.time, event.stream, event.text))
        self._log_bytes[record.rank] += len(event.text) + 200  # The tuple and its parts take about 200 bytes.
        most = max(self._max_log_bytes, self._run_log_bytes // len(self._logs))
        while self._log_bytes[record.rank] > most and len(lines) > 1:
            self._log_bytes[record.rank] -= len(lines.popleft().text) + 200

    def add_points(self, name: str, rank: int, tail: SeriesTail, *, thinned: bool = False) -> None:
        """Add many points of one metric and rank, in order, from another store.

        Args:
            name: The name of the metric.
            rank: The rank's global index.
            tail: The points to add.
            thinned: Whether points between them were removed.
        """
        if not len(tail.values):
            return
        with self._lock:
            ranks = self._metrics.get(name)
            if ranks is None and len(self._metrics) >= self._max_series:
                self.dropped[rank] += len(tail.values)
                return
            points = ranks[rank] if ranks is not None and rank in ranks else self._add_series(name, rank)
            before = len(points.values)
            points.extend(tail, self._most_points, thinned=thinned)
            self._points_count += len(points.values) - before
            if (envelope := self._envelopes.get(name)) is not None:
                for step, time, value in zip(*(column.tolist() for column in tail[:3]), strict=True):
                    envelope.add(step, time, value)
            self._note_not_finite(name, rank, tail)
            self.last_step[rank] = int(tail.steps[-1])
            self.last_activity[rank] = max(self.last_activity.get(rank, 0.0), float(tail.times[-1]))
            self.changes += 1

    def _note_not_finite(self, name: str, rank: int, tail: SeriesTail) -> None:
        """If a series ends with points that are NaN or infinite, record the first of these."""
        import numpy as np

        finite = np.flatnonzero(np.isfinite(tail.values))
        first = int(finite[-1]) + 1 if len(finite) else 0
        if len(finite):
            self.not_finite.pop((name, rank), None)
        if first < len(tail.values):
            self.not_finite.setdefault((name, rank), (int(tail.steps[first]), float(tail.values[first])))

    # ---- reading

    @property
    def automatic(self) -> Store:
        """The curves that are recorded without calling ``log``: samples of the training and of the ranks' hosts."""
        with self._lock:
            if self._automatic is None:
                self._automatic = Store(AUTOMATIC_POINTS)
            return self._automatic

    def metric_names(self) -> list[str]:
        """Return the names of the metrics, in order of first appearance."""
        with self._lock:
            return list(self._metrics)

    def series(self, name: str) -> MetricSeries:
        """Return the points of one metric on all ranks.

        Raises:
            KeyError: The metric is unknown. The message lists the known ones.
        """
        import numpy as np

        with self._lock:
            if name not in self._metrics:
                known = f"known: {', '.join(self._metrics)}" if self._metrics else "no metric has been logged yet"
                raise KeyError(f"no metric {name!r}; {known}")
            tails = {rank: points.since() for rank, points in self._metrics[name].items()}
            thinned = any(points.thinned for points in self._metrics[name].values())
        steps, times, values = (np.concatenate(column) for column in list(zip(*tails.values(), strict=True))[:3])
        ranks = np.repeat(list(tails), [len(tail.values) for tail in tails.values()])
        order = np.argsort(times, kind="stable")
        return MetricSeries(name, steps[order], times[order], ranks[order], values[order], thinned)

    def ranks_of(self, name: str) -> list[int]:
        """Return the ranks that logged ``name``, in order."""
        with self._lock:
            return sorted(self._metrics.get(name, ()))

    def last_value(self, name: str, rank: int) -> float | None:
        """Return the last value of ``name`` on ``rank``, or None if the rank has not logged it."""
        with self._lock:
            points = self._metrics.get(name, {}).get(rank)
            return points.values[-1] if points is not None and points.values else None

    def step_rate(self, name: str, rank: int) -> float | None:
        """Return the steps per second between the first and the last point of ``name`` on ``rank``, if it has steps."""
        with self._lock:
            points = self._metrics.get(name, {}).get(rank)
            if points is None or not points.steps or points.steps[0] < 0:
                return None
            return _rate(points.steps[-1] - points.steps[0], points.times[-1] - points.times[0])

    def loop_rate(self, rank: int) -> float | None:
        """Return how many rounds per second a rank's latest loop has completed since its first report."""
        with self._lock:
            if (loop := self.loops.get(rank)) is None:
                return None
            first, begun, latest = self._loop_times[rank]
            return _rate(loop.step - first, latest - begun)

    def tail(self, name: str, rank: int, cursor: tuple[int, int] = (0, 0)) -> SeriesTail:
        """Return the points of ``name`` on ``rank`` since ``cursor``, or all points if they were thinned since then.

        Raises:
            KeyError: The rank has not logged the metric.
        """
        with self._lock:
            return self._metrics[name][rank].since(cursor)

    def is_thinned(self, name: str, rank: int) -> bool:
        """Return whether points of ``name`` on ``rank`` were removed. Raises KeyError if the rank has not logged it."""
        with self._lock:
            return self._metrics[name][rank].thinned > 0

    def envelope(self, name: str, cursor: tuple[int, int] = (0, 0)) -> EnvelopeTail | None:
        """Return the changes of an envelope since ``cursor``, or None if only a few ranks have logged ``name``."""
        with self._lock:
            envelope = self._envelopes.get(name)
            return None if envelope is None else envelope.since(cursor)

    def traces(self) -> list[tuple[int, str, int]]:
        """Return the rank, path and size in bytes of each profiler trace that was written, sorted by rank."""
        with self._lock:
            return sorted((rank, path, size) for (rank, path), size in self._traces.items())

    def latest_step_time(self, rank: int) -> StepTimeEvent | None:
        """Return the rank's latest step time, or None if it has not sent any."""
        with self._lock:
            events = self._step_times.get(rank)
            return events[-1] if events else None

    def step_times(self, rank: int) -> list[StepTimeEvent]:
        """Return the rank's step times of the last few seconds, oldest first."""
        with self._lock:
            return list(self._step_times.get(rank, ()))

    def log_tail(self, rank: int, cursor: int = 0, limit: int = 500) -> tuple[list[LogLine], int, int]:
        """Return the lines that ``rank`` wrote since ``cursor``.

        Args:
            rank: The rank's global index.
            cursor: The cursor that the last call returned, or 0 for all lines.
            limit: The maximum number of lines to return. If there are more, the newest ones are returned.

        Returns:
            The lines, the cursor for the next call, and the number of omitted lines (excluding those that the store has
            already removed).
        """
        with self._lock:
            count = self._log_count[rank]
            chunks = list(islice(reversed(self._logs.get(rank, ())), count - cursor))
        lines: list[LogLine] = []
        skipped = 0
        for chunk in chunks:
            left = limit - len(lines)
            if left <= 0:
                skipped += chunk.text.count("\n") + 1
                continue
            texts = chunk.text.split("\n")
            skipped += max(0, len(texts) - left)
            lines += [LogLine(chunk.time, chunk.stream, text) for text in reversed(texts[max(0, len(texts) - left) :])]
        return lines[::-1], count, skipped

    def log_ranks(self) -> list[int]:
        """Return the ranks that wrote lines, in order."""
        with self._lock:
            return sorted(self._logs)

    def log_chunks(self, rank: int) -> list[LogLine]:
        """Return the kept output of ``rank``, oldest first, in the pieces that were added, each of whole lines."""
        with self._lock:
            return list(self._logs.get(rank, ()))

    def log_lines(self, rank: int) -> list[LogLine]:
        """Return the kept lines of ``rank``, oldest first."""
        chunks = self.log_chunks(rank)
        return [LogLine(chunk.time, chunk.stream, text) for chunk in chunks for text in chunk.text.split("\n")]


class Metrics(Mapping[str, MetricSeries]):
    """A live, read-only mapping from the names of metrics to their series."""

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

    def plot(self, *names: str) -> Any:
        """Plot metrics side by side.

        Args:
            names: The metrics to plot, in this order. Without names, all metrics are plotted.

        Returns:
            One of matplotlib's axes, or an array of them. If matplotlib is not installed, the images that reports show.

        Raises:
            KeyError: A metric was not logged.
            ValueError: No metric has been logged.
        """
        return plot_series([self[name] for name in names or self])

    def to_pandas(self) -> pd.DataFrame:
        """Return all metrics as one data frame with the columns name, step, time, rank and value. This needs pandas."""
        import pandas as pd

        frames = [series.to_pandas().assign(name=series.name) for series in self.values()]
        columns = ["name", "step", "time", "rank", "value"]
        return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)
