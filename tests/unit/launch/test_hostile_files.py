"""Malicious run files. Opening one gives a run or raises an error that names the file, and takes little memory."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import BrokenRunError, Run, open_run, runs
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch.kept import journal_format, run_folder
from notebook_accelerate.launch.kept.journal_format import JOURNAL_NAME
from notebook_accelerate.launch.state.rank_result import RankResult
from notebook_accelerate.launch.state.run_events import (
    AttemptEnded,
    FailuresRecorded,
    NoteAdded,
    RankExited,
    RankFailed,
    RankReturned,
    RunEnded,
    RunStalled,
    WarningAdded,
)
from notebook_accelerate.telemetry import (
    CheckpointEvent,
    DeviceMemoryEvent,
    DeviceUseEvent,
    DroppedEvent,
    EpochEvent,
    ExceptionInfo,
    FrameInfo,
    LogEvent,
    MetricEvent,
    ProgressEvent,
    RankFailure,
    ResourceEvent,
    StepTimeEvent,
    TraceEvent,
)
from notebook_accelerate.telemetry.automatic_metrics import AutomaticMetricEvent
from notebook_accelerate.telemetry.sharding import ShardReport, ShardSizes
from notebook_accelerate.telemetry.store import Record
from tests.support.odd_values import with_odd_values
from tests.support.runs import START, make_run


def rows_of_a_run() -> list[list[Any]]:
    """Return the rows of a failed run, with events of every kind."""
    frame = FrameInfo("/tmp/ipykernel_1/2.py", 3, "train", "raise ValueError")
    failure = RankFailure(1, "exception", START + 2, "ValueError: x", (ExceptionInfo("ValueError", "x", (frame,), ""),))
    sizes = {kind: ShardSizes(100, 50, ("dp",)) for kind in ("parameters", "gradients")}
    shards = ShardReport("FSDP", "FULL_SHARD", {"dp": 2, "tp": 1}, {"dp": 0, "tp": 0}, sizes)
    ranks = [
        MetricEvent({"loss": 1.0, "accuracy": 0.5}, 1), AutomaticMetricEvent({"auto/loss": 1.0}, 1),
        LogEvent("stdout", "a\nb"), ProgressEvent(3, 10, "epoch"), ProgressEvent(3), EpochEvent(0, 5),
        ResourceEvent(50.0, 1 << 30), DeviceMemoryEvent("cuda:0", 1, 2, 3, 4, "H100", "a"),
        DeviceUseEvent("a", 50.0, 1, 2), StepTimeEvent({"forward": 0.05}, 3, 3), DroppedEvent(3),
        TraceEvent("/tmp/trace.json", 300), CheckpointEvent("/tmp/checkpoint", START + 1), shards.event(),
    ]  # fmt: skip
    run = [
        NoteAdded("a note"), WarningAdded("a warning"), RunStalled(START + 1, "rank 1 waits"),
        RankReturned(0, RankResult(int)), RankExited(0, "succeeded", "exit 0"), RankFailed(failure),
        RankExited(1, "failed", "exit 1"), FailuresRecorded([failure]), AttemptEnded("failed"),
        RunEnded("failed", "WorkerError", "rank 1 failed"),
    ]  # fmt: skip
    records = [
        *make_run()._internals.journal.records,
        *(Record(rank, START + 1, event) for event in ranks for rank in (0, 1)),
    ]
    records += [Record(-1, START + 2, event) for event in run]
    return [json.loads(json.dumps(journal_format.row_of(record))) for record in records]


def header() -> dict[str, Any]:
    return run_folder.new_header("made", 1, int, (), LaunchConfig(), START)


def write(folder: Path, rows: list[Any], head: dict[str, Any], *frames: bytes) -> Path:
    folder.mkdir()
    found = [journal_format.encode_frame(head), *(journal_format.encode_frame([row]) for row in rows), *frames]
    (folder / JOURNAL_NAME).write_bytes(journal_format.MAGIC + b"".join(found))
    return folder


# ---- unexpected values


def mutated(rng: random.Random, rows: list[Any], head: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return a copy in which some values are replaced and a row may be moved or repeated."""
    rows, head = with_odd_values(rng, [rows, head], 2)
    if rng.random() < 0.3:
        index = rng.randrange(len(rows))
        rows.insert(rng.randrange(len(rows)), rows.pop(index) if rng.random() < 0.5 else rows[index])
    return rows, head


def use(run: Run) -> None:
    """Use a run as users and views would."""
    report = run.report()
    for text in (report.text, report.html, repr(run), str(run.logs()), str(run.ranks), str(run.plan), str(run.error)):
        text.encode()
    for series in (*run.metrics.values(), *run.automatic_metrics.values()):
        series.to_pandas()
    if panel := run.panel():
        panel.close()


@pytest.mark.parametrize("seed", range(8))
def test_odd_values_raise_one_error_or_give_a_run(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows, head, opened = rows_of_a_run(), header(), 0
    use(open_run(write(tmp_path / "unchanged", rows, head)))
    for number in range(60):
        folder = write(tmp_path / str(number), *mutated(rng, rows, head))
        try:
            run = open_run(folder)
        except BrokenRunError as error:
            assert str(folder / JOURNAL_NAME) in str(error)  # noqa: PT017 - most of them open
        else:
            opened += 1
            use(run)
    table = runs(tmp_path)
    assert len(table) == 61
    repr(table).encode()
    table._repr_html_().encode()
    table.to_pandas()
    assert 10 < opened < 60


@pytest.mark.parametrize("seed", range(4))
def test_odd_summaries_still_give_a_table(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    summary = {
        "format": 1, "name": "made", "function": "train", "status": "failed", "started": START, "ended": START + 2,
        "ranks": 2, "config": {"save": "runs"}, "arguments": {"rate": 1.0}, "commit": "abc", "dirty": False,
        "metrics": {"loss": 1.0}, "message": "", "continues": ["earlier"],
    }  # fmt: skip
    for number in range(50):
        folder = write(tmp_path / str(number), rows_of_a_run(), header())
        (folder / run_folder.SUMMARY_NAME).write_text(json.dumps(with_odd_values(rng, summary)))
    table = runs(tmp_path)
    repr(table).encode()
    table._repr_html_().encode()
    table.to_pandas()
    assert len(table) == 50


# ---- small files that would take hours, or all memory, without bounds


def _planned(count: int) -> list[Any]:
    rows = rows_of_a_run()[:2]
    rows[1][3]["count"] = count
    return rows


def _restarts(count: int, restarts: int) -> list[Any]:
    ends = [
        ["AttemptStarted", -1, START, {"number": 0}],
        ["AttemptEnded", -1, START, {"outcome": "", "restarts": True}],
    ]
    return [*_planned(count), *(ends * restarts)]


def _frames(text: bytes, count: int) -> list[bytes]:
    """Return this many frames, all of which contain the same JSON."""
    lengths = struct.pack("<II", len(text), 0)
    return [lengths + struct.pack("<I", zlib.crc32(text, zlib.crc32(lengths))) + text] * count


COSTLY: dict[str, Callable[[], tuple[list[Any], dict[str, Any], list[bytes]]]] = {
    "a hundred million ranks": lambda: (_planned(100_000_000), header(), []),
    "many ranks": lambda: (_planned(journal_format.MAX_RANKS), header(), []),
    "many ranks, planned often": lambda: (_planned(16_000) + _planned(16_000)[1:] * 2000, header(), []),
    "many ranks that restart": lambda: (_restarts(16_000, 5_000), header(), []),
    "many notes": lambda: (_planned(2) + [["NoteAdded", -1, START, {"text": "x"}]] * 60_000, header(), []),
    "many warnings": lambda: (
        _planned(2) + [["WarningAdded", -1, START, {"text": str(n)}] for n in range(60_000)], header(), [],
    ),
    "lists of lists": lambda: (_planned(2), header(), _frames(b'{"kind":"x","a":[' + b"[]," * 900_000 + b"0]}", 3)),
    "unknown sections": lambda: (
        _planned(2), header(), [journal_format.encode_frame({"kind": f"x{n}", "a": [[]] * 60_000}) for n in range(10)],
    ),
    "a deep header": lambda: (_planned(2), {**header(), "cells": json.loads("[" * 900 + "]" * 900)}, []),
    "ranks that log": lambda: (
        _planned(2) + [["LogEvent", n % 2**20, START, {"stream": "stdout", "text": "x"}] for n in range(30_000)],
        header(), [],
    ),
    "many metrics": lambda: (
        _planned(2) + [["MetricEvent", n % 50, START, {"values": {str(n): 1.0}, "step": 1}] for n in range(30_000)],
        header(), [],
    ),
    "a mesh of all": lambda: (
        [*_planned(2), [
            "ShardingEvent", 0, START,
            {"strategy": "x", "variant": "", "axes": {"a": 10**9, "b": 10**9}, "place": {"a": 0, "b": 0}, "held": {}},
        ]],
        header(), [],
    ),
}  # fmt: skip
"""Journals of less than 10 MiB, by defect."""

_READ = """
import gc, json, sys, time
from pathlib import Path
from notebook_accelerate import BrokenRunError, open_run
import numpy

def memory(which):
    (line,) = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(which)]
    return int(line.split()[1]) >> 10

for name in sys.argv[1:]:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the highest use is counted from here
    before, begin, problem = memory("VmRSS"), time.process_time(), ""
    try:
        run = open_run(name)
        repr(run.report()), run.report().html
    except BrokenRunError as error:
        problem = str(error)
    print(json.dumps([Path(name).name, time.process_time() - begin, memory("VmHWM") - before, problem]), flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, to measure memory")
def test_small_files_cost_little(tmp_path: Path) -> None:
    """With bounds, this takes seconds and a few hundred MB. Without them, it would take hours and gigabytes."""
    for name, make in COSTLY.items():
        (tmp_path / name).mkdir()
        rows, head, frames = make()
        folder = write(tmp_path / name / name, [], head, *journal_format.encode_rows(rows), *frames)
        assert (folder / JOURNAL_NAME).stat().st_size < 10 << 20
    command = [sys.executable, "-c", _READ, *(str(tmp_path / name / name) for name in COSTLY)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=500)
    found = {name: rest for name, *rest in map(json.loads, done.stdout.splitlines())}
    print("\n".join(map(str, found.items())))
    assert found.keys() == COSTLY.keys()
    for name, (seconds, megabytes, problem) in found.items():
        assert seconds < 30, name
        assert megabytes < 500, name
        assert not problem or JOURNAL_NAME in problem


# ---- paths that are not regular files


def test_opening_something_that_is_not_a_regular_file_does_not_block(tmp_path: Path) -> None:
    write(tmp_path / "good", rows_of_a_run(), header())
    for name in ("pipe", "zero", "folder", "loop"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe" / JOURNAL_NAME)
    (tmp_path / "zero" / JOURNAL_NAME).symlink_to("/dev/zero")
    (tmp_path / "folder" / JOURNAL_NAME).mkdir()
    (tmp_path / "loop" / JOURNAL_NAME).symlink_to(JOURNAL_NAME)
    assert {row.name: row.status for row in runs(tmp_path)} == {
        "made": "failed", "pipe": "broken", "zero": "broken", "folder": "broken", "loop": "broken",
    }  # fmt: skip
    for name in ("pipe", "zero", "folder", "loop"):
        for path in (tmp_path / name, tmp_path / name / JOURNAL_NAME):
            with pytest.raises((BrokenRunError, FileNotFoundError), match=str(tmp_path / name)):
                open_run(path)


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "x" * 5000, "a/" + "x" * 5000, "a\0b", "\ud800"])
def test_an_impossible_path_raises_one_error(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (open_run, runs):
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            call(name)
        assert len(str(caught.value)) < 500
        assert str(caught.value).encode()
