"""Progress bars of tqdm and rich: the panel shows them, beside their text."""

from __future__ import annotations

from typing import Any

from notebook_accelerate import telemetry
from notebook_accelerate.integrations.reporting.sources import after
from notebook_accelerate.telemetry import ProgressEvent


def connect_tqdm(module: Any) -> None:
    """Report bars of tqdm whenever they are drawn."""
    after(module.tqdm, "display", send_bar)


def send_bar(bar: Any, *_: Any, **__: Any) -> None:
    """Report a bar of tqdm."""
    send_progress(bar.n, bar.total, bar.desc)


def connect_rich(module: Any) -> None:
    """Report tasks of rich's bars whenever they change."""
    after(module.Progress, "update", _send_task)
    after(module.Progress, "advance", _send_task)


def _send_task(progress: Any, task_id: Any, *_: Any, **__: Any) -> None:
    task = progress._tasks[task_id]
    send_progress(task.completed, task.total, task.description)


def send_progress(done: float, total: float | None, label: Any) -> None:
    """Report that a loop has done ``done`` of ``total``; a loop without an end is not shown."""
    if total:
        telemetry.emit(ProgressEvent(step=int(done), total=int(total), label=str(label or "")))
