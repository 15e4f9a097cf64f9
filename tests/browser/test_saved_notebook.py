"""Live panels in a saved notebook without its kernel, in JupyterLab 4 and Notebook 7."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter, WebPDFExporter

from tests.support.browser import CHROMIUM, DAILY_IN_LAB, LIMIT, ROOT, SCREENSHOTS, App, Browser, NotebookPage, Server
from tests.support.kernel import headless

TRAIN = """
import os, time, notebook_accelerate
from notebook_accelerate import notebook_launcher, telemetry
from notebook_accelerate.telemetry import MetricEvent, ProgressEvent

def train(steps):
    for step in range(steps):
        telemetry.emit(MetricEvent({"loss": 1 / (step + 1)}, step))
        telemetry.emit(ProgressEvent(step + 1, steps, "step"))
        time.sleep(0.02)
"""
FAILING = """
def fails(step):
    if os.environ["RANK"] == "1":
        raise ValueError("it diverged")
    time.sleep(60)

notebook_launcher(fails, (0,), num_processes=2, use_port=0)
"""
LAUNCH = "run = notebook_launcher(train, ({},), num_processes=2, use_port=0, block=False)"
CELLS = [
    TRAIN,
    LAUNCH.format(100_000),
    "notebook_accelerate.configure(train)",
    "notebook_accelerate.widgets.RunsTable()",
    "run.debug_panel()",
]
NAMES = ("Run 1 (train), running", "Settings of a launch", "Runs of this kernel", "Run 1 (train), running")
STATIC = ".na-left"
DRAWN = """() => {
    document.querySelector('.na-card').scrollIntoView();
    return document.querySelector('.na-chart canvas');
}"""
SHOWN = "(selector) => [...document.querySelectorAll(selector)].filter(node => node.checkVisibility()).length"


@pytest.fixture
def pages() -> Iterator[list[NotebookPage]]:
    """Yield a list for pages, which are closed with their kernels at the end."""
    opened: list[NotebookPage] = []
    yield opened
    for page in opened:
        page.close()
        assert page.outside == []


def _count(page: NotebookPage, selector: str) -> int:
    return int(page.page.evaluate(SHOWN, selector))


@DAILY_IN_LAB
def test_without_its_kernel_a_notebook_shows_static_forms(
    server: Server, chromium: Browser, app: App, pages: list[NotebookPage]
) -> None:
    name = f"{app}-{time.monotonic_ns()}.ipynb"
    server.write(name, CELLS)
    live = server.open(chromium, name, app)
    pages.append(live)
    for index in range(len(CELLS)):
        live.run(index)
        live.idle()
    # Scroll each panel into view, because curves that are out of sight are not drawn.
    live.wait_for(DRAWN)
    live.page.locator(".na-card").first.scroll_into_view_if_needed()
    live.until(lambda: _count(live, ".na-live") >= 1, "a live panel")
    live.until(lambda: _count(live, STATIC) == 0, "no visible static form next to a live panel")
    live.shot(f"{app}-live-page")
    saved = live.save()
    views = [output["data"] for cell in saved["cells"] for output in cell["outputs"] if "data" in output]
    assert sum("application/vnd.jupyter.widget-view+json" in data for data in views) == 4
    assert sum("na-left" in "".join(data.get("text/html", "")) for data in views) == 4
    assert live.errors == []

    # A kernel that is killed sends nothing, so the file stays as it was saved.
    copy = f"without-kernel-{name}"
    shutil.copy(server.notebooks / name, server.notebooks / copy)
    again = server.open(chromium, copy, app)
    pages.append(again)
    again.wait_for("() => document.querySelector('.na-left')?.checkVisibility()")
    for index, words in enumerate(NAMES):
        cell = again.page.locator(".jp-CodeCell").nth(index + 1)
        cell.scroll_into_view_if_needed()
        cell.locator(f"{STATIC} > summary", has_text=words).wait_for()
        cell.locator(".jp-OutputArea-output.jupyter-widgets", has_text="model not found").wait_for(state="attached")
        assert "model not found" not in cell.inner_text()
    again.shot(f"{app}-without-kernel")
    assert all("model not found" in error for error in again.errors)


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a notebook with the reports of a successful and a failed run, executed without a browser."""
    sources = (TRAIN, LAUNCH.format(20).replace(", block=False", ""), FAILING)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    folder = tmp_path_factory.mktemp("kernel")
    client = headless(book, folder, startup_timeout=round(LIMIT), timeout=3 * round(LIMIT), allow_errors=True)
    return client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_printed_report_is_complete(executed: Any, chromium: Browser, tmp_path: Path) -> None:
    html, _ = HTMLExporter(template_name="webpdf").from_notebook_node(executed)
    (tmp_path / "saved.html").write_text(html)
    page = chromium.context.new_page()
    try:
        page.route("http*://**", lambda route: route.abort())  # The page from nbconvert refers to external scripts.
        page.emulate_media(media="print")
        page.goto(f"file://{tmp_path / 'saved.html'}")
        for words in ("number of processes", "python", "rank 1 failed: ValueError: it diverged", "peak memory"):
            assert page.locator(".notebook-accelerate-report", has_text=words).first.is_visible()
        rows = page.locator(".notebook-accelerate-report th", has_text="number of processes")
        assert rows.count() == 2
        assert rows.first.evaluate("e => e.checkVisibility({contentVisibilityAuto: true}) && e.offsetHeight > 0")
        assert page.locator(".notebook-accelerate-report img").first.evaluate("e => e.naturalWidth") > 100
        page.screenshot(path=SCREENSHOTS / "report-on-paper.png", full_page=True)
    finally:
        page.close()


@DAILY_IN_LAB
def test_a_report_in_an_untrusted_notebook_is_complete(
    executed: Any, server: Server, chromium: Browser, app: App, pages: list[NotebookPage]
) -> None:
    """The front end sanitizes the HTML of an untrusted notebook."""
    name = f"{app}-untrusted-{time.monotonic_ns()}.ipynb"
    (server.notebooks / name).write_text(nbformat.writes(executed), encoding="utf-8")
    page = server.open(chromium, name, app)
    pages.append(page)
    for index, words in ((1, "peak memory"), (2, "rank 1 failed: ValueError: it diverged")):
        cell = page.page.locator(".jp-CodeCell").nth(index)
        cell.scroll_into_view_if_needed()
        output = cell.locator(".jp-RenderedHTML").first
        output.scroll_into_view_if_needed()
        output.locator("summary", has_text="Ranks").click()
        output.locator("table").first.wait_for()
        assert words in output.inner_text()
        assert "@media" not in output.inner_text()
        assert page.page.locator("script", has_text="notebook-accelerate").count() == 0
    image = page.page.locator(".jp-CodeCell").nth(1).locator(".jp-RenderedHTML img").first
    image.scroll_into_view_if_needed()
    assert image.get_attribute("alt").startswith("Curve of loss: ")
    page.until(lambda: image.evaluate("e => e.naturalWidth") > 100, "the curve")
    page.shot(f"{app}-untrusted")


def test_a_report_can_be_converted_to_pdf(executed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from playwright.async_api import BrowserType, Page

    launch, goto = BrowserType.launch, Page.goto

    async def debian(self: Any, **options: Any) -> Any:  # nbconvert looks for playwright's own browser.
        return await launch(self, executable_path=CHROMIUM, timeout=1000 * LIMIT, **options)

    async def patient(self: Any, url: str, **options: Any) -> Any:
        return await goto(self, url, timeout=1000 * LIMIT, **options)

    monkeypatch.setattr(BrowserType, "launch", debian)
    monkeypatch.setattr(Page, "goto", patient)
    exporter = WebPDFExporter()
    exporter.disable_sandbox = True
    pdf, _ = exporter.from_notebook_node(executed)
    assert pdf.startswith(b"%PDF-")
    assert pdf.count(b"/Type /Page\n") >= 1
    assert len(pdf) > 20_000
