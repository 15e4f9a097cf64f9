"""Views of kept runs: a table with the latest runs in one plot, and the panel of a failed run, which can resume it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from notebook_accelerate import notebook_launcher, open_run, runs
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.launch import run_registry
from notebook_accelerate.launch.kept import journal_file, journal_format, run_folder
from notebook_accelerate.launch.report.document import Cell
from notebook_accelerate.telemetry import MetricEvent
from notebook_accelerate.telemetry.store import Record
from notebook_accelerate.widgets.live_panel import close_all
from notebook_accelerate.widgets.run_panel import RunPanel
from notebook_accelerate.widgets.runs_table import RunsTable
from tests.faults.test_kept_runs import check_history, train
from tests.support.runs import START, end, make_run
from tests.support.waiting import until

if TYPE_CHECKING:
    from notebook_accelerate.launch.output.replaceable_outputs import Output


def _keep(folder: Path, name: str, rate: float, begin: float = 0.0) -> None:
    """Write a kept run that started this many seconds after START and has finished."""
    folder.mkdir(parents=True)
    run = make_run(started=START + begin)
    metrics = [Record(0, START + begin + step, MetricEvent({"loss": rate / (step + 1)}, step)) for step in range(30)]
    end(run, at=START + begin + 30)
    config = LaunchConfig(name=name, save=folder.parent, tags=("sweep",))
    frames = [journal_format.encode_frame(run_folder.new_header(name, 1, train, (), config, START))]
    records = run._internals.journal.records
    frames += journal_format.encode_records([*records[:-4], *metrics, *records[-4:]])
    journal_file.JournalFile(folder / journal_format.JOURNAL_NAME).append(b"".join(frames))


def test_ten_kept_runs_are_overlaid(tmp_path: Path) -> None:
    for number in range(10):
        _keep(tmp_path / f"run-{number}", f"rate-{number}", 1.0 + number)
    opened = runs(tmp_path).open()
    assert [run.status for run in opened] == ["succeeded"] * 10
    table = RunsTable(opened)
    try:
        assert [row[0] for row in table.rows[1:]] == [f"{run.id} · {run.name}" for run in opened[::-1]]
        assert "save" not in table.rows[0]
        assert table.plot.order == [f"{run.function_name} {run.id} · {run.name}" for run in opened]
        firsts = [row.cells[0] for row in table.table.rows]
        assert [cell.colour for cell in firsts if isinstance(cell, Cell)] == list(range(9, -1, -1))
        (image,) = re.findall(r"<img[^>]*>", str(table.html))
        assert all(f"{run.function_name} {run.id} · {run.name}: " in image for run in opened)
        assert (str(table.html).count("● "), str(table.html).count("○ ")) == (8, 2)
    finally:
        table.close()
        close_all(table.widget)


class _Output:
    """An output of a cell that can show live widgets."""

    cell = notebook_cell = ""
    interactive = True

    def show(self, _: object) -> None:
        return

    show_static = end = show


def test_the_kept_runs_of_a_folder_are_shown_like_the_runs_of_a_kernel(tmp_path: Path) -> None:
    for number in range(18):
        _keep(tmp_path / f"run-{number:02}", "same" if number < 2 else f"rate-{number}", 1.0 + number, number)
    (tmp_path / "run-17" / journal_format.JOURNAL_NAME).write_bytes(b"broken")
    kept = runs(tmp_path)
    assert kept[0].status == "broken", "a run whose launch time is unknown comes first"
    labels = ["run-17", "run-00", "run-01", *(f"rate-{number}" for number in range(2, 17))]
    assert kept.labels == labels, "runs with the same name are labelled by folder"
    assert repr(kept).splitlines()[2].split()[:2] == ["rate-16", "succeeded"]

    table = RunsTable(kept)
    try:
        assert table.rows[0] == ["run", "state", "loss", "took", "started", "tags", "ranks", "function"]
        assert table.rows[1][2] == "0.5667"
        assert [row.key for row in table.table.rows] == labels[::-1]
        assert not table.plot.full.get("series"), "no run is open"

        table._show_in(cast("Output", _Output()))
        until(lambda: not table._unopened())
        until(lambda: {label for _, label, _ in table.plot.full.get("series", ())} == set(labels[2:]))
        assert table.rows[0][2:4] == ["loss", "best loss"]
        assert [row[0] for row in table.rows[1:]] == labels[::-1]
        assert [row[3] for row in table.rows[-3:]] == ["0.06667", "–", "–"], "for the others, only summaries are read"
        assert [[action.label for action in row.actions] for row in table.table.rows[-2:]] == [["Open"], []]

        table.grid.filtered = ["run-01", "rate-2"]
        until(lambda: {label for _, label, _ in table.plot.full.get("series", ())} == {"run-01", "rate-2"})
        assert table.plot.order == ["run-01", "rate-2"], "the filter also selects the runs whose curves are drawn"
        table.grid.filtered = None
        assert table.plot.order == labels[2:]

        table._on_action("run-00", "open")
        until(lambda: table._open is not None)
        assert table._open is not None
        assert table._open[1].run.folder == tmp_path / "run-00"
        assert [action.label for action in table.table.rows[-2].actions] == ["Close"]
        table._on_action("run-00", "open")
        until(lambda: table._open is None)
    finally:
        table.close()
        close_all(table.widget)


def test_the_panel_of_a_failed_run_offers_to_continue(tmp_path: Path) -> None:
    run = notebook_launcher(
        train, (str(tmp_path / "project"), 0.0, 40, 25), num_processes=2, use_port=0, start_method="fork", panel=False,
        block=False, save=tmp_path / "runs",
    )  # fmt: skip
    assert run.wait(120)
    panel = RunPanel(run)
    try:
        panel.schedule.tick()
        assert "Can continue from checkpoint_1 [Resume training]" in panel.attention.text
        panel.attention.click("continue")
        until(lambda: "continues this training" in panel.attention.text)
        resumed = run_registry.runs()[-1]
        assert resumed.wait(120)
        check_history(resumed, 40)
        assert not resumed.config.block
        panel.attention.click("continue")
        until(lambda: panel._request is None or not panel._request.is_alive())
        assert run_registry.runs()[-1].id == resumed.id, "a second click must not resume again"
    finally:
        panel.close()
        close_all(panel.widget)
    assert run.folder is not None
    opened = RunPanel(open_run(run.folder))
    try:
        opened.schedule.tick()
        line = "notebook_launcher(train, args, config=run.config, resume=run)"
        assert f"execute the cells that define train, then {line}" in opened.attention.text
        assert "[Resume" not in opened.attention.text
    finally:
        opened.close()
        close_all(opened.widget)


@pytest.mark.parametrize("status", ["succeeded", "stopped"])
def test_without_a_checkpoint_nothing_is_offered(status: str) -> None:
    run = make_run()
    end(run, status)
    panel = RunPanel(run)
    try:
        panel.schedule.tick()
        assert "go on" not in panel.attention.text
    finally:
        panel.close()
        close_all(panel.widget)
