"""Branches: runs that continue an earlier run with other arguments, in the table of runs and its curves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from notebook_accelerate import Run, notebook_launcher
from notebook_accelerate.config.constants import MANIFEST_NAME
from notebook_accelerate.telemetry import CheckpointEvent, MetricEvent, emit
from notebook_accelerate.widgets import compared_run
from notebook_accelerate.widgets.runs_table import RunsTable


def train(lr: float, folder: str, first: int = 0) -> None:
    """Log five steps, with a checkpoint after the third."""
    for step in range(first, 5):
        emit(MetricEvent({"loss": lr * step}, step))
        time.sleep(0.02)
        if step == 2:
            (Path(folder) / MANIFEST_NAME).touch()
            emit(CheckpointEvent(folder, time.time()))


def _launch(*arguments: Any, **options: Any) -> Run:
    return notebook_launcher(train, arguments, start_method="fork", panel=False, **options)


def _points(run: Run) -> list[tuple[float, float]]:
    (series,) = compared_run.source_of(run, "").series(["loss"], 8)
    curve = series.read(100)
    return list(zip(curve.x.tolist(), curve.y.tolist(), strict=True))


def test_a_continuation_with_other_arguments_is_a_branch(tmp_path: Path) -> None:
    first = _launch(1.0, str(tmp_path))
    branch = _launch(3.0, str(tmp_path), 3, resume=first)
    same = _launch(3.0, str(tmp_path), 3, resume=branch)
    assert (branch.name, same.name) == (f"train-{branch.id}", branch.name)
    (point,) = branch.resume_points
    assert (point.name, point.step, point.changed) == (first.name, 2, {"lr": 1.0, "first": 0})
    assert [dict(each.changed) for each in same.resume_points] == [{"lr": 1.0, "first": 0}, {}]
    head, *rows = RunsTable([first, branch, same]).rows
    assert [row[head.index("branch of")] for row in rows] == ["", f"{first.name}, step 2", ""]
    assert compared_run.label_of(branch) == f"run {branch.id} · branch of {first.name}"
    assert compared_run.names_of([first, branch]) == [
        f"train {first.id}: lr 1, first 0", f"train {branch.id} · branch of {first.name}: lr 3, first 3"
    ]  # fmt: skip
    assert _points(first) == [(float(step), float(step)) for step in range(5)]
    assert _points(branch) == [(2.0, 2.0), (3.0, 9.0), (4.0, 12.0)], (
        "its curve starts where it leaves that of the first"
    )
    assert len(branch.metrics["loss"].values) == 5, "the run itself has the whole history"
