"""The Profile button in a run's panel. The run records nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.report.document import Section, Text
from notebook_accelerate.launch.report.rendering import DocumentView
from notebook_accelerate.widgets.profile_panel import TimelineView
from notebook_accelerate.widgets.run_panel import RunPanel
from tests.support.runs import Clock, make_run
from tests.support.timelines import training
from tests.support.waiting import until


class _Profile(DocumentView):
    """The parts of a profile that the panel uses."""

    def __init__(self, *, missing: bool = False) -> None:
        self.paths = {} if missing else {0: "rank0.json"}
        self.missing = {0: "it is paused"} if missing else {}
        self.timeline = training(ranks=2, steps=1)
        self.steps = 2  # The rank ended before the third step.

    def summary(self) -> Section:
        return Section(key="summary", nodes=(Text(lines=("rank 1's data loading takes 41 % of each step",)),))

    def tables(self) -> Section:
        return Section(key="tables", nodes=())

    def document(self) -> Section:
        return Section(key="profile", nodes=(Text(lines=("static <form>",)),))


def _panel(monkeypatch: Any, profile: Callable[[int | None], Any]) -> RunPanel:
    run = make_run(2)
    monkeypatch.setattr(type(run), "profile", lambda _, steps=None: profile(steps))
    return RunPanel(run, Clock())


def _status(panel: RunPanel) -> str:
    rows = panel.profile_section.widget.children
    return str(rows[0].text) if rows else ""


def _button(panel: RunPanel) -> Any:
    return next(each for each in panel.buttons.rows[0]["actions"] if each["id"] == "profile")


def test_a_click_shows_the_recording_and_then_the_steps(monkeypatch: Any) -> None:
    recorded = threading.Event()
    asked: list[int | None] = []

    def profile(steps: int | None) -> _Profile:
        asked.append(steps)
        recorded.wait(30)
        return _Profile()

    panel = _panel(monkeypatch, profile)
    assert _button(panel)["enabled"]
    panel.buttons.click("profile")  # The click returns while steps are still being recorded.
    assert _status(panel) == "Profiling 3 steps"
    panel.schedule.tick(due=True)
    assert not _button(panel)["enabled"]
    panel.buttons.click("profile")
    recorded.set()
    until(lambda: not panel.profile_section.recording)
    assert asked == [None]  # Without a number of steps, samples are taken for half a second.
    assert any(isinstance(each, TimelineView) for each in panel.profile_section.widget.children)
    assert _status(panel) == "Profile of 2 steps [Close]"
    assert "static &lt;form&gt;" in panel.html
    assert "static &lt;form&gt;" in panel.bundle["text/html"]
    panel.schedule.tick(due=True)
    assert _button(panel)["enabled"]
    panel.profile_section.widget.children[0].click("close")
    assert panel.profile_section.widget.children == ()
    assert "static" not in panel.html
    panel.close()


def test_an_error_is_explained_and_another_click_tries_again(monkeypatch: Any) -> None:
    def profile(_: int | None) -> _Profile:
        raise ValueError("rank 1 has ended")

    panel = _panel(monkeypatch, profile)
    for _ in range(2):
        panel.buttons.click("profile")
        until(lambda: not panel.profile_section.recording)
        assert _status(panel) == "The ranks could not be profiled: rank 1 has ended [Close]"
    panel.close()


def test_ranks_that_could_not_record_give_the_reason(monkeypatch: Any) -> None:
    panel = _panel(monkeypatch, lambda _: _Profile(missing=True))
    panel.buttons.click("profile")
    until(lambda: not panel.profile_section.recording)
    assert _status(panel) == "No rank was profiled: rank 0: it is paused [Close]"
    panel.close()


def test_a_second_profile_replaces_the_first(monkeypatch: Any) -> None:
    panel = _panel(monkeypatch, lambda _: _Profile())
    panel.buttons.click("profile")
    until(lambda: not panel.profile_section.recording)
    first = panel.profile_section.widget.children
    panel.buttons.click("profile")
    until(lambda: not panel.profile_section.recording)
    second = panel.profile_section.widget.children
    assert len(second) == len(first)
    assert first[0] is second[0]
    assert not set(map(id, first[1:])) & set(map(id, second[1:]))
    assert first[1].comm is None, "the widgets of the first profile must be deleted"
    panel.close()


class _Memory(DocumentView):
    """The parts of a memory report that the panel uses."""

    reports: ClassVar[dict[int, dict[str, int]]] = {0: {}}
    missing: ClassVar[dict[int, str]] = {}

    def document(self) -> Section:
        return Section(key="memory", nodes=(Text(lines=("a batch of 64 would fit",)),))


def test_memory_opens_under_the_header_and_stays_in_the_saved_notebook(monkeypatch: Any) -> None:
    panel = _panel(monkeypatch, lambda _: _Profile())
    monkeypatch.setattr(type(panel.run), "memory", lambda _: _Memory())
    parts = panel.widget.children
    places = [parts.index(each.widget) for each in (panel.profile_section, panel.memory_section)]
    assert max(places) < parts.index(panel._tabs)
    panel.buttons.click("memory")
    until(lambda: not panel.memory_section.recording)
    status, _, tables = panel.memory_section.widget.children
    assert status.text == "Memory [Close]"
    assert "a batch of 64 would fit" in tables.value
    assert "a batch of 64 would fit" in panel.html
    status.click("close")
    assert panel.memory_section.widget.children == ()
    panel.close()


def test_good_news_of_a_profile_are_not_a_warning() -> None:
    shown = rendering.html(Text(lines=("No bottleneck found.",), tone="good"), inline=False)
    assert shown == '<p class="na-good">No bottleneck found.</p>'
