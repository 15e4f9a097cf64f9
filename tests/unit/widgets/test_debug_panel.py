"""The debug panel without a browser, with recorded events and a fake clock, and with a real run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from notebook_accelerate import notebook_launcher
from notebook_accelerate.debugging.diagnosis import RankPosition, diagnose
from notebook_accelerate.launch import Run
from notebook_accelerate.launch.report import rendering
from notebook_accelerate.launch.state.run_events import (
    AttemptEnded,
    DiagnosisAdded,
    FailuresRecorded,
    RankFailed,
    RanksReleased,
    RunEnded,
    StopAdvanced,
    WarningAdded,
)
from notebook_accelerate.telemetry import FrameInfo, RankFailure
from notebook_accelerate.telemetry.debug_protocol import Collective
from notebook_accelerate.widgets.debug_panel import ALL, MAX_HISTORY, DebugPanel, Entry
from tests.support.runs import START, Clock, end, make_run
from tests.support.snapshots import Snapshot
from tests.support.waiting import until

EVIL = "<script>alert('&')</script>"
SECONDS = 60.0


@pytest.fixture
def made() -> Iterator[list[DebugPanel]]:
    """Yield a list for panels, which are closed at the end."""
    panels: list[DebugPanel] = []
    yield panels
    for panel in panels:
        panel.wait(SECONDS)
        panel.close()


def _panel(made: list[DebugPanel], run: Run, clock: Any = None) -> DebugPanel:
    made.append(DebugPanel(run, clock or Clock()))
    return made[-1]


def _render(panel: DebugPanel, clock: Clock) -> str:
    clock.turn(1.0)
    panel.schedule.touch()
    assert panel.schedule.tick()
    shown = panel.live.widgets
    assert shown["places"].table is not None
    parts = [part.value for part in (shown["head"], panel._problem, *(shown[name] for name in ("verdict", "frames")))]
    return "\n".join([*parts, shown["history"].value, rendering.html(shown["places"].table, inline=False)])


def _found(source: str = "dist.all_reduce(x)") -> Any:
    frames = (FrameInfo("cell", 13, "train", source),)
    call = Collective("0", 4, "all_reduce", ((128,),), ("f32",), START - 31)
    waiting = [RankPosition(rank, "running", frames, START - 31, (call,), {"0": 4}) for rank in (0, 2)]
    absent = RankPosition(1, "running", (FrameInfo("cell", 12, "train", "time.sleep(60)"),), START - 31, (), {"0": 3})
    return diagnose([waiting[0], absent, waiting[1]], lambda frame: f"Cell In[7], line {frame.lineno}", START)


def test_ranks_are_listed_with_state_and_step_before_a_diagnosis(made: list[DebugPanel], snapshot: Snapshot) -> None:
    run, clock = make_run(2), Clock()
    run._internals.store.last_step[1] = 1200
    snapshot("debug_before_a_diagnosis", _render(_panel(made, run, clock), clock))


def test_an_automatic_diagnosis_and_the_warnings_are_shown(made: list[DebugPanel], snapshot: Snapshot) -> None:
    run, clock = make_run(3), Clock()
    panel = _panel(made, run, clock)
    run._internals.journal.append(DiagnosisAdded(_found()))
    run._internals.journal.append(WarningAdded("every rank trains on the same data"))
    snapshot("debug_diagnosis", _render(panel, clock))


def test_strings_are_escaped(made: list[DebugPanel]) -> None:
    run, clock = make_run(3), Clock()
    run._internals.journal.append(DiagnosisAdded(_found(EVIL)))
    run._internals.journal.append(WarningAdded(EVIL))
    panel = _panel(made, run, clock)
    panel.history.append(Entry("ask", EVIL, {0: EVIL}))
    panel._show_problem(EVIL)
    for html in (_render(panel, clock), panel.html):
        assert "<script>" not in html
        assert "&lt;script&gt;" in html


def test_equal_replies_are_grouped_and_colours_removed() -> None:
    entry = Entry("command", "p loss", {0: "\x1b[32m1.5\x1b[0m\n", 1: "1.5", 2: "2.0"})
    assert entry.text == "command> p loss\n  ranks 0, 1: 1.5\n  rank 2: 2.0"


def test_history_is_bounded(made: list[DebugPanel]) -> None:
    panel = _panel(made, make_run(2))
    for number in range(MAX_HISTORY + 5):
        panel._record("ask", str(number), {0: "x"})
    assert len(panel.history) == MAX_HISTORY
    assert panel.history[-1].line == str(MAX_HISTORY + 4)


def test_static_forms_are_complete(made: list[DebugPanel], snapshot: Snapshot) -> None:
    run = make_run(3)
    run._internals.journal.append(DiagnosisAdded(_found()))
    panel = _panel(made, run)
    panel._record("ask", "loss", {0: "1.0", 1: "1.0"})
    snapshot("debug_static", panel.html)
    for piece in ("rank 1 never reached all_reduce, the 4th", "ask> loss", "ranks 0, 1: 1.0", "dist.all_reduce(x)"):
        assert piece in panel.text
    assert panel.bundle == {"text/html": panel.html, "text/plain": panel.text}
    assert panel.bundle.items() <= panel._repr_mimebundle_().items()


def test_controls_are_disabled_after_the_run(made: list[DebugPanel]) -> None:
    run, clock = make_run(2), Clock()
    panel = _panel(made, run, clock)
    _render(panel, clock)
    assert not panel.why_button.disabled
    end(run)
    _render(panel, clock)
    assert panel.why_button.disabled
    assert panel.line.disabled


def test_held_ranks_can_be_asked_after_the_failure(made: list[DebugPanel]) -> None:
    run, clock = make_run(2), Clock()
    panel = _panel(made, run, clock)
    failure = RankFailure(1, "exception", START, "KeyError: 1")
    for event in (RankFailed(failure), StopAdvanced("settling"), StopAdvanced("held"), FailuresRecorded([failure])):
        run._internals.journal.append(event)
    for event in (AttemptEnded("KeyError: 1"), RunEnded("failed", "WorkerError", "it failed")):
        run._internals.journal.append(event)
    _render(panel, clock)
    assert not panel.why_button.disabled
    run._internals.journal.append(RanksReleased())
    _render(panel, clock)
    assert panel.why_button.disabled


def test_a_failing_request_is_shown(made: list[DebugPanel]) -> None:
    run, clock = make_run(2), Clock()
    panel = _panel(made, run, clock)
    panel.line.value = "x ="
    panel.wait(SECONDS)
    panel._send()
    panel.wait(SECONDS)
    assert "&#x27;x =&#x27; is not an expression" in _render(panel, clock)
    assert panel.history == []


def _loop() -> None:
    number, rank = 21, int(os.environ["RANK"])
    print("in", flush=True)
    while number:
        time.sleep(0.01)
    print(rank)


def _patient(run: Run) -> Run:
    """Give a run's requests a longer timeout, for busy machines."""

    def with_time(method: Any) -> Any:
        return lambda *arguments, **named: method(*arguments, **{**named, "timeout": SECONDS})

    for name in ("ask", "complete", "pause", "unpause", "debug_command"):
        setattr(run, name, with_time(getattr(run, name)))
    return run


def test_the_panel_works_with_a_real_run(made: list[DebugPanel]) -> None:
    run = _patient(notebook_launcher(_loop, num_processes=2, use_port=0, start_method="fork", block=False))
    try:
        until(lambda: len(run.logs()) == 2)
        panel = _panel(made, run, time.time)

        def sees_both() -> bool:
            panel.why_button.click()
            panel.wait(SECONDS)
            assert panel.found is not None
            frames = [place.user_frame for place in panel.found.places]
            return [frame.function for frame in frames if frame is not None] == ["_loop", "_loop"]

        until(sees_both)  # On a busy machine, a rank may take more than a second to reply.
        assert re.search(r"test_debug_panel\.py, line \d+, in _loop", panel.text)
        panel.target.value = "rank 1"
        panel.line.value = "numb"
        panel.wait(SECONDS)
        assert panel.line.options == ("number",)
        panel.line.value = "number * (rank + 1)"
        panel.wait(SECONDS)
        panel._on_line_message(None, {"event": "submit"}, [])
        panel.wait(SECONDS)
        assert panel.history[-1] == Entry("ask", "number * (rank + 1)", {1: "42"})
        assert panel.line.value == ""
        panel.target.value = ALL
        panel.pause_button.click()
        panel.wait(SECONDS)
        assert panel.history[-1].answers == {0: "paused", 1: "paused"}
        panel.unpause_button.click()
        panel.wait(SECONDS)
        assert panel.history[-1].answers == {0: "unpaused", 1: "unpaused"}
    finally:
        run.stop(1.0)
    assert run.debug_panel() is not None
    run.debug_panel().close()


def _stops() -> int:
    loss = int(os.environ["RANK"]) + 41
    breakpoint()  # noqa: T100
    return loss


def test_a_line_is_sent_to_the_debuggers_of_stopped_ranks(made: list[DebugPanel]) -> None:
    """If no rank is stopped, the line is an expression to evaluate. The placeholder says which of the two it is."""
    run = _patient(notebook_launcher(_stops, num_processes=2, use_port=0, start_method="fork", block=False))
    try:
        until(lambda: sorted(run._internals.commands.prompts.debugged()) == [0, 1])
        clock = Clock(time.time())
        panel = _panel(made, run, clock)
        _render(panel, clock)
        assert panel.line.placeholder == "a command for the debugger of ranks 0, 1, e.g. p loss"
        for target, line, answers in ((ALL, "p loss", {0: "41", 1: "42"}), ("rank 1", "p loss * 2", {1: "84"})):
            panel.target.value, panel.line.value = target, line
            panel.wait(SECONDS)  # Setting the line requests completions.
            panel._send()
            panel.wait(SECONDS)
            entry = panel.history[-1]
            assert (entry.kind, entry.line) == ("command", line)
            assert {rank: text.strip() for rank, text in entry.answers.items()} == answers
        assert "p loss * 2" in _render(panel, clock)
        panel.target.value, panel.line.value = ALL, "c"
        panel.wait(SECONDS)
        panel._send()
        panel.wait(SECONDS)
        assert run.wait(60)
        assert run.results == (41, 42)
    finally:
        run.stop(1.0)
