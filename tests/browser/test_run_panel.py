"""A run that is watched, stopped and saved, in JupyterLab 4 and Notebook 7."""

from __future__ import annotations

from typing import Any

from tests.support.browser import DAILY_IN_LAB, App, Browser, NotebookPage, Server

TRAIN = """
import math, os, random, sys, time
from notebook_accelerate import notebook_launcher, telemetry
from notebook_accelerate.telemetry import MetricEvent, ProgressEvent, StepTimeEvent
from notebook_accelerate.telemetry.sharding_events import KINDS, ShardSizes, ShardReport

EVIL = "<img src=x onerror=alert(1)>"

def train(seconds, fail_at=None):
    rank, steps = int(os.environ["RANK"]), int(seconds / 0.02)
    rng = random.Random(rank)
    held = {kind: ShardSizes(48 << 20, 24 << 20, ("dp_shard",), "cpu" if "state" in kind else "") for kind in KINDS}
    telemetry.emit(ShardReport("fsdp2", EVIL, {"dp_shard": 2}, {"dp_shard": rank}, held, units=5).event())
    for s in range(steps):
        telemetry.emit(MetricEvent({
            "train/loss": 2.5 * math.exp(-4 * s / steps) + 0.15 * rng.gauss(0, 1) * math.exp(-s / steps) + 0.3,
            "lr": 5e-4 * (1 + math.cos(3.14 * s / steps)), EVIL: float(s)}, s))
        telemetry.emit(ProgressEvent(s + 1, steps, "step"))
        slow = rank == 1
        if s % 10 == 0:
            telemetry.emit(StepTimeEvent({"waiting for data": 0.03 + 0.18 * slow, "forward and backward": 0.12,
                "collectives": 0.22 - 0.18 * slow, "optimizer": 0.02, "other": 0.01}, s, 10))
        if s % 25 == 0:
            print(f"step {s}: {EVIL}")
        if rank == 1 and s == fail_at:
            while not os.path.exists("drawn"):
                time.sleep(0.02)
            raise ValueError(f"the loss is {EVIL}")
        time.sleep(0.02)
    return rank
"""
LAUNCH = "run = notebook_launcher(train, ({},), num_processes=2, use_port=0, block=False)"
LONG = 1200
"""Seconds of a run whose end no test waits for, even with slow steps."""
LAST = "import notebook_accelerate; notebook_accelerate.runs()[-1].panel()"
CARD = ".na-live"
REPORT = ".notebook-accelerate-report:not(.na-left *)"


WATCHED = """(ranks) => {
    const card = [...document.querySelectorAll('.na-live')].at(-1);
    card?.scrollIntoView({ block: "center" });  // curves out of sight are not drawn
    const drawn = [...(card?.querySelectorAll('.na-chart:has(canvas)') ?? [])];
    return drawn.length === 3 && drawn.every(chart => ranks.every(rank => chart.ariaLabel.includes(rank)));
}"""


def _watch(page: NotebookPage, *ranks: str) -> None:
    """Wait until the last panel draws the ranks' three curves; another panel may become the last during loading."""
    page.wait_for(WATCHED, list(ranks or ("rank 0", "rank 1")))


def _step(page: NotebookPage) -> int:
    words = page.page.locator(".na-figures").last.inner_text().replace("\n", " ").split()
    return int(words[words.index("step") + 1].replace(",", "")) if "step" in words else -1


def test_curves_move_and_a_click_stops_the_run_on_an_idle_kernel(opened: Any, server: Server, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG), "run.status, run.results if run.error is None else str(run.error)"])
    page.run(1)
    _watch(page)
    first = _step(page)
    page.until(lambda: _step(page) > first + 20, "progress")
    page.shot(f"{app}-running", CARD)
    page.wait_for(f"() => document.querySelector('{CARD}').innerText.includes('The Stop button works now')")
    assert page.page.locator(".na-chart-name").nth(2).inner_text() == "<img src=x onerror=alert(1)>"

    page.page.get_by_role("button", name="Stop").click()
    page.wait_for(f"() => document.querySelector('{REPORT}')")
    page.wait_for(f"() => !document.querySelector('{CARD}')")
    assert "stopped" in page.text(REPORT)
    page.run(2)
    page.wait_for("() => document.body.innerText.includes('it was stopped')")


@DAILY_IN_LAB
def test_the_saved_notebook_keeps_the_report(opened: Any, server: Server, chromium: Browser, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(3)])
    page.run(1)
    page.wait_for(f"() => document.querySelector('{REPORT}')")
    saved = page.save()
    bundles = [output["data"] for cell in saved["cells"] for output in cell["outputs"] if "data" in output]
    bundles = [
        data for data in bundles if any("".join(part) for part in data.values())
    ]  # without the empty output beside it
    assert len(bundles) == 1
    assert set(bundles[0]) == {"text/html", "text/plain"}
    html = "".join(bundles[0]["text/html"])
    assert html.count('alt="Curve of ') == 3
    assert html.count("data:image/svg+xml;base64,") == 3 + 1, "the curves, and the mesh of the ranks"

    name = page.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
    page.shut_down()
    page.page.wait_for_timeout(500)
    again = server.open(chromium, name, app)
    try:
        again.wait_for(f"() => document.querySelector('{REPORT} img')?.naturalWidth > 100")
        assert "model not found" not in again.page.inner_text("body")
        again.page.locator(REPORT).scroll_into_view_if_needed()
        again.shot(f"{app}-reopened")
        assert again.errors == []
    finally:
        again.close()


@DAILY_IN_LAB
def test_tabs_show_the_straggler_the_step_times_and_the_logs(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG)])
    page.run(1)
    _watch(page)
    tabs = page.page.locator(".na-tabs [role=tab]")
    page.wait_for("() => document.querySelector('.na-run').innerText.includes('Ranks ⚠')")
    tabs.nth(1).click()
    page.wait_for("() => document.querySelector('.na-verdict').innerText.includes('Rank 1 is a straggler')")
    page.wait_for("() => document.querySelector('tr.na-late')?.innerText.includes('straggler')")
    page.shot(f"{app}-ranks", CARD)
    tabs.nth(2).click()
    bar = page.page.locator(".na-stack").nth(1)
    assert "waiting for data 52 %" in str(bar.get_attribute("aria-label"))
    page.shot(f"{app}-step-time", CARD)
    tabs.nth(3).click()
    page.wait_for("() => document.querySelectorAll('.na-mesh g').length === 2")
    text = "fsdp2 <img src=x onerror=alert(1)> · dp_shard 2 · 5 units"
    page.wait_for(f"(text) => document.querySelector('{CARD}').innerText.includes(text)", text)
    assert "each rank" in page.text(".na-shards")
    page.shot(f"{app}-sharding", CARD)
    tabs.nth(4).click()
    page.page.get_by_role("tab", name="Rank 1").click()
    page.page.get_by_role("searchbox", name="Search the lines").fill("step 25")
    page.wait_for("() => document.querySelectorAll('.na-log mark').length >= 1")
    assert page.text(".na-log").startswith("step 25: <img src=x onerror=alert(1)>")
    page.shot(f"{app}-logs", CARD)


def test_a_failing_run_shows_the_cell_line(opened: Any, server: Server, app: App) -> None:
    (server.notebooks / "drawn").unlink(missing_ok=True)
    page = opened([TRAIN, "run = notebook_launcher(train, (60, 40), num_processes=2, use_port=0)", LAST])
    page.run(1)
    _watch(page)  # ipywidgets reports an error for a box that is removed before its children are drawn
    (server.notebooks / "drawn").touch()
    page.wait_for(f"() => document.querySelector('{REPORT}')")
    assert "ValueError: the loss is <img" in page.text(f"{REPORT} details")
    assert "Cell In[1], line" in page.text(f"{REPORT} details")
    page.page.locator(REPORT).scroll_into_view_if_needed()
    page.shot(f"{app}-failed-report")
    page.run(2)
    _watch(page, "rank 1")  # rank 0 may have been ended before its first step
    page.page.locator(".na-tabs [role=tab]").nth(5).click()
    assert "Cell In[1], line" in page.text(f"{CARD} details")
    page.shot(f"{app}-failed", CARD)


def test_a_blocking_cell_says_which_stop_works(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG).replace(", block=False", "")])
    page.run(1)
    _watch(page)
    page.wait_for("() => document.querySelector('.na-hint').innerText.includes('own stop button (■)')")
    page.interrupt()
    page.wait_for(f"() => document.querySelector('{REPORT}')")
    assert "stopped" in page.text(REPORT)
    page.idle()


@DAILY_IN_LAB
def test_dark_theme_and_keyboard(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG)], theme="dark")
    page.run(1)
    _watch(page)
    colour = page.page.evaluate("() => getComputedStyle(document.querySelector('.na-chip i')).backgroundColor")
    assert colour == "rgb(106, 165, 248)", "the light blue of the dark palette"
    motion = "() => getComputedStyle(document.querySelector('.na-state'), '::before').animationName"
    assert page.page.evaluate(motion) == "na-pulse"
    page.page.emulate_media(reduced_motion="reduce")
    assert page.page.evaluate(motion) == "none"
    page.page.emulate_media(reduced_motion="no-preference")
    chart = page.page.locator(".na-chart").first
    chart.focus()
    page.page.keyboard.press("PageUp")
    page.wait_for("() => document.querySelector('.na-chart-value').innerText.includes('step')")
    assert str(chart.get_attribute("aria-label")).startswith("Curve of train/loss over step; latest: rank 0 ")
    page.shot(f"{app}-dark", CARD)
    page.page.get_by_role("button", name="rank 0").focus()
    page.page.keyboard.press("Space")
    page.wait_for("() => document.querySelectorAll('.na-chip')[0].getAttribute('aria-pressed') === 'false'")


@DAILY_IN_LAB
def test_after_a_reload_the_panel_is_there_again(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG), "run"])
    page.run(1)
    _watch(page)
    page.save()
    page.page.reload()
    page.wait_until_ready()
    page.run(2)
    _watch(page)
    first = _step(page)
    page.until(lambda: _step(page) > first, "progress after the reload")
