"""Streaming a run's records to an attached kernel, from any position. Each record is sent once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch.detached import control_service
from notebook_accelerate.launch.detached.control_service import RecordStream
from notebook_accelerate.launch.kept import run_folder
from notebook_accelerate.launch.kept.journal_reader import JournalReader
from notebook_accelerate.launch.kept.run_writer import RunWriter
from notebook_accelerate.launch.run import Run
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.launch.state.run_events import WarningAdded
from notebook_accelerate.telemetry import CheckpointEvent, LogEvent, MetricEvent
from notebook_accelerate.telemetry.store import Record
from tests.support.runs import START, make_run


def _step(number: int) -> list[Record]:
    time = START + 1 + number
    return [Record(0, time, MetricEvent({"loss": 0.5}, number)), Record(0, time, LogEvent("stdout", f"line {number}"))]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a run that is kept in a folder."""
    made = make_run()
    writer = RunWriter(tmp_path, run_folder.new_header("made", 1, int, (), LaunchConfig(), START), Journal())
    made.folder, made._internals.journal_file = tmp_path, writer.file
    return made


def _reader(run: Run) -> JournalReader:
    assert run._internals.journal_file is not None
    return JournalReader(run._internals.journal_file, lambda rank, _: RankResult(int, rank=rank))


def _receive(stream: RecordStream, reader: JournalReader) -> None:
    """Bring a reader up to date, as the service does for an attached kernel."""
    stream.advance(hold=True)
    if not stream.holds(reader.restart()):
        found = stream.history()
        assert found is not None
        position, parts = found
        for part in parts:
            reader.take_history(0, part)
        reader.take_history(position, b"")
    while (held := stream.after(reader.position)) is not None:
        reader.take_records(*held)


def _check(reader: JournalReader, steps: int) -> None:
    store = reader.journal.store
    assert store.series("loss").steps.tolist() == list(range(steps))
    assert [line.text for line in store.log_lines(0)] == [f"line {number}" for number in range(steps)]


def test_a_reader_receives_each_record_once_while_others_are_appended(run: Run) -> None:
    stream, reader = RecordStream(run), _reader(run)

    def append() -> None:
        for number in range(2000):
            run._internals.journal.add(_step(number))
            if number % 100 == 0:
                run._internals.journal.append(WarningAdded(f"warning {number}"))

    thread = threading.Thread(target=append)
    thread.start()
    late = None
    while thread.is_alive():
        _receive(stream, reader)
        if late is None and reader.journal.store.last_step.get(0, 0) > 500:
            _receive(stream, late := _reader(run))
    for each in (reader, late or _reader(run)):
        _receive(stream, each)
        _check(each, 2000)
        assert each.journal.state.warnings == tuple(f"warning {number}" for number in range(0, 2000, 100))


def test_a_reader_that_falls_behind_misses_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "MAX_HELD_BYTES", 1000)
    stream, slow, fast = RecordStream(run), _reader(run), _reader(run)
    for number in range(100):
        run._internals.journal.add(_step(number))
        run._internals.journal.add([Record(0, START + 1 + number, CheckpointEvent(f"/{number}", START))])
        _receive(stream, fast)
        if number == 20:
            _receive(stream, slow)
    assert not stream.holds(slow.position)
    _receive(stream, slow)
    for each in (slow, fast):
        _check(each, 100)
        assert [event.path for event in each.journal.store.checkpoints] == [f"/{number}" for number in range(100)]


def test_a_connection_that_breaks_during_the_history_starts_it_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_service, "PART_BYTES", 100)
    stream, reader = RecordStream(run), _reader(run)
    for number in range(1000):
        run._internals.journal.add(_step(number))
    found = stream.history()
    assert found is not None
    for _ in range(3):
        reader.take_history(0, next(found[1]))
    _receive(stream, reader)
    _check(reader, 1000)
