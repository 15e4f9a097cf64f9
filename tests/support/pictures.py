"""Take the README's screenshots in JupyterLab: ``python -m tests.support.pictures``, or ``make pictures``."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.support import browser
from tests.support.browser import Browser, NotebookPage, Server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOGGED_STEPS = 420
TRAIN = """
import math, random, time
import torch
from notebook_accelerate import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    noise = random.Random(accelerator.process_index)
    for step in range(100_000):
        accuracy = min(1.0, 0.1 + 0.9 * (1 - math.exp(-step / 110)) + noise.gauss(0, 0.05))
        loss = 0.25 + 2.05 * math.exp(-step / 130) + noise.gauss(0, 0.05)
        accelerator.log({"loss": loss, "accuracy": accuracy}, step=step)
        time.sleep(0.03)

def evaluate():
    accelerator = Accelerator()
    for batch in range(3 - accelerator.process_index):  # rank 1 has one batch less
        correct = accelerator.reduce(torch.ones(128, device=accelerator.device))
    while accelerator.process_index:
        time.sleep(0.05)
"""


def main() -> int:
    """Take both screenshots. Return 1 if there is no browser."""
    if reason := browser.missing():
        print(reason, file=sys.stderr)
        return 1
    with Server() as server, Browser(width=1120) as chromium:
        run_panel(server, chromium)
        diagnosis(server, chromium)
    return 0


def opened(server: Server, chromium: Browser, function: str, launch: str, *cells: str) -> NotebookPage:
    """Run the cells of a notebook, which launches a function on two ranks in the background."""
    run = f"run = notebook_launcher({function}, num_processes=2, block=False{launch})"
    server.write(f"{function}.ipynb", [TRAIN, run, *cells, "run.stop()"])
    page = server.open(chromium, f"{function}.ipynb")
    for index in range(2 + len(cells)):
        page.run(index)
        page.idle()
    return page


def run_panel(server: Server, chromium: Browser) -> None:
    """Take the screenshot of the panel of a run."""
    wait = f"while (run.ranks[0].last_step or 0) < {LOGGED_STEPS}: time.sleep(0.1)"
    page = opened(server, chromium, "train", "", wait)
    keep(page, "run_panel.png", end=3)


def diagnosis(server: Server, chromium: Browser) -> None:
    """Take the screenshot of the answer to "Why is it stuck?"."""
    wait = "while 'never reached' not in run.diagnose().verdict: time.sleep(0.2)"
    page = opened(server, chromium, "evaluate", ", panel=False", wait, "run.debug_panel()")
    page.page.get_by_role("button", name="Why is it stuck?").click()
    page.wait_for("() => document.querySelector('.na-verdict').innerText.includes('never reached')")
    keep(page, "diagnosis.png", end=4)


def keep(page: NotebookPage, name: str, end: int) -> None:
    """Save a screenshot of the panel to the folder of the examples, and run the cell that ends the run."""
    page.page.locator(".na-live").first.scroll_into_view_if_needed()
    page.page.wait_for_timeout(1000)
    shutil.copy(page.shot(name.removesuffix(".png"), ".na-live"), EXAMPLES / name)
    page.run(end)
    page.idle()
    page.close()


if __name__ == "__main__":
    sys.exit(main())
