"""The panels are drawn in every state, at 1280 and 600 pixels, light and dark, without errors or cut-off text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, NotebookPage, Server

pytestmark = pytest.mark.nightly  # These tests take minutes, and others cover the same states without screenshots.

TRAIN = """
import math, os, random, time
import torch
import notebook_accelerate
from notebook_accelerate import Accelerator, notebook_launcher

def happens(name):
    if os.path.exists(name):
        os.remove(name)
        return True

def train(lr, steps=100_000):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(torch.ones(40_000, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    rank, bad, noise = accelerator.process_index, False, random.Random(accelerator.process_index)
    for step, batch in enumerate(loader):
        accelerator.backward(model(batch).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); schedule.step(); optimizer.zero_grad()
        bad = rank == 1 and (bad or happens("bad"))
        share = math.exp(-lr * step / 2)
        accelerator.log({
            "train/loss": math.nan if bad else 0.3 + 2 * share + noise.gauss(0, 0.05),
            "train/accuracy": 0.95 - 0.8 * share + noise.gauss(0, 0.01),
        }, step)
        if step % 20 == 0:
            accelerator.log({"val/loss": 0.35 + 2.1 * share, "val/accuracy": 0.93 - 0.8 * share}, step)
            print(f"step {step}: loss {0.3 + 2 * share:.3f}")
        if rank == 1 and happens("ask"):
            input("go on? ")
        if rank == 1 and happens("break"):
            breakpoint()
        if rank == 1 and happens("fail"):
            raise ValueError(f"the loss diverged at step {step}")
        while rank == 1 and os.path.exists("hang"):
            time.sleep(0.05)
        time.sleep(0.02)
        if step + 1 >= steps:
            return float(share)
"""
LAUNCH = "run = notebook_launcher(train, ({}), num_processes=2, use_port=0, block=False{})"
CARD = ".na-live"
HEIGHT = 2200
"""The height of the window in pixels, which fits a whole panel without the toolbar above it."""
SIZES = ((1280, "desktop"), (600, "narrow"))
# Return the elements that are wider than the card, except for parts that scroll and curves that are not drawn yet.
WIDER = """(selector) => {
  const card = document.querySelector(selector), right = card.getBoundingClientRect().right + 1;
  const scrolling = '.na-scroll, .na-code, pre, .na-log, .lm-TabBar, .na-chart-value, .na-chart-plot, .na-hidden';
  const scrolls = each => each.closest(scrolling);
  return [...card.querySelectorAll('*')].filter(each => each.checkVisibility() && each.getClientRects().length
    && each.getBoundingClientRect().right > right && !scrolls(each))
    .map(each => `${each.tagName} ${each.className} ${each.textContent.slice(0, 60)}`);
}"""
DRAWN = """(count) => {
  document.querySelector('.na-live .na-sections')?.scrollIntoView({ block: 'start' });
  return document.querySelectorAll('.na-live .na-chart canvas').length >= count;
}"""


@pytest.fixture
def page(server: Server, chromium: Browser, request: pytest.FixtureRequest) -> Iterator[NotebookPage]:
    """Yield a notebook whose first cell defines the training and has been run."""
    for name in ("bad", "ask", "break", "fail", "hang"):
        (server.notebooks / name).unlink(missing_ok=True)
    name = f"{request.node.name}.ipynb"
    server.write(name, [TRAIN, *request.param])
    opened = server.open(chromium, name)
    opened.page.set_viewport_size({"width": 1280, "height": HEIGHT})
    opened.run(0)
    opened.idle()
    yield opened
    opened.page.set_viewport_size({"width": 1280, "height": 1000})
    opened.close()
    assert opened.errors == []
    assert opened.outside == []
    assert not [line for line in server.log.splitlines() if line.startswith("[E ")]


def cells(*sources: str) -> pytest.MarkDecorator:
    """Return a decorator that gives a test's notebook these cells."""
    return pytest.mark.parametrize("page", [sources], indirect=True, ids=["states"])


def shoot(page: NotebookPage, name: str, selector: str = CARD) -> None:
    """Take four screenshots of a state: light and dark, wide and narrow."""
    for dark in (False, True):
        page._theme("JupyterLab Dark" if dark else "JupyterLab Light", light=not dark)
        for width, size in SIZES:
            page.page.set_viewport_size({"width": width, "height": HEIGHT})
            page.page.locator(selector).first.scroll_into_view_if_needed()
            page.page.wait_for_timeout(1000)
            page.shot(f"state-{name}-{size}-{'dark' if dark else 'light'}", selector)
            assert page.page.evaluate(WIDER, selector) == [], f"{name} is cut off at a width of {width} pixels"
    page._theme("JupyterLab Light", light=True)
    page.page.set_viewport_size({"width": 1280, "height": HEIGHT})


def tab(page: NotebookPage, title: str) -> None:
    page.page.locator(".na-tabs [role=tab]", has_text=title).first.click()


def state(page: NotebookPage, text: str) -> None:
    page.wait_for("(text) => document.querySelector('.na-head .na-state')?.innerText === text", text)


def run_state(page: NotebookPage, run: int, text: str) -> None:
    """Wait until a run has a state. Its panel may be one of several, and out of sight."""
    find = """([run, text]) => [...document.querySelectorAll('.na-live .na-head')]
        .some(head => [`run ${run}`, text].every(each => head.textContent.includes(each)))"""
    page.wait_for(find, [run, text])


def happen(server: Server, name: str) -> Path:
    path = server.notebooks / name
    path.touch()
    return path


@cells(LAUNCH.format("0.02,", ""), "notebook_accelerate.debug(rank=1)")
def test_a_running_run_has_no_cut_off_text(page: NotebookPage, server: Server) -> None:
    page.run(1)
    state(page, "Running")
    page.wait_for(DRAWN, 4)
    page.page.wait_for_timeout(6000)
    shoot(page, "running")
    for title in ("Ranks", "Step time", "Logs", "Setup"):
        tab(page, title)
        shoot(page, f"tab-{title.lower().replace(' ', '-')}")
    tab(page, "Curves")

    page.page.get_by_role("button", name="Pause", exact=True).click()
    state(page, "Paused")
    shoot(page, "paused")
    page.page.locator(".na-toolbar").get_by_role("button", name="Unpause").click()
    state(page, "Running")

    happen(server, "bad")
    page.wait_for("() => document.querySelector('.na-attention').innerText.includes('NaN since')")
    page.page.wait_for_timeout(4000)
    shoot(page, "nan")

    happen(server, "ask")
    state(page, "Waits for input")
    shoot(page, "input")
    page.page.get_by_role("button", name="Answer").click()
    shoot(page, "input-answer")
    page.page.get_by_role("button", name="Answer").click()
    page.run(2)
    box = page.page.locator(".jp-Stdin-input")
    box.fill("yes")
    box.press("Enter")
    state(page, "Running")
    page.idle()

    happen(server, "break")
    state(page, "At breakpoint")
    shoot(page, "breakpoint")
    page.run(2)
    box = page.page.locator(".jp-Stdin-input")
    box.fill("c")
    box.press("Enter")
    state(page, "Running")
    page.idle()

    hang = happen(server, "hang")
    state(page, "Stuck")
    shoot(page, "stuck")
    page.page.locator(".na-toolbar").get_by_role("button", name="Debug").first.click()
    page.page.get_by_role("button", name="Why is it stuck?").click()
    page.wait_for("() => document.querySelector('.na-debug .na-verdict')?.innerText.includes('never reached')")
    shoot(page, "stuck-debug")
    page.page.locator(".na-toolbar").get_by_role("button", name="Stop").click()
    hang.unlink()
    state(page, "Stopped")
    page.idle()
    shoot(page, "stopped")


@cells(
    LAUNCH.format("0.02, 150", ", tags=('baseline', 'small')"),
    LAUNCH.format("0.05, 150", ""),
    LAUNCH.format("0.08,", ", hold_on_error=True"),
    "notebook_accelerate.runs()",
    "run = notebook_launcher(train, (0.03,), num_processes=2, use_port=0, block=False, panel=False)",
    "run.stop()",
)
def test_finished_runs_have_no_cut_off_text(page: NotebookPage, server: Server, chromium: Browser) -> None:
    page.run(1)
    page.wait_for(DRAWN, 4)
    run_state(page, 1, "Succeeded")
    page.idle()
    shoot(page, "succeeded")
    page.run(2)
    run_state(page, 2, "Succeeded")
    page.run(3)
    run_state(page, 3, "Running")
    page.page.wait_for_timeout(5000)  # Let the ranks train for a while.
    happen(server, "fail")
    run_state(page, 3, "Failed")
    page.idle()
    failed = f"{CARD}:has(.na-state-failed)"
    shoot(page, "failed", failed)
    page.page.get_by_role("button", name="Show error").click()
    shoot(page, "failed-errors", failed)

    page.run(5)
    page.idle()
    page.run(4)
    page.wait_for("() => document.querySelectorAll('.na-runs-table tbody tr').length === 4")
    page.wait_for("() => { document.querySelector('.na-runs').scrollIntoView(); return true; }")
    page.page.wait_for_timeout(3000)
    table = f"{CARD}:has(.na-runs)"
    shoot(page, "runs", table)
    page.page.get_by_role("button", name="Open the panel of run 1").click()
    page.wait_for("() => document.querySelector('.na-opened-run .na-head')")
    shoot(page, "runs-opened", table)
    page.run(6)
    page.idle()
    page.save()
    name = page.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
    page.shut_down()
    again = server.open(chromium, name)
    try:
        for index, what in ((2, "succeeded"), (4, "failed"), (5, "runs")):
            cell = f".jp-CodeCell:nth-child({index}) .jp-OutputArea"
            again.page.locator(cell).first.scroll_into_view_if_needed()
            shoot(again, f"saved-{what}", cell)
        assert all("model not found" in error for error in again.errors)
    finally:
        again.page.set_viewport_size({"width": 1280, "height": 1000})
        again.close()


@cells("notebook_accelerate.configure(train, (0.02,))")
def test_the_launch_form_has_no_cut_off_text(page: NotebookPage) -> None:
    form = ".na-form.na-config"
    page.run(1)
    page.page.locator(form).wait_for()
    page.idle()
    shoot(page, "form", form)
    page.page.get_by_label("Number of processes").fill("2")
    page.page.get_by_label("Use only the CPU").check()
    page.wait_for("() => document.querySelector('.na-form .na-plan').innerText.includes('2 processes on cpu')")
    for title in ("Training", "Configuration file"):
        page.page.locator(".na-form [role=tab]", has_text=title).first.click()
        page.page.wait_for_timeout(1500)
        shoot(page, f"form-{title.lower().replace(' ', '-')}", form)
    page.page.locator(".na-form [role=tab]", has_text="Launch").first.click()
    page.page.get_by_label("Number of processes").fill("0")
    page.wait_for("() => document.querySelector('.na-form .na-aside [role=alert]')")
    shoot(page, "form-wrong", form)
