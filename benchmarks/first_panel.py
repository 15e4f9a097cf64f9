"""The time from a launch to its panel, in kernels that have not shown a panel before."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.bench import Figure, alternate, compared, row
from tests.support.browser import Browser, Server, missing
from tests.support.kernel import Kernel

ROUNDS = 7

FIRST, LATER = 0.25, 0.2
"""The goals for the first launch of a kernel and for later ones, in seconds."""
_VISIBLE = 1.0
"""The goal for the time until the browser shows the panel, in seconds."""

_WIDGET = "application/vnd.jupyter.widget-view+json"
_SETUP = """
import time, torch
from notebook_accelerate import notebook_launcher
def train():
    time.sleep(2)
def launch(**options):
    global begin
    begin = time.monotonic()
    return notebook_launcher(train, num_processes=2, use_port=0, **options)
"""
# Record how long after this call a panel's header becomes visible.
_NOTE_PANEL = """() => {
    const begin = performance.now();
    window.panelAfter = undefined;
    const look = () => {
        const head = document.querySelector('.na-card .na-headline');
        if (head?.offsetHeight && head.innerText.trim()) window.panelAfter = performance.now() - begin;
        else requestAnimationFrame(look);
    };
    look();
}"""


@row("panels", "first panel")
def first_panel() -> Iterator[Figure]:
    """Measure the time until the message that shows the panel arrives, for two launches in each new kernel.

    The first launch immediately follows the cell that imports torch.
    """
    for options, what in (("", "call to the panel's message"), ("block=False", "the same, block=False")):
        found: list[list[float]] = []

        def measure(options: str = options, found: list[list[float]] = found) -> float:
            with Kernel(forked=False) as kernel:
                kernel.check(_SETUP)
                found.append([_seconds_to_panel(kernel, options) for _ in range(2)])
            return 0.0

        alternate(ROUNDS, measure)
        first, second = zip(*found[1:], strict=True)
        yield compared(f"{what}, first launch of a kernel", first, unit="s", limit=FIRST)
        yield compared(f"{what}, second launch", second, unit="s", limit=LATER)


def _seconds_to_panel(kernel: Kernel, options: str) -> float:
    cell = kernel.submit(f"run = launch({options})")
    kernel.wait_for(lambda: any(_WIDGET in output.get("data", {}) for output in cell.outputs), what="the panel")
    end = time.monotonic()
    kernel.finish(cell).expect_ok()
    kernel.check("run.wait()")
    return end - float(kernel.value("begin"))


@row("browser", "first panel in the browser")
def first_panel_in_browser() -> Iterator[Figure]:
    """Measure the time until JupyterLab shows the panel. Each kernel is new, but the page is not."""
    what = "from running the cell to the visible panel, first launch of a kernel"
    if reason := missing():
        yield Figure(what=what, unit="s", ours=None, note=reason)
        return
    with Server() as server, Browser() as browser:
        numbers = iter(range(1 + ROUNDS))

        def measure() -> float:
            name = f"first-panel-{next(numbers)}.ipynb"
            server.write(name, [_SETUP, "run = launch()"])
            page = server.open(browser, name)
            page.run(0)
            page.idle()
            page.page.evaluate(_NOTE_PANEL)
            page.run(1)
            page.wait_for("() => window.panelAfter")
            seconds = float(page.page.evaluate("() => window.panelAfter")) / 1e3
            page.idle()
            page.close()
            return seconds

        yield compared(what, alternate(ROUNDS, measure)[0], unit="s", limit=_VISIBLE)
