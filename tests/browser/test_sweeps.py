"""The table of a sweep: its rows appear as runs are launched, and each run can be stopped, even while it waits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.browser import DAILY_IN_LAB, App

TRAIN = """
import math, time
from notebook_accelerate import Accelerator, LaunchConfig, notebook_launcher, sweep

def train(lr, width):
    accelerator = Accelerator(cpu=True)
    for step in range(60):
        accelerator.log({"loss": math.exp(-lr * step) + 1 / width}, step)
        if lr == 0.1 and step == 20:
            raise ValueError("the loss is not finite")
        time.sleep(0.05 if lr < 0.5 else 0.5)

held = notebook_launcher(time.sleep, (600,), devices=1, block=False, panel=False, name="held")
core = int(list(held.plan.slots.values())[0])
"""
SWEEP = """
space = {"lr": [0.02, 0.1, 0.5], "width": [8, 16]}
found = sweep(train, space, config=LaunchConfig(cpu=True), devices=[core, 1 - core])
"""
ROWS = (
    "() => [...document.querySelectorAll('.na-runs-table tbody tr')].map(row => row.innerText.toLowerCase()).join('|')"
)


@DAILY_IN_LAB
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_sweep_shows_a_table_of_its_runs(opened: Any, app: App, theme: str) -> None:
    page = opened([TRAIN, SWEEP, "found.stop(0.5); held.stop(0.5)"], theme)
    page.run(1)
    page.wait_for(f"() => ({ROWS})().includes('queued, behind held')")
    assert "queued, behind held" in page.page.locator(".na-runs-table tbody tr").last.inner_text().lower()
    page.page.locator(".na-runs-table tbody tr").last.get_by_role("button", name="Stop").click()
    page.wait_for(f"() => ({ROWS})().includes('stopped')")
    page.wait_for(f"() => ({ROWS})().includes('failed')")
    page.wait_for("() => document.querySelectorAll('.na-live .na-chart canvas').length >= 1")
    page.page.wait_for_timeout(1500)
    page.shot(f"{app}-sweep-{theme}", ".na-live")
    page.page.get_by_role("button", name="Open the panel of run", exact=False).first.click()
    page.wait_for("() => document.querySelector('.na-opened-run .na-head')")
    page.page.wait_for_timeout(1000)
    page.shot(f"{app}-sweep-opened-{theme}", ".na-live")
    page.run(2)
    page.idle()
