"""The run panel without a browser, with recorded events and a fake clock."""

from __future__ import annotations

import html
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import ipywidgets
import pytest

from notebook_accelerate.debugging.diagnosis import Diagnosis
from notebook_accelerate.errors import SITE
from notebook_accelerate.launch import Run
from notebook_accelerate.launch.report import mesh_diagram, rendering, run_report
from notebook_accelerate.launch.report.document import Section, Table
from notebook_accelerate.launch.report.run_snapshot import RunWatcher
from notebook_accelerate.launch.state.run_events import (
    AttemptEnded,
    DiagnosisAdded,
    FailuresRecorded,
    NoteAdded,
    PromptClosed,
    PromptOpened,
    RankFailed,
    RankPaused,
    RankResumed,
    RanksReleased,
    RunEnded,
    RunMoved,
    RunStalled,
    StopAdvanced,
    WarningAdded,
)
from notebook_accelerate.telemetry import (
    DeviceMemoryEvent,
    EpochEvent,
    Event,
    ExceptionInfo,
    FrameInfo,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    RankFailure,
    ResourceEvent,
    StepTimeEvent,
    steady_time,
)
from notebook_accelerate.telemetry.step_time import PARTS
from notebook_accelerate.telemetry.store import MAX_POINTS, RUN_LOG_BYTES, Record
from notebook_accelerate.widgets import live_panel
from notebook_accelerate.widgets.actions import CopyButton, stopping
from notebook_accelerate.widgets.config_panel import ConfigPanel
from notebook_accelerate.widgets.debug_panel import DebugPanel
from notebook_accelerate.widgets.front_end import KernelState
from notebook_accelerate.widgets.panel_elements import GUIDES
from notebook_accelerate.widgets.panel_output import PanelOutput
from notebook_accelerate.widgets.resource_strip import ResourceStrip
from notebook_accelerate.widgets.run_panel import RunPanel
from notebook_accelerate.widgets.runs_table import RunsTable
from tests.support.runs import START, Clock, devices, end, feed, make_run
from tests.support.shard_reports import hybrid, zero
from tests.support.snapshots import Snapshot
from tests.support.waiting import until

EVIL = "<script>alert('&')</script>"


class _Panel:
    """A run panel with its run and its clock."""

    def __init__(self, ranks: int = 2, **settings: Any) -> None:
        self.run, self.clock = make_run(ranks, **settings), Clock()
        self.panel = RunPanel(self.run, self.clock)

    def look(self, seconds: float = 1.0) -> str:
        """Advance the clock and render. Return all HTML of the panel."""
        self.clock.turn(seconds)
        self.panel.schedule.touch()
        assert self.panel.schedule.tick()
        parts = "head progress resources verdict devices times sharding errors setup"
        rows = [self.panel.attention.text, self.panel.buttons.text]
        return "\n".join([self.panel._problem.value, self.parts(parts), *map(html.escape, rows)])

    def parts(self, names: str) -> str:
        """Return the HTML of these parts of the panel, as last rendered."""
        values = {name: self.panel.sections.widgets[name].value for name in names.split()}
        if "verdict" in values:
            values["verdict"] += self.ranks()
        return "\n".join(values.values())

    def ranks(self) -> str:
        """Return the table of ranks as HTML, as last sent."""
        table = self.panel.rank_table.table
        assert table is not None
        return rendering.html(table, inline=False)

    def buttons(self) -> list[str]:
        """Return the labels of the header's buttons."""
        return [action["label"] for row in self.panel.buttons.rows for action in row["actions"]]


@pytest.fixture
def made() -> Iterator[list[_Panel]]:
    panels: list[_Panel] = []
    yield panels
    for one in panels:
        one.panel.close()


def _text(html: str) -> str:
    words: list[str] = []

    class Reader(HTMLParser):
        def handle_data(self, data: str) -> None:
            words.append(data)

    Reader().feed(html)
    return re.sub(r"\s+", " ", " ".join(words))


def _failure(rank: int = 1) -> RankFailure:
    frames = (FrameInfo("train.py", 7, "train", "loss = model(x)"),)
    return RankFailure(rank, "exception", START, f"ValueError: {EVIL}", (ExceptionInfo("ValueError", EVIL, frames),))


def test_the_header_has_state_name_and_time_and_the_setup_has_the_rest() -> None:
    one = _Panel(ranks=4)
    one.run._internals.journal.append(NoteAdded("port 29500 is taken"))
    text = _text(one.look(65.0))
    assert "Running train run" in text
    assert "1:05" in text
    assert "port" not in one.panel.sections.widgets["head"].value
    assert "start method fork: as asked backend gloo" in _text(one.panel.sections.widgets["setup"].value)
    assert "remark port 29500 is taken" in _text(one.panel.sections.widgets["setup"].value)
    one.panel.close()


def test_progress_is_one_bar_for_all_ranks_with_rate_and_time_left(snapshot: Snapshot) -> None:
    one = _Panel()
    for second in range(6):
        for rank, behind in ((0, 0), (1, 2)):
            feed(one.run, ProgressEvent(10 * second + 2 - behind, 100, "step"), rank=rank)
        one.look()
    snapshot("progress", one.parts("head progress"))


def test_progress_through_the_epoch_of_a_prepared_loader_is_shown() -> None:
    one = _Panel()
    for rank in range(2):
        feed(one.run, EpochEvent(0, 10), *(ProgressEvent(step + 1) for step in range(10)), EpochEvent(0, 3), rank=rank)
    assert "epoch 1 step 10 of 10 100 %" in _text(one.look())
    for rank in range(2):
        feed(one.run, EpochEvent(1, 10), ProgressEvent(11), rank=rank)
    one.look()
    for rank in range(2):
        feed(one.run, ProgressEvent(12), ProgressEvent(13), rank=rank)
    text = _text(one.look())
    assert "epoch 2 step 3 of 10 30 %" in text, "the pass without steps was an evaluation"
    assert "left in this epoch" in text
    end(one.run)
    assert "step 13" in _text(one.look())


def test_logged_steps_from_zero_do_not_count_twice() -> None:
    one = _Panel()
    for rank in range(2):
        feed(one.run, EpochEvent(0, 100), rank=rank)
        for step in range(10):
            feed(one.run, ProgressEvent(step + 1), MetricEvent({"loss": 1.0}, step), rank=rank)
    assert "epoch 1 step 10 of 100 10 %" in _text(one.look())


def _stall(run: Run, verdict: str = "rank 1 never reached all_reduce #4") -> None:
    run._internals.journal.append(RunStalled(START - 10, verdict))


def test_ranks_paused_at_different_steps_are_shown_with_the_range(made: list[_Panel]) -> None:
    made.append(one := _Panel())
    for rank, step in enumerate((1041, 1042)):
        feed(one.run, ProgressEvent(step), rank=rank)
        one.run._internals.journal.append(RankPaused(rank))
    one.look(2.0)
    assert one.panel.attention.rows[0]["text"] == "Paused at steps 1,041 to 1,042"


def test_items_that_need_the_user_are_listed_by_urgency() -> None:
    one = _Panel(ranks=3)
    feed(one.run, MetricEvent({"loss": math.nan, "lr": 1.0}, 240), rank=1)
    feed(one.run, MetricEvent({"loss": math.nan}, 241), rank=1)
    one.run._internals.journal.append(RankPaused(2))
    one.run._internals.journal.append(PromptOpened(1, 1, "input"))
    one.run._internals.journal.append(WarningAdded("the data are the same"))
    _stall(one.run)
    one.look(2.0)
    texts = [row["text"] for row in one.panel.attention.rows]
    assert texts == [
        "Stuck for 12 s: rank 1 never reached all_reduce #4",
        "rank 1 waits for input",
        "rank 2 paused",
        "NaN since step 240 on rank 1: loss",
        "the data are the same",
    ]
    labels = [[action["label"] for action in row["actions"]] for row in one.panel.attention.rows]
    assert labels == [[], ["Answer"], ["Unpause"], [], []], "Debug and Stop are only in the header"
    one.run._internals.journal.append(RunMoved())
    one.run._internals.journal.append(PromptClosed(1, answered=True))
    one.run._internals.journal.append(RankResumed(2))
    feed(one.run, MetricEvent({"loss": 0.5}, 242), rank=1)
    one.look()
    assert [row["text"] for row in one.panel.attention.rows] == ["the data are the same"]


def _models() -> dict[str, Any]:
    with pytest.deprecated_call():
        return dict(ipywidgets.Widget.widgets)


def test_a_panel_sends_few_models() -> None:
    """Each model is a message, and an object that the browser creates before it shows the panel."""
    before = _models()
    one = _Panel()
    made = [widget for key, widget in _models().items() if key not in before]
    assert len({widget.layout.model_id for widget in one.panel.sections.widgets.values()}) == 1
    assert not any(isinstance(widget, CopyButton) for widget in made), "the Debug section has not been opened"
    assert len(made) < 45
    one.panel.close()
    live_panel.close_retired(float("inf"))
    assert _models().keys() <= before.keys()


def test_a_stall_and_the_mistake_that_caused_it_are_one_row() -> None:
    one = _Panel()
    mistake = "the call of all_reduce #4 is under 'if main:': move it out of that block"
    one.run._internals.journal.append(DiagnosisAdded(Diagnosis("", (), (), START, mistake=mistake)))
    one.run._internals.journal.append(WarningAdded(mistake))
    _stall(one.run)
    one.look(2.0)
    (row,) = one.panel.attention.rows
    assert row["text"] == f"Stuck for 12 s: rank 1 never reached all_reduce #4; {mistake}"
    assert "Stuck for " in one.run.report().text
    assert one.run.report().text.count(mistake) == 1
    one.run._internals.journal.append(RunMoved())
    one.look()
    assert [row["text"] for row in one.panel.attention.rows] == [mistake], "a mistake stays a warning"


def test_each_panel_links_to_its_guide() -> None:
    one = _Panel()
    panels = {"run": one.panel, "table": RunsTable([one.run]), "debug": DebugPanel(one.run), "form": ConfigPanel()}
    for name, panel in panels.items():
        text = panel.widget.texts["title"] if name == "form" else panel.widget.children[0].value
        assert f'href="{SITE}{GUIDES[name]}"' in text
        panel.close()


def test_a_failed_run_has_a_debug_button_with_the_line_to_type() -> None:
    one = _Panel(hold_on_error=True)
    one.look()
    end(one.run, "failed", (_failure(1),))
    one.look()
    (row,) = one.panel.attention.rows
    assert row["text"].startswith("rank 1 failed: ValueError: ")
    assert [action["label"] for action in row["actions"]] == ["Show error", "Debug"]
    assert (
        'href="https://notebook-accelerate.github.io/notebook-accelerate/e/'
        in one.panel.sections.widgets["errors"].value
    )
    one.panel.attention.click("debug")
    assert one.panel.debug_section.copy.text == "import notebook_accelerate; notebook_accelerate.debug()"
    assert "Launch with hold_on_error=True" in one.panel.debug_section._text.value
    one.panel.attention.click("debug")
    assert one.panel.debug_section.widget.children == ()
    one.panel.attention.click("errors")
    assert one.panel._tabs.selected_index == 5
    one.panel.close()


def test_stop_asks_only_if_a_run_is_older_than_a_minute() -> None:
    run = make_run(2, started=steady_time.now())
    assert stopping(run, None).action.question == ""
    run = make_run(2, started=steady_time.now() - 61.0)
    assert stopping(run, None).action.question == "Stop run?"
    run._internals.journal.append(StopAdvanced("interrupting", "it was stopped"))
    assert stopping(run, None).action.question == "", "Kill needs no question, because it follows a click on Stop"


def test_without_a_total_the_steps_are_counted_and_no_bar_is_drawn() -> None:
    one = _Panel()
    for step in (0, 20):
        for rank in range(2):
            feed(one.run, ProgressEvent(step), rank=rank)
        html = one.look()
    assert "progressbar" not in html
    assert "step 20" in _text(html)


def test_a_straggler_is_found_by_its_steps(snapshot: Snapshot) -> None:
    one = _Panel(ranks=3)
    for rank, step in ((0, 100), (1, 100), (2, 60)):
        feed(one.run, MetricEvent({"loss": 0.5}, step), rank=rank)
    assert "steps behind" not in one.look(), "the rate is not known yet"
    one.look(3.0)
    snapshot("straggler_by_steps", one.parts("verdict devices"))
    assert one.panel._tab_titles[1] == "Ranks ⚠"


def test_hidden_ranks_are_updated_once_a_second_and_when_their_tab_is_selected() -> None:
    one = _Panel()
    one.look()

    def reach(step: int) -> str:
        for rank in range(2):
            feed(one.run, MetricEvent({"loss": 0.5}, step), rank=rank)
        one.look(0.2)
        return one.ranks()

    assert '<td class="na-num">10</td>' not in reach(10), "it is too early for an update"
    for _ in range(4):
        html = reach(10)
    assert '<td class="na-num">10</td>' in html
    one.panel._tabs.selected_index = 1
    for step in (20, 30):
        assert f'<td class="na-num">{step}</td>' in reach(step), "the tab is visible"
    one.panel.close()


def test_a_straggler_is_found_by_its_own_work_if_all_are_in_step(snapshot: Snapshot) -> None:
    one = _Panel(ranks=3)
    for rank in range(3):
        own = 0.2 if rank == 1 else 0.05
        parts = dict(zip(PARTS, (0.05, 0.1, 0.05, 0.01, 0.04), strict=True))
        feed(one.run, MetricEvent({"loss": 0.5}, 7), StepTimeEvent(parts, 7, 10, own), rank=rank)
    one.look()
    snapshot("straggler_by_own_work", one.parts("verdict times"))


_PARTS = dict(zip(PARTS, (0.0, 0.1, 0.05, 0.01, 0.04), strict=True))


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_has_one_speed(ended: bool) -> None:
    """The start of the ranks, which takes 60 s here, does not count, even after the run has ended."""
    one = _Panel()
    for rank in range(2):
        feed(one.run, ProgressEvent(80), StepTimeEvent(_PARTS, 80, 50, 0.05), rank=rank, at=START + 60.0)
    if ended:
        end(one.run)
    one.clock.turn(61.0)
    one.look()
    assert "250 steps/s" in one.parts("progress")
    assert "4.0 ms/step" in one.parts("times")
    rates = [rank.rate for rank in RunWatcher(one.run).snapshot(one.clock()).ranks]
    assert rates == pytest.approx([250.0, 250.0])


@pytest.mark.parametrize(
    ("events", "rate"),
    [
        ([MetricEvent({"loss": 0.1}, 100)], None),
        ([MetricEvent({"loss": 0.1}, 100), MetricEvent({"loss": 0.1}, 110)], 2.0),
        ([ProgressEvent(3, 90, "batches"), ProgressEvent(28, 90, "batches")], 5.0),
        ([ProgressEvent(80, 90), ProgressEvent(3, 90), ProgressEvent(28, 90)], 5.0),
    ],
    ids=["one point", "logged steps", "loop", "two loops"],
)
def test_the_speed_of_an_ended_run_leaves_out_its_start(events: list[Event], rate: float | None) -> None:
    one = _Panel(ranks=1)
    for second, event in enumerate(events):
        feed(one.run, event, at=START + 60.0 + 5 * second)
    end(one.run)
    assert RunWatcher(one.run).snapshot(one.clock()).progress.rate == rate


def test_own_work_that_is_not_known_is_not_shown() -> None:
    """A run of less than a second is too short for it."""
    one = _Panel()
    for rank in range(2):
        feed(one.run, StepTimeEvent(_PARTS, 7, 5, 0.0), rank=rank)
    one.look()
    assert "ms/step" in one.parts("times")
    assert "own work" not in one.parts("times").lower()
    assert [rank.own_seconds for rank in RunWatcher(one.run).snapshot(one.clock()).ranks] == [None, None]


def test_pages_of_an_ended_run_do_not_wait_for_anything() -> None:
    one = _Panel()
    assert "Nothing prepared yet" in one.look()
    end(one.run)
    ended = one.look()
    assert "yet" not in ended
    for text in ("This run prepared no model.", "This run measured no steps."):
        assert text in ended
    assert one.panel.logs.empty_text == "This run printed nothing."


def test_the_setup_begins_with_the_arguments() -> None:
    one = _Panel()
    journal = one.run._internals.journal
    journal._state = replace(journal.state, arguments={"lr": 0.1})
    setup = rendering.html(Section(key="setup", nodes=run_report.setup(one.run)), inline=False)
    assert _text(setup).strip().startswith("Arguments of train lr 0.1 Launch ranks 2")


def test_the_setup_has_the_words_of_the_form() -> None:
    run = make_run(2, block=False, start_method="fork", name="baseline", cpu=True)
    rows = dict(run_report.config_rows(run)[1:])
    assert rows == {
        "number of processes": "2",
        "start method": "fork",
        "wait until the run ends": "no",
        "use only the CPU": "yes",
        "name of the run": "baseline",
    }


def test_the_sharding_page_is_rebuilt_only_for_new_reports(snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, make = [], mesh_diagram.sharding

    def counted(*given: Any, **how: Any) -> Any:
        drawn.append(given)
        return make(*given, **how)

    monkeypatch.setattr(mesh_diagram, "sharding", counted)
    one = _Panel(ranks=4)
    assert "Nothing prepared yet" in one.look()
    for rank, report in hybrid().items():
        feed(one.run, report.event(), rank=rank)
    one.look()
    snapshot("sharding", one.parts("sharding"))
    one.look()
    assert len(drawn) == 1
    feed(one.run, zero(3)[0].event(), rank=0)
    one.look()
    assert len(drawn) == 2


def test_the_tables_of_ranks_and_devices_show_the_known_figures(snapshot: Snapshot) -> None:
    one = _Panel()
    feed(one.run, MetricEvent({"train/loss": 0.123456}, 3), ResourceEvent(97.0, 300 << 20), rank=0)
    for rank in (0, 1):
        feed(one.run, *devices(rank, 45.0 + rank, 2 << 30), rank=rank)
    feed(one.run, DeviceMemoryEvent("cuda:7", 1 << 20, 2 << 20, 3 << 20, 0, EVIL), rank=1)
    one.look(4.0)
    snapshot("ranks_and_devices", one.parts("resources verdict devices"))


def test_texts_from_ranks_are_escaped() -> None:
    one = _Panel()
    one.run._internals.journal.append(NoteAdded(EVIL))
    feed(one.run, MetricEvent({f"loss {EVIL}": 1.0}, 1), ProgressEvent(1, 2, EVIL), LogEvent("stdout", EVIL))
    assert EVIL not in one.look()
    end(one.run, "failed", (_failure(),))
    html = one.look()
    assert EVIL not in html
    assert "alert(" in _text(html)
    assert one.panel.logs.full["lines"] == [(0, START, "stdout", EVIL)], "the browser inserts it as text"
    assert EVIL not in one.panel.html


def test_late_lines_start_with_a_full_message() -> None:
    """While the kernel is busy, a view cannot request the full message that a delta continues."""
    one = _Panel()
    for _ in range(20):  # Advance past all ages at which everything is sent again.
        one.look()
    feed(one.run, LogEvent("stdout", "first"))
    one.look()
    assert [text for *_, text in one.panel.logs.full["lines"]] == ["first"]
    feed(one.run, LogEvent("stdout", "second"))
    one.look()
    assert [text for *_, text in one.panel.logs.delta["lines"]] == ["second"]
    assert one.panel.logs.delta["prev"] == one.panel.logs.full["seq"]


def test_errors_are_grouped_and_a_failed_run_keeps_everything(snapshot: Snapshot) -> None:
    one = _Panel(ranks=3)
    feed(one.run, MetricEvent({"loss": 1.0}, 1))
    end(one.run, "failed", (_failure(0), _failure(1), RankFailure(2, "signal", START, "killed", consequence=True)))
    again = RunPanel(one.run, one.clock)
    snapshot("errors", again.sections.widgets["errors"].value)
    assert again._tab_titles[5] == "Errors (3)"
    assert again.plot.full["series"] == [("loss", "rank 0", 1)]
    again.close()


def test_the_first_stop_requests_and_the_second_kills() -> None:
    one = _Panel()
    asked: list[float] = []
    one.run.stop = lambda grace=5.0, **_: asked.append(grace)  # type: ignore[method-assign]
    one.look()
    assert one.buttons() == ["Pause", "Profile", "Memory", "Debug", "Stop"]
    one.panel.buttons.click("stop")
    assert asked == [5.0]
    one.run._internals.journal.append(StopAdvanced("interrupting", "it was stopped"))
    one.look()
    assert one.buttons() == ["Pause", "Profile", "Memory", "Debug", "Kill"]
    one.panel.buttons.click("stop")
    assert len(asked) == 2
    end(one.run, "stopped")
    one.look()
    assert one.buttons() == []


@pytest.mark.parametrize(
    ("kernel", "block", "interrupts", "words"),
    [
        (KernelState((7, 4), False, False, False), False, False, "(■ does not affect background runs)"),
        (KernelState((6, 17), True, True, False), True, True, "Click Stop, or ■ in the toolbar"),
        (KernelState((7, 3), True, True, True), True, False, "Click Stop, or ■ in the toolbar"),
        (KernelState((7, 4), True, True, True), True, True, "Click Stop, or ■ in the toolbar"),
        (KernelState((7, 4), True, True, False), False, False, "Another cell is running"),
        (KernelState((6, 30), True, False, False), False, True, "Click Stop, or ■ in the toolbar"),
        (KernelState((7, 4), True, False, False), False, False, "Click Stop, or ■ in the toolbar"),
    ],
)
def test_the_header_shows_which_stop_works_now(kernel: KernelState, block: bool, interrupts: bool, words: str) -> None:
    how = stopping(make_run(block=block), kernel)
    assert words in how.note
    assert how.action.interrupts == interrupts
    assert not interrupts or how.unreachable.startswith("Press ■ in the toolbar")
    assert stopping(make_run(), None).note == ""


def test_an_inline_run_is_stopped_by_an_interrupt() -> None:
    one = _Panel(ranks=1, method="inline")
    one.look()
    assert one.buttons() == ["Stop"]
    assert stopping(one.run, KernelState((7, 4), True, True, False)).action.interrupts


def test_a_panel_that_raises_shows_a_problem_and_the_run_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    one = _Panel()

    def broken(_: float) -> None:
        raise RuntimeError(EVIL)

    monkeypatch.setattr(one.panel.plot, "update", broken)
    one.clock.turn(1.0)
    with pytest.warns(UserWarning, match="stopped updating"):
        one.panel.schedule.tick()
    assert "This panel stopped updating" in one.panel._problem.value
    assert EVIL not in one.panel._problem.value
    feed(one.run, MetricEvent({"loss": 1.0}, 1))
    end(one.run)
    assert one.run.status == "succeeded"


def test_the_static_forms_are_the_report() -> None:
    one = _Panel()
    feed(one.run, MetricEvent({"loss": 1.0}, 1), MetricEvent({"loss": 0.5}, 2))
    assert "notebook-accelerate-report" in one.panel.html
    assert one.panel.text.startswith(f"run {one.run.id} · train · running")
    bundle = one.panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    one.panel.close()
    assert set(one.panel._repr_mimebundle_()) == {"text/html", "text/plain"}


def test_a_panel_on_two_hundred_thousand_points_opens_within_a_second() -> None:
    run = make_run(ranks=4)
    for rank in range(4):
        feed(run, *(MetricEvent({"loss": math.sin(step / 100)}, step) for step in range(49_900)), rank=rank)
    RunPanel(make_run(), Clock())  # The first panel of a process imports modules.
    begin = time.thread_time()  # Measure CPU time, because test machines are busy.
    panel = RunPanel(run, Clock())
    seconds = time.thread_time() - begin
    print(f"\na panel on 200,000 points opens in {1000 * seconds:.0f} ms")
    assert seconds < 1.0
    panel.close()


def test_a_day_of_metrics_is_bounded() -> None:
    """On a fake clock, two ranks log 10 metrics each per second for 24 hours. The store's stated bounds must hold."""
    run, clock = make_run(ranks=2), Clock()
    panel = RunPanel(run, clock)
    text = "a line of a rank " + "x" * 80
    kept, sizes = [], []
    for _ in range(24):
        for _ in range(6):
            records = []
            for rank in range(2):
                for _ in range(600):
                    now = clock.now
                    values = {f"m{index}": math.sin(now + index) for index in range(10)}
                    records.append(Record(rank, now, MetricEvent(values, int(now - START))))
                    clock.turn(0.5)
                records.append(Record(rank, clock.now, ResourceEvent(50.0, 1 << 30)))
                records.append(Record(rank, clock.now, LogEvent("stdout", "\n".join([text] * 600))))
            run._internals.store.add(records)
            panel.schedule.tick()
        series = [points for ranks in run._internals.store._metrics.values() for points in ranks.values()]
        kept.append(max(len(points.values) for points in series))
        curves = sum(sys.getsizeof(a) for points in series for a in (points.steps, points.times, points.values))
        sizes.append((curves / 1e6, max(run._internals.store._log_bytes.values()) / 1e6))
    print("\nMB of curves, MB of a rank's text, by hour:", [f"{a:.0f}, {b:.1f}" for a, b in sizes[::6]])
    assert clock.now - START == pytest.approx(86_400)
    assert max(kept) <= MAX_POINTS
    assert max(curves for curves, _ in sizes) <= 108
    assert max(logs for _, logs in sizes) <= RUN_LOG_BYTES / 2 / 1e6
    assert sizes[-1][0] < 1.5 * sizes[12][0], "the curves must stop growing"
    panel.close()


def test_the_resource_strip_can_be_shown_alone(snapshot: Snapshot) -> None:
    run, clock = make_run(), Clock()
    strip = ResourceStrip(run, clock)
    for cpu in (10.0, 90.0):
        feed(run, ResourceEvent(cpu, 512 << 20), rank=0, at=clock.now)
        clock.turn(1.0)
        strip.schedule.touch()
        strip.schedule.tick()
    snapshot("resource_strip", strip._content.value + strip.html)
    assert "537 MB" in strip.text
    strip.close()


def _past(value: float, **settings: Any) -> Run:
    run = make_run(**settings)
    feed(run, MetricEvent({"loss": value, EVIL: 1.0}, 1), MetricEvent({"loss": value / 2}, 2))
    end(run, at=START + 12)
    return run


def test_the_table_of_runs_shows_differences_and_final_metrics(snapshot: Snapshot) -> None:
    runs = [_past(1.0, mixed_precision="bf16"), _past(3.0)]
    table = RunsTable(runs, Clock())
    numbers = re.compile(r'(?<=[>"])\d+(?=[<"])|(?<=\btrain )\d+')  # These are the numbers of the runs.
    snapshot("runs_table", numbers.sub("N", table.html))
    assert {label for _, label, _ in table.plot.full["series"]} == {f"train {run.id}" for run in runs}
    assert table.text.split()[:3] == ["run", "state", "mixed_precision"]
    with pytest.raises(ValueError, match="no run 999999 in this kernel"):
        RunsTable([999999])


def _states(table: Table) -> list[str]:
    return [str(row.cells[1]) for row in table.rows]


class _Place:
    """An output of a cell. A callback may run while it shows a view."""

    cell = notebook_cell = ""
    interactive = True

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self._meanwhile = meanwhile

    def show(self, _: Any) -> None:
        self._meanwhile()

    show_static = end = show


def test_a_run_that_ends_while_the_table_of_runs_is_shown_is_drawn_as_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    table = RunsTable([run])
    monkeypatch.setattr(live_panel, "current_output", lambda: _Place(lambda: None if run.ended else end(run)))
    table._ipython_display_()
    until(lambda: table.grid.table is not None and _states(table.grid.table) == ["succeeded"])
    table.close()


class _LiveOutput:
    """Outputs that remain live after the run ends."""

    stays_live = True

    def update(self, _: float) -> None:
        return

    def leave(self) -> None:
        return

    end = leave


def test_ranks_released_while_the_panel_is_rendered_are_shown_as_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, failure = _Panel(), RankFailure(1, "exception", START, "ValueError: bad")
    monkeypatch.setattr(one.panel, "_shown", _LiveOutput())
    for event in (RankFailed(failure), StopAdvanced("settling"), StopAdvanced("held"), FailuresRecorded([failure])):
        one.run._internals.journal.append(event)
    for event in (AttemptEnded("ValueError: bad"), RunEnded("failed", "WorkerError", "it failed")):
        one.run._internals.journal.append(event)
    render = one.panel._render

    def released_meanwhile(now: float) -> None:
        render(now)
        if one.run.held:
            one.run._internals.journal.append(RanksReleased())

    monkeypatch.setattr(one.panel, "_render", released_meanwhile)
    one.look()
    assert "the ranks are kept" in one.panel.attention.text
    assert not one.panel._rests, "a panel at rest is not rendered again"
    one.look()
    assert "the ranks are kept" not in one.panel.attention.text
    assert one.panel._rests
    one.panel.close()


def test_the_table_of_runs_shows_what_holds_a_run() -> None:
    run = make_run()
    table = RunsTable([run], clock := Clock())

    def state() -> str:
        clock.turn(5.0)
        table.schedule.tick()
        assert table.grid.table is not None
        return _states(table.grid.table)[0]

    assert state() == "running"
    run._internals.journal.append(RunStalled(clock.now, "rank 1 never reached the barrier"))
    assert state() == "stuck"
    run._internals.journal.append(RunMoved())
    assert state() == "running"
    for rank in range(2):
        run._internals.journal.append(RankPaused(rank))
    assert state() == "paused"
    table.close()


def test_two_views_may_be_shown_at_the_same_time() -> None:
    """One view may be shown on the kernel's thread, and the other one on the thread of a click."""
    both = threading.Barrier(2)

    class Widget:
        model_id = "1"

        def add_class(self, _: str) -> None:
            both.wait(60)

    views = [
        PanelOutput(lambda: {"text/html": "", "text/plain": ""}, lambda: "A view", lambda: "A view") for _ in range(2)
    ]
    threads = [threading.Thread(target=view.add, args=(_Place(), Widget()), daemon=True) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for view in views:
        view.end()


def test_a_few_steps_behind_at_full_speed_is_not_a_straggler() -> None:
    one = _Panel()
    for second in range(4):
        for rank in range(2):
            feed(one.run, MetricEvent({"loss": 0.5}, 50 * second - 10 * rank), rank=rank)
        html = one.look()
    assert "No rank is behind." in html
    assert "straggler" not in html


def test_many_ranks_have_a_dense_strip(snapshot: Snapshot) -> None:
    one = _Panel(ranks=9)
    for rank in range(9):
        feed(one.run, ResourceEvent(90.0 + rank, (300 + rank) << 20), *devices(rank, 40.0, 2 << 30), rank=rank)
    one.look()
    snapshot("dense_strip", one.parts("resources"))


def test_the_table_of_runs_renders_at_most_five_times_a_second_and_adds_new_runs() -> None:
    run, clock = make_run(), Clock()
    table = RunsTable([run], clock)
    values = set()
    for step in range(100):  # The loop takes one second of the clock.
        clock.turn(0.01)
        feed(run, MetricEvent({"loss": float(step)}, step), at=clock.now)
        table.schedule.tick()
        values.add(str(table.plot.delta or table.plot.full))
    assert 5 <= len(values) <= 7
    late = make_run()
    table.add_run(late)
    clock.turn(1.0)
    feed(late, MetricEvent({"loss": 7.0}, 1), at=clock.now)
    assert table.schedule.tick()
    assert [row[0] for row in table.rows[1:]] == [str(late.id), str(run.id)]
    assert {label for _, label, _ in table.plot.full["series"]} == {f"train {run.id}", f"train {late.id}"}
    for one in (run, late):
        end(one)
    table.close()
    assert not table.schedule.tick()


def test_the_curves_of_a_named_run_carry_its_name() -> None:
    named, other = make_run(name="baseline"), make_run()
    table = RunsTable([named, other])
    assert table.plot.order == [f"train {named.id} · baseline", f"train {other.id}"]
    table.close()
