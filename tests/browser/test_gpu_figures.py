"""GPUs of Kaggle and Colab in the panels, with emulated variables and NVML, and a stub of torch.cuda in the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import fake_gpu
from tests.support.browser import SCREENSHOTS, Browser, NotebookPage, Server
from tests.support.nightly import rest_nightly

SETUP = """
import torch
from notebook_accelerate import configure, notebook_launcher
from notebook_accelerate.hardware import detect, device_counts
torch.version.cuda = "12.6"                       # Kaggle's and Colab's builds are for CUDA,
device_counts._nvidia_driver = lambda: True       # and their machines have the driver's device files
here = detect()
(here.accelerator, here.count, here.host)
"""
TRAIN = """
def train():
    import os, time
    from notebook_accelerate import Accelerator
    from tests.support.counted_cuda import CountedCuda
    accelerator, cuda = Accelerator(cpu=True), CountedCuda({count}).install()
    model, optimizer = (lambda m: (m, torch.optim.SGD(m.parameters(), 1e-3)))(torch.nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, optimizer)
    step = 0
    while not os.path.exists("stop"):
        loss = model(torch.ones(8, 4)).square().mean()
        accelerator.backward(loss)
        optimizer.step(); optimizer.zero_grad()
        cuda.hold((3 << 30) + (step % 7 << 27) + (accelerator.process_index << 28), 5 << 30)
        accelerator.log({{"loss": loss.item()}}, step)
        step += 1
        time.sleep(0.02)
"""
LAUNCH = "run = notebook_launcher(train, num_processes={count}, use_port=0, block=False)"
MACHINES = {
    "kaggle": ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, 2),
    "colab": ({"COLAB_RELEASE_TAG": "release-colab", "COLAB_GPU": "1"}, 1),
}


@pytest.fixture(params=rest_nightly(((name,) for name in MACHINES), daily=lambda name: name == "kaggle"))
def machine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chromium: Browser
) -> Iterator[tuple[str, int, NotebookPage]]:
    """Emulate a machine. Yield its name, its number of GPUs, and a notebook on it."""
    variables, count = MACHINES[request.param]
    emulated = {"LD_LIBRARY_PATH": str(fake_gpu.build(tmp_path).parent), "FAKE_NVML_NAME": "Tesla T4", **variables}
    for name, value in {**emulated, "FAKE_NVML_COUNT": str(count)}.items():
        monkeypatch.setenv(name, value)
    with Server() as server:
        server.write("gpu.ipynb", [SETUP, "configure()", TRAIN.format(count=count), LAUNCH.format(count=count)])
        page = server.open(chromium, "gpu.ipynb")
        try:
            yield request.param, count, page
        finally:
            (server.notebooks / "stop").touch()
            page.shut_down()
            page.page.close()


def test_the_gpus_of_the_machine_and_of_each_rank_are_shown(machine: tuple[str, int, NotebookPage]) -> None:
    name, count, page = machine
    for index in range(3):
        page.run(index)
        page.idle()
    page.wait_for(f"() => document.body.innerText.includes(\"('cuda', {count}, '{name}')\")")
    page.wait_for("(text) => document.body.innerText.includes(text)", f"{count} × cuda")
    page.shot(f"{name}-configure", ".na-config")
    page.run(3)
    page.wait_for("() => [...document.querySelectorAll('.na-live')].at(-1)?.innerText.includes('GPU memory')")
    page.page.locator(".na-tabs [role=tab]", has_text="Ranks").click()
    page.wait_for(
        """(count) => {
            const tables = [...document.querySelectorAll('.na-live table')];
            const devices = tables.find(table => table.caption?.textContent.startsWith('Devices'));
            return devices.tBodies[0].rows.length === count && devices.innerText.includes('40 %');
        }""",
        count,
    )
    card = page.page.locator(".na-live").last
    card.screenshot(path=SCREENSHOTS / f"{name}-ranks.png")
    assert "Tesla T4 · 16.1 GB" in card.inner_text()
    assert page.errors == []
