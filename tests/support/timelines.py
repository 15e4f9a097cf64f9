"""Timelines of any size that look like those of training runs."""

from __future__ import annotations

import random

from notebook_accelerate.profiling.timeline import EventWait, Step, Timeline, Track
from notebook_accelerate.profiling.trace import CATEGORIES

_OPS = ("aten::linear", "aten::addmm", "aten::relu", "aten::layer_norm", "aten::softmax", "aten::copy_", "aten::view")

_LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


class _Builder:
    """Adds events to a track. An event that is added before another one ends is inside that one."""

    def __init__(self, timeline: Timeline, known: dict[str, int], rank: int, name: str) -> None:
        self.names, self.known = timeline.names, known
        self.track = Track(rank, f"rank {rank} · {name}")
        self.index = len(timeline.tracks)
        timeline.tracks.append(self.track)

    def add(self, name: str, category: str, start: float, duration: float, depth: int = 0) -> int:
        track, index = self.track, self.known.setdefault(name, len(self.known))
        if index == len(self.names):
            self.names.append(name)
        track.start.append(start)
        track.duration.append(duration)
        track.names.append(index)
        track.depth.append(depth)
        track.category.append(CATEGORIES.index(category))
        return len(track) - 1


def training(ranks: int = 4, steps: int = 3, ops: int = 60, slow: int = 1, seed: int = 0) -> Timeline:
    """Return the timeline of a training run in which one rank loads its data slowly, so that the others wait for it.

    Args:
        ranks: The number of ranks.
        steps: The number of steps of each rank.
        ops: The number of operations in a forward pass. A backward pass has twice as many.
        slow: The number of the rank that the others wait for.
        seed: The seed of the random numbers.
    """
    timeline, rng = Timeline(), random.Random(seed)
    known: dict[str, int] = {}
    both = [[_Builder(timeline, known, rank, name) for name in ("main thread", "collectives")] for rank in range(ranks)]
    mains, grouped = [main for main, _ in both], [collectives for _, collectives in both]
    clock = [200.0 * rank for rank in range(ranks)]
    for number in range(steps):
        begins = list(clock)
        entered = [_forward(main, clock, rank, ops, slow, rng) for rank, main in enumerate(mains)]
        clock = _reduced(timeline, mains, grouped, entered, number, rng)
        for rank, main in enumerate(mains):
            main.add("Optimizer.step#AdamW.step", "optimizer", clock[rank], 900.0)
            clock[rank] += 950.0
            timeline.steps.append(Step(rank, begins[rank], clock[rank], 40 + number))
    timeline.span = max(clock)
    timeline.details = {
        known[_LOADER]: "Cell In[4], line 12: for batch in loader:",
        known["gloo:all_reduce #0"]: "Cell In[4], line 15: accelerator.backward(loss)",
    }
    return timeline


def _forward(main: _Builder, clock: list[float], rank: int, ops: int, slow: int, rng: random.Random) -> float:
    """Add the loading of a batch, a forward pass and most of a backward pass. Return when the gradients are ready."""
    at, load = clock[rank], 9000.0 if rank == slow else 400.0 + rng.random() * 200
    main.add(_LOADER, "loader", at, load)
    at += load + 40
    for name, category, count in (("forward", "forward", ops), ("backward", "backward", 2 * ops)):
        times = [20.0 + rng.expovariate(1 / 60.0) for _ in range(count)]
        main.add(name, category, at, sum(times) + 6 * count)
        for time in times:
            op = rng.choice(_OPS)
            main.add(op, "op", at + 2, time, 1)
            if time > 40:
                main.add("aten::empty", "op", at + 5, 4.0, 2)
                main.add("aten::mm", "op", at + 12, time - 20, 2)
            at += time + 6
        at += 15
    return at


def _reduced(
    timeline: Timeline, mains: list[_Builder], grouped: list[_Builder], entered: list[float], number: int,
    rng: random.Random,
) -> list[float]:  # fmt: skip
    """Add an all_reduce that ends after all ranks have entered it. Return when each rank leaves it."""
    last = max(range(len(entered)), key=lambda rank: entered[rank])
    end = entered[last] + 700.0
    events = [
        each.add(f"gloo:all_reduce #{number}", "collective", entered[rank], end + 20 * rng.random() - entered[rank])
        for rank, each in enumerate(grouped)
    ]
    for rank, each in enumerate(grouped):
        if rank != last:
            timeline.waits.append(EventWait(each.index, events[rank], grouped[last].index, events[last]))
    return [end + 60.0 for _ in mains]


def large(ranks: int = 8, events: int = 200_000, seed: int = 0) -> Timeline:
    """Return a timeline with this many events for each rank, four levels of calls and a collective in each step.

    Args:
        ranks: The number of ranks.
        events: The number of events of each rank.
        seed: The seed of the random numbers.
    """
    one = sum(map(len, training(ranks, 4, seed=seed).tracks)) / ranks / 4
    return training(ranks, round(events / one), seed=seed)


__all__ = ["large", "training"]
