"""The report: text and HTML that stay in the saved notebook."""

from __future__ import annotations

import math
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import Run, WorkerError, notebook_launcher, telemetry
from notebook_accelerate.launch.report.run_report import sparkline
from notebook_accelerate.telemetry import MetricEvent

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


def _launch(function: Any) -> Run:
    return notebook_launcher(function, num_processes=2, use_port=0, start_method="fork")


def test_a_finished_run() -> None:
    def train() -> None:
        for step in range(5):
            telemetry.emit(MetricEvent({"loss": 5.0 - step, EVIL: 1.0}, step))

    run = _launch(train)
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
        with accelerator.profile(settings):  # it replaces the first one
            raise ValueError(f"rank {accelerator.process_index} ends early")

    with pytest.raises(WorkerError) as caught:
        notebook_launcher(train, (str(tmp_path),), num_processes=2, use_port=0, start_method="fork")
    assert caught.value.run is not None
    report = caught.value.run.report()
    listed = caught.value.run.store.traces()
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


def test_a_failed_run_escapes_error_messages() -> None:
    def fail() -> None:
        raise ValueError(EVIL)

    with pytest.raises(WorkerError) as caught:
        _launch(fail)
    assert caught.value.run is not None
    report = caught.value.run.report()
    assert EVIL not in report.html
    assert EVIL in report.text
    assert _Tags(report.html).open == []
    assert "fail" in report.text
    assert "supervisor" not in report.text


def test_a_running_run_has_a_report() -> None:
    run = notebook_launcher(lambda: time.sleep(600), num_processes=2, use_port=0, start_method="fork", block=False)
    try:
        assert str(run.id) in run.report().text
        assert _Tags(run.report().html).open == []
    finally:
        run.stop(grace=0)
    assert "stopped" in run.report().text


def test_metrics_without_finite_values() -> None:
    run = _launch(lambda: [telemetry.emit(MetricEvent({"loss": math.nan}, s)) for s in range(3)] and None)
    assert "nan" in run.report().text


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
def test_sparklines(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_a_long_curve_is_24_characters() -> None:
    assert len(sparkline([float(n) for n in range(1000)])) == 24
    assert os.linesep not in sparkline([1.0] * 100)
