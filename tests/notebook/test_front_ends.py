"""The displays of a run in front ends without live widgets, and in notebooks that run without a front end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.support import pages
from tests.support.kernel import ROOT, Cell, Kernel
from tests.support.launching import open_gate

pytestmark = pytest.mark.notebook

WIDGET = "application/vnd.jupyter.widget-view+json"
NOT_DRAWN = "This front end has drawn no live panel: panels are HTML displays here"
NOBODY = "No front end shows this notebook"
TRAIN = """
import os, time
from notebook_accelerate import notebook_launcher, runs, telemetry
from notebook_accelerate.telemetry import MetricEvent

def train(until):
    step = 0
    while not os.path.exists(until):
        telemetry.emit(MetricEvent({"loss": 1.0 / (step + 1)}, step))
        step += 1
        time.sleep(0.05)
    return step

def launch(until, **options):
    return notebook_launcher(train, (until,), num_processes=2, use_port=0, **options)
"""


def _static(cell: Cell) -> list[dict[str, Any]]:
    """Return the MIME bundles that a cell has in the saved notebook, except for the live view and empty ones."""
    return [data for data in cell.displays if WIDGET not in data and data != {"text/plain": ""}]


def _points(cell: Cell) -> int:
    """Return the number of points that the static form shows, or -1 if it shows no curve."""
    found = re.search(r"^loss +(\d+) ", "\n".join(data["text/plain"] for data in _static(cell)), re.MULTILINE)
    return int(found.group(1)) if found else -1


def _grows(kernel: Kernel, cell: Cell) -> None:
    """Wait until the static form has been updated twice."""
    for _ in range(2):
        before = _points(cell)
        kernel.wait_for(lambda before=before: _points(cell) > before, what="an update of the HTML display")


@pytest.mark.parametrize(
    "front_end",
    [{}, {"VSCODE_PID": "1"}, {"DATABRICKS_RUNTIME_VERSION": "17.3"}],
    ids=["jupyter", "vscode", "databricks"],
)
def test_a_front_end_without_a_renderer_gets_an_updated_html_display(front_end: dict[str, str]) -> None:
    # This kernel's front end never reports that it has drawn a view.
    with Kernel(env=front_end, server=False) as kernel:
        kernel.check(TRAIN)
        cell = kernel.check("run = launch('end', block=False)")
        assert any(WIDGET in data for data in cell.displays)
        kernel.wait_for(lambda: NOT_DRAWN in str(_static(cell)), 60, what="the note")
        assert '<details class="na-left" open' in _static(cell)[0]["text/html"]
        _grows(kernel, cell)
        second = kernel.check("second = launch('end', block=False)")
        _grows(kernel, second)
        assert NOT_DRAWN not in str(second.displays), "the hint is shown only once"
        open_gate(kernel, "end")
        kernel.check("[one.wait() for one in (run, second)]")
        kernel.wait_for(lambda: "na-left" not in str(cell.displays) and len(_static(cell)) == 1, what="the report")
        assert "· train · succeeded ·" in _static(cell)[0]["text/plain"]
        assert NOT_DRAWN not in str(cell.displays)


@pytest.mark.parametrize("front_end", [{}, {"VSCODE_PID": "1"}], ids=["jupyter", "vscode"])
def test_the_first_cell_of_the_readme_succeeds(front_end: dict[str, str]) -> None:
    with Kernel(env=front_end, server=False) as kernel:
        cell = kernel.check(pages.first_cell())
        assert kernel.value("len(run.results)") == 2
        assert "⚠" not in cell.stderr


def test_a_front_end_that_draws_the_panel_gets_no_hint() -> None:
    with Kernel(server=False) as kernel:
        kernel.check(TRAIN)
        cell = kernel.check("run = launch('end', block=False)")
        plots = [comm for comm in cell.comms if comm["msg_type"] == "comm_open" and _is_feed(comm)]
        client = kernel.client
        content = {"comm_id": plots[0]["comm_id"], "data": {"method": "custom", "content": {"kind": "drawn"}}}
        # In a browser, static/feed.js sends this message.
        client.session.send(client.shell_channel.socket, "comm_msg", content)
        kernel.pump(13.0)
        assert kernel.value("__import__('notebook_accelerate.widgets.front_end').widgets.front_end.front_end.drawn")
        assert NOT_DRAWN not in str(cell.displays)
        open_gate(kernel, "end")
        kernel.check("run.wait()")


def _is_feed(comm: dict[str, Any]) -> bool:
    return "full" in comm["data"].get("state", {})


def test_a_blocking_cell_expects_no_report() -> None:
    with Kernel(server=False) as kernel:  # While a cell blocks, ipykernel cannot handle a view's report.
        kernel.check(TRAIN)
        cell = kernel.submit("launch('end')")
        kernel.wait_for(lambda: any(WIDGET in data for data in cell.displays), what="the panel")
        kernel.pump(13.0)
        open_gate(kernel, "end")
        kernel.finish(cell).expect_ok()
        assert not any(NOT_DRAWN in str(output) for output in cell.outputs)


def test_a_client_without_input_gets_no_widgets() -> None:
    with Kernel(front_end=False, server=False) as kernel:
        kernel.check(TRAIN)
        cell = kernel.submit("launch('end')")
        kernel.wait_for(lambda: NOBODY in str(cell.displays), what="the HTML display")
        _grows(kernel, cell)
        open_gate(kernel, "end")
        kernel.finish(cell).expect_ok()
        form = kernel.check("__import__('notebook_accelerate').configure(train)")
        assert [set(data) for data in form.displays] == [{"text/html", "text/plain"}]
        assert not cell.comms
        assert [set(data) for data in _static(cell)] == [{"text/html", "text/plain"}]
        assert NOBODY not in str(cell.displays)


def test_a_notebook_executed_by_nbconvert_shows_the_report(tmp_path: Path) -> None:
    cells = [
        pages.first_cell(),
        TRAIN,
        "import threading; threading.Timer(2.0, lambda: open('end', 'w').close()).start()",
        "launch('end');",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    nbformat.write(book, tmp_path / "training.ipynb")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    command = ["nbconvert", "--execute", "--to", "notebook", "--output", "executed", "training.ipynb"]
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    executed = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    shown = [output["data"] for output in executed.cells[-1].outputs if "data" in output]
    shown = [data for data in shown if data != {"text/plain": ""}]
    assert [set(data) for data in shown] == [{"text/html", "text/plain"}]
    assert "· train · succeeded ·" in shown[0]["text/plain"]
    assert 'alt="Curve of loss: ' in shown[0]["text/html"]
    assert not executed.metadata.get("widgets"), "the live form is not stored, either"


def test_launch_input_and_stop_work() -> None:
    """The kernel has the environment variable by which VS Code is detected."""
    with Kernel(env={"VSCODE_PID": "1"}, server=False) as kernel:
        kernel.check(TRAIN)
        assert kernel.value("__import__('notebook_accelerate').hardware.detect().host") == "vscode"
        prompts = kernel.types("Ada")
        kernel.check("def ask():\n    return input('name? ')")
        assert (
            kernel.check("notebook_launcher(ask, num_processes=1, start_method='fork').results").result_text
            == "('Ada',)"
        )
        assert prompts == ["[rank 0] name? "]
        cell = kernel.submit("launch('never')")
        kernel.wait_for(lambda: any(WIDGET in data for data in cell.displays), what="the panel")
        kernel.interrupt()
        kernel.finish(cell)
        assert cell.error is not None
        assert cell.error.ename == "RunInterrupted"
        assert "· train · stopped ·" in _static(cell)[-1]["text/plain"]
