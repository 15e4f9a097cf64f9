"""Automatic curves, several runs side by side, and a lot of output, in JupyterLab and Notebook."""

from __future__ import annotations

from typing import Any

from tests.support.browser import DAILY_IN_LAB, App

TRAIN = """
import math, random, time
import torch
import notebook_accelerate
from notebook_accelerate import Accelerator, notebook_launcher

def train(lr, seconds=3, log=True):
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100 * seconds)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    inputs, noise = torch.randn(32, 16), random.Random(accelerator.process_index)
    for step in range(40 * seconds):  # the same number on each rank
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(); schedule.step(); optimizer.zero_grad()
        if log:
            accuracy = 1 - math.exp(-lr * step) + noise.gauss(0, .01)
            accelerator.log({"train/loss": loss.item(), "accuracy": accuracy}, step)
        time.sleep(0.02)

def talk(lines):
    for line in range(lines):
        print(f"line {line} of a rank that talks a lot")
"""
CARD = ".na-live"
AUTOMATIC = """(names) => {
    document.querySelector('.na-section-auto')?.scrollIntoView({ block: 'center' });
    const drawn = [...document.querySelectorAll('.na-section-auto figure:has(canvas) .na-chart-name')];
    return names.every(name => drawn.some(each => each.innerText === name));
}"""
DRAWN = """() => {
    // Curves out of sight are not drawn.
    document.querySelector('.na-live .na-sections')?.scrollIntoView({ block: 'center' });
    return document.querySelectorAll('.na-live .na-chart canvas').length >= 2;
}"""
CHIPS = "() => [...document.querySelectorAll('.na-live .na-chip')].map(chip => chip.innerText.split(':')[0]).join()"
ROWS = "() => [...document.querySelectorAll('.na-runs-table tbody tr')].map(row => row.dataset.key).join()"


@DAILY_IN_LAB
def test_curves_appear_without_logging(opened: Any, app: App) -> None:
    page = opened(
        [TRAIN, "run = notebook_launcher(train, (0.05, 60, False), num_processes=2, use_port=0, block=False)"]
    )
    page.run(1)
    page.wait_for(AUTOMATIC, ["learning rate", "gradient norm", "steps per second"])
    assert page.page.locator(".na-section-auto .na-auto").count() == 4
    assert "rank 0 = rank 1" in page.text("figure[data-metric='auto/lr'] .na-chart-value")
    assert "accelerator.log" in page.text(".na-plots > .na-note")
    page.page.get_by_role("button", name="System 2").click()
    page.wait_for("() => document.querySelectorAll('.na-section-system figure:has(canvas)').length === 2")
    page.page.wait_for_timeout(3000)
    page.shot(f"{app}-automatic", CARD)
    page.page.get_by_role("button", name="Stop", exact=True).click()
    page.wait_for("() => document.querySelector('.notebook-accelerate-report')")


@DAILY_IN_LAB
def test_runs_can_be_compared_opened_and_stopped(opened: Any, app: App) -> None:
    launches = [
        f"notebook_launcher(train, ({lr}, 2), num_processes=2, use_port=0, panel=False, tags=('sweep',));"
        for lr in (0.02, 0.08)
    ]
    launches.append(
        "run = notebook_launcher(train, (0.04, 600), num_processes=2, use_port=0, block=False, panel=False)"
    )
    page = opened(
        [TRAIN, *launches, "notebook_accelerate.runs()", "[run.status for run in notebook_accelerate.runs()]"]
    )
    for index in range(4):
        page.run(1 + index)
        page.idle()
    page.wait_for(DRAWN)
    heads = page.page.locator(".na-runs-table thead th").all_inner_texts()
    for head in ("tags", "lr", "seconds", "log", "train/loss", "best train/loss", "best accuracy"):
        assert head in heads
    colours = "node => getComputedStyle(node).backgroundColor"
    swatches = page.page.locator(".na-run-colour").evaluate_all(f"nodes => nodes.map({colours})")
    chips = page.page.locator(".na-chip i").evaluate_all(f"nodes => nodes.map({colours})")
    assert swatches == chips[::-1]
    assert page.page.locator(".na-chip").last.inner_text() == "train 3: lr 0.04, seconds 600"
    page.shot(f"{app}-runs", CARD)

    # Test sorting and filtering.
    assert page.page.evaluate(ROWS) == "3,2,1"
    page.page.get_by_role("button", name="lr", exact=True).click()
    page.wait_for(f"() => ({ROWS})() === '2,3,1'")
    page.page.get_by_role("button", name="lr", exact=True).click()
    page.wait_for(f"() => ({ROWS})() === '1,3,2'")
    page.page.get_by_role("searchbox", name="Filter runs").fill("sweep|nothing")
    page.wait_for(f"() => ({ROWS})() === '1,2'")
    page.wait_for(f"() => ({CHIPS})() === 'train 1,train 2'")
    page.shot(f"{app}-runs-filtered", CARD)
    page.page.get_by_role("searchbox", name="Filter runs").fill("")
    page.wait_for(f"() => ({CHIPS})() === 'train 1,train 2,train 3'")

    # If columns are cut off, a button counts them and scrolls to them.
    page.page.set_viewport_size({"width": 700, "height": 1000})
    page.wait_for("() => /^[1-9].* more columns? →$/.test(document.querySelector('.na-more:not([hidden])').innerText)")
    page.page.locator(".na-more").click()
    page.wait_for("() => document.querySelector('.na-runs .na-scroll').scrollLeft > 0")
    page.page.set_viewport_size({"width": 1280, "height": 1000})

    # Open a run's panel below its row, and end the run with a click.
    page.page.get_by_role("button", name="Open the panel of run 3").click()
    page.wait_for("() => document.querySelector('.na-opened-run .na-head')?.innerText.includes('run 3')")
    page.page.get_by_role("button", name="Close the panel of run 3").click()
    page.wait_for("() => !document.querySelector('.na-opened-run .na-head')")
    assert page.page.get_by_role("button", name="Stop run 1").count() == 0
    page.page.get_by_role("button", name="Stop run 3").click()
    page.wait_for("() => document.querySelectorAll('.na-runs-table .na-state-stopped').length === 1")
    page.run(5)
    page.wait_for("() => document.body.innerText.includes(\"['succeeded', 'succeeded', 'stopped']\")")


@DAILY_IN_LAB
def test_the_head_and_the_tail_of_much_output_remain_in_a_small_notebook(opened: Any, app: App) -> None:
    launch = "run = notebook_launcher(talk, ({},), num_processes=2, use_port=0{})"
    logs = "len(run.logs()), run.logs(1)[0], run.logs(1)[-1]"
    page = opened([TRAIN, launch.format(50_000, ""), logs, launch.format(30, ", output='panel'"), logs])
    for index in range(4):
        page.run(1 + index)
        page.idle()
    page.wait_for("() => document.body.innerText.includes('lines not shown here: run.logs() returns them')")
    texts = [[_text(output) for output in cell["outputs"]] for cell in page.save()["cells"]]
    assert any("] line 0 of a rank that talks a lot" in text for text in texts[1])
    tail = next(text for text in texts[1] if text.startswith("… "))
    assert "line 49999 of a rank that talks a lot" in tail
    assert texts[2] == ["(100000, 'line 0 of a rank that talks a lot', 'line 49999 of a rank that talks a lot')"]
    assert not any("[rank 0] line 3 of" in text and "▶ run" in text for text in texts[3]), "the panel shows the output"
    assert texts[4] == ["(60, 'line 0 of a rank that talks a lot', 'line 29 of a rank that talks a lot')"]
    path = page.page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
    assert (page.server.notebooks / path).stat().st_size < 300_000


def _text(output: dict[str, Any]) -> str:
    text = "".join(output.get("text") or output.get("data", {}).get("text/plain", ""))
    return " ".join(text.split()) if output["output_type"] == "execute_result" else text
