"""Reports: the text and the HTML that remain in a saved notebook."""

from __future__ import annotations

import math
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import WorkerError, telemetry
from notebook_accelerate.launch.report.run_report import sparkline
from notebook_accelerate.launch.state.run_events import NoteAdded, WarningAdded
from notebook_accelerate.telemetry import MetricEvent
from notebook_accelerate.telemetry.automatic_metrics import AutomaticMetricEvent
from notebook_accelerate.telemetry.step_time import PARTS, StepTimeEvent
from tests.support.runs import feed, launch, make_run
from tests.support.snapshots import Snapshot

EVIL = "<script>alert('&')</script>"


class _Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_finished_run_has_a_report() -> None:
    def train() -> None:
        for step in range(5):
            telemetry.emit(MetricEvent({"loss": 5.0 - step, EVIL: 1.0}, step))

    run = launch(train)
    report = run.report()
    assert report.text.startswith(f"run {run.id} · train · succeeded")
    assert "loss" in report.text
    assert str(report) == report.text
    tags = _Tags(report.html)
    assert tags.open == []
    assert "script" not in tags.seen
    assert EVIL not in report.html
    assert "&lt;script&gt;" in report.html
    assert run._repr_html_() == report.html


def test_the_traces_of_profilers_are_listed(tmp_path: Path) -> None:
    def train(folder: str) -> None:
        from notebook_accelerate import Accelerator, ProfileKwargs

        settings = ProfileKwargs(activities=["cpu"], output_trace_dir=folder)
        accelerator = Accelerator(cpu=True)
        with accelerator.profile(settings):
            accelerator.wait_for_everyone()
        accelerator.wait_for_everyone()
        with accelerator.profile(settings):  # The second profile replaces the first one.
            raise ValueError(f"rank {accelerator.process_index} ends early")

    with pytest.raises(WorkerError) as caught:
        launch(train, str(tmp_path))
    assert caught.value.run is not None
    report = caught.value.run.report()
    listed = caught.value.run._internals.store.traces()
    assert [(rank, path) for rank, path, _ in listed if path.endswith(f"profile_{rank}.json")] == [
        (rank, str(tmp_path / f"profile_{rank}.json")) for rank in range(2)
    ]
    for _, path, size in listed:
        assert Path(path).stat().st_size > 100
        assert size > 100
        assert path in report.text
        assert f"<td>{path}</td>" in re.sub(r" style=\"[^\"]*\"", "", report.html)
    assert "Profiler traces" in report.html
    assert _Tags(report.html).open == []


def test_the_report_of_a_failed_run_escapes_error_messages() -> None:
    def fail() -> None:
        raise ValueError(EVIL)

    with pytest.raises(WorkerError) as caught:
        launch(fail)
    assert caught.value.run is not None
    report = caught.value.run.report()
    assert EVIL not in report.html
    assert EVIL in report.text
    assert _Tags(report.html).open == []
    assert "fail" in report.text
    assert "supervisor" not in report.text


def test_a_running_run_has_a_report() -> None:
    run = launch(time.sleep, 600, block=False)
    try:
        assert str(run.id) in run.report().text
        assert _Tags(run.report().html).open == []
    finally:
        run.stop(grace=0)
    assert "stopped" in run.report().text


def test_metrics_without_finite_values_are_shown() -> None:
    run = launch(lambda: [telemetry.emit(MetricEvent({"loss": math.nan}, s)) for s in range(3)] and None)
    assert "nan" in run.report().text
    assert "<li>NaN since step 0 on all ranks: loss</li>" in run.report().html


def test_the_report_of_a_run_is_complete(snapshot: Snapshot) -> None:
    run = make_run()
    for rank, own in ((0, 0.05), (1, 0.2)):
        parts = dict(zip(PARTS, (0.05, 0.1, 0.05, 0.01, 0.04), strict=True))
        feed(run, MetricEvent({"loss": 1.0}, 1), StepTimeEvent(parts, 7, 10, own), rank=rank)
    run._internals.journal.append(WarningAdded(f"the data are the same: {EVIL}"))
    run._internals.journal.append(NoteAdded("port 29500 is taken"))
    feed(run, MetricEvent({"loss": math.inf}, 2), rank=1)
    html, environment = run.report().html, r"(<summary>Environment</summary>).*?(</details>)"
    snapshot("report", re.sub(r"\d+\.\d s\b", "S s", re.sub(environment, r"\1\2", html)))
    for line in ("Infinite since step 2 on rank 1: loss", "Rank 1 is a straggler: 20 ms of its own work per step"):
        assert line in run.report().text


def test_a_run_that_logged_nothing_shows_its_automatic_curves() -> None:
    run = make_run()
    assert "<img" not in run.report().html
    feed(run, *(AutomaticMetricEvent({"auto/loss": 1 / step}, step) for step in (1, 2, 3)))
    assert run.report().html.count("<img") == 1
    feed(run, MetricEvent({"accuracy": 1.0}, 1), MetricEvent({"accuracy": 0.5}, 2))
    assert 'alt="Curve of accuracy' in run.report().html
    assert "auto/loss" not in run.report().html


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([math.nan, math.inf], ""),
        ([1.0], "▁"),
        ([1.0, 1.0], "▁▁"),
        ([0.0, 1.0], "▁█"),
        ([0.0, math.nan, 1.0], "▁█"),
        ([-1e308, 1e308], "▁█"),
    ],
)
def test_sparklines_show_the_shape_of_a_curve(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_the_sparkline_of_a_long_curve_has_24_characters() -> None:
    assert len(sparkline([float(n) for n in range(1000)])) == 24
    assert os.linesep not in sparkline([1.0] * 100)
