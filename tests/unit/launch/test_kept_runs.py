"""Kept runs on disk: reopened, damaged, malicious and thinned journals, and their tables and exports."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import pytest

import notebook_accelerate
from notebook_accelerate import BrokenRunError, RunLostError, WorkerError, notebook_launcher, open_run, runs
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.errors import LaunchError, NotebookAccelerateError, ResultsFreedError, SerializationError
from notebook_accelerate.launch.kept import journal_file, journal_format, journal_reader, run_folder
from notebook_accelerate.launch.kept.journal_format import JOURNAL_NAME
from notebook_accelerate.launch.kept.journal_reader import read_journal
from notebook_accelerate.launch.kept.run_writer import RunWriter
from notebook_accelerate.launch.report.run_report import environment_rows
from notebook_accelerate.launch.resumption import newest_complete_checkpoint
from notebook_accelerate.launch.run import rebuild, without_results
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.launch.state.run_events import NoteAdded, RunStalled
from notebook_accelerate.launch.state.run_state import Stall
from notebook_accelerate.telemetry import CheckpointEvent, LogEvent, MetricEvent, ProgressEvent
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.widgets.actions import stopping
from notebook_accelerate.widgets.live_panel import close_all
from notebook_accelerate.widgets.runs_table import RunsTable
from tests.support.runs import START, feed, launch, make_run


def train(rate: float, api_key: str, fails: bool) -> dict[str, Any]:
    from notebook_accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    for step in range(20):
        accelerator.log({"loss": rate / (step + 1)}, step=step)
        print("step", step)
    if fails and accelerator.process_index == 1:
        raise RuntimeError("the second rank")
    return {"rank": accelerator.process_index, "many": b"x" * (3 << 20)}


def keep(folder: Path, **options: Any) -> Path:
    """Launch a run that is kept, and return its folder."""
    kept = launch(int, save=folder / "runs", **options).folder
    assert kept is not None
    return kept


def write_journal(folder: Path, records: list[Record], name: str = "made") -> Path:
    """Write a kept run with these records of ranks. It looks as if its processes were still running."""
    folder.mkdir(parents=True, exist_ok=True)
    made = make_run()
    header = run_folder.new_header(name, 1, train, (), LaunchConfig(), START)
    file = journal_file.JournalFile(folder / JOURNAL_NAME)
    frames = [
        journal_format.encode_frame(header),
        *journal_format.encode_records([*made._internals.journal.records, *records]),
    ]
    file.append(b"".join(frames))
    return folder


def change_process(file: Path, **changes: Any) -> None:
    """Change what a journal says about the process that wrote it."""
    content = file.read_bytes()
    frame, end = next(iter(journal_format.read_frames(content[8:])))
    frame.content["process"] |= changes
    file.write_bytes(content[:8] + journal_format.encode_frame(frame.content) + content[8 + end :])


def metric(step: int, rank: int = 0, name: str = "loss") -> Record:
    return Record(rank, START + step, MetricEvent({name: step / 8}, step))


def problem_of(path: Path) -> str:
    """Open a kept run and write its report. Return the text of the error, or "" if there is none."""
    try:
        str(open_run(path).report())
    except BrokenRunError as error:
        return str(error)
    return ""


# ---- what a kept run provides


def test_a_kept_run_opens_as_the_same_run(tmp_path: Path) -> None:
    arguments = (0.5, "sesame", False)
    run = launch(train, *arguments, save=tmp_path / "runs", name="first", env={"A": "word"})
    assert run.name == "first"
    assert run.folder is not None
    assert run.folder.parent == tmp_path / "runs"
    opened = open_run(run.folder)
    assert (opened.name, opened.status, opened.folder) == ("first", "succeeded", run.folder)
    assert (opened.started, opened.ended, opened.attempts) == (run.started, run.ended, run.attempts)
    for rank in (0, 1):
        ours, theirs = opened.metrics["loss"].rank(rank), run.metrics["loss"].rank(rank)
        assert [column.tolist() for column in ours[1:5]] == [column.tolist() for column in theirs[1:5]]
        assert opened.logs(rank) == run.logs(rank)
    assert [info.pid for info in opened.ranks] == [info.pid for info in run.ranks]
    assert [result["rank"] for result in opened.results] == [0, 1]
    assert [len(result["many"]) for result in opened.results] == [3 << 20] * 2
    assert opened.wait(0)
    opened.stop()
    tables = [[line.split()[:3] for line in str(each.report()).splitlines()[2:12]] for each in (opened, run)]
    assert tables[0] == tables[1]
    text = b"".join(path.read_bytes() for path in run.folder.iterdir() if "result" not in path.name)
    assert b"sesame" not in text
    assert b"word" not in text
    assert {thread.name for thread in threading.enumerate()}.isdisjoint({"notebook-accelerate-save"})

    with pytest.raises(WorkerError):
        launch(train, 0.25, "sesame", True, save=tmp_path / "runs")
    failed = notebook_accelerate.runs()[-1]
    assert failed.folder is not None
    again = open_run(failed.folder / JOURNAL_NAME)
    assert (again.status, [failure.rank for failure in again.failures]) == ("failed", [1])
    assert again.failures[0].chain[-1].frames[-1].source == 'raise RuntimeError("the second rank")'
    assert str(again.error) == str(failed.error).replace(f"run {failed.id}", f"run {failed.id}")
    with pytest.raises(WorkerError, match="the second rank"):
        _ = again.results

    table = runs(tmp_path / "runs")
    assert [(row.name, row.status, row.ranks) for row in table] == [
        ("first", "succeeded", 2), (failed.name, "failed", 2),
    ]  # fmt: skip
    assert [row.metrics for row in table] == [{"loss": 0.5 / 20}, {"loss": 0.25 / 20}]
    assert table[0].arguments == {"rate": 0.5, "api_key": "***", "fails": False}
    assert table[0].config["env"] == {"A": "***"}
    assert table[0].seconds == pytest.approx(run.elapsed)
    assert "first" in repr(table)
    assert ">first</th>" in table._repr_html_()
    frame = table.to_pandas()
    assert frame["loss"].tolist() == [0.5 / 20, 0.25 / 20]
    assert [each.name for each in table.open()] == ["first", failed.name]


def test_no_secret_of_a_call_is_kept_or_shown(tmp_path: Path) -> None:
    def call(openai_key: str, options: dict[str, Any], tokenizer: str, max_tokens: int, key_frames: int) -> None:
        pass

    settings = {"accessToken": "sesame", "wandb_key": {"first": "sesame"}, "url": "https://host/?access_key=sesame"}
    arguments = ("sesame", settings, "bert", 512, 8)
    run = notebook_launcher(call, arguments, 1, start_method="inline", save=tmp_path / "runs", panel=False)
    assert run.arguments == {
        "openai_key": "***", "options.accessToken": "***", "options.wandb_key": "***",
        "options.url": "https://host/?access_key=***", "tokenizer": "bert", "max_tokens": 512, "key_frames": 8,
    }  # fmt: skip
    assert run.folder is not None
    files = {path.name: path.read_bytes() for path in run.folder.iterdir() if "result" not in path.name}
    assert len(files) == 2, "the journal and the summary"
    table = RunsTable([run])
    kept = runs(tmp_path / "runs")
    texts = [str(table.rows), repr(kept), kept._repr_html_(), run.report().html, run.report().text]
    table.close()
    assert all("sesame" not in text for text in [*texts, *map(repr, files.values())])
    assert kept[0].arguments == run.arguments


def test_the_variable_sets_the_folder_and_a_file_in_its_place_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTEBOOK_ACCELERATE_RUNS", str(tmp_path / "all"))
    run = notebook_launcher(int, (), num_processes=1, start_method="inline", panel=False)
    assert run.folder is not None
    assert run.name == f"int-{run.id}"
    opened = open_run(run.folder)
    assert opened.status == "succeeded"
    with pytest.raises(ResultsFreedError, match="inline"):
        _ = opened.results
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match=r"cannot be kept in .*file"):
        launch(int, save=tmp_path / "file")
    with pytest.raises(ValueError, match="name='a b' is not allowed"):
        LaunchConfig(name="a b")
    with pytest.raises(FileNotFoundError, match=r"is not a kept run"):
        open_run(tmp_path)


def test_a_run_whose_writer_exited_is_lost(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    folder = write_journal(tmp_path / "runs" / "made", [metric(step) for step in range(5)])
    alive = open_run(folder)
    assert alive.status == "running"
    with pytest.raises(NotebookAccelerateError, match="read-only"):
        alive.stop()
    assert not stopping(alive, None).action.enabled
    table = RunsTable([alive])
    assert [action.id for action in table.table.rows[0].actions] == ["open"], "only its own notebook can stop it"
    table.close()
    close_all(table.widget)
    del table, alive
    gc.collect()  # Only the garbage collector frees these: the table, its widgets and the run refer to each other.
    assert runs(tmp_path / "runs")[0].status == "running"
    change_process(folder / JOURNAL_NAME, pid=int(done.stdout))
    lost = open_run(folder)
    assert (lost.status, lost.ended, lost.wait()) == ("lost", START + 4, True)
    assert [(info.state, info.exit) for info in lost.ranks] == [("lost", "lost")] * 2
    assert lost.metrics["loss"].values.tolist() == [step / 8 for step in range(5)]
    with pytest.raises(RunLostError, match="is gone and did not record an end"):
        _ = lost.results
    assert "lost" in str(lost.report())
    assert runs(tmp_path / "runs")[0].status == "lost"


def test_a_run_of_a_machine_that_was_restarted_is_lost(tmp_path: Path) -> None:
    folder = write_journal(tmp_path / "made", [metric(step) for step in range(5)])
    file = folder / JOURNAL_NAME
    change_process(file, machine="another boot")
    alive = open_run(folder)
    assert alive.status == "running", "another machine may have written it just now"
    del alive
    os.utime(file, (START, START))
    assert open_run(folder).status == "lost"


def test_a_run_rebuilt_from_an_unfinished_journal_is_finished() -> None:
    rebuilt = rebuild(LaunchConfig(), "train", make_run()._internals.journal.records)
    assert (rebuilt.status, rebuilt.wait()) == ("lost", True)


def test_tensorboard_reads_the_export(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    opened = open_run(write_journal(tmp_path / "made", [metric(step) for step in range(5)]))
    found = accumulator.EventAccumulator(str(opened.to_tensorboard(tmp_path / "events")))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(step, step / 8) for step in range(5)]


def test_without_tensorboard_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        make_run().to_tensorboard(tmp_path)


# ---- damaged or malicious files


def test_a_truncated_journal_opens_with_the_complete_records(tmp_path: Path) -> None:
    folder = write_journal(tmp_path / "made", [metric(0)])
    whole = (folder / JOURNAL_NAME).read_bytes()
    last = b"".join(journal_format.encode_records([metric(1), metric(2)]))
    for length in range(0, len(last), 7):
        (folder / JOURNAL_NAME).write_bytes(whole + last[:length])
        assert read_journal(folder / JOURNAL_NAME).journal.store.series("loss").steps.tolist() == [0]
    for tail in (b"\0" * 5000, last[:-1] + b"?"):
        (folder / JOURNAL_NAME).write_bytes(whole + tail)
        assert read_journal(folder / JOURNAL_NAME).journal.store.series("loss").steps.tolist() == [0]
    for length in range(0, len(whole), 11):
        (folder / JOURNAL_NAME).write_bytes(whole[:length])
        refused = problem_of(folder / JOURNAL_NAME)
        assert not refused or str(folder / JOURNAL_NAME) in refused


def test_damaged_journals_raise_one_error_that_names_the_file(tmp_path: Path) -> None:
    records = [metric(step) for step in range(50)] + [Record(1, START, LogEvent("stdout", "a\nb"))]
    folder = write_journal(tmp_path / "made", records)
    path = folder / JOURNAL_NAME
    whole = path.read_bytes() + b"".join(journal_format.encode_records([metric(51)]))
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        problem = problem_of(path)
        refused += bool(problem)
        assert not problem or str(path) in problem
    assert refused > 200


def frame_of(text: bytes, payload: bytes = b"") -> bytes:
    lengths = struct.pack("<II", len(text), len(payload))
    return lengths + struct.pack("<I", zlib.crc32(payload, zlib.crc32(text, zlib.crc32(lengths)))) + text + payload


HEADER: dict[str, Any] = {
    "kind": "header", "format": 1, "name": "x", "function": "f", "config": {}, "process": {}, "arguments": {},
}  # fmt: skip
HEADER_FRAME = json.dumps(HEADER).encode()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([HEADER_FRAME, b"[" * 30_000 + b"]" * 30_000], "is damaged"),  # Python 3.14 can parse this.
        ([b"[" * 100_000], "lists and objects"),
        ([b"{}"], "header"),
        ([b'[["RankPaused", -1, 1.0, {"rank": 0}]]'], "header"),
        ([HEADER_FRAME, b"17"], "section"),
        ([json.dumps({**HEADER, "format": 99}).encode()], "format 99"),
        ([json.dumps({**HEADER, "name": 3}).encode()], "name"),
        ([HEADER_FRAME, b'[["RunCreated", -1, 1.0, {"function_name": 3}]]'], "function_name"),
        ([HEADER_FRAME, b'[["RunCreated", -1, "soon", {"function_name": "f"}]]'], "time"),
        ([HEADER_FRAME, b'[["RunEnded", -1, 1.0, {"status": "fine"}]]'], "RunEnded"),
        ([HEADER_FRAME, b'[["RunCreated", 7, 1.0, {"function_name": "f"}]]'], "rank: 7"),
        ([HEADER_FRAME, b'[["RankPaused"]]'], "not an event"),
        ([HEADER_FRAME, b'[["RankReturned", -1, 1.0, {"rank": "a"}]]'], "rank"),
        ([HEADER_FRAME, b'{"kind":"points","name":"l","rank":0,"count":9}'], "points"),
        ([HEADER_FRAME, b'{"kind":"points","name":"l","rank":99999999,"count":0}'], "curve"),
        ([HEADER_FRAME], "no events"),
    ],
)
def test_hostile_frames_are_refused(tmp_path: Path, frames: list[bytes], why: str) -> None:
    path = tmp_path / JOURNAL_NAME
    path.write_bytes(journal_format.MAGIC + b"".join(map(frame_of, frames)))
    with pytest.raises(BrokenRunError) as caught:
        open_run(tmp_path)
    assert str(path) in str(caught.value)
    assert why.lower() in str(caught.value).lower()


def test_sizes_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    for head in (struct.pack("<III", 1 << 30, 0, 0), struct.pack("<III", 10, 1 << 31, 0)):
        path.write_bytes(journal_format.MAGIC + head + b"x" * 100)
        with pytest.raises(BrokenRunError, match="cannot have"):
            open_run(path)
    with path.open("r+b") as file:
        file.truncate(journal_reader.MAX_READ_BYTES + 1)
    with pytest.raises(BrokenRunError, match="at most"):
        open_run(path)
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(BrokenRunError, match="does not start with"):
        open_run(path)


class Harm:
    """An object whose pickle creates a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_pickles_of_other_users_run_only_when_results_are_read(tmp_path: Path) -> None:
    folder = keep(tmp_path)
    harm = pickle.dumps((pickle.dumps(Harm(tmp_path / "harmed")), []))
    journal = folder / JOURNAL_NAME
    content, changed = journal.read_bytes(), [journal_format.MAGIC]
    for frame, _ in journal_format.read_frames(content[8:]):
        for row in frame.content if isinstance(frame.content, list) else ():
            if row[0] == "RankReturned":
                row[3]["stored"] = {"bytes": len(harm), "crc32": zlib.crc32(harm)}
        changed.append(journal_format.encode_frame(frame.content, frame.payload))
    journal.write_bytes(b"".join(changed))
    for rank in (0, 1):
        (folder / f"result-{rank}.pickle").write_bytes(harm)
    opened = open_run(folder)
    report, table = opened.report(), runs(tmp_path / "runs")
    _ = repr(opened), repr(opened.ranks), str(report), report.html, opened.panel(), repr(table)
    without_results(opened)
    assert not (tmp_path / "harmed").exists()
    (folder / "result-1.pickle").write_bytes(harm[:-1] + b"?")
    with pytest.raises(SerializationError, match=r"result-1.pickle is not the result"):
        _ = opened.ranks[1].result
    _ = opened.ranks[0].result
    assert (tmp_path / "harmed").exists()


def test_one_odd_file_does_not_spoil_the_table(tmp_path: Path) -> None:
    for name, started in {"ages": 1e300, "nan": float("nan"), "good": START}.items():
        folder = write_journal(tmp_path / name, [], name)
        summary = {
            "name": name, "function": "f", "status": "succeeded", "started": started, "ended": started, "ranks": 1,
            "config": {}, "arguments": {}, "commit": "", "dirty": None, "metrics": {}, "message": "", "continues": [],
        }  # fmt: skip
        (folder / run_folder.SUMMARY_NAME).write_text(json.dumps(summary))
    os.mkfifo(write_journal(tmp_path / "pipe", [], "pipe") / run_folder.SUMMARY_NAME)  # Reading the pipe would block.
    table = runs(tmp_path)
    assert {row.name: row.status for row in table} == {
        "ages": "succeeded", "nan": "succeeded", "good": "succeeded", "pipe": "running",
    }  # fmt: skip
    assert "1970-01-12" in repr(table)
    assert "ages" in table._repr_html_()
    assert table.to_pandas()["name"].tolist() == [row.name for row in table]


def test_dependent_settings_are_read_together(tmp_path: Path) -> None:
    config = LaunchConfig(node_rank=1, num_nodes=3, min_nodes=2, rdzv_backend="c10d", tags=["a"])
    stored = run_folder.new_header("x", 1, int, (), config, START)["config"]
    assert run_folder.config_from(stored) == config.changed(tags=("a",))
    odd = {**stored, "rdzv_endpoint": 5, "start_method": {}, "added_later": 1}
    assert run_folder.config_from(odd).num_nodes == 3


def test_a_run_is_kept_if_the_working_folder_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    run = notebook_launcher(int, (), save=tmp_path / "runs", num_processes=1, start_method="inline", panel=False)
    assert open_run(run.folder or "").status == "succeeded"


def test_a_checkpoint_that_cannot_be_searched_for_is_ignored(tmp_path: Path) -> None:
    records = [Record(0, START, CheckpointEvent(path, START)) for path in (f"/{'x' * 5000}", "/a\0b")]
    assert newest_complete_checkpoint(open_run(write_journal(tmp_path / "made", records))) is None


def test_the_report_shows_the_machine_of_the_run(tmp_path: Path) -> None:
    folder = write_journal(tmp_path / "made", [])
    path = folder / JOURNAL_NAME
    frames = [frame for frame, _ in journal_format.read_frames(path.read_bytes()[8:])]
    here = str(os.cpu_count())
    assert ["processors", here] in environment_rows(open_run(folder))
    other = {**frames[0].content, "environment": {"python": "3.12.1 on Plan 9", "torch": "9.9", "processors": "4096"}}
    frames[0] = frames[0]._replace(content=other)
    path.write_bytes(journal_format.MAGIC + b"".join(journal_format.encode_frame(*frame) for frame in frames))
    opened = open_run(folder)
    for run in (opened, without_results(opened)):
        assert environment_rows(run)[1:4] == [["python", "3.12.1 on Plan 9"], ["torch", "9.9"], ["processors", "4096"]]
    assert "Plan 9" in opened.report().html


def test_every_event_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """This includes events of the run itself, such as a stall with its cause and a note."""
    records = [Record(-1, START, RunStalled(START, "rank 1 waits")), Record(-1, START, NoteAdded("a note"))]
    (run,) = [open_run(write_journal(tmp_path / "made", records))]
    assert run.stall == Stall(START, "rank 1 waits")
    assert run.notes == ["a note"]


# ---- deleting


def test_deleting_a_run_deletes_only_its_own_files(tmp_path: Path) -> None:
    run = launch(int, save=tmp_path / "runs")
    assert run.folder is not None
    (run.folder / "model.pt").touch()
    (run.folder / "result-9.pickle").touch()  # The run has only two ranks.
    (run.folder / "plots").mkdir()
    (run.folder / f"{JOURNAL_NAME}.new").touch()  # An interrupted write leaves such a file behind.
    run.delete()
    assert {path.name for path in run.folder.iterdir()} == {"model.pt", "result-9.pickle", "plots"}
    with pytest.raises(FileNotFoundError):
        run.delete()
    assert list(runs(tmp_path / "runs")) == []
    other = keep(tmp_path)
    open_run(other).delete()
    assert not other.exists()


@pytest.mark.parametrize("name", [JOURNAL_NAME, "copy.nbac"])
def test_a_journal_elsewhere_is_deleted_alone(tmp_path: Path, name: str) -> None:
    """A downloaded journal may be in a folder where other files happen to have names that runs use."""
    folder = keep(tmp_path)
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    shutil.copy(folder / JOURNAL_NAME, downloads / name)
    other = "another.txt" if name == JOURNAL_NAME else JOURNAL_NAME
    for each in ("thesis.txt", "result-0.pickle", "result-1.pickle", run_folder.SUMMARY_NAME, other):
        (downloads / each).write_text("mine")
    open_run(downloads / name).delete()
    assert sorted(path.name for path in downloads.iterdir()) == sorted(
        ["thesis.txt", "result-0.pickle", "result-1.pickle", run_folder.SUMMARY_NAME, other]
    )


def test_a_folder_that_was_not_created_for_the_run_is_kept(tmp_path: Path) -> None:
    first, again = keep(tmp_path, name="a-b.c"), keep(tmp_path, name="a-b.c")
    for name in ("downloads", "20260101-000000", f"{first.name}x", f"{again.name}-copy"):
        mine = tmp_path / name
        mine.mkdir()
        shutil.copy(first / JOURNAL_NAME, mine / JOURNAL_NAME)
        open_run(mine).delete()
        assert list(mine.iterdir()) == []
    # The folder may have been named in another time zone.
    numbered = again.rename(tmp_path / f"20260101-000000{first.name[15:]}-2")
    for each in (first, numbered):
        open_run(each).delete()
        assert not each.exists()


def test_a_run_behind_a_symbolic_link_is_deleted(tmp_path: Path) -> None:
    folder = keep(tmp_path)
    (tmp_path / "latest").symlink_to(folder)
    open_run(tmp_path / "latest").delete()
    assert not folder.exists()


def test_a_folder_is_deleted_while_its_last_file_is_being_written(tmp_path: Path) -> None:
    folder = keep(tmp_path)
    opened, summary = open_run(folder), folder / run_folder.SUMMARY_NAME
    content = summary.read_bytes()
    summary.unlink()
    writer = threading.Timer(0.5, journal_file.replace_file, (summary, content))
    writer.start()
    opened.delete()
    writer.join()
    assert not folder.exists()


# ---- bounds and kills


def test_points_without_a_step_keep_the_step_that_they_had_live(tmp_path: Path) -> None:
    journal = Journal()
    writer = RunWriter(tmp_path, run_folder.new_header("short", 1, train, (), LaunchConfig(), START), journal)
    journal.replay(make_run()._internals.journal.records)
    journal.add([Record(0, START, MetricEvent({"rate": 1.0}))])
    for step in range(1, 20):
        journal.add(
            [
                Record(0, START + step, ProgressEvent(step=step)),
                Record(0, START + step, MetricEvent({"loss": 1 / step})),
            ]
        )
    writer._write(last=False)
    opened = open_run(tmp_path)
    assert opened.metrics["loss"].steps.tolist() == journal.store.tail("loss", 0).steps.tolist() == [*range(1, 20)]
    assert opened.metrics["rate"].steps.tolist() == [-1], "no step was known yet"


def test_a_long_journal_is_thinned_and_keeps_its_extremes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_file, "MAX_JOURNAL_BYTES", 200_000)
    monkeypatch.setattr(journal_file, "KEPT_POINTS", 2_000)
    monkeypatch.setattr(journal_file, "KEPT_LOG_BYTES", 20_000)
    journal = Journal()
    writer = RunWriter(tmp_path, run_folder.new_header("long", 1, train, (), LaunchConfig(), START), journal)
    journal.replay(make_run()._internals.journal.records)
    sizes = []
    for step in range(20_000):
        value = 1e9 if step == 777 else step / 8
        journal.add([Record(0, START + step, MetricEvent({"loss": value}, step))])
        journal.add([Record(0, START + step, LogEvent("stdout", f"line {step}"))])
        if step % 500 == 499:
            writer._write(last=False)
            sizes.append((tmp_path / JOURNAL_NAME).stat().st_size)
    assert max(sizes) < 200_000 + 100_000
    assert sorted(sizes) != sizes, "the journal was thinned"
    opened = open_run(tmp_path)
    series = opened.metrics["loss"]
    assert series.thinned
    assert (series.values.max(), series.steps[0], series.steps[-1]) == (1e9, 0, 19_999)
    assert opened.logs(0)[-1] == "line 19999"
    assert [info.state for info in opened.ranks] == ["running", "running"]


_WRITES = """
import os, signal, sys
from pathlib import Path
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch.kept import journal_file, run_folder
from notebook_accelerate.launch.kept.run_writer import RunWriter
from notebook_accelerate.launch.state.journal import Journal
from notebook_accelerate.telemetry import MetricEvent
from notebook_accelerate.telemetry.store import Record
from tests.support.runs import START, make_run

journal_file.MAX_JOURNAL_BYTES, journal_file.KEPT_POINTS = 3000, 40
base, torn = Path(sys.argv[1]), sys.argv[2] == "torn"

def victim(step, folder, told):
    seen = 0
    write = os.write
    def change(kind):
        nonlocal seen
        seen += 1
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)
    def audited(event, arguments):
        if event in ("os.rename", "os.remove", "os.truncate") or (event == "open" and arguments[2] & os.O_CREAT):
            change(event)
    def counted(descriptor, data):
        nonlocal seen
        if descriptor != told:
            seen += 1
            if seen == step:
                write(descriptor, bytes(data)[: len(data) // 2 if torn else 0])
                os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, data)
    os.write = counted
    sys.addaudithook(audited)
    journal = Journal()
    writer = RunWriter(folder, run_folder.new_header("killed", 1, victim, (), LaunchConfig(), START), journal)
    journal.replay(make_run()._internals.journal.records)
    for number in range(12):
        journal.add([Record(0, START + number * 8 + i, MetricEvent({"loss": 1.0}, number * 8 + i)) for i in range(8)])
        writer._write(last=number == 11)
        write(told, b"%d\\n" % (number * 8 + 8))

step, code = 0, None
while code != 0:
    step += 1
    folder = base / str(step)
    folder.mkdir()
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        victim(step, folder, theirs)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as told:
        known = told.read().split()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    print(step, known[-1] if known else -1, flush=True)
"""


@pytest.mark.parametrize("torn", ["torn", "before"])
def test_a_journal_opens_after_a_kill_at_any_write(tmp_path: Path, torn: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WRITES, str(tmp_path), torn], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pairs = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(pairs) > 30, "there must be a step for each write and each change of the folder"
    thinned = 0
    for step, known in pairs:
        folder = tmp_path / str(step)
        if known < 0 and not (folder / JOURNAL_NAME).exists():
            continue
        if problem := problem_of(folder / JOURNAL_NAME):
            assert known < 0, f"killed at {step}: {problem}"
            continue
        opened = open_run(folder)
        steps = opened.metrics["loss"].steps.tolist() if "loss" in opened.metrics else []
        thinned += opened.metrics["loss"].thinned if steps else 0
        assert (opened.status, opened.wait()) == ("lost", True)
        if known > 0:
            assert steps[0] == 0
            assert steps[-1] >= known - 1, f"killed at {step}: step {known - 1} had been written"
    assert thinned, "some kills came after the journal had been thinned"


def test_a_disk_error_is_reported_once_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal()
    writer = RunWriter(tmp_path, run_folder.new_header("full", 1, train, (), LaunchConfig(), START), journal)
    journal.replay(make_run()._internals.journal.records)
    write, full = os.write, True

    def half(descriptor: int, data: Any) -> int:
        if full:
            write(descriptor, bytes(data)[:10])
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", half)
    for step in range(3):
        journal.add([metric(step)])
        writer._retry_at = 0.0
        writer._write(last=False)
    assert len([text for text in journal.state.warnings if "No space left" in text]) == 1
    full = False
    writer._retry_at = 0.0
    writer._write(last=False)
    assert open_run(tmp_path).metrics["loss"].steps.tolist() == [0, 1, 2]


def test_an_opened_run_supports_views(tmp_path: Path) -> None:
    """A view can follow an opened run that is still running, like any other run."""
    opened = open_run(write_journal(tmp_path / "made", [metric(0)]))
    seen: list[Any] = []
    opened._internals.journal.subscribe(seen.extend)
    feed(opened, MetricEvent({"loss": 3.0}, 1), at=START + 9)
    assert [record.event.values for record in seen] == [{"loss": 3.0}]
    assert signal.getsignal(signal.SIGINT) is not None
