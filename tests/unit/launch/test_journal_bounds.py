"""Journals under load: long lines, a lot of output, a disk that becomes full, a day of metrics, and thinned files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import open_run, runs
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.hardware.process_liveness import this_process
from notebook_accelerate.launch.kept import (
    journal_file,
    journal_format,
    journal_reader,
    opened_run,
    run_folder,
    run_writer,
)
from notebook_accelerate.launch.kept.journal_format import JOURNAL_NAME
from notebook_accelerate.launch.kept.journal_reader import JournalReader, read_journal
from notebook_accelerate.launch.kept.run_writer import RunWriter
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.launch.state.run_events import (
    AttemptEnded,
    FailuresRecorded,
    RankReturned,
    RunEnded,
    StopAdvanced,
    WarningAdded,
)
from notebook_accelerate.telemetry import (
    CheckpointEvent,
    DroppedEvent,
    EpochEvent,
    Event,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    TraceEvent,
)
from notebook_accelerate.telemetry.automatic_metrics import AutomaticMetricEvent
from notebook_accelerate.telemetry.pickling import dump_bytes, load_bytes
from notebook_accelerate.telemetry.store import Record
from tests.support.runs import START, end, make_run
from tests.support.waiting import until


def _written(folder: Path, **options: Any) -> tuple[Journal, RunWriter]:
    """Return the journal of a run that has just started, and the writer of its file."""
    journal = Journal()
    writer = RunWriter(folder, run_folder.new_header("made", 1, int, (), LaunchConfig(), START), journal, **options)
    journal.replay(make_run()._internals.journal.records)
    return journal, writer


def _log(text: str, at: float, rank: int = 0) -> Record:
    return Record(rank, START + at, LogEvent("stdout", text))


def test_frames_respect_the_format_whatever_ranks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_format, "MAX_JSON_BYTES", 20_000)
    journal, writer = _written(tmp_path)
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
    journal, writer = _written(tmp_path)
    for number in range(50):
        text = f"{number:02} " + "x" * 97
        journal.add([_log(text, number), Record(0, START + number, MetricEvent({"loss": 1.0}, number))])
    writer._write(last=False)
    opened = open_run(tmp_path)
    lines = [int(line[:2]) for line in opened.logs(0)]
    assert 5 <= len(lines) <= 10
    assert lines == list(range(50))[-len(lines) :], "the newest output is kept"
    assert opened._internals.store.dropped[0] == 50 - len(lines)
    assert len(opened.metrics["loss"].steps) == 50, "only output is dropped"


def test_the_newest_points_are_kept_if_many_wait_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "MAX_WAITING", 400)
    journal, writer = _written(tmp_path)
    for step in range(1000):
        journal.add([Record(rank, START + step, MetricEvent({"loss": 1.0}, step)) for rank in (0, 1)])
    writer._write(last=False)
    opened = open_run(tmp_path)
    for rank in (0, 1):
        steps = opened.metrics["loss"].rank(rank).steps.tolist()
        assert steps[0] == 0
        assert steps[-50:] == list(range(950, 1000))
        assert opened._internals.store.dropped[rank] == 1000 - len(steps) > 0
    assert "1,632 metrics and lines of rank" in str(opened.report())


def test_the_end_of_a_detached_run_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "END_PERIOD", 0.05)
    journal, writer = _written(tmp_path, detached=True)
    run = Run(LaunchConfig(), "int", journal)
    writer.start(run)
    until(lambda: (tmp_path / JOURNAL_NAME).stat().st_size > 200)
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
    assert not full.is_set(), "the end of the run was written"
    opened = open_run(tmp_path)
    assert (opened.status, opened.results) == ("succeeded", (0, 21))


def _reader(file: Path) -> JournalReader:
    reader = JournalReader(file, lambda rank, _: RankResult(int, rank=rank))
    reader.read_file()
    return reader


def test_a_follower_of_a_thinned_journal_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, writer = _written(tmp_path)
    journal.add([_log("first", 10.0), Record(0, START + 20, MetricEvent({"loss": 1.0}, 0))])
    journal.add([Record(0, START + 20, DroppedEvent(3)), Record(0, START + 20, CheckpointEvent("/a", START + 20))])
    writer._write(last=False)
    reader = _reader(tmp_path / JOURNAL_NAME)
    reader.journal.append(WarningAdded("found from here"))  # A diagnosis adds such a warning.
    journal.append(WarningAdded("found there"))
    journal.add([_log("late", 15.0, rank=1), _log("second", 21.0), Record(0, START + 16, DroppedEvent(2))])
    journal.add([Record(1, START + 19, CheckpointEvent("/b", START + 19))])
    journal.add([Record(1, START + 17, AutomaticMetricEvent({"auto/lr": 0.5}, 3))])
    writer._write(last=False)
    writer._file.thin()
    reader.read_file()
    read, store = reader.journal, reader.journal.store
    assert read.state.warnings == ("found from here", "found there")
    assert [line.text for rank in (0, 1) for line in store.log_lines(rank)] == ["first", "second", "late"]
    assert store.dropped == {0: 5}
    assert [event.path for event in store.checkpoints] == ["/a", "/b"]
    assert store.automatic.series("auto/lr").values.tolist() == [0.5]
    reader.read_file()
    assert (store.dropped, len(store.checkpoints)) == ({0: 5}, 2)


def test_a_journal_that_cannot_be_shortened_is_not_thinned_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_file, "MAX_JOURNAL_BYTES", 1_000)
    thin, calls = journal_file.JournalFile.thin, []
    monkeypatch.setattr(journal_file.JournalFile, "thin", lambda file: (calls.append(file.size), thin(file)))
    journal, writer = _written(tmp_path)
    for number in range(40):
        journal.add([_log("x" * 200, number)])
        writer._write(last=False)
    assert 2 <= len(calls) <= 8
    assert len(open_run(tmp_path).logs(0)) == 40


# ---- problems other than a full disk


def test_git_does_not_delay_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = threading.Event()

    def slow(_folder: Path) -> dict[str, Any]:
        assert found.wait(60)
        return {"kind": "code", "commit": "abc", "dirty": False}

    monkeypatch.setattr(run_folder, "code_version", slow)
    folder = tmp_path / "run"
    folder.mkdir()
    journal, writer = _written(folder)
    run = Run(LaunchConfig(), "int", journal)
    writer.start(run)
    journal.add([Record(0, START, MetricEvent({"loss": 1.0}, 7))])
    until(lambda: read_journal(folder / JOURNAL_NAME).journal.store.metric_names() == ["loss"], seconds=20)
    found.set()
    end(run)
    assert runs(tmp_path)[0].commit == "abc"
    assert read_journal(folder / JOURNAL_NAME).sections["code"]["commit"] == "abc"


def test_a_result_that_cannot_be_written_does_not_block_others(tmp_path: Path) -> None:
    journal, writer = _written(tmp_path, detached=True)
    run = Run(LaunchConfig(), "int", journal)

    def too_large() -> bytes:
        raise MemoryError("no room")

    journal.append(RankReturned(0, RankResult(int, 1, rank=0, pickled=too_large)))
    end(run)
    writer._write(last=False)
    opened = open_run(tmp_path)
    assert opened.status == "succeeded"
    assert opened.warnings == ["the result of rank 0 is not kept: MemoryError: no room"]


def test_the_end_of_a_run_does_not_wait_for_a_deleted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "END_PERIOD", 0.05)
    (tmp_path / "run").mkdir()
    journal, writer = _written(tmp_path / "run", detached=True)
    run = Run(LaunchConfig(), "int", journal)
    writer.start(run)
    until(lambda: (tmp_path / "run" / JOURNAL_NAME).stat().st_size > 200, seconds=20)
    shutil.rmtree(tmp_path / "run")
    begin = time.monotonic()
    end(run)
    assert time.monotonic() - begin < 30


def test_partial_writes_from_a_full_disk_are_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, writer = _written(tmp_path)
    writer._write(last=False)
    write, truncate = os.write, os.ftruncate

    def half(descriptor: int, data: Any) -> int:
        write(descriptor, bytes(data)[:10])
        raise OSError(5, "Input/output error")

    def refused(_descriptor: int, _size: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(os, "ftruncate", refused)
    journal.add([_log("first", 1.0)])
    writer._write(last=False)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "ftruncate", truncate)
    writer._retry_at = 0.0
    journal.add([_log("second", 2.0)])
    writer._write(last=False)
    assert open_run(tmp_path).logs(0) == ["first", "second"]


def test_a_follower_waits_for_a_disk_that_does_not_respond(tmp_path: Path) -> None:
    journal, writer = _written(tmp_path)
    writer._write(last=False)
    followed = open_run(tmp_path)
    (tmp_path / JOURNAL_NAME).rename(tmp_path / "away")
    time.sleep(3 * opened_run.POLL_SECONDS)
    assert followed.status == "running"
    (tmp_path / "away").rename(tmp_path / JOURNAL_NAME)
    journal.add([_log("later", 1.0)])
    writer._write(last=False)
    until(lambda: followed.logs(0) == ["later"], seconds=20)


def test_a_follower_continues_from_the_position_of_an_undone_append(tmp_path: Path) -> None:
    """After a disk error, the same events are written again to the same position."""
    journal, writer = _written(tmp_path)
    writer._write(last=False)
    file = tmp_path / JOURNAL_NAME
    before = file.read_bytes()
    journal.append(WarningAdded("again"))
    journal.add([Record(0, START + 1, MetricEvent({"loss": 1.0}, 0))])
    writer._write(last=False)
    whole = file.read_bytes()
    reader = _reader(file)
    for content in (before, whole):
        with file.open("r+b") as stream:
            stream.write(content)
            stream.truncate()
        reader.read_file()
    assert reader.journal.state.warnings == ("again",)
    assert reader.journal.store.series("loss").steps.tolist() == [0]


def test_held_ranks_are_released_if_their_journal_is_deleted(tmp_path: Path) -> None:
    """No event reports the release, so attached kernels must notice that the process of the run has exited."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        journal = Journal()
        identity = asdict(replace(this_process(), pid=process.pid, started=0))
        header = run_folder.new_header("made", 1, int, (), LaunchConfig(), START) | {"process": identity}
        (tmp_path / "run").mkdir()
        writer = RunWriter(tmp_path / "run", header, journal)
        journal.replay(make_run()._internals.journal.records)
        for event in (
            StopAdvanced("settling"), StopAdvanced("held"), FailuresRecorded([]), AttemptEnded("failed"),
            RunEnded("failed", "WorkerError", "it failed"),
        ):  # fmt: skip
            journal.append(event)
        writer._write(last=False)
        held = open_run(tmp_path / "run")
        assert held.held
        shutil.rmtree(tmp_path / "run")
        time.sleep(3 * opened_run.POLL_SECONDS)
        assert held.held
        process.communicate()
    until(lambda: not held.held, seconds=20)
    held.stop()
    assert held.status == "failed"


@pytest.mark.parametrize("thinned", [False, True])
def test_the_progress_through_an_epoch_matches_the_live_run(tmp_path: Path, *, thinned: bool) -> None:
    """The journal contains only the last step event of each period."""
    journal, writer = _written(tmp_path)
    for epoch in range(3):
        journal.add([Record(0, START + epoch, EpochEvent(epoch, 40))])
        for step in range(40 if epoch < 2 else 15):
            journal.add([Record(0, START + epoch, ProgressEvent(epoch * 40 + step + 1, None, "step"))])
            if step % 7 == 0:
                writer._write(last=False)
    writer._write(last=False)
    if thinned:
        writer._file.thin()
    found = open_run(tmp_path)._internals.store.epochs
    assert found == journal.store.epochs
    assert (found[0].number, found[0].done) == (2, 15)


_METRICS = 24 * 3600 * 10


def test_a_day_of_metrics_stays_within_the_documented_bound() -> None:
    """The bound follows from the data that is written between two thinnings, and the data that remains after each."""
    records = [
        Record(0, START + step / 10 + 0.123456, MetricEvent({"train/loss": 1 / (step + 3)}, step))
        for step in range(_METRICS - 1_000, _METRICS)
    ]
    each = len(b"".join(journal_format.encode_records(records))) / len(records)
    whole = each * _METRICS
    left = journal_file.KEPT_POINTS * journal_reader._POINT_BYTES + 2 * journal_file.KEPT_LOG_BYTES
    assert left < 0.6 * journal_file.MAX_JOURNAL_BYTES, "thinning makes room for hours of metrics"
    period = run_writer.PERIOD * 10 * each
    assert min(whole, journal_file.MAX_JOURNAL_BYTES) + period < 64_000_000 + run_writer._WRITE_BYTES
    guide = Path(__file__).parents[3] / "docs" / "guides" / "kept_runs.md"
    assert "limited to 64 MB plus one write" in guide.read_text(encoding="utf-8")


@pytest.mark.nightly
def test_a_day_of_metrics_as_written(tmp_path: Path) -> None:
    journal, writer = _written(tmp_path)
    largest = 0
    for begin in range(0, _METRICS, 1_000):
        journal.add([
            Record(0, START + step / 10, MetricEvent({"train/loss": 1 / (step + 3)}, step))
            for step in range(begin, begin + 1_000)
        ])  # fmt: skip
        writer._write(last=False)
        largest = max(largest, (tmp_path / JOURNAL_NAME).stat().st_size)
    assert largest < 64_000_000 + run_writer._WRITE_BYTES
    opened = open_run(tmp_path)
    assert opened.metrics["train/loss"].steps[[0, -1]].tolist() == [0, _METRICS - 1]


def test_a_deleted_journal_is_rewritten_with_the_events_of_ranks(tmp_path: Path) -> None:
    journal, writer = _written(tmp_path)
    first = [CheckpointEvent("/made", START), TraceEvent("/trace.json", 5), EpochEvent(1)]
    then: list[Event] = [ProgressEvent(3, 9), CheckpointEvent("/later", START)]
    journal.add([Record(0, START + 1, event) for event in first])
    writer._write(last=False)
    writer.file.unlink()
    journal.add([Record(0, START + 2, event) for event in then])
    writer._write(last=False)
    found = read_journal(writer.file)
    assert [record.event for record in found.latest.values()] == [*first, *then]
    assert [each.path for each in found.journal.store.checkpoints] == ["/made", "/later"]


def test_a_new_journal_with_the_inode_of_a_deleted_one_is_read_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_reader, "_identity", lambda _: (1, 1))
    journal, writer = _written(tmp_path)
    journal.add([Record(0, START + step, MetricEvent({"loss": 1.0}, step)) for step in range(100)])
    writer._write(last=False)
    reader = _reader(writer.file)
    writer.file.unlink()
    journal.add([Record(0, START + step, MetricEvent({"loss": 1.0}, step)) for step in range(100, 1000)])
    writer._write(last=False)
    assert writer.file.stat().st_size > reader.contents.end
    reader.read_file()
    assert reader.journal.store.last_step[0] == 999
