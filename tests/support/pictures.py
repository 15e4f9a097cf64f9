"""Take the pictures of the documentation in JupyterLab: ``python -m tests.support.pictures [NAME ...]``.

Every picture shows a real run. It is saved as docs/pictures/NAME.png in the light theme and NAME-dark.png in the dark
one; the site shows the picture that matches the reader's theme (see docs/conf.py). tests.support.moving_picture takes
the moving picture of the home page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from tests.support import browser
from tests.support.browser import Browser, NotebookPage, Server

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
THEMES = {"light": "", "dark": "-dark"}
"""The ends of the file names, by theme."""
WIDTH, HEIGHT = 1120, 1500
SETUP = """
import time
import notebook_accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from notebook_accelerate import Accelerator, LaunchConfig, notebook_launcher

angles = torch.rand(20_000, generator=torch.Generator().manual_seed(0)) * 10
arms = torch.arange(20_000) % 3
points = torch.stack([(angles + 2 * arms).cos(), (angles + 2 * arms).sin()], 1) * (angles / 10)[:, None]
dataset = TensorDataset(points + 0.02 * torch.randn(points.shape, generator=torch.Generator().manual_seed(1)), arms)

def train(epochs, lr=3e-3, width=128, pause=0.02):
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    loader = DataLoader(dataset, batch_size=64, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(epochs):
        for step, (inputs, classes) in enumerate(loader):
            scores = model(inputs)
            loss = nn.functional.cross_entropy(scores, classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accuracy = (scores.argmax(1) == classes).float().mean()
            accelerator.log({"loss": loss.item(), "accuracy": accuracy.item()})
            if step % 10 == 0:
                print(f"epoch {epoch + 1}, step {step}: loss {loss.item():.3f}, accuracy {accuracy.item():.3f}")
            time.sleep(pause)

def evaluate():
    accelerator = Accelerator()
    for batch in range(3 - accelerator.process_index):  # rank 1 has one batch less
        correct = accelerator.reduce(torch.ones(128, device=accelerator.device))
    while accelerator.process_index:
        time.sleep(0.05)

def broken(scales):
    accelerator = Accelerator()
    scale = scales[accelerator.process_index]
    return accelerator.reduce(torch.tensor(1.0 / scale))

def stops_at_a_breakpoint():
    accelerator = Accelerator()
    loss = torch.tensor(0.5) * (accelerator.process_index + 1)
    if accelerator.is_main_process:
        breakpoint()
    accelerator.wait_for_everyone()

def shard():
    plugin = notebook_accelerate.FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(fsdp_plugin=plugin)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Linear(64, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for step in range(100_000):
        loss = model(torch.randn(8, 16, 64)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()})
        time.sleep(0.05)
"""
BACKGROUND = "num_processes=2, block=False"
LAUNCH = f"run = notebook_launcher(train, (100,), {BACKGROUND})"
STEPS = "while not all((info.last_step or 0) >= {0} for info in run.ranks): time.sleep(0.1)"
STOP = "run.stop()"
Prepare = Callable[[NotebookPage], None]


def nothing(_: NotebookPage) -> None:
    """Take the picture as soon as the cells have finished."""


def click(name: str, then: str = "") -> Prepare:
    """Return a function that clicks a button of the panel, and waits until an element appears.

    Args:
        name: The text of the button.
        then: The selector of the element.
    """

    def prepare(page: NotebookPage) -> None:
        page.page.get_by_role("button", name=name, exact=True).first.click()
        if then:
            page.page.locator(then).first.wait_for()

    return prepare


def open_tab(name: str) -> Prepare:
    """Return a function that opens a tab of the panel.

    Args:
        name: The title of the tab.
    """

    def prepare(page: NotebookPage) -> None:
        page.page.get_by_role("tab", name=name).first.click()

    return prepare


def answer_why(page: NotebookPage) -> None:
    """Click "Why is it stuck?" in the debug panel, and wait for the answer."""
    click("Why is it stuck?")(page)
    page.wait_for("() => document.querySelector('.na-verdict').innerText.includes('never reached')")


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture of one element of a notebook.

    Args:
        name: The name of the files, without the ending.
        cells: The cells to run after SETUP.
        prepare: Brings the element into the state to show.
        element: The selector of the element.
        waits: Whether the last cell waits for the user, so that it has not finished when the picture is taken.
        after: The cell that ends the run.
        height: The part of a longer element that is shown, in pixels from its top.
    """

    name: str
    cells: Sequence[str]
    prepare: Prepare = nothing
    element: str = ".na-live"
    waits: bool = False
    after: str = STOP
    height: int = 900


GRID = """
for lr, width in [(3e-3, 128), (3e-3, 32), (1e-3, 128), (1e-2, 64)]:
    name = f"width-{width}-lr-{lr}"
    run = notebook_launcher(train, (2, lr, width, 0.0), num_processes=2, save="runs", panel=False, name=name)
"""
RUN_TABS = {"step_time": "Step time", "logs": "Logs"}
GALLERY = (
    Picture(name="run_panel", cells=[LAUNCH, STEPS.format(420)]),
    *(
        Picture(name=name, cells=[LAUNCH, STEPS.format(160)], prepare=open_tab(title))
        for name, title in RUN_TABS.items()
    ),
    Picture(
        name="profile",
        cells=[LAUNCH, STEPS.format(40)],
        prepare=click("Profile", ".na-profile canvas"),
        element=".na-profile",
        height=580,
    ),
    Picture(
        name="memory",
        cells=[LAUNCH, STEPS.format(40)],
        prepare=click("Memory", ".na-memory table"),
        element=".na-memory",
        height=402,
    ),
    Picture(
        name="diagnosis",
        cells=[
            f"run = notebook_launcher(evaluate, {BACKGROUND}, panel=False)",
            "while 'never reached' not in run.diagnose().verdict: time.sleep(0.2)",
            "run.debug_panel()",
        ],
        prepare=answer_why,
    ),
    Picture(
        name="sharding",
        cells=[f"run = notebook_launcher(shard, {BACKGROUND})", STEPS.format(20)],
        prepare=open_tab("Sharding"),
    ),
    Picture(
        name="form",
        cells=["notebook_accelerate.configure(train, (3,))"],
        element=".na-config",
        after="pass",
        height=1100,
    ),
    Picture(
        name="kept_runs",
        cells=[GRID, 'notebook_accelerate.runs("runs")'],
        prepare=lambda page: page.page.wait_for_timeout(6000),  # until the curves of all runs are read
        after="pass",
    ),
    Picture(
        name="failure",
        cells=["notebook_launcher(broken, ({0: 1.0, 1: 0.0},), num_processes=2, panel=False)"],
        element=".jp-CodeCell:has-text('notebook_launcher(broken')",
        after="pass",
    ),
    Picture(
        name="breakpoint",
        cells=["run = notebook_launcher(stops_at_a_breakpoint, num_processes=2)"],
        prepare=lambda page: page.page.locator(".jp-Stdin").wait_for(),
        element=".jp-CodeCell:has-text('notebook_launcher(stops')",
        waits=True,
        after="pass",
    ),
    Picture(
        name="warm_ranks",
        cells=[
            "%load_ext notebook_accelerate",
            "%%ranks -n 2\nx = torch.ones(2) * (rank + 1)\ntorch.distributed.all_reduce(x)\nx",
        ],
        element=".jp-CodeCell:has-text('%%ranks')",
        after="notebook_accelerate.shutdown()",
    ),
)


def main(names: Sequence[str] = ()) -> int:
    """Take pictures. Return 1 if there is no browser.

    Args:
        names: The names of the pictures. If empty, all are taken.
    """
    if reason := browser.missing():
        print(reason, file=sys.stderr)
        return 1
    PICTURES.mkdir(exist_ok=True)
    with Server() as server, Browser(width=WIDTH) as chromium:
        for picture in GALLERY:
            if not names or picture.name in names:
                take(picture, server, chromium)
    return 0


def take(picture: Picture, server: Server, chromium: Browser) -> None:
    """Run the cells of a picture, and take it in both themes."""
    server.write(f"{picture.name}.ipynb", [SETUP, *picture.cells, picture.after])
    page = server.open(chromium, f"{picture.name}.ipynb")
    page.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})  # Pictures must not be cut off at the window.
    for index in range(1 + len(picture.cells)):
        page.run(index)
        if index < len(picture.cells) or not picture.waits:
            page.idle()
    target = page.page.locator(picture.element).first
    picture.prepare(page)
    target.wait_for()
    for theme, end in THEMES.items():
        if theme == "dark":
            page.dark()
        target.scroll_into_view_if_needed()
        page.page.mouse.move(0, 0)
        page.page.wait_for_timeout(1200)
        save(target.screenshot(), picture.height, PICTURES / f"{picture.name}{end}.png")
    if not picture.waits:
        page.run(1 + len(picture.cells))
        page.idle()
    page.close()


def save(shot: bytes, height: int, path: Path) -> None:
    """Write the upper part of a screenshot with a palette of 256 colours, which takes a third of the space."""
    from PIL import Image

    image = Image.open(BytesIO(shot)).convert("RGB")
    image = image.crop((0, 0, image.width, min(image.height, height)))
    image.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
