"""Ranks prompt in the notebook's input line, and the front end reports that it has drawn the panel."""

from __future__ import annotations

from typing import Any

from tests.support.browser import DAILY_IN_LAB, App, NotebookPage

SETUP = """
import os, time
from notebook_accelerate import notebook_launcher

def ask():
    name = input("name? ")
    limit = 7
    breakpoint()
    return name, limit

def wait(until):
    while not os.path.exists(until):
        time.sleep(0.05)
"""


WAITS = ".jp-Stdin-input:not([data-answered])"


def _type(page: NotebookPage, prompt: str, line: str) -> None:
    """Type a line at a prompt that has not been answered yet. Answered prompts remain visible for a moment."""
    asks = f"(prompt) => document.querySelector('{WAITS}')?.parentElement.innerText.includes(prompt)"
    page.wait_for(asks, prompt)
    box = page.page.query_selector(WAITS)
    box.fill(line)
    box.evaluate("(box) => { box.dataset.answered = 'yes'; }")
    box.press("Enter")


def test_input_and_the_debugger_ask_in_the_cell(opened: Any, app: App) -> None:
    page = opened([SETUP, "notebook_launcher(ask, num_processes=1, start_method='fork').results"])
    page.run(1)
    _type(page, "[rank 0] name? ", "Ada")
    _type(page, "ipdb>", "limit = limit * 6")
    _type(page, "ipdb>", "c")
    page.wait_for("() => document.body.innerText.includes(\"(('Ada', 42),)\")")
    page.idle()


@DAILY_IN_LAB
def test_a_front_end_reports_that_it_draws_the_panel(opened: Any, app: App) -> None:
    end = f"drawn-{app}"  # JupyterLab and Notebook share the server's folder.
    launch = f"run = notebook_launcher(wait, ('{end}',), num_processes=1, start_method='fork', block=False)"
    drawn = "from notebook_accelerate.widgets.front_end import front_end\nprint('drawn:', front_end.drawn)"
    page = opened([SETUP, launch, f"{drawn}\nopen('{end}', 'w').close(); run.wait()"])
    page.run(1)
    page.wait_for("() => document.querySelector('.na-card')?.innerText.includes('Click Stop to end this run')")
    page.page.wait_for_timeout(3000)  # Wait for the front end's report.
    page.run(2)
    page.wait_for("() => document.body.innerText.includes('drawn: True')")
    page.idle()
