"""A detached run that outlives a kernel restart from the menu, and ten kept runs in one plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from notebook_accelerate import attach
from tests.support.browser import DAILY_IN_LAB, App, NotebookPage
from tests.support.detached import user_folder

# Tests request the fixture `state` before `opened`, so that the kernel ends before the folder is removed.
TRAIN = """
import math, os, time
os.environ["XDG_STATE_HOME"] = {state!r}
os.environ.pop("XDG_RUNTIME_DIR", None)
import notebook_accelerate
from notebook_accelerate import Accelerator, notebook_launcher
from notebook_accelerate.widgets import RunsTable

def train(rate, steps, seconds):
    accelerator = Accelerator(cpu=True)
    for step in range(steps):
        loss = 2.5 * math.exp(-rate * step / 400) + 0.3
        accelerator.log({{"loss": loss, "accuracy": 1 - math.exp(-rate * step / 300)}}, step=step)
        if step % 50 == 0:
            print("step", step)
        time.sleep(seconds)
    return accelerator.process_index
"""
LAUNCH = "run = notebook_launcher(train, (1.0, 100_000, 0.02), num_processes=2, use_port=0, detach=True, name='night')"
ATTACH = "run = notebook_accelerate.attach('night')\nrun"
CHECK = """
steps = [run.metrics["loss"].rank(rank).steps.tolist() for rank in (0, 1)]
print("whole:", all(each == list(range(len(each))) for each in steps), run.logs(0)[0])
"""
CARD = ".na-live"
CURVES = """() => {
    const card = [...document.querySelectorAll('.na-live')].at(-1);
    card?.querySelector('.na-sections')?.scrollIntoView({ block: 'center' });  // curves out of sight are not drawn
    return (card?.querySelectorAll('.na-chart canvas').length ?? 0) >= 2;
}"""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder for detached runs."""
    with user_folder(tmp_path / "state", monkeypatch) as folder:
        yield folder


def _step(page: NotebookPage) -> int:
    words = " ".join(page.page.locator(f"{CARD} .na-figures").all_inner_texts()[-1:]).split()
    return int(words[words.index("step") + 1].replace(",", "")) if "step" in words else -1


def _restart_from_the_menu(page: NotebookPage) -> None:
    page.page.locator(".lm-MenuBar-itemLabel", has_text="Kernel").click()
    page.page.locator(".lm-Menu-itemLabel", has_text="Restart Kernel…").first.click()
    page.page.locator(".jp-Dialog button", has_text="Restart").last.click()
    page.page.wait_for_timeout(1000)
    page.wait_until_ready()


@DAILY_IN_LAB
def test_a_run_outlives_a_restart_from_the_menu(state: Path, opened: Any, app: App) -> None:
    cells = [TRAIN.format(state=str(state)), LAUNCH, "await run", ATTACH, CHECK, "run.stop(); print(run.status)"]
    page = opened(cells)
    page.run(1)
    page.wait_for(CURVES)
    page.until(lambda: _step(page) > 20, "progress")
    page.shot(f"{app}-detached-before", CARD)
    page.run(2)
    page.wait_for("() => window.cellsThatRun?.size > 0")
    pids = [info.pid for info in attach("night").ranks]
    before = _step(page)
    _restart_from_the_menu(page)
    page.page.evaluate("() => { delete window.cellsThatRun; }")
    page.run(0)
    page.idle()
    page.run(3)
    page.wait_for(CURVES)
    page.until(lambda: _step(page) > before, "the step of before the restart")
    known = _step(page)
    page.until(lambda: _step(page) > known + 20, "progress")
    assert attach("night").status == "running"
    assert [info.pid for info in attach("night").ranks] == pids
    page.shot(f"{app}-detached-attached", f"{CARD} >> nth=-1")
    page.run(4)
    page.wait_for("() => document.body.innerText.includes('whole: True step 0')")
    page.run(5)
    page.wait_for("() => document.querySelector('.na-live .na-head .na-state-stopped')")
    page.idle()


@DAILY_IN_LAB
def test_ten_kept_runs_are_compared_in_one_plot(state: Path, opened: Any, app: App) -> None:
    launches = """
for number in range(10):
    notebook_launcher(train, (0.5 + number / 3, 200, 0.0), num_processes=1, start_method="fork", cpu=True,
                      save="kept", name=f"rate-{number}", panel=False)
""".replace("cpu=True,", "config=notebook_accelerate.LaunchConfig(cpu=True),")
    tables = ["RunsTable(notebook_accelerate.runs('kept').open())", "notebook_accelerate.runs('kept')"]
    page = opened([TRAIN.format(state=str(state)), launches, *tables])
    page.run(1)
    page.idle()
    page.run(2)
    page.wait_for(CURVES)
    page.idle()
    page.wait_for("() => document.querySelectorAll('.na-runs-table tbody tr').length === 10")
    page.wait_for("() => document.querySelectorAll('.na-live .na-chip').length === 10")
    assert page.page.locator(".na-chip i.na-dashed").count() == 2, "there are only eight colours"
    page.shot(f"{app}-ten-runs", CARD)

    # This table shows the runs' summaries, and opens the runs only to draw their curves.
    page.run(3)
    page.wait_for("() => document.querySelectorAll('.na-live').length === 2")
    shown = "[...document.querySelectorAll('.na-live')].at(-1)"
    chips = f"[...{shown}.querySelectorAll('.na-chip')].map((chip) => chip.innerText).join()"
    names = ",".join(f"rate-{number}" for number in range(10))
    page.wait_for(f"() => {chips}.replaceAll(/: rate [\\d.]+/g, '') === '{names}'")
    page.page.get_by_role("button", name="Open the panel of rate-7").click()
    page.wait_for(f"() => {shown}.querySelector('.na-opened-run .na-head')?.innerText.includes('rate-7')")
