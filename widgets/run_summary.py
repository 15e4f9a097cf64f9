"""The state of a run as panels show it: numbers and sentences, without markup."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from notebook_accelerate.launch.report.rank_rows import own_seconds, step_time
from notebook_accelerate.telemetry.rank_names import rank_names

if TYPE_CHECKING:
    from notebook_accelerate.launch import Run
    from notebook_accelerate.launch.run import RankInfo
    from notebook_accelerate.telemetry import ResourceEvent, StepTimeEvent

RATE_SECONDS = 10.0
"""Rates are measured over this many last seconds."""
HISTORY = 60
"""Samples of a rank's processor use that the strip draws: a minute."""
SILENT_SECONDS = 10.0
"""A running rank that sends nothing for longer is silent."""
SETTLE_SECONDS = 2.0
"""Before that the ranks' pace is not known, and so neither is how many steps mean that a rank is behind."""
SLOW = 1.25
"""A rank whose own work takes this many times the others' median is a straggler."""
MAX_NAMED = 60
"""Characters of the ranks in one sentence."""


@dataclass(frozen=True)
class RankSnapshot:
    """One rank at one moment; None: not known."""

    rank: int
    state: str
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
        """Whether it has sent nothing for longer than a running rank should."""
        return self.silence is not None and self.silence > SILENT_SECONDS


@dataclass(frozen=True)
class Progress:
    """The progress of all ranks.

    Attributes:
        share: From 0 to 1; None: no total is known.
        step: The step that every rank has reached.
        total: The number of all steps; None: not known.
        rate: Steps per second.
        left: Seconds to the end.
        label: The name of the counted unit, such as step.
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
    ranks: list[RankSnapshot]
    progress: Progress
    verdict: str
    warned: bool
    dropped: int


@dataclass
class _Counter:
    """The latest readings of a counter, for its rate."""

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
    """Makes snapshots of a run; keeps a few readings per rank and nothing else.

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

    def snapshot(self, now: float) -> RunSnapshot:
        """Return the run's state at ``now``, in seconds since the epoch."""
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
        elapsed = max(0.0, (run.ended or now) - run.started)
        dropped = sum(run.store.dropped.values())
        return RunSnapshot(run.status, elapsed, ranks, self._progress(now, ranks), verdict, bool(late), dropped)

    def _sample(self) -> None:
        for rank, event in list(self.run.store.resources.items()):
            if self._sampled.get(rank) is not event:
                self._sampled[rank] = event
                self.processor.setdefault(rank, deque(maxlen=HISTORY)).append(event.cpu_percent)

    def _step_time(self, rank: int) -> tuple[dict[str, float], int, float]:
        """Return the seconds by part of the rank's latest steps, the number of those steps, and its own seconds."""
        store = self.run.store
        latest, known = store.latest_step_time(rank), self._parts.get(rank)
        if latest is None:
            return {}, 0, 0.0
        if known is None or known[0] is not latest:
            parts, counted = step_time(store, rank)
            own = own_seconds(store, rank) or sum(parts.values()) - parts["collectives"]
            known = self._parts[rank] = (latest, parts, counted, own)
        return known[1:]

    def _rank(self, info: RankInfo, now: float, ahead: int | None, loss: str) -> RankSnapshot:
        store, rank = self.run.store, info.rank
        step = info.last_step if info.last_step is not None and info.last_step >= 0 else None
        used, last = store.resources.get(rank), store.last_activity.get(rank)
        parts, counted, own = self._step_time(rank)
        alive = self.run.ended is None and info.state in ("starting", "running")
        rate = self._steps.setdefault(rank, _Counter()).rate(now, step) if alive else self._mean_rate(step)
        return RankSnapshot(
            rank=rank,
            state=info.state,
            step=step,
            behind=ahead - step if ahead is not None and step is not None else 0,
            rate=rate,
            loss=store.last_value(loss, rank) if loss else None,
            cpu=used.cpu_percent if used and alive else None,
            memory=used.memory_bytes if used and alive else store.peak_memory.get(rank),
            gpu=used.gpu_percent if used and alive else None,
            gpu_memory=used.gpu_memory_bytes if used else None,
            silence=max(0.0, now - last) if last is not None and alive else None,
            parts=parts,
            step_seconds=sum(parts.values()) / counted if counted else None,
            own_seconds=own / counted if counted else None,
            late=False,
            exit=info.exit,
            node=info.node,
            host=info.host,
        )

    def _mean_rate(self, step: int | None) -> float | None:
        lasted = self.run.elapsed
        return step / lasted if step and lasted > 0 else None

    def _progress(self, now: float, ranks: list[RankSnapshot]) -> Progress:
        loops = list(self.run.store.loops.values())
        steps = [rank.step for rank in ranks if rank.step is not None]
        reached = min(steps, default=None)
        if not loops:
            rates = [rank.rate for rank in ranks if rank.rate is not None]
            return Progress(None, reached, None, min(rates, default=None), None, "step")
        total = max(loop.total or 0 for loop in loops)
        step = min(loop.step for loop in loops)
        rate = self._loop.rate(now, step) if self.run.ended is None else self._mean_rate(step)
        left = (total - step) / rate if rate and self.run.ended is None else None
        share = min(1.0, max(0.0, step / total)) if total > 0 else None
        label = next((loop.label for loop in loops if loop.label), "step")
        return Progress(share, step, total or None, rate, left, label)


def loss_name(run: Run) -> str:
    """Return the metric that is most likely the training loss, else the first one; "" without any."""
    names = run.store.metric_names()
    likely = [name for name in names if "loss" in name.lower()]
    training = [name for name in likely if "val" not in name.lower() and "test" not in name.lower()]
    return (training or likely or names or [""])[0]


def _verdict(ranks: list[RankSnapshot], *, active: bool, settled: bool) -> tuple[set[int], str]:
    """Return the ranks that delay the others, and a sentence with the evidence."""
    if len(ranks) < 2:
        return set(), ""
    late: set[int] = set()
    sentences = []
    # The ranks of an ended run stopped at different steps: only the step times that they measured still count.
    for found, text in (_slow(ranks), _behind(ranks) if active and settled else _NONE):
        late |= found
        sentences += [text] if text else []
    if late:
        return late, " ".join(sentences)
    silent = [rank.rank for rank in ranks if rank.silent]
    if active and silent and len(silent) < len(ranks):
        have = "has" if len(silent) == 1 else "have"
        seconds = f"{SILENT_SECONDS:.0f} s"
        return set(silent), f"{few_names(silent)} {have} sent nothing for {seconds} while other ranks continue."
    return set(), "No rank is behind." if any(rank.step is not None for rank in ranks) else ""


_NONE: tuple[set[int], str] = (set(), "")


def _behind(ranks: list[RankSnapshot]) -> tuple[set[int], str]:
    """Return the ranks that are steps behind; less than a second of steps does not count: ranks report in batches."""
    pace = max((rank.rate or 0.0 for rank in ranks), default=0.0)
    least = max(3.0, 0.02 * max((rank.step or 0 for rank in ranks), default=0), pace)
    far = {rank.rank: rank.behind for rank in ranks if rank.step is not None and rank.behind >= least}
    if not far or len(far) == len(ranks):
        return _NONE
    worst = max(far, key=lambda rank: far[rank])
    if len(far) == 1:
        return set(far), f"Rank {worst} is {far[worst]:,} steps behind."
    return set(far), f"{few_names(far)} are behind, rank {worst} by {far[worst]:,} steps."


def _slow(ranks: list[RankSnapshot]) -> tuple[set[int], str]:
    """Return the ranks whose own work takes longer than the others', if every rank has measured its own."""
    own = {rank.rank: rank.own_seconds for rank in ranks if rank.own_seconds is not None}
    if len(own) < len(ranks):
        return _NONE
    worst = max(own, key=lambda rank: own[rank])
    others = sorted(seconds for rank, seconds in own.items() if rank != worst)
    usual = others[len(others) // 2]
    if own[worst] <= SLOW * usual or own[worst] - usual <= 1e-3:
        return _NONE
    mine, theirs = _milliseconds(own[worst]), _milliseconds(usual)
    found = {rank for rank, seconds in own.items() if seconds > SLOW * usual and seconds - usual > 1e-3}
    if len(found) == 1:
        return found, f"Rank {worst} is a straggler: {mine} of its own work per step, {theirs} on the other ranks."
    text = f"{few_names(found)} are stragglers: up to {mine} of their own work per step, {theirs} on the other ranks."
    return found, text


def few_names(ranks: Iterable[int]) -> str:
    """Return "Ranks 0–5, 8", or a shortened list such as "Ranks 3, 9, 17, 31 and 40 more"."""
    ordered = sorted(ranks)
    name = rank_names(ordered).capitalize()
    if len(name) <= MAX_NAMED:
        return name
    shown = ordered[: MAX_NAMED // 10]
    return f"{rank_names(shown).capitalize()} and {len(ordered) - len(shown)} more"


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
