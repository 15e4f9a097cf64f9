"""A run that is watched, stopped and saved, in JupyterLab 4 and Notebook 7."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.support import pages
from tests.support.browser import DAILY_IN_LAB, App, Browser, NotebookPage, Server

TRAIN = """
import math, os, random, sys, time
from notebook_accelerate import notebook_launcher, telemetry
from notebook_accelerate.telemetry import MetricEvent, ProgressEvent, StepTimeEvent
from notebook_accelerate.telemetry.sharding import KINDS, ShardSizes, ShardReport

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
                "collectives": 0.22 - 0.18 * slow, "optimizer": 0.02, "other": 0.01}, s, 10, 0.06 + 0.18 * slow))
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
"""The duration in seconds of a run that no test waits for, even with slow steps."""
LAST = "import notebook_accelerate; notebook_accelerate.runs()[-1].panel()"
CARD = ".na-live"
BOOK = "window.jupyterapp.shell.currentWidget.content"
KERNEL = "window.jupyterapp.shell.currentWidget.sessionContext.session.kernel"
REPORT = ".notebook-accelerate-report:not(.na-left *)"
ENDED = (
    "() => document.querySelector('.na-live .na-head :is(.na-state-succeeded, .na-state-failed, .na-state-stopped)')"
)
SUCCEEDED = f"""() => {{
    // If the run ends before the live panel is drawn, the report takes its place.
    const shown = document.querySelector('.na-live:has(.na-head .na-state-succeeded):has(.na-section-own canvas)');
    return shown || document.querySelector('{REPORT}:has(img[alt^="Curve of loss"])')?.innerText.includes('Succeeded');
}}"""
NEWS = ".na-attention"


WATCHED = """(ranks) => {
    const card = [...document.querySelectorAll('.na-live')].at(-1);
    card?.scrollIntoView({ block: "center" });  // curves out of sight are not drawn
    const drawn = [...(card?.querySelectorAll('.na-chart:has(canvas)') ?? [])];
    return drawn.length === 3 && drawn.every(chart => ranks.every(rank => chart.ariaLabel.includes(rank)));
}"""


def _watch(page: NotebookPage, *ranks: str) -> None:
    """Wait until the last panel has drawn three curves of these ranks. During loading, another panel may be last."""
    page.wait_for(WATCHED, list(ranks or ("rank 0", "rank 1")))


def _report(page: NotebookPage) -> str:
    """Return the static form that the notebook's file stores next to the live panel."""
    outputs = [output["data"] for cell in page.save()["cells"] for output in cell["outputs"] if "data" in output]
    shown = ["".join(data.get("text/html", "")) for data in outputs]
    return next((html for html in shown if "na-left" in html), "")


def _zoom(page: NotebookPage) -> None:
    """Select a part of the first chart with the mouse."""
    over = page.page.locator(f"{CARD} .u-over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    assert box is not None
    page.page.mouse.move(box["x"] + 20, box["y"] + 50)
    page.page.mouse.down()
    page.page.mouse.move(box["x"] + 90, box["y"] + 50, steps=4)
    page.page.mouse.up()
    page.page.get_by_role("button", name="Reset zoom").wait_for()


def _insert(page: NotebookPage) -> None:
    """Insert the code that a panel shows as a new cell below it."""
    count = page.page.evaluate(f"() => {BOOK}.widgets.length")
    page.page.get_by_role("button", name="Insert a cell below with this code").click()
    page.wait_for(f"(count) => {BOOK}.widgets.length === count + 1", count)
    page.wait_for(f"() => {BOOK}.activeCell.model.sharedModel.getSource().length > 0")


def _active_source(page: NotebookPage) -> str:
    return str(page.page.evaluate(f"() => {BOOK}.activeCell.model.sharedModel.getSource()"))


def _type(page: NotebookPage, prompt: str, line: str) -> None:
    """Type a line at a prompt that has not been answered yet. Answered prompts remain visible for a moment."""
    waits = ".jp-Stdin-input:not([data-answered])"
    page.wait_for(f"(text) => document.querySelector('{waits}')?.parentElement.innerText.includes(text)", prompt)
    box = page.page.query_selector(waits)
    box.fill(line)
    box.evaluate("(box) => { box.dataset.answered = 'yes'; }")
    box.press("Enter")


def _step(page: NotebookPage) -> int:
    words = " ".join(page.page.locator(".na-figures").all_inner_texts()[-1:]).split()
    return int(words[words.index("step") + 1].replace(",", "")) if "step" in words else -1


def test_the_first_cell_of_the_readme_succeeds(opened: Any, app: App) -> None:
    page = opened([pages.first_cell()])
    page.wait_for(SUCCEEDED)
    outputs = page.save()["cells"][0]["outputs"]
    streams = {
        name: "".join("".join(each["text"]) for each in outputs if each.get("name") == name)
        for name in ("stdout", "stderr")
    }
    assert streams["stderr"] == ""
    assert len(re.findall(r"\d\.\d", streams["stdout"].splitlines()[-1])) == 2, "a loss for each rank"
    assert "⚠" not in streams["stdout"]
    page.shot(f"{app}-first-cell")


def test_curves_move_and_a_click_stops_the_run_on_an_idle_kernel(opened: Any, server: Server, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG), "run.status, run.results if run.error is None else str(run.error)"])
    page.run(1)
    _watch(page)
    first = _step(page)
    page.until(lambda: _step(page) > first + 20, "progress")
    page.shot(f"{app}-running", CARD)
    hint = "Click Stop to end this run (■ does not affect background runs)"
    page.wait_for(f"(hint) => document.querySelector('{CARD}').innerText.includes(hint)", hint)
    assert page.page.locator(".na-chart-name", has_text="<img src=x onerror=alert(1)>").count() == 1

    # After the run ends, the panel keeps its elements, the zoom of a chart, and the selected tab.
    _zoom(page)
    page.page.locator(".na-tabs [role=tab]", has_text="Logs").click()
    page.page.evaluate(f"() => {{ document.querySelector('{CARD}').dataset.mine = 'yes'; }}")
    page.page.get_by_role("button", name="Stop").click()
    page.wait_for(ENDED)
    page.idle()
    assert page.page.locator(f"{CARD}[data-mine]").count() == 1
    assert page.text(".na-tabs [role=tab][aria-selected=true]") == "Logs"
    assert page.page.locator(".na-toolbar button:visible, .na-hint:visible").count() == 0
    page.page.locator(".na-tabs [role=tab]", has_text="Curves").click()
    assert page.page.get_by_role("button", name="Reset zoom").is_visible()
    page.page.locator(".na-tabs [role=tab]", has_text="Setup").click()
    page.wait_for(f"() => /start method\\s+fork:/.test(document.querySelector('{CARD}').innerText)")
    page.shot(f"{app}-stopped", CARD)
    page.run(2)
    page.wait_for("() => document.body.innerText.includes('it was stopped')")


@DAILY_IN_LAB
def test_the_saved_notebook_keeps_the_report(opened: Any, server: Server, chromium: Browser, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(3)])
    page.run(1)
    page.wait_for(ENDED)
    page.idle()
    page.until(lambda: "Succeeded" in _report(page), "the report of the end")
    html = _report(page)
    assert '<details class="na-left' not in html, "the report has a title"
    assert html.count('alt="Curve of ') == 3
    assert html.count("data:image/svg+xml;base64,") == 3 + 1, "the report has the curves and the mesh of the ranks"

    name = page.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
    page.shut_down()
    page.page.wait_for_timeout(500)
    again = server.open(chromium, name, app)
    try:
        again.wait_for("() => document.querySelector('.notebook-accelerate-report img')?.naturalWidth > 100")
        assert "model not found" not in again.page.inner_text("body")
        again.page.locator(".notebook-accelerate-report").scroll_into_view_if_needed()
        again.shot(f"{app}-reopened")
        assert all("model not found" in error for error in again.errors)
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


@DAILY_IN_LAB
def test_a_failing_run_shows_the_cell_line(opened: Any, server: Server, app: App) -> None:
    (server.notebooks / "drawn").unlink(missing_ok=True)
    page = opened([TRAIN, "notebook_launcher(train, (60, 40), num_processes=2, use_port=0, hold_on_error=True)"])
    page.run(1)
    _watch(page)
    (server.notebooks / "drawn").touch()
    page.wait_for("() => document.querySelector('.na-live .na-state-failed')")
    page.idle()
    page.wait_for(f"() => document.querySelector('{NEWS}').innerText.startsWith('rank 1 failed: ValueError: the loss')")
    page.page.get_by_role("button", name="Show error").click()
    page.wait_for(f"() => document.querySelector('{CARD} details')?.innerText.includes('Cell In[1], line')")
    page.shot(f"{app}-failed", CARD)

    page.page.locator(NEWS).get_by_role("button", name="Debug").click()
    _insert(page)
    page.shot(f"{app}-failed-debug", CARD)
    assert _active_source(page) == "import notebook_accelerate; notebook_accelerate.debug()"
    page.run(2)
    _type(page, "ipdb>", "p fail_at + 1")
    _type(page, "ipdb>", "q")
    page.wait_for("() => document.body.innerText.includes('[rank 1] 41')")
    page.idle()
    page.wait_for(f"() => !document.querySelector('{NEWS}').innerText.includes('the ranks are kept')")


@DAILY_IN_LAB
def test_a_launch_that_is_executed_again_offers_to_stop_the_running_run(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG), "[each.status for each in __import__('notebook_accelerate').runs()]"])
    page.run(1)
    _watch(page)
    page.run(1)
    page.wait_for(f"() => document.querySelector('{NEWS}')?.innerText.includes('run 1 is still running')")
    _watch(page)
    page.shot(f"{app}-executed-again", CARD)
    page.page.get_by_role("button", name="Stop run 1").click()
    page.wait_for(f"() => !document.querySelector('{NEWS}').innerText.includes('is still running')")
    page.run(2)
    page.wait_for("() => document.body.innerText.includes(\"['stopped', 'running']\")")
    page.page.get_by_role("button", name="Stop", exact=True).click()
    page.wait_for(ENDED)


@DAILY_IN_LAB
def test_a_run_that_fails_while_its_panel_is_drawn_causes_no_error(opened: Any, app: App) -> None:
    fails = "def fails(after):\n    time.sleep(after)\n    raise ValueError('lost')"
    delays = (0.0, 0.25, 0.3, 0.4, 0.6)
    page = opened([TRAIN, fails, *(f"notebook_launcher(fails, ({delay},), num_processes=2)" for delay in delays)])
    page.run(1)
    for index in range(len(delays)):
        page.run(2 + index)
        page.idle()
    # If a run ends before its panel is shown, its report is shown instead.
    each = f"{REPORT}, {CARD}:has(.na-state-failed)"
    page.wait_for(f"() => document.querySelectorAll('{each}').length === {len(delays)}")
    # anywidget gives a page 2 s to load a script, and a busy machine may take longer.
    page.errors[:] = [error for error in page.errors if "[anywidget] Failed to initialize model" not in error]


BARS = """
def bars():
    from tqdm.auto import tqdm
    for epoch in tqdm(range(3), desc="epochs"):
        for step in tqdm(range(100), desc="steps", leave=False):
            time.sleep(0.02)
"""


@DAILY_IN_LAB
def test_bars_imported_in_the_function_are_lines_and_show_the_progress(opened: Any, app: App) -> None:
    page = opened([TRAIN, BARS, "run = notebook_launcher(bars, num_processes=2, use_port=0, block=False)"])
    page.run(1)
    page.run(2)
    page.wait_for("() => /(epochs|steps) \\d+ of \\d+/.test(document.querySelector('.na-live .na-figures')?.innerText)")
    page.wait_for("() => document.querySelector('.na-live .na-state-succeeded')")
    page.idle()
    outputs = page.save()["cells"][2]["outputs"]
    lines = [line for output in outputs for line in "".join(output.get("text", "")).splitlines() if line.strip()]
    assert len(lines) <= 4, "there is at most one line for each bar of each rank"
    assert page.page.locator(".jupyter-widgets .widget-label", has_text="epochs").count() == 0, (
        "there is no dead widget"
    )


def test_a_click_on_stop_works_while_a_cell_blocks(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG).replace(", block=False", ""), "'over'"])
    page.run(1)
    _watch(page)
    stop = page.page.get_by_role("button", name="Stop")
    page.wait_for(f"() => {KERNEL}.status === 'busy'")
    page.until(stop.is_enabled, "a button that works")
    assert page.page.get_by_role("button", name="Pause", exact=True).is_disabled()
    page.wait_for("() => document.querySelector('.na-hint').innerText.startsWith('Click Stop, or ■ in the toolbar')")
    page.shot(f"{app}-blocking", CARD)
    stop.click()
    page.wait_for(ENDED)
    page.idle()
    page.run(2)
    page.wait_for("() => document.body.innerText.includes('over')")
    assert not [line for line in page.server.log.splitlines() if "/interrupt" in line and " 40" in line]


@DAILY_IN_LAB
def test_a_blocking_cell_without_its_server_says_how_to_stop(opened: Any, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG).replace(", block=False", "")])
    # Simulate a separate frame, where this element is missing.
    page.page.evaluate("() => document.getElementById('jupyter-config-data').remove()")
    page.run(1)
    _watch(page)
    page.wait_for("() => document.querySelector('.na-hint').innerText === 'Press ■ in the toolbar to end this run'")
    stop = page.page.get_by_role("button", name="Stop")
    assert stop.is_disabled()
    assert stop.get_attribute("title") == "Press ■ in the toolbar"
    page.wait_for(f"() => {KERNEL}.status === 'busy'")
    for index in (1, 4, 0):  # Clicks are handled outside of the cell, and do not make the kernel idle.
        page.page.locator(".na-tabs [role=tab]").nth(index).click()
    page.page.wait_for_timeout(3000)
    page.wait_for(f"() => {KERNEL}.status === 'busy'")
    page.interrupt()
    page.wait_for("() => document.querySelector('.na-live .na-state-stopped')")
    page.idle()
    page.page.wait_for_timeout(1500)
    assert page.page.evaluate(f"() => {KERNEL}.status") == "idle"


@DAILY_IN_LAB
def test_the_dark_theme_and_the_keyboard_work(opened: Any, app: App) -> None:
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


GONE = """() => {
  const card = [...document.querySelectorAll('.na-live')].at(-1);
  const shown = [...card.querySelectorAll('*')].filter(each => each.checkVisibility());
  return card.classList.contains('jupyter-widgets-disconnected')
    && getComputedStyle(card.querySelector('.na-state'), '::after').content === '"Kernel gone"'
    && shown.every(each => getComputedStyle(each, '::before').animationName === 'none')
    && !shown.some(each => each.matches('button.na-stop, button.na-action, .na-hint'));
}"""


@DAILY_IN_LAB
def test_a_panel_whose_kernel_is_gone_says_so(opened: Any, server: Server, chromium: Browser, app: App) -> None:
    page = opened([TRAIN, LAUNCH.format(LONG), LAST.replace("panel()", "debug_panel()")])
    page.run(1)
    _watch(page)
    page.run(2)
    page.wait_for("() => document.querySelectorAll('.na-live').length === 2")
    page.save()
    name = page.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
    page.page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    page.wait_for(GONE)
    page.page.locator(CARD).first.scroll_into_view_if_needed()
    page.shot(f"{app}-kernel-gone")
    page.shut_down()
    again = server.open(chromium, name, app)
    try:
        again.wait_for("() => document.querySelector('.na-left-gone')?.checkVisibility()")
        assert "Kernel gone. Run " in again.text(".na-left > summary")
        assert "as of" not in again.text(".na-left > summary")
        again.shot(f"{app}-kernel-gone-reopened")
    finally:
        again.close()


@DAILY_IN_LAB
def test_the_panel_reappears_after_a_reload(opened: Any, app: App) -> None:
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


Say = Callable[[str], None]
NEEDS = """
import math, os, time, torch
from notebook_accelerate import Accelerator, notebook_launcher

def happens(name):
    if os.path.exists(name):
        os.remove(name)
        return True

def needs():
    accelerator = Accelerator(cpu=True)
    model, loader = torch.nn.Linear(2, 1), torch.utils.data.DataLoader(torch.ones(200_000, 2))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-6), loader)
    late, bad = accelerator.process_index == 1, False
    for step, batch in enumerate(loader):
        accelerator.backward(model(batch).mean())
        optimizer.step()
        optimizer.zero_grad()
        bad = late and (bad or happens("bad"))
        accelerator.log({"loss": math.nan if bad else 1.0}, step=step)
        if late and happens("ask"):
            input("go on? ")
        if late and happens("break"):
            breakpoint()
        while late and os.path.exists("hang"):
            time.sleep(0.05)
        time.sleep(0.02)
"""


def _await_news(page: Any, text: str) -> None:
    page.wait_for(f"(text) => document.querySelector('{NEWS}')?.innerText.includes(text)", text)


def _await_no_news(page: Any, text: str) -> None:
    page.wait_for(f"(text) => !document.querySelector('{NEWS}').innerText.includes(text)", text)


def _await_state(page: Any, text: str) -> None:
    page.wait_for("(text) => document.querySelector('.na-head .na-state').innerText === text", text)


@DAILY_IN_LAB
def test_the_panel_says_when_it_needs_its_user(opened: Any, server: Server, app: App) -> None:
    page = opened([NEEDS, "run = notebook_launcher(needs, num_processes=2, use_port=0, block=False)"])
    news, gone, state = partial(_await_news, page), partial(_await_no_news, page), partial(_await_state, page)
    button = lambda name: page.page.locator(NEWS).get_by_role("button", name=name)  # noqa: E731
    page.run(1)
    page.page.locator(CARD).wait_for()
    page.wait_for("() => document.querySelector('.na-figures').innerText.includes('left in this epoch')")
    assert re.fullmatch(r"Running\s+needs\s+run 1\s+.+ s", page.text(".na-head"))
    figures = r".+ steps/s\s+epoch 1\s+step \d.* of 100,000\s+\d+ %\s+.+ left in this epoch"
    assert re.fullmatch(figures, page.text(".na-figures"))
    _assert_figures_stay(page)
    page.page.locator(CARD).scroll_into_view_if_needed()

    page.page.get_by_role("button", name="Pause", exact=True).click()
    news("Paused at step")
    state("Paused")
    page.shot(f"{app}-news-paused", CARD)
    page.page.locator(".na-toolbar").get_by_role("button", name="Unpause").click()
    gone("Paused")
    state("Running")

    (server.notebooks / "bad").touch()
    news("NaN since step ")
    news(" on rank 1: loss")

    (server.notebooks / "ask").touch()
    news("rank 1 waits for input")
    state("Waits for input")
    page.shot(f"{app}-news-input", CARD)
    button("Answer").click()
    _insert(page)
    assert _active_source(page) == "import notebook_accelerate; notebook_accelerate.debug(rank=1)"
    page.run(2)
    _type(page, "go on?", "yes")
    gone("waits for input")
    page.idle()

    (server.notebooks / "break").touch()
    news("rank 1 at breakpoint")
    state("At breakpoint")
    page.run(2)
    _type(page, "ipdb>", "c")
    gone("at breakpoint")
    page.idle()

    _hang_and_stop(page, server, news, gone, state)


def _assert_figures_stay(page: NotebookPage) -> None:
    """Check that the figures above the bar stay in place while their values change."""
    edges = (
        "() => [...document.querySelectorAll('.na-figures .na-fact')].map(node => node.getBoundingClientRect().left)"
    )
    before, text = page.page.evaluate(edges), page.text(".na-figures")
    page.until(lambda: page.text(".na-figures") != text, "other figures")
    assert page.page.evaluate(edges) == before


def _hang_and_stop(page: NotebookPage, server: Server, news: Say, gone: Say, state: Say) -> None:
    """Let rank 1 hang, continue, and hang again; then stop the run."""
    button = lambda name: page.page.locator(".na-toolbar").get_by_role("button", name=name)  # noqa: E731
    (server.notebooks / "hang").touch()
    news("Stuck for ")
    news(": rank 1 never reached all_reduce, the ")
    state("Stuck")
    button("Debug").first.click()
    page.wait_for(f"() => document.querySelector('{CARD} .na-debug')?.innerText.includes('Why is it stuck?')")
    page.shot("news-stuck", CARD)
    assert page.page.locator(NEWS).get_by_role("button").all_inner_texts() == [], "the header has the buttons"
    assert "has stalled" not in page.page.locator(".jp-OutputArea").nth(1).inner_text(), "the panel shows it"
    (server.notebooks / "hang").unlink()
    gone("Stuck")
    state("Running")
    (server.notebooks / "hang").touch()
    news("Stuck for ")
    button("Stop").click()
    page.wait_for("() => document.querySelector('.na-live .na-state-stopped')")
    (server.notebooks / "hang").unlink()
    page.idle()
