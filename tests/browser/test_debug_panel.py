"""The debug panel diagnoses and questions two hanging ranks, in JupyterLab 4 and Notebook 7."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from tests.support.browser import DAILY_IN_LAB, LIMIT, App, NotebookPage

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
LOG = "[role=log]"


def _says(page: NotebookPage, selector: str, words: str) -> None:
    page.wait_for(
        "([selector, words]) => [...document.querySelectorAll(selector)].some(e => e.innerText.includes(words))",
        [selector, words],
    )


def _repeat_until_shown(page: NotebookPage, ask: Callable[[], None], selector: str, words: str) -> None:
    """Repeat a request until a reply contains the text. Each reply covers only what arrived within a few seconds."""
    deadline = time.monotonic() + LIMIT
    shown = "([selector, words]) => document.querySelector(selector)?.innerText.includes(words)"
    while not page.page.evaluate(shown, [selector, words]):
        assert time.monotonic() < deadline, page.page.inner_text(CARD)
        before = page.page.evaluate("(selector) => document.querySelector(selector)?.innerText", selector)
        ask()
        page.wait_for(
            """([selector, before, since]) => Date.now() - since > 10000
                || (document.querySelector(selector)?.innerText ?? before) !== before""",
            [selector, before, page.page.evaluate("Date.now()")],
        )


def _start_and_hang(page: NotebookPage) -> None:
    page.run(1)
    page.idle()
    page.run(2)
    page.page.locator(CARD).wait_for()
    page.idle()
    page.run(3)
    page.idle()
    page.page.locator(CARD).scroll_into_view_if_needed()


# Wait until rank 0 is in the second all_reduce and rank 1 is in its loop.
UNTIL = """
deadline = time.monotonic() + 100
while time.monotonic() < deadline and not all(map(run.diagnose().verdict.count, ("never reached", "time.sleep"))):
    time.sleep(0.2)
"""
STUCK = "rank 1 never reached all_reduce, the "
LOOP = TRAIN.strip().splitlines().index("        time.sleep(0.05)") + 1
LOOPS = f"(float32 [128]); it is at Cell In[1], line {LOOP}: time.sleep(0.05)"


@DAILY_IN_LAB
def test_two_stuck_ranks_are_explained(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH, SHOW, UNTIL])
    _start_and_hang(page)
    page.shot(f"{app}-debug-before", CARD)

    _repeat_until_shown(page, page.page.get_by_role("button", name="Why is it stuck?").click, VERDICT, LOOPS)
    assert re.search(re.escape(STUCK) + r"\d+(st|nd|rd|th) collective " + re.escape(LOOPS), page.text(VERDICT))
    _says(page, f"{CARD} table", f"Cell In[1], line {SKIPPED}, in train: dist.all_reduce(total)")
    _says(page, f"{CARD} table", " s in all_reduce, the ")

    stacks = page.page.locator(f"{CARD} details", has_text="Stacks")
    stacks.locator("summary").press("Enter")
    _says(page, f"{CARD} details[open] pre", "time.sleep(0.05)")
    page.page.wait_for_timeout(1500)  # Wait for a few more renders.
    assert stacks.get_attribute("open") is not None, "an opened fold stays open"
    page.shot(f"{app}-debug-verdict", CARD)

    line = page.page.get_by_label("Expression or command")
    page.page.get_by_label("Ranks to ask").select_option("rank 1")

    def one() -> None:
        line.fill("rank + float(total[0])")
        line.press("Enter")

    def all_of_them() -> None:
        line.fill("total.shape")
        page.page.get_by_role("button", name="Send").click()

    _repeat_until_shown(page, one, LOG, "rank 1: 5.0")
    page.until(lambda: line.input_value() == "", "an empty line")
    page.page.get_by_label("Ranks to ask").select_option("all ranks")
    _repeat_until_shown(page, all_of_them, LOG, "ranks 0, 1: torch.Size([128])")
    line.fill("total +")
    line.press("Enter")
    _says(page, f"{CARD} [role=alert]", "is not an expression")
    page.shot(f"{app}-debug-answers", CARD)


STEPS = """
import time
from notebook_accelerate import Accelerator, notebook_launcher

def steps():
    accelerator = Accelerator(cpu=True)
    for step in range(100_000):
        accelerator.log({"loss": 1 / (step + 1)}, step=step)
        time.sleep(0.02)
"""
PULSES = """() => [...document.querySelectorAll('.na-live .na-state')]
    .some(each => each.checkVisibility() && getComputedStyle(each, '::before').animationName !== 'none')"""


@DAILY_IN_LAB
def test_a_pause_is_shown_in_every_panel(opened: Any, app: App) -> None:
    launch = "run = notebook_launcher(steps, num_processes=2, use_port=0, block=False)"
    page = opened([STEPS, launch, SHOW])
    page.run(1)
    page.idle()
    page.run(2)
    page.idle()
    page.page.locator(CARD).nth(1).wait_for()
    page.wait_for("() => document.querySelector('.na-figures')?.innerText.includes('step')")
    page.wait_for(PULSES)
    button = lambda name: page.page.locator(CARD).nth(1).get_by_role("button", name=name, exact=True)  # noqa: E731
    button("Pause").click()
    page.wait_for("() => document.querySelectorAll('.na-live .na-head .na-state-paused').length === 1")
    page.wait_for(f"() => !({PULSES})()")
    button("Why is it stuck?").click()
    _says(page, VERDICT, "paused by you")
    page.page.locator(CARD).first.scroll_into_view_if_needed()
    page.shot(f"{app}-paused")
    page.shot(f"{app}-paused-debug-panel", f"{CARD} >> nth=1")
    page.page.set_viewport_size({"width": 600, "height": 1000})
    page.dark()
    page.shot(f"{app}-paused-narrow-dark", f"{CARD} >> nth=1")
    page.shot(f"{app}-paused-run-narrow-dark", CARD)
    page.page.set_viewport_size({"width": 1280, "height": 1000})
    button("Unpause").click()
    page.wait_for("() => document.querySelector('.na-live .na-head .na-state-running')")


@DAILY_IN_LAB
def test_the_dark_theme_is_legible(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH, SHOW, UNTIL], "dark")
    _start_and_hang(page)
    _repeat_until_shown(page, page.page.get_by_role("button", name="Why is it stuck?").click, VERDICT, STUCK)
    page.shot(f"{app}-debug-dark", CARD)
    page.page.get_by_label("Expression or command").focus()
    seen = []
    for _ in range(6):
        page.page.keyboard.press("Tab")
        seen.append(page.page.evaluate("() => document.activeElement.innerText?.trim()"))
    assert "Send" in seen, seen
