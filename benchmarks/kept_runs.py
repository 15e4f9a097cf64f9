"""Saved runs: their cost for the ranks, the size of the journal, and the time that opening a run takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.bench import Figure, alternate, compared, row
from notebook_accelerate import notebook_launcher, open_run
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch.kept import journal_file, journal_format, run_folder
from notebook_accelerate.launch.kept.run_writer import RunWriter
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.telemetry import MetricEvent
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.utils import patch_environment
from tests.support.runs import START, make_run

_COUNT = 2_000
_DAY = 24 * 3600


def work(kind: str) -> float:
    """Log, print, or do both in each step. Return the seconds per number, line or step."""
    import torch

    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    x, count = torch.ones(180, 180), _COUNT // 20 if kind == "step" else _COUNT
    begin = time.perf_counter()
    for step in range(count):
        if kind == "step":
            for _ in range(10):
                x @ x
        if kind != "line":
            accelerator.log({"loss": 0.25}, step=step)
        if kind != "number":
            print("a line of output", step)
    return (time.perf_counter() - begin) / count


@row("kept", "cost")
def costs() -> Iterator[Figure]:
    """Measure what saving or detaching a run costs its ranks, compared with a run that is neither."""
    with tempfile.TemporaryDirectory() as folder, patch_environment(XDG_STATE_HOME=folder):
        for kind, what in (("number", "a logged number"), ("line", "a printed line"), ("step", "a step")):

            def measure(kind: str = kind, **options: Any) -> float:
                run = notebook_launcher(
                    work, (kind,), 2, use_port=0, start_method="zygote", block=False, panel=False, **options
                )
                run.wait()
                return max(run.results)

            kept, plain = alternate(5, lambda: measure(save=folder), measure)
            yield compared(f"2 ranks, save: {what}", kept, plain, unit="µs", scale=1e6, ratio=1.2)
            detached, plain = alternate(5, lambda: measure(detach=True), measure)
            yield compared(f"2 ranks, detach: {what}", detached, plain, unit="µs", scale=1e6, ratio=1.2)


@row("kept", "journal of a day")
def journal_of_a_day() -> Iterator[Figure]:
    """Measure how large a journal becomes in 24 hours at 10 metrics per second, and how long it takes to open it."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal()
        writer = RunWriter(Path(folder), run_folder.new_header("day", 1, work, (), LaunchConfig(), START), journal)
        journal.replay(make_run()._internals.journal.records)
        largest = 0
        for second in range(_DAY):
            records = [
                Record(0, START + second + part / 10, MetricEvent({"loss": 1 / (1 + second)}, second * 10 + part))
                for part in range(10)
            ]
            journal.add(records)
            if second % 10 == 9:
                writer._write(last=False)
                largest = max(largest, (Path(folder) / journal_format.JOURNAL_NAME).stat().st_size)
        limit = journal_file.MAX_JOURNAL_BYTES / 2**20 + 1
        yield compared("24 hours, 10 metrics/s: largest journal", [largest], unit="MiB", scale=2**-20, limit=limit)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            open_run(folder)
            seconds.append(time.perf_counter() - begin)
        size = (Path(folder) / journal_format.JOURNAL_NAME).stat().st_size
        note = f"a journal of {size / 2**20:.0f} MiB"
        yield compared("24 hours, 10 metrics/s: open_run", seconds, unit="s", note=note)


@row("kept", "opening")
def opening() -> Iterator[Figure]:
    """Measure how long it takes to open a run of 200,000 points."""
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal()
        writer = RunWriter(Path(folder), run_folder.new_header("many", 1, work, (), LaunchConfig(), START), journal)
        journal.replay(make_run()._internals.journal.records)
        for step in range(100_000):
            journal.add([Record(rank, START + step, MetricEvent({"loss": 0.5}, step)) for rank in (0, 1)])
            if step % 1000 == 999:
                writer._write(last=False)
        seconds = []
        for _ in range(5):
            begin = time.perf_counter()
            open_run(folder)
            seconds.append(time.perf_counter() - begin)
        yield compared("open_run of 200,000 points", seconds, unit="s", limit=1.0)
