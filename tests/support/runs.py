"""Runs for tests: real launches, and runs without processes, which have a store to feed and a clock to advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from notebook_accelerate import notebook_launcher
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch import LaunchPlan, Run
from notebook_accelerate.launch.output.publisher import Publisher, TextPublisher
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.run_events import (
    RUN,
    AttemptEnded,
    AttemptStarted,
    FailuresRecorded,
    RankExited,
    RankFailed,
    RankRunning,
    RankStarted,
    RunCreated,
    RunEnded,
    RunEvent,
    RunPlanned,
)
from notebook_accelerate.launch.supervisor.command_queue import CommandQueue
from notebook_accelerate.launch.supervisor.rank_supervisor import RankSupervisor
from notebook_accelerate.telemetry import DeviceMemoryEvent, DeviceUseEvent, Event, RankFailure
from notebook_accelerate.telemetry.store import Record

START = 1_000_000.0
METHODS = pytest.mark.parametrize("method", ["fork", "zygote", pytest.param("spawn", marks=pytest.mark.nightly)])
"""The start methods. Spawned ranks, which take seconds to import torch, are tested only nightly."""
HostOf = Callable[[int], tuple[int, str]]


class Clock:
    """A clock that advances only on request."""

    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        """Advance by this many seconds."""
        self.now += seconds


def launch(function: Any, *args: Any, **options: Any) -> Run:
    """Launch on two forked ranks, unless the options say otherwise."""
    return notebook_launcher(function, args, **{"num_processes": 2, "use_port": 0, "start_method": "fork", **options})


def plan_run(ranks: int = 2, method: str = "fork", started: float = START, **settings: Any) -> Run:
    """Return a run whose ranks are planned but not started."""
    return _unfinished(LaunchConfig(num_processes=ranks, **settings), _planned(ranks, method, started))


def make_run(
    ranks: int = 2, method: str = "fork", started: float = START, host_of: HostOf = lambda _: (0, ""), **settings: Any
) -> Run:
    """Return a run, rebuilt from a journal, that looks as if its ranks had just started at ``started``.

    Args:
        ranks: The number of ranks.
        method: The start method of the plan.
        started: When the ranks started, in seconds since the epoch.
        host_of: A function that returns a rank's node and host.
        settings: The fields of the ``LaunchConfig``.
    """
    events: list[RunEvent] = [AttemptStarted(0)]
    events += [RankStarted(rank, 100 + rank, *host_of(rank)) for rank in range(ranks)]
    events += [RankRunning(rank) for rank in range(ranks)]
    records = [*_planned(ranks, method, started), *(Record(RUN, started, event) for event in events)]
    return _unfinished(LaunchConfig(num_processes=ranks, **settings), records)


def _unfinished(config: LaunchConfig, records: list[Record]) -> Run:
    """Return an unfinished run from these records. `rebuild` would return a finished one."""
    journal = Journal()
    journal.replay(records)
    return Run(config, "train", journal)


def _planned(ranks: int, method: str, started: float) -> list[Record]:
    plan = LaunchPlan(
        start_method=method, reason="as asked", num_processes=ranks, world_size=ranks, first_rank=0,
        accelerator="cpu", backend="gloo" if ranks > 1 else "", threads=1, master_addr="127.0.0.1", port=29500,
        loopback="lo",
    )  # fmt: skip
    return [Record(RUN, started, event) for event in (RunCreated("train"), RunPlanned(plan, 0, ranks))]


def supervisor_of(run: Run, publisher: Publisher | None = None) -> RankSupervisor:
    """Return a supervisor of ``run`` that is not started, to test its parts. Callers must close its ``commands``."""
    commands = CommandQueue()
    run._internals.commands = commands
    return RankSupervisor(run, commands, publisher or TextPublisher())


def feed(run: Run, *events: Event, rank: int = 0, at: float = START) -> None:
    """Append events to a run's journal, as if a rank had sent them."""
    run._internals.journal.add([Record(rank, at, event) for event in events])


def devices(rank: int, percent: float, reserved: int) -> list[Event]:
    """Return the messages about one GPU: from the rank that uses it, and from that rank's host."""
    uuid = f"{rank:08x}-0000"
    return [
        DeviceMemoryEvent(f"cuda:{rank}", reserved // 2, reserved, reserved // 2, 15 << 30, "Tesla T4", uuid),
        DeviceUseEvent(uuid, percent, reserved + (1 << 28), 15 << 30),
    ]


def end(
    run: Run,
    status: str = "succeeded",
    failures: tuple[RankFailure, ...] = (),
    at: float | None = None,
    exit_of: Callable[[int], str] = lambda _: "",
) -> None:
    """End a run, with these failures if there are any."""
    journal = run._internals.journal
    for failure in failures:
        journal.append(RankFailed(failure))
    for info in journal.state.ranks:
        state = "failed" if info.state == "failed" else status
        text = exit_of(info.rank) or ("exit 0" if state == "succeeded" else "exit 1")
        journal.append(RankExited(info.rank, state, text))
    journal.append(FailuresRecorded(failures))
    journal.append(AttemptEnded(status), at)
    error = ("WorkerError", "it failed") if failures else ("", "")
    journal.append(RunEnded(status, *error), at)


__all__ = ["START", "Clock", "end", "feed", "make_run", "plan_run", "supervisor_of"]
