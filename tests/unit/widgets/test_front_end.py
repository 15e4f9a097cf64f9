"""Detection of front ends that draw no panel, and the panel that needs no widgets."""

from __future__ import annotations

import subprocess
import sys

from notebook_accelerate.widgets.front_end import ANSWER_SECONDS, FrontEnd


def _watched(front_end: FrontEnd, seconds: int, *, handles_messages: bool = True) -> bool:
    for now in range(seconds + 1):
        front_end.observe(float(now), handles_messages=handles_messages)
    return front_end.silent


def test_only_time_when_a_report_could_be_handled_counts() -> None:
    assert _watched(FrontEnd(), int(ANSWER_SECONDS))
    assert not _watched(FrontEnd(), int(ANSWER_SECONDS) - 1)
    assert not _watched(FrontEnd(), 1000, handles_messages=False)


def test_time_without_a_panel_does_not_count() -> None:
    front_end = FrontEnd()
    for now in (0.0, 1000.0, 2000.0):
        front_end.observe(now, handles_messages=True)
    assert not front_end.silent


def test_a_front_end_that_has_drawn_a_view_is_not_silent() -> None:
    front_end = FrontEnd()
    assert _watched(front_end, 20)
    front_end.drawn = True
    assert not front_end.silent


def test_the_reason_is_shown_once() -> None:
    front_end = FrontEnd()
    assert front_end.note("There are no widgets").startswith("There are no widgets: panels are HTML displays here")
    assert front_end.note("There are no widgets") == ""


def test_the_html_panel_imports_no_widget_library() -> None:
    code = "import sys, notebook_accelerate.widgets.live_panel; print({'ipywidgets', 'anywidget'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
