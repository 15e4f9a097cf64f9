"""Two ranks that hang, looked into and talked to from the debug panel, in JupyterLab 4 and Notebook 7."""

from __future__ import annotations

import re
from typing import Any

from tests.support.browser import App, NotebookPage

TRAIN = """
import time, torch, torch.distributed as dist
from notebook_accelerate import notebook_launcher

def train():
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.full((128,), 2.0)
    dist.all_reduce(total)
    if rank == 0:
        dist.all_reduce(total)  # rank 1 does not
    while rank == 1:
        time.sleep(0.05)
"""
SKIPPED = TRAIN.strip().splitlines().index("        dist.all_reduce(total)  # rank 1 does not") + 1
LAUNCH = "run = notebook_launcher(train, num_processes=2, use_port=0, block=False, panel=False)"
SHOW = "run.debug_panel()"
CARD = ".na-live"
VERDICT = ".na-verdict"


def _says(page: NotebookPage, selector: str, words: str) -> None:
    page.wait_for(
        "([selector, words]) => [...document.querySelectorAll(selector)].some(e => e.innerText.includes(words))",
        60,
        argument=[selector, words],
    )


def _hangs(page: NotebookPage) -> None:
    page.run(1)
    page.idle()
    page.run(2)
    page.page.locator(CARD).wait_for()
    page.idle()
    page.run(3)
    page.idle()
    page.page.locator(CARD).scroll_into_view_if_needed()


# Until rank 0 waits in the second all_reduce and rank 1 has come to its loop.
UNTIL = """
deadline = time.monotonic() + 60
while time.monotonic() < deadline and not any(place.waiting for place in run.diagnose().places):
    time.sleep(0.2)
"""


def test_why_two_ranks_are_stuck(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH, SHOW, UNTIL])
    _hangs(page)
    page.shot(f"{app}-debug-before", CARD)

    page.page.get_by_role("button", name="Why is it stuck?").click()
    _says(page, VERDICT, "rank 1 never reached all_reduce #")
    verdict = page.text(VERDICT)
    assert re.search(r"all_reduce #\d \(f32 \[128\]\); it is at Cell In\[1\], line \d+: time\.sleep\(0\.05\)", verdict)
    table = page.text(f"{CARD} table")
    assert f"Cell In[1], line {SKIPPED}, in train: dist.all_reduce(total)" in table
    assert "waits in all_reduce #" in table

    stacks = page.page.locator(f"{CARD} details", has_text="Stacks")
    stacks.locator("summary").focus()
    page.page.keyboard.press("Enter")
    _says(page, f"{CARD} details[open] pre", "time.sleep(0.05)")
    page.page.wait_for_timeout(1500)  # over the next renders
    assert stacks.get_attribute("open") is not None, "what was opened stays open"
    page.shot(f"{app}-debug-verdict", CARD)

    line = page.page.get_by_label("Ask the ranks")
    page.page.get_by_label("Whom to ask").select_option("rank 1")
    line.fill("rank + float(total[0])")
    line.press("Enter")
    _says(page, "[role=log]", "rank 1: 5.0")
    assert line.input_value() == ""
    page.page.get_by_label("Whom to ask").select_option("all ranks")
    line.fill("total.shape")
    page.page.get_by_role("button", name="Send").click()
    _says(page, "[role=log]", "ranks 0, 1: torch.Size([128])")
    line.fill("total +")
    line.press("Enter")
    _says(page, f"{CARD} [role=alert]", "is not an expression")
    page.shot(f"{app}-debug-answers", CARD)


def test_in_the_dark(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH, SHOW, UNTIL], "dark")
    _hangs(page)
    page.page.get_by_role("button", name="Why is it stuck?").click()
    _says(page, VERDICT, "rank 1 never reached all_reduce #")
    page.shot(f"{app}-debug-dark", CARD)
    page.page.get_by_label("Ask the ranks").focus()
    seen = []
    for _ in range(6):
        page.page.keyboard.press("Tab")
        seen.append(page.page.evaluate("() => document.activeElement.innerText?.trim()"))
    assert "Send" in seen, seen
