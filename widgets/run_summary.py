"""What a panel says of a run at one moment: numbers and sentences, without any markup."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.rank_rows import step_time
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.run import RankInfo
    from notebook_accelerate.telemetry import ResourceEvent, StepTimeEvent, Store

RATE_SECONDS = 10.0
"""Rates are over so many last seconds."""
HISTORY = 60
"""Samples of a rank's processor use that the strip draws: a minute."""
SILENT_SECONDS = 10.0
"""A running rank that was not heard of for longer is said to be silent."""
SETTLE_SECONDS = 2.0
"""Before that nobody knows how fast the ranks go, and so how many steps mean that one is behind."""
SLOW = 1.25
"""A rank whose own work takes this many times the others' median holds them up."""

MAX_NAMED = 60
"""Characters of ranks that a sentence names."""


@dataclass(frozen=True)
class RankNow:
    """One rank at one moment; None where nothing is known."""

    rank: int
    state: str
    pid: int | None
    step: int | None
    behind: int
    rate: float | None
    loss: float | None
    cpu: float | None
    memory: int | None
    gpu: float | None
    gpu_memory: int | None
    silence: float | None
    parts: dict[str, float]
    step_seconds: float | None
    own_seconds: float | None
    late: bool
    exit: str
    node: int = 0
    host: str = ""

    @property
    def silent(self) -> bool:
        """Whether it was not heard of for longer than a rank that runs should be."""
        return self.silence is not None and self.silence > SILENT_SECONDS


@dataclass(frozen=True)
class Progress:
    """How far all ranks have come.

    Attributes:
        share: From 0 to 1; None where no total is known.
        step: The step that every rank has reached.
        total: Steps in all; None where not known.
        rate: Steps per second.
        left: Seconds to the end.
        label: What is counted.
    """

    share: float | None
    step: int | None
    total: int | None
    rate: float | None
    left: float | None
    label: str


@dataclass(frozen=True)
class RunSnapshot:
    """A run at one moment."""

    status: str
    elapsed: float
    ranks: list[RankNow]
    progress: Progress
    verdict: str
    warned: bool
    dropped: int


@dataclass
class _Counter:
    """The latest readings of a rising number, for its rate."""

    readings: deque[tuple[float, int]] = field(default_factory=deque)

    def rate(self, now: float, count: int | None) -> float | None:
        if count is None:
            return None
        if self.readings and count < self.readings[-1][1]:  # a new epoch, a new attempt
            self.readings.clear()
        self.readings.append((now, count))
        while len(self.readings) > 2 and self.readings[1][0] < now - RATE_SECONDS:
            self.readings.popleft()
        begin, first = self.readings[0]
        return (count - first) / (now - begin) if now - begin >= 0.5 and count > first else None


class RunWatcher:
    """Turns a run's store into what panels show; keeps a few readings per rank and nothing else.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.processor: dict[int, deque[float]] = {}
        self._sampled: dict[int, ResourceEvent] = {}
        self._steps: dict[int, _Counter] = {}
        self._parts: dict[int, tuple[StepTimeEvent, dict[str, float], int, float]] = {}
        self._loop = _Counter()
        self._first_step: float | None = None

    def look(self, now: float) -> RunSnapshot:
        """Return the run as it is ``now``, in seconds since the epoch."""
        run = self.run
        infos = run.ranks
        steps = [info.last_step for info in infos if info.last_step is not None and info.last_step >= 0]
        ahead = max(steps, default=None)
        self._sample()
        loss = loss_name(run)
        ranks = [self._rank(info, now, ahead, loss) for info in infos]
        if self._first_step is None and ahead is not None:
            self._first_step = now
        settled = self._first_step is not None and now - self._first_step >= SETTLE_SECONDS
        late, verdict = _verdict(ranks, active=run.ended is None, settled=settled)
        ranks = [replace(rank, late=True) if rank.rank in late else rank for rank in ranks]
        elapsed = (run.ended or now) - run.started
        dropped = sum(run.store.dropped.values())
        return RunSnapshot(
            run.status, max(0.0, elapsed), ranks, self._progress(now, ranks), verdict, bool(late), dropped
        )

    def _sample(self) -> None:
        for rank, event in list(self.run.store.resources.items()):
            if self._sampled.get(rank) is not event:
                self._sampled[rank] = event
                self.processor.setdefault(rank, deque(maxlen=HISTORY)).append(event.cpu_percent)

    def _step_time(self, rank: int) -> tuple[dict[str, float], int, float]:
        """Return the seconds by part of the rank's latest steps, how many those are, and the seconds of its own."""
        store = self.run.store
        latest, known = store.latest_step_time(rank), self._parts.get(rank)
        if latest is None:
            return {}, 0, 0.0
        if known is None or known[0] is not latest:
            parts, counted = step_time(store, rank)
            own = _own(store, rank, sum(parts.values()) - parts["collectives"])
            known = self._parts[rank] = (latest, parts, counted, own)
        return known[1:]

    def _rank(self, info: RankInfo, now: float, ahead: int | None, loss: str) -> RankNow:
        store, rank = self.run.store, info.rank
        step = info.last_step if info.last_step is not None and info.last_step >= 0 else None
        used = store.resources.get(rank)
        heard = store.last_activity.get(rank)
        parts, counted, own = self._step_time(rank)
        alive = self.run.ended is None and info.state in ("starting", "running")
        rate = self._steps.setdefault(rank, _Counter()).rate(now, step) if alive else self._whole_rate(step)
        return RankNow(
            rank=rank,
            state=info.state,
            pid=info.pid,
            step=step,
            behind=ahead - step if ahead is not None and step is not None else 0,
            rate=rate,
            loss=last_value(self.run, loss, rank),
            cpu=used.cpu_percent if used is not None and alive else None,
            memory=used.memory_bytes if used is not None and alive else store.peak_memory.get(rank),
            gpu=used.gpu_percent if used is not None and alive else None,
            gpu_memory=used.gpu_memory_bytes if used is not None else None,
            silence=max(0.0, now - heard) if heard is not None and alive else None,
            parts=parts,
            step_seconds=sum(parts.values()) / counted if counted else None,
            own_seconds=own / counted if counted else None,
            late=False,
            exit=info.exit,
            node=info.node,
            host=info.host,
        )

    def _whole_rate(self, step: int | None) -> float | None:
        lasted = self.run.elapsed
        return step / lasted if step and lasted > 0 else None

    def _progress(self, now: float, ranks: list[RankNow]) -> Progress:
        loops = list(self.run.store.loops.values())
        steps = [rank.step for rank in ranks if rank.step is not None]
        reached = min(steps, default=None)
        if not loops:
            rates = [rank.rate for rank in ranks if rank.rate is not None]
            return Progress(None, reached, None, min(rates, default=None), None, "step")
        total = max(loop.total or 0 for loop in loops)
        step = min(loop.step for loop in loops)
        rate = self._loop.rate(now, step) if self.run.ended is None else self._whole_rate(step)
        left = (total - step) / rate if rate and self.run.ended is None else None
        share = min(1.0, max(0.0, step / total)) if total > 0 else None
        label = next((loop.label for loop in loops if loop.label), "step")
        return Progress(share, step, total or None, rate, left, label)


def loss_name(run: Run) -> str:
    """Return the metric that is most likely the training loss; the first one where none says so; "" without any."""
    names = run.store.metric_names()
    likely = [name for name in names if "loss" in name.lower()]
    training = [name for name in likely if "val" not in name.lower() and "test" not in name.lower()]
    return (training or likely or names or [""])[0]


def last_value(run: Run, name: str, rank: int) -> float | None:
    """Return the last value that ``rank`` logged of ``name``."""
    return run.store.last_value(name, rank) if name else None


def _verdict(ranks: list[RankNow], *, active: bool, settled: bool) -> tuple[set[int], str]:
    """Say which ranks keep the others waiting, and how that is known."""
    if len(ranks) < 2:
        return set(), ""
    late: set[int] = set()
    said = []
    # Ranks of a run that has ended stopped where they were; only what they measured of themselves still counts.
    for found, text in (_slow(ranks), _behind(ranks) if active and settled else _NOBODY):
        late |= found
        said += [text] if text else []
    if late:
        return late, " ".join(said)
    silent = [rank.rank for rank in ranks if rank.silent]
    if active and silent and len(silent) < len(ranks):
        have = "has" if len(silent) == 1 else "have"
        return set(silent), f"{few_names(silent)} {have} been silent while others go on."
    return set(), "No rank is behind." if any(rank.step is not None for rank in ranks) else ""


_NOBODY: tuple[set[int], str] = (set(), "")


def _behind(ranks: list[RankNow]) -> tuple[set[int], str]:
    """Return the ranks that are steps behind; less than a second's means nothing, for ranks tell in batches."""
    pace = max((rank.rate or 0.0 for rank in ranks), default=0.0)
    least = max(3.0, 0.02 * max((rank.step or 0 for rank in ranks), default=0), pace)
    far = {rank.rank: rank.behind for rank in ranks if rank.step is not None and rank.behind >= least}
    if not far or len(far) == len(ranks):
        return _NOBODY
    worst = max(far, key=lambda rank: far[rank])
    if len(far) == 1:
        return set(far), f"Rank {worst} is {far[worst]:,} steps behind."
    return set(far), f"{few_names(far)} are behind, rank {worst} by {far[worst]:,} steps."


def _slow(ranks: list[RankNow]) -> tuple[set[int], str]:
    """Return the ranks whose own work takes longer than the others', where each has measured its own."""
    own = {rank.rank: rank.own_seconds for rank in ranks if rank.own_seconds is not None}
    if len(own) < len(ranks):
        return _NOBODY
    worst = max(own, key=lambda rank: own[rank])
    others = sorted(seconds for rank, seconds in own.items() if rank != worst)
    usual = others[len(others) // 2]
    if own[worst] <= SLOW * usual or own[worst] - usual <= 1e-3:
        return _NOBODY
    mine, theirs = _milliseconds(own[worst]), _milliseconds(usual)
    found = {rank for rank, seconds in own.items() if seconds > SLOW * usual and seconds - usual > 1e-3}
    if len(found) == 1:
        return found, f"Rank {worst} holds the others up: {mine} of its own work per step, the others {theirs}."
    text = f"{few_names(found)} hold the others up: up to {mine} of their own work per step, the others {theirs}."
    return found, text


def few_names(ranks: Iterable[int]) -> str:
    """Return "Ranks 0–5, 8", or of many apart from each other "Ranks 3, 9, 17, 31 and 40 more"."""
    ordered = sorted(ranks)
    name = rank_names(ordered).capitalize()
    if len(name) <= MAX_NAMED:
        return name
    shown = ordered[: MAX_NAMED // 10]
    return f"{rank_names(shown).capitalize()} and {len(ordered) - len(shown)} more"


def _own(store: Store, rank: int, otherwise: float) -> float:
    """Return the seconds in which the rank cannot have waited for others."""
    return sum(event.own for event in store.step_times(rank)) or otherwise


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:,.0f} ms"


def duration(seconds: float) -> str:
    """Return "4.2 s", "1:05" or "26:00:05"."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: int | None) -> str:
    """Return bytes as "312 MiB", "2.4 GiB" or "1.5 TiB"; "–" for None."""
    if count is None:
        return "–"
    if count >= 2**40:
        return f"{count / 2**40:.1f} TiB"
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"


__all__ = ["Progress", "RankNow", "RunSnapshot", "RunWatcher", "duration", "last_value", "loss_name", "size"]
