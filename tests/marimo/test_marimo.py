"""Launches in marimo's editor, driven in Chromium, and in a notebook that marimo exports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import pages
from tests.support.browser import CHROMIUM, FLAGS
from tests.support.kernel import ROOT
from tests.support.ranks import reserved_port

SECONDS = 240.0
"""The time limit in seconds for steps that take a second or two on an idle machine."""
NOTE = "marimo shows no ipywidgets: panels are HTML displays here"
TRAIN = """
import os, time
from notebook_accelerate import notebook_launcher, telemetry
from notebook_accelerate.telemetry import MetricEvent

def train(until):
    step = 0
    while not os.path.exists(until):
        telemetry.emit(MetricEvent({"loss": 1.0 / (step + 1)}, step))
        print("step", step)
        step += 1
        time.sleep(0.1)
    return step

def ask():
    name = input("name? ")
    limit = 7
    breakpoint()
    return name, limit
"""


def _environment(folder: Path) -> dict[str, str]:
    homes = {name: str(folder) for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    return {**os.environ, **homes, "PYTHONPATH": str(ROOT)}


def _write(folder: Path, *cells: str) -> Path:
    """Write a marimo notebook with ``TRAIN`` and these cells, which run when it is opened."""
    (folder / "pyproject.toml").write_text("[tool.marimo.runtime]\nauto_instantiate = true\n")
    setup = f"def _():{_indented(TRAIN)}\n    return ask, notebook_launcher, train"
    functions = [setup, *(f"def _(ask, notebook_launcher, train):{_indented(cell)}\n    return" for cell in cells)]
    path = folder / "book.py"
    path.write_text(
        "import marimo\n\napp = marimo.App()\n\n\n" + "".join(f"@app.cell\n{one}\n\n\n" for one in functions)
    )
    return path


def _indented(code: str) -> str:
    return re.sub(r"^(?=.)", "    ", "\n" + code.strip("\n"), flags=re.MULTILINE)


@contextmanager
def _opened(folder: Path, *cells: str) -> Iterator[Any]:
    """Open a notebook in marimo's editor. Yield playwright's page."""
    from playwright.sync_api import sync_playwright

    book = _write(folder, *cells)
    log = (folder / "server.log").open("w")
    with reserved_port() as port:
        options = ["--headless", "--no-token", "--skip-update-check", "--port", str(port)]
        command = [sys.executable, "-m", "marimo", "edit", *options, book.name]
        server = subprocess.Popen(command, cwd=folder, env=_environment(folder), stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_for_server(folder, server)
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
                page = browser.new_page()
                page.set_default_timeout(1000 * SECONDS)
                page.goto(f"http://127.0.0.1:{port}/")
                yield page
                browser.close()
        finally:
            server.terminate()
            server.wait(30)
            log.close()


def _wait_for_server(folder: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + SECONDS
    while "URL:" not in (folder / "server.log").read_text():
        assert server.poll() is None, (folder / "server.log").read_text()[-2000:]
        assert time.monotonic() < deadline, "the marimo server did not start"
        time.sleep(0.2)


def _body(page: Any) -> str:
    return str(page.inner_text("body"))


def _wait(page: Any, text: str) -> None:
    page.wait_for_function("(text) => document.body.innerText.includes(text)", arg=text, polling=200)


def _points(page: Any) -> int:
    found = re.search(r"^loss\s+(\d+)\s", _body(page), re.MULTILINE)
    return int(found.group(1)) if found else -1


def test_a_launch_shows_an_updated_html_display_and_the_report(tmp_path: Path) -> None:
    first = (
        "first = notebook_launcher(train, ('end',), num_processes=2, use_port=0)\nprint('ranks:', len(first.results))"
    )
    with _opened(tmp_path, first) as page:
        _wait(page, "[rank 1] step 3")
        _wait(page, NOTE)
        for _ in range(2):
            before = _points(page)
            _until(lambda before=before: _points(page) > before, "an update of the HTML display")
        (tmp_path / "end").touch()
        _wait(page, "ranks: 2")
        _wait(page, "Succeeded train · run")
        assert NOTE not in _body(page)


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.2)


def test_the_first_cell_of_the_readme_and_displays_work(tmp_path: Path) -> None:
    shows = """
from IPython.display import display, update_display

def show(number):
    display(f"first {number}", display_id="here")
    display(f"other {number}")
    update_display(f"second {number}", display_id="here")
    return number

print("shown:", notebook_launcher(show, (7,), num_processes=1, start_method="fork").results)
"""
    readme = pages.first_cell().replace("import Accelerator, notebook_launcher", "import Accelerator")
    readme = readme.replace("train", "learn").replace("print(run.results)", "print('losses:', len(run.results))")
    with _opened(tmp_path, readme, shows) as page:
        _wait(page, "losses: 2")
        _wait(page, "shown: (7,)")
        _wait(page, "other 7")
        _wait(page, "second 7")
        assert "every rank trains on the same data" not in _body(page)
        assert "Traceback" not in _body(page)


def test_input_asks_in_the_cell(tmp_path: Path) -> None:
    cell = "print('answers:', notebook_launcher(ask, num_processes=1, start_method='fork').results)"
    with _opened(tmp_path, cell) as page:
        for number, (prompt, line) in enumerate([("name?", "Ada"), ("(Pdb)", "limit = limit * 6"), ("(Pdb)", "c")]):
            asked = max(1, number)  # Prompts that have been answered remain on the page.
            _until(
                lambda text=f"[rank 0] {prompt}", asked=asked: _body(page).count(text) >= asked, f"the prompt {prompt}"
            )
            box = page.locator("[data-testid=console-input]:visible").last
            box.fill(line)
            box.press("Enter")
        _wait(page, "answers: (('Ada', 42),)")


def test_the_stop_button_stops_the_run(tmp_path: Path) -> None:
    cell = "notebook_launcher(train, ('never',), num_processes=2, use_port=0)"
    with _opened(tmp_path, cell) as page:
        _wait(page, "[rank 1] step 3")
        _wait(page, NOTE)
        page.locator("[data-testid=interrupt-button]").first.click()
        _wait(page, "Stopped train · run")


def test_an_exported_notebook_contains_the_report(tmp_path: Path) -> None:
    (tmp_path / "end").touch()
    book = _write(tmp_path, "first = notebook_launcher(train, ('end',), num_processes=2, use_port=0)")
    command = [sys.executable, "-m", "marimo", "export", "html", book.name, "-o", "book.html"]
    env = _environment(tmp_path)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (tmp_path / "book.html").read_text()
    assert "Succeeded" in page
    assert NOTE not in page


def test_outside_a_cell_there_is_no_output() -> None:
    from notebook_accelerate.launch.output.replaceable_outputs import marimo_output

    assert pytest.importorskip("marimo").running_in_notebook() is False
    assert marimo_output() is None
