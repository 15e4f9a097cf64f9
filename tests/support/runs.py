"""Runs without processes, for the tests of views: a plan, a store to feed, and a clock to turn."""

from __future__ import annotations

from typing import Any

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.errors import WorkerError
from notebook_accelerate.launch import LaunchPlan, Run
from notebook_accelerate.telemetry import Event, RankFailure
from notebook_accelerate.telemetry.store import Record

START = 1_000_000.0


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.now += seconds


def make_run(ranks: int = 2, method: str = "fork", **settings: Any) -> Run:
    """Return a run that looks as if its ranks had just started, at `START`."""
    run = Run(LaunchConfig(num_processes=ranks, **settings), "train")
    run.started = START
    run._planned(
        LaunchPlan(
            start_method=method, reason="as asked", num_processes=ranks, world_size=ranks, first_rank=0,
            accelerator="cpu", backend="gloo" if ranks > 1 else "", threads=1, master_addr="127.0.0.1", port=29500,
            loopback="lo",
        )
    )  # fmt: skip
    run._begin_attempt(0)
    run._set_status("running")
    for info in run.ranks:
        info.state, info.pid = "running", 100 + info.rank
    return run


def feed(run: Run, *events: Event, rank: int = 0, at: float = START) -> None:
    """Put events into the run's store, as if a rank had sent them."""
    run.store.add([Record(rank, at, event) for event in events])


def end(run: Run, status: str = "succeeded", failures: tuple[RankFailure, ...] = (), at: float | None = None) -> None:
    """End the run, with these failures where there are any."""
    run.failures = failures
    for info in run.ranks:
        info.state = "failed" if any(failure.rank == info.rank for failure in failures) else status
    run._end_attempt(status)
    run._finish(status, WorkerError("it failed", run, failures) if failures else None)
    if at is not None:
        run.ended = at


__all__ = ["START", "Clock", "end", "feed", "make_run"]
