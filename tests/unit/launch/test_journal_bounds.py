"""Journals under load: long lines, much output, a full disk at the end, a day of metrics, a file that is thinned."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import open_run
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch.kept import journal_file, journal_format, opened_run, run_folder, run_writer
from notebook_accelerate.launch.kept.journal_file import JOURNAL_NAME, read_journal
from notebook_accelerate.launch.kept.run_writer import RunWriter
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.launch.state.run_events import RankReturned, WarningAdded
from notebook_accelerate.telemetry import (
    CheckpointEvent,
    DroppedEvent,
    EpochEvent,
    LogEvent,
    MetricEvent,
    ProgressEvent,
)
from notebook_accelerate.telemetry.automatic_metrics import AutomaticMetricEvent
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes
from notebook_accelerate.telemetry.store import Record
from tests.support.runs import START, end, make_run


def _writer(folder: Path, journal: Journal, **options: Any) -> RunWriter:
    writer = RunWriter(folder, run_folder.header("made", 1, int, (), LaunchConfig(), START), journal, **options)
    journal.replay(make_run().journal.records)
    return writer


def _log(text: str, at: float, rank: int = 0) -> Record:
    return Record(rank, START + at, LogEvent("stdout", text))


def test_frames_stay_within_the_format_whatever_ranks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_format, "MAX_JSON_BYTES", 20_000)
    journal = Journal()
    writer = _writer(tmp_path, journal)
    texts = ["é" * 300 + str(number) for number in range(400)] + ["\x01" * 30_000, "the last"]
    journal.add([_log(text, number) for number, text in enumerate(texts)])
    writer._write(last=False)
    lines = open_run(tmp_path).logs(0)
    assert lines[:400] == texts[:400]
    assert lines[400] == "\x01" * (len(lines[400]) - 1) + "…"
    assert len(lines[400]) > 1_000
    assert lines[401] == "the last"


def test_output_that_waits_for_a_disk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "MAX_WAITING_CHARS", 1_000)
    journal = Journal()
    writer = _writer(tmp_path, journal)
    for number in range(50):
        journal.add([_log("x" * 100, number), Record(0, START + number, MetricEvent({"loss": 1.0}, number))])
    writer._write(last=False)
    opened = open_run(tmp_path)
    assert 10 <= len(opened.logs(0)) <= 12
    assert opened.store.dropped[0] == 50 - len(opened.logs(0))
    assert len(opened.metrics["loss"].steps) == 50, "only output is left out"


def test_the_end_of_a_detached_run_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "END_PERIOD", 0.05)
    journal = Journal()
    writer = _writer(tmp_path, journal, detached=True)
    run = Run(LaunchConfig(), "int", journal)
    writer.start(run)
    while not (tmp_path / JOURNAL_NAME).stat().st_size > 200:
        time.sleep(0.01)
    write, full = os.write, threading.Event()
    full.set()

    def refusing(descriptor: int, data: Any) -> int:
        if full.is_set() and threading.current_thread().name == "notebook-accelerate-save":
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", refusing)
    threading.Timer(1.0, full.clear).start()
    for rank in (0, 1):
        data = dump_bytes(rank * 21, "the value")
        returned = RankResult(partial(load_bytes, data), len(data), rank=rank, pickled=partial(bytes, data))
        journal.append(RankReturned(rank, returned))
    end(run)
    assert not full.is_set(), "the end was waited for"
    opened = open_run(tmp_path)
    assert (opened.status, opened.results) == ("succeeded", (0, 21))


def test_a_follower_misses_nothing_of_a_journal_that_was_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal()
    writer = _writer(tmp_path, journal)
    journal.add([_log("first", 10.0), Record(0, START + 20, MetricEvent({"loss": 1.0}, 0))])
    journal.add([Record(0, START + 20, DroppedEvent(3)), Record(0, START + 20, CheckpointEvent("/a", START + 20))])
    writer._write(last=False)
    contents = read_journal(tmp_path / JOURNAL_NAME)
    contents.journal.append(WarningAdded("found from here"))  # by a diagnosis
    journal.append(WarningAdded("found there"))
    journal.add([_log("late", 15.0, rank=1), _log("second", 21.0), Record(0, START + 16, DroppedEvent(2))])
    journal.add([Record(1, START + 19, CheckpointEvent("/b", START + 19))])
    journal.add([Record(1, START + 17, AutomaticMetricEvent({"auto/lr": 0.5}, 3))])
    writer._write(last=False)
    writer._file.thin()
    opened_run._read_on(contents, tmp_path / JOURNAL_NAME)
    read, store = contents.journal, contents.journal.store
    assert read.state.warnings == ("found from here", "found there")
    assert [line.text for rank in (0, 1) for line in store.log_lines(rank)] == ["first", "second", "late"]
    assert store.dropped == {0: 5}
    assert [event.path for event in store.checkpoints] == ["/a", "/b"]
    assert store.automatic.series("auto/lr").values.tolist() == [0.5]
    opened_run._read_on(contents, tmp_path / JOURNAL_NAME)
    assert (store.dropped, len(store.checkpoints)) == ({0: 5}, 2)


@pytest.mark.parametrize("thinned", [False, True])
def test_the_progress_through_an_epoch_is_that_of_the_live_run(tmp_path: Path, *, thinned: bool) -> None:
    """Of the events of steps, a journal has the last one of each period."""
    journal = Journal()
    writer = _writer(tmp_path, journal)
    for epoch in range(3):
        journal.add([Record(0, START + epoch, EpochEvent(epoch, 40))])
        for step in range(40 if epoch < 2 else 15):
            journal.add([Record(0, START + epoch, ProgressEvent(epoch * 40 + step + 1, None, "step"))])
            if step % 7 == 0:
                writer._write(last=False)
    writer._write(last=False)
    if thinned:
        writer._file.thin()
    found = open_run(tmp_path).store.epochs
    assert found == journal.store.epochs
    assert (found[0].number, found[0].done) == (2, 15)


_METRICS = 24 * 3600 * 10


def test_a_day_of_metrics_stays_within_the_bound_of_the_guide() -> None:
    """As computed: what is written between two times of thinning, and what is left by it."""
    records = [
        Record(0, START + step / 10 + 0.123456, MetricEvent({"train/loss": 1 / (step + 3)}, step))
        for step in range(_METRICS - 1_000, _METRICS)
    ]
    each = len(b"".join(journal_format.encode_records(records))) / len(records)
    whole = each * _METRICS
    left = journal_file.KEPT_POINTS * journal_file._POINT_BYTES + 2 * journal_file.KEPT_LOG_BYTES
    assert left < 0.6 * journal_file.MAX_JOURNAL_BYTES, "thinning leaves room for hours"
    period = run_writer.PERIOD * 10 * each
    assert min(whole, journal_file.MAX_JOURNAL_BYTES) + period < (64 << 20) + run_writer._WRITE_BYTES
    guide = Path(__file__).parents[3] / "docs" / "guides" / "kept_runs.md"
    assert "stays below 64 MiB, and one write above" in guide.read_text(encoding="utf-8")


@pytest.mark.nightly
def test_a_day_of_metrics_as_written(tmp_path: Path) -> None:
    journal = Journal()
    writer = _writer(tmp_path, journal)
    largest = 0
    for begin in range(0, _METRICS, 1_000):
        journal.add([
            Record(0, START + step / 10, MetricEvent({"train/loss": 1 / (step + 3)}, step))
            for step in range(begin, begin + 1_000)
        ])  # fmt: skip
        writer._write(last=False)
        largest = max(largest, (tmp_path / JOURNAL_NAME).stat().st_size)
    assert largest < (64 << 20) + run_writer._WRITE_BYTES
    opened = open_run(tmp_path)
    assert opened.metrics["train/loss"].steps[[0, -1]].tolist() == [0, _METRICS - 1]
