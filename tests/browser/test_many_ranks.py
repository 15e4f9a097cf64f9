"""A panel of many ranks on several machines, with recorded events, in JupyterLab 4 and Notebook 7."""

from __future__ import annotations

from typing import Any

from tests.support.browser import DAILY_IN_LAB, App, NotebookPage

FEED = """
import threading, time
from notebook_accelerate.launch.run_display import load
from notebook_accelerate.telemetry import LogEvent, MetricEvent, ProgressEvent, ResourceEvent
from tests.support.runs import feed, make_run

run = make_run(64, started=time.time(), host_of=lambda rank: (rank // 8, f"worker-{rank // 8}<b>"))

def say(step):
    for info in run.ranks:
        at = step - 500 if info.rank == 42 else step
        feed(run, MetricEvent({"loss": 1.0 + info.rank / 100 + 1 / step}, at), ProgressEvent(at, 100_000, "step"),
             ResourceEvent(90.0, 1 << 30), LogEvent("stdout", f"step {at}"), rank=info.rank, at=time.time())

def go():
    step = 1000
    while run.ended is None:
        say(step)
        step += 5
        time.sleep(0.5)

threading.Thread(target=go, daemon=True).start()
"""
SHOW = "load('panel')(run)"
CARD = ".na-live"
DRAWN = """() => {
    document.querySelector('.na-live').scrollIntoView({ block: "center" });  // curves out of sight are not drawn
    return document.querySelectorAll('.na-chart canvas').length >= 1;
}"""
ROWS = (
    "[...document.querySelectorAll('.na-many tbody')].filter((body) => !body.hidden).flatMap((body) => [...body.rows])"
)


def _tab(page: NotebookPage, name: str) -> None:
    page.page.locator(".na-tabs [role=tab]").filter(has_text=name).click()


@DAILY_IN_LAB
def test_each_node_has_a_row_and_its_ranks_unfold(opened: Any, app: App) -> None:
    page = opened([FEED, SHOW])
    page.run(1)
    page.wait_for(DRAWN)
    page.page.locator(CARD).first.scroll_into_view_if_needed()
    _tab(page, "Ranks")
    page.wait_for("() => document.querySelector('.na-many .na-late')")
    for words in ("node 5 · worker-5<b>", "rank 42 late", "8 running"):  # Names are inserted as text, not as HTML.
        page.wait_for("(words) => document.querySelector('.na-many').innerText.includes(words)", words)
    before = int(page.page.evaluate(f"() => {ROWS}.length"))
    fold = page.page.get_by_role("button", name="The other 63 ranks")
    assert fold.get_attribute("aria-expanded") == "false"
    fold.focus()
    page.page.keyboard.press("Enter")
    page.wait_for(f"() => {ROWS}.length === {before + 63}")
    assert fold.get_attribute("aria-expanded") == "true"
    cell = "[...document.querySelectorAll('.na-many tbody:last-child tr')][3].cells[2]"
    step = f"() => Number({cell}.innerText.replace(',', ''))"
    first = int(page.page.evaluate(step))
    page.until(lambda: int(page.page.evaluate(step)) > first, "updates of the rows behind the fold")
    page.shot(f"{app}-many-ranks")


@DAILY_IN_LAB
def test_curves_are_an_envelope_with_selected_ranks_over_it(opened: Any, app: App) -> None:
    page = opened([FEED, SHOW])
    page.run(1)
    page.wait_for(DRAWN)
    page.wait_for("() => /to/.test(document.querySelector('.na-chart-value small')?.innerText)")
    chosen = page.page.get_by_role("searchbox", name="Ranks to draw over the envelope")
    chosen.fill("3, 60-61")
    wanted = "all ranks: min, mean, max,rank 3,rank 60,rank 61"
    chips = "(wanted) => [...document.querySelectorAll('.na-chip')].map((chip) => chip.innerText).join() === wanted"
    page.wait_for(chips, wanted)
    page.page.locator(CARD).first.scroll_into_view_if_needed()
    page.shot(f"{app}-envelope", CARD)


@DAILY_IN_LAB
def test_lines_can_be_selected_by_node_and_rank(opened: Any, app: App) -> None:
    page = opened([FEED, SHOW])
    page.run(1)
    page.wait_for(DRAWN)
    _tab(page, "Logs")
    picker = page.page.get_by_role("combobox", name="Ranks whose lines are shown")
    page.wait_for("() => document.querySelectorAll('.na-logs optgroup').length === 8")
    shown = "[...document.querySelectorAll('.na-line-rank')].map((node) => node.innerText.replace('rank ', ''))"
    ranks = f"() => [...new Set({shown})].sort().join()"
    picker.select_option(label="All of node 1")
    page.until(lambda: page.page.evaluate(ranks) == "10,11,12,13,14,15,8,9", "the lines of one node")
    picker.select_option(label="Rank 42")
    page.until(lambda: not page.page.evaluate(ranks) and "step" in page.text(".na-log"), "the lines of one rank")
    page.shot(f"{app}-many-logs", CARD)
