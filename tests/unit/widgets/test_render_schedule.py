"""The rate of renders is limited, and a view that fails is closed."""

from __future__ import annotations

import threading
import time

import pytest

from notebook_accelerate.telemetry import MetricEvent, Store
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.widgets.render_schedule import IDLE_PERIOD, PERIOD, RenderSchedule, Ticker
from tests.support.runs import Clock


def _change(store: Store) -> None:
    store.add([Record(0, 0.0, MetricEvent({"loss": 1.0}, 0))])


def test_there_are_at_most_five_renders_per_second() -> None:
    store, clock, renders = Store(), Clock(), []
    schedule = RenderSchedule([store], renders.append, lambda _: None, clock)
    for _ in range(1000):  # The loop takes one second of the clock.
        clock.turn(0.001)
        _change(store)
        schedule.tick()
    assert 5 <= len(renders) <= 6
    schedule.close()


def test_without_changes_one_render_a_second_updates_the_clock() -> None:
    store, clock, renders = Store(), Clock(), []
    schedule = RenderSchedule([store], renders.append, lambda _: None, clock)
    for _ in range(100):  # The loop takes ten seconds of the clock.
        schedule.tick()
        clock.turn(PERIOD / 2)
    assert 9 <= len(renders) <= 11
    _change(store)
    clock.turn(IDLE_PERIOD / 2)
    assert schedule.tick()
    schedule.close()


def test_a_clock_that_was_set_back_does_not_stop_the_view() -> None:
    store, clock, renders = Store(), Clock(), []
    schedule = RenderSchedule([store], renders.append, lambda _: None, clock)
    schedule.tick()
    clock.turn(-3600.0)
    assert schedule.tick()
    schedule.close()


def test_a_view_that_fails_is_closed_and_the_store_is_not_affected() -> None:
    store, clock, errors = Store(), Clock(), []

    def broken(_: float) -> None:
        raise KeyError("a bug in a panel")

    schedule = RenderSchedule([store], broken, errors.append, clock)
    with pytest.warns(UserWarning, match="a panel stopped updating: KeyError.*the run continues"):
        schedule.tick()
    assert isinstance(errors[0], KeyError)
    assert schedule.closed
    _change(store)
    clock.turn(10.0)
    assert not schedule.tick()
    assert store.metric_names() == ["loss"]


def test_showing_the_problem_may_fail_too() -> None:
    def broken(_: object) -> None:
        raise ValueError("again")

    schedule = RenderSchedule([Store()], broken, broken, Clock())
    with pytest.warns(UserWarning, match="again"):
        schedule.tick()


def test_the_thread_exists_only_while_there_are_schedules() -> None:
    ticker, renders = Ticker(), []
    schedule = RenderSchedule([Store()], renders.append, lambda _: None)
    ticker.add(schedule)
    deadline = time.monotonic() + 60
    while not renders and time.monotonic() < deadline:
        time.sleep(0.01)
    assert renders
    schedule.close()
    while any(thread.name == "notebook-accelerate-panels" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again = RenderSchedule([Store()], renders.append, lambda _: None)
    count = len(renders)
    ticker.add(again)
    while len(renders) == count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(renders) > count
    again.close()
