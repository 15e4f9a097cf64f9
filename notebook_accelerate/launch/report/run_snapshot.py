"""Snapshots of a run for reports and panels, as numbers and sentences without markup."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from notebook_accelerate.launch.state.run_view import internals
from notebook_accelerate.telemetry.rank_names import rank_names
from notebook_accelerate.telemetry.step_time import PARTS

if TYPE_CHECKING:
    from notebook_accelerate.launch.state.run_state import RankInfo
    from notebook_accelerate.launch.state.run_view import RunView
    from notebook_accelerate.telemetry import ResourceEvent, StepTimeEvent
    from notebook_accelerate.telemetry.rank_devices import RankDevice

RATE_SECONDS = 10.0
"""The period in seconds over which rates are measured."""
HISTORY = 60
"""Number of samples of each rank's CPU use to keep for the strip of resources, which covers a minute."""
SILENT_SECONDS = 10.0
"""A running rank that has sent nothing for more than this many seconds is silent."""
SETTLE_SECONDS = 2.0
"""For this many seconds after the first step, no rank counts as behind, because the rates are not known yet."""


@dataclass  # Not frozen, because creating thousands of frozen snapshots would take four times as long.
class RankSnapshot:
    """A snapshot of one rank. Unknown values are None."""

    rank: int
    state: str
    step: int | None
    behind: int
    rate: float | None
    loss: float | None
    cpu: float | None
    memory: int | None
    devices: Sequence[RankDevice]
    silence: float | None
    parts: dict[str, float]
    step_seconds: float | None
    own_seconds: float | None
    late: bool
    exit: str
    pid: int | None = None
    peak: int | None = None
    node: int = 0
    host: str = ""

    @property
    def gpu(self) -> float | None:
        """The mean utilisation of the rank's devices by all processes, in percent."""
        known = [device.percent for device in self.devices if device.percent is not None]
        return sum(known) / len(known) if known and self.active else None

    @property
    def gpu_memory(self) -> int | None:
        """The bytes that the rank has reserved on its devices, or after its exit, the peak of its allocated bytes."""
        if not self.devices:
            return None
        return sum(device.reserved if self.active else device.peak for device in self.devices)

    @property
    def active(self) -> bool:
        """Whether the rank is starting or running."""
        return self.state in ("starting", "running")

    @property
    def silent(self) -> bool:
        """Whether the rank has sent nothing for more than `SILENT_SECONDS`."""
        return self.silence is not None and self.silence > SILENT_SECONDS


@dataclass(frozen=True)
class Progress:
    """The progress of all ranks together.

    Attributes:
        share: The completed share, from 0 to 1, or None if the total is not known.
        step: The step that all ranks have reached, or None if unknown.
        total: The total number of steps, or None if unknown.
        rate: Steps per second in about the last 10 seconds in which there were any, or None if unknown.
        left: The estimated number of seconds until the end, or None if unknown.
        label: The name of the unit that is counted, such as "step".
        epoch: The epoch of the rank that is furthest behind, counted from 1, or None if unknown.
        of_epoch: Whether ``share``, ``step``, ``total`` and ``left`` refer to this epoch only.
    """

    share: float | None
    step: int | None
    total: int | None
    rate: float | None
    left: float | None
    label: str
    epoch: int | None = None
    of_epoch: bool = False


@dataclass(frozen=True)
class RunSnapshot:
    """A snapshot of a run and its ranks."""

    status: str
    elapsed: float
    ranks: list[RankSnapshot]
    progress: Progress
    verdict: str
    warned: bool
    dropped: int


@dataclass
class _Counter:
    """The latest readings of a counter, used to compute its rate."""

    readings: deque[tuple[float, int]] = field(default_factory=deque)

    def rate(self, now: float, count: int | None) -> float | None:
        if count is None:
            return None
        if self.readings and count < self.readings[-1][1]:  # A new epoch or attempt has started from 0.
            self.readings.clear()
        self.readings.append((now, count))
        while len(self.readings) > 2 and self.readings[1][0] < now - RATE_SECONDS:
            self.readings.popleft()
        begin, first = self.readings[0]
        return (count - first) / (now - begin) if now - begin >= 0.5 and count > first else None


class RunWatcher:
    """Takes snapshots of a run. Between them, it keeps only a few readings of each rank.

    Args:
        run: The run to watch.
    """

    def __init__(self, run: RunView) -> None:
        self.run = run
        self.processor: dict[int, deque[float]] = {}
        self._sampled: dict[int, ResourceEvent] = {}
        self._steps: dict[int, _Counter] = {}
        self._parts: dict[int, tuple[StepTimeEvent, dict[str, float], int, float]] = {}
        self._loop = _Counter()
        self._first_step: float | None = None
        self._paused: frozenset[int] = frozenset()

    def snapshot(self, now: float) -> RunSnapshot:
        """Return a snapshot of the run at ``now``, in seconds since the epoch."""
        run = self.run
        infos = run.ranks
        steps = [info.last_step for info in infos if info.last_step is not None and info.last_step >= 0]
        ahead = max(steps, default=None)
        self._sample()
        self._paused = frozenset(run.paused)
        loss = loss_name(run)
        ranks = [self._rank(info, now, ahead, loss) for info in infos]
        if self._first_step is None and ahead is not None:
            self._first_step = now
        settled = self._first_step is not None and now - self._first_step >= SETTLE_SECONDS
        late, verdict = _verdict(ranks, active=run.ended is None, settled=settled)
        ranks = [replace(rank, late=True) if rank.rank in late else rank for rank in ranks]
        elapsed = max(0.0, (run.ended or now) - run.started)
        dropped = sum(internals(run).store.dropped.values())
        return RunSnapshot(status(run), elapsed, ranks, self._progress(now, ranks), verdict, bool(late), dropped)

    def _sample(self) -> None:
        for rank, event in list(internals(self.run).store.resources.items()):
            if self._sampled.get(rank) is not event:
                self._sampled[rank] = event
                self.processor.setdefault(rank, deque(maxlen=HISTORY)).append(event.cpu_percent)

    def _step_time(self, rank: int) -> tuple[dict[str, float], int, float]:
        """Return totals of a rank's latest steps: seconds in each part, number of steps, and seconds of own work.

        The own work is 0.0 if it is unknown.
        """
        store = internals(self.run).store
        latest, known = store.latest_step_time(rank), self._parts.get(rank)
        if latest is None:
            return {}, 0, 0.0
        if known is None or known[0] is not latest:
            events = store.step_times(rank)
            parts = {part: sum([event.parts.get(part, 0.0) for event in events]) for part in PARTS}
            counted = sum([event.steps for event in events])
            own = sum([event.own for event in events])
            known = self._parts[rank] = (latest, parts, counted, own)
        return known[1:]

    def _rank(self, info: RankInfo, now: float, ahead: int | None, loss: str) -> RankSnapshot:
        store, rank = internals(self.run).store, info.rank
        is_paused = rank in self._paused
        step = info.last_step if info.last_step is not None and info.last_step >= 0 else None
        used, last = store.resources.get(rank), store.last_activity.get(rank)
        parts, counted, own = self._step_time(rank)
        alive = self.run.ended is None and info.state in ("starting", "running")
        step_seconds = sum(parts.values()) / counted if counted else None
        return RankSnapshot(
            rank=rank,
            state="paused" if is_paused else info.state,
            step=step,
            behind=ahead - step if ahead is not None and step is not None else 0,
            rate=1 / step_seconds if step_seconds else self._logged_rate(rank, step, now, alive=alive),
            loss=store.last_value(loss, rank) if loss else None,
            cpu=used.cpu_percent if used and alive else None,
            memory=used.memory_bytes if used and alive else store.peak_memory.get(rank),
            devices=store.devices.of_rank(rank),
            silence=max(0.0, now - last) if last is not None and alive and not is_paused else None,
            parts=parts,
            step_seconds=step_seconds,
            own_seconds=own / counted if counted and own else None,
            late=False,
            exit=info.exit,
            pid=info.pid,
            peak=store.peak_memory.get(rank),
            node=info.node,
            host=info.host,
        )

    def _logged_rate(self, rank: int, step: int | None, now: float, *, alive: bool) -> float | None:
        """Return the rate of a rank whose steps are not timed, because it only logs them.

        The time before the first step does not count, because it includes the start of the rank.
        """
        if alive:
            return self._steps.setdefault(rank, _Counter()).rate(now, step)
        store = internals(self.run).store
        return max((rate for name in store.metric_names() if (rate := store.step_rate(name, rank))), default=None)

    def _progress(self, now: float, ranks: list[RankSnapshot]) -> Progress:
        loops = list(internals(self.run).store.loops.values())
        if not loops:
            return self._progress_of_steps(ranks)
        epochs = [epoch.number + 1 for epoch in list(internals(self.run).store.epochs.values())]
        total = max(loop.total or 0 for loop in loops)
        step = min(loop.step for loop in loops)
        rate = self._loop_rate(now, step, ranks)
        left = (total - step) / rate if rate and self.run.ended is None else None
        share = min(1.0, max(0.0, step / total)) if total > 0 else None
        label = next((loop.label for loop in loops if loop.label), "step")
        return Progress(share, step, total or None, rate, left, label, min(epochs, default=None))

    def _loop_rate(self, now: float, step: int, ranks: list[RankSnapshot]) -> float | None:
        """Return how many steps of their loops all ranks complete per second."""
        store = internals(self.run).store
        loops = dict(store.loops)
        known = [rank for rank in ranks if rank.rank in loops]
        if all(rank.rate and _counts_steps(loops[rank.rank].step, rank.step) for rank in known):
            return min((rank.rate or 0.0 for rank in known), default=None)
        if self.run.ended is None:
            return self._loop.rate(now, step)
        return min((rate for rank in loops if (rate := store.loop_rate(rank))), default=None)

    def _progress_of_steps(self, ranks: list[RankSnapshot]) -> Progress:
        """Return the progress in optimizer steps, within the epoch if a prepared loader has a length."""
        reached = min((rank.step for rank in ranks if rank.step is not None), default=None)
        rate = min((rank.rate for rank in ranks if rank.rate is not None), default=None)
        epochs = list(internals(self.run).store.epochs.values())
        if not epochs:
            return Progress(None, reached, None, rate, None, "step")
        last = min(epochs, key=lambda epoch: (epoch.number, epoch.done))
        number, total = last.number + 1, last.steps
        if total is None or last.done > total or self.run.ended is not None:
            return Progress(None, reached, None, rate, None, "step", number)
        left = (total - last.done) / rate if rate else None
        return Progress(last.done / total, last.done, total, rate, left, "step", number, of_epoch=True)


def _counts_steps(done: int, step: int | None) -> bool:
    """Return whether a loop that has completed ``done`` rounds counts the same steps as the optimizer."""
    return step is not None and abs(done - step) <= 1 + step // 50


def status(run: RunView) -> str:
    """Return the run's status. For a queued run, add what it waits for. For a waiting one, return one of `HELD`."""
    if run.status == "queued":
        return f"queued, behind {internals(run).journal.state.behind}"
    if run.status != "running":
        return run.status
    if run.stall is not None:
        return "stuck"
    if internals(run).commands.prompts.debugged():
        return "at breakpoint"
    if run.prompts:
        return "waits for input"
    held = run.paused and all(info.rank in run.paused for info in run.ranks if info.state == "running")
    return "paused" if held else "running"


HELD = ("stuck", "at breakpoint", "waits for input", "paused")
"""The states of a running run that currently makes no steps."""


def loss_name(run: RunView) -> str:
    """Return the name of the metric that is most likely the training loss, or "" if there are no metrics."""
    names = internals(run).store.metric_names()
    likely = [name for name in names if "loss" in name.lower()]
    training = [name for name in likely if "val" not in name.lower() and "test" not in name.lower()]
    return (training or likely or names or [""])[0]


# ---- ranks that delay the others

SLOW = 1.25
"""A rank is a straggler if its own work takes more than this many times the median of the other ranks."""
MAX_NAMED = 60
"""Maximum number of characters for the names of ranks in a sentence."""


def _verdict(ranks: list[RankSnapshot], *, active: bool, settled: bool) -> tuple[set[int], str]:
    """Return the ranks that delay the others, and sentences with the evidence."""
    if len(ranks) < 2:
        return set(), ""
    late: set[int] = set()
    sentences = []
    # In a finished run, compare only step times, because ranks may have stopped at different steps.
    own = {rank.rank: rank.own_seconds for rank in ranks if rank.own_seconds is not None}
    slow = stragglers(own) if len(own) == len(ranks) else _NONE  # Wait until all ranks have measured their own work.
    for found, text in (slow, _behind(ranks) if active and settled else _NONE):
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
    """Return the ranks that are behind by more steps than ranks make in a second, and a sentence about them.

    A smaller difference is normal, because ranks report in batches.
    """
    pace = max((rank.rate or 0.0 for rank in ranks), default=0.0)
    least = max(3.0, 0.02 * max((rank.step or 0 for rank in ranks), default=0), pace)
    far = {rank.rank: rank.behind for rank in ranks if rank.step is not None and rank.behind >= least}
    if not far or len(far) == len(ranks):
        return _NONE
    worst = max(far, key=lambda rank: far[rank])
    if len(far) == 1:
        return set(far), f"Rank {worst} is {far[worst]:,} steps behind."
    return set(far), f"{few_names(far)} are behind, rank {worst} by {far[worst]:,} steps."


def stragglers(own: Mapping[int, float]) -> tuple[set[int], str]:
    """Return the ranks whose own work takes much longer than the other ranks', and a sentence with the evidence.

    Args:
        own: For each rank, the seconds per step that the rank cannot have spent waiting for other ranks.
    """
    if len(own) < 2:
        return set(), ""
    worst = max(own, key=lambda rank: own[rank])
    others = sorted(seconds for rank, seconds in own.items() if rank != worst)
    usual = others[len(others) // 2]
    if own[worst] <= SLOW * usual or own[worst] - usual <= 1e-3:
        return set(), ""
    mine, theirs = _milliseconds(own[worst]), _milliseconds(usual)
    found = {rank for rank, seconds in own.items() if seconds > SLOW * usual and seconds - usual > 1e-3}
    if len(found) == 1:
        return found, f"Rank {worst} is a straggler: {mine} of its own work per step, {theirs} on the other ranks."
    text = f"{few_names(found)} are stragglers: up to {mine} of their own work per step, {theirs} on the other ranks."
    return found, text


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 0.01 else f"{1000 * seconds:,.0f} ms"


def few_names(ranks: Iterable[int]) -> str:
    """Return the names of ranks, as in "Ranks 0–5, 8", or shortened, as in "Ranks 3, 9, 17, 31 and 40 more"."""
    ordered = sorted(ranks)
    name = rank_names(ordered).capitalize()
    if len(name) <= MAX_NAMED:
        return name
    shown = ordered[: MAX_NAMED // 10]
    return f"{rank_names(shown).capitalize()} and {len(ordered) - len(shown)} more"
