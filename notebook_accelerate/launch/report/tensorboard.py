"""Export a run's metrics to TensorBoard event files."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from notebook_accelerate.config.plain_values import given_folder

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    from notebook_accelerate.telemetry import Store


def write_event_files(store: Store, folder: str | PathLike[str]) -> Path:
    """Write the metrics of each rank to TensorBoard event files; see ``Run.to_tensorboard``."""
    try:
        events: Any = import_module("tensorboard.compat.proto.event_pb2")
        summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
        writer: Any = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
    except ImportError as error:
        raise ImportError("to_tensorboard needs tensorboard's writer: pip install tensorboard") from error
    target = given_folder(folder)
    names = store.metric_names()
    ranks = sorted({rank for name in names for rank in store.ranks_of(name)})
    for rank in ranks:
        file = writer(str(target / f"rank{rank}" if len(ranks) > 1 else target))
        for name in names:
            if rank in store.ranks_of(name):
                tail = store.tail(name, rank)
                numbered = bool((tail.steps >= 0).all())
                for index, (step, time, value) in enumerate(zip(*(c.tolist() for c in tail[:3]), strict=True)):
                    summary = summaries.Summary(value=[summaries.Summary.Value(tag=name, simple_value=value)])
                    file.add_event(events.Event(wall_time=time, step=step if numbered else index, summary=summary))
        file.close()
    return target
