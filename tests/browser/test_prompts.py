"""Prompts of ranks that are answered in the notebook's input line, and the report that the panel has been drawn."""

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
    """Type a line at an unanswered prompt. An answered one remains visible for a moment."""
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
    end = f"drawn-{app}"  # Both applications share the server's folder.
    launch = f"run = notebook_launcher(wait, ('{end}',), num_processes=1, start_method='fork', block=False)"
    drawn = "from notebook_accelerate.widgets.front_end import front_end\nprint('drawn:', front_end.drawn)"
    page = opened([SETUP, launch, f"{drawn}\nopen('{end}', 'w').close(); run.wait()"])
    page.run(1)
    page.wait_for("() => document.querySelector('.na-card')?.innerText.includes('Click Stop to end this run')")
    page.page.wait_for_timeout(3000)  # Wait until the report has arrived.
    page.run(2)
    page.wait_for("() => document.body.innerText.includes('drawn: True')")
    page.idle()
