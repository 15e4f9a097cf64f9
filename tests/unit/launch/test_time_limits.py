"""Time limits count only while the kernel runs, on a clock that ignores changes of the system's clock."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_accelerate.launch.state.run_events import AttemptStarted
from notebook_accelerate.launch.supervisor import command_queue
from notebook_accelerate.launch.supervisor.rank_group import RankGroup, TimeLimits
from notebook_accelerate.launch.supervisor.rank_supervisor import RankSupervisor
from notebook_accelerate.launch.supervisor.stall_detector import StallDetector
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.debug_protocol import Collective, HeartbeatEvent
from tests.support.runs import make_run, plan_run, supervisor_of


@pytest.fixture
def supervisor() -> Iterator[RankSupervisor]:
    found = supervisor_of(plan_run(2, timeout=60.0, hang_timeout=5.0))
    yield found
    found.commands.close()


@pytest.fixture
def group(supervisor: RankSupervisor) -> Iterator[RankGroup]:
    plan = supervisor.state.plan
    assert plan is not None
    supervisor.journal.append(AttemptStarted(0))
    found = RankGroup(supervisor, plan)
    yield found
    found.abandon()


class _Asleep:
    """A selector that wakes up much later than requested, as on a machine that has slept."""

    removals = 0

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def select(self, _timeout: float | None = None) -> list[Any]:
        time.sleep(self._seconds)
        return []

    def get_map(self) -> dict[int, Any]:
        return {}

    def close(self) -> None:
        return


def test_seconds_without_a_running_supervisor_do_not_count(
    supervisor: RankSupervisor, group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = supervisor.clock.now()
    with monkeypatch.context() as patch:
        patch.setattr(group, "selector", _Asleep(1.6))
        group._wait(0.1)
    assert supervisor.clock.now() - before < 1.0


def test_seconds_of_an_ordinary_wait_count(supervisor: RankSupervisor, group: RankGroup) -> None:
    before = supervisor.clock.now()
    assert isinstance(group.selector, selectors.BaseSelector)
    group._wait(0.3)
    assert supervisor.clock.now() - before >= 0.3


def test_a_step_of_the_wall_clock_ends_no_run(
    supervisor: RankSupervisor, group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = TimeLimits(supervisor, group.events, group.stops)
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert limits.reached() == ""
    left = limits.seconds_left()
    assert left is not None
    assert 0 < left <= 5.0


def test_two_hours_of_sleep_end_no_run(
    supervisor: RankSupervisor, group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a Linux machine sleeps, the clock of the limits stops, but the clock of the run's times does not."""
    limits = TimeLimits(supervisor, group.events, group.stops)
    before, uptime = steady_time.now(), steady_time._uptime
    monkeypatch.setattr(steady_time, "_uptime", lambda: uptime() + 7200.0)
    assert limits.reached() == ""
    assert 7200.0 <= steady_time.now() - before < 7300.0


def test_a_step_of_the_wall_clock_moves_no_time_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_time.now()
    wall = time.time()
    monkeypatch.setattr(time, "time", lambda: wall - 3600.0)
    run = make_run(1, started=before)
    assert 0.0 <= run.elapsed < 300.0
    assert steady_time.now() >= before


def test_limits_are_measured_by_the_runs_clock(
    supervisor: RankSupervisor, group: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = TimeLimits(supervisor, group.events, group.stops)
    now = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(command_queue.time, "monotonic", lambda: now + 6.0)
        assert limits.reached() == "no rank gave a sign of life for 5 s (hang_timeout)"
        patch.setattr(command_queue.time, "monotonic", lambda: now + 61.0)
        assert limits.reached() == "the run reached its timeout of 60 s"
        supervisor.clock.pause(0)
        assert limits.seconds_left() is None


def test_a_rank_whose_clock_differs_is_not_reported_as_stalled() -> None:
    """Heartbeats contain the time on the rank's own clock. Only its changes count."""
    supervisor = supervisor_of(make_run(1))
    try:
        stall = StallDetector(supervisor)
        waiting = Collective("0", 1, "all_reduce", (), (), 5.0)
        assert stall.note(0, HeartbeatEvent(5.0, waiting))
        assert not stall.note(0, HeartbeatEvent(5.0, waiting))
        assert stall.note(0, HeartbeatEvent(-7000.0, waiting))
        assert not stall.busy
    finally:
        supervisor.commands.close()
