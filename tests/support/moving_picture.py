"""Take the moving picture of the home page in JupyterLab: ``python -m tests.support.moving_picture``.

Two real runs are recorded as screenshots: one trains while its panel draws the curves, and the next one hangs until its
panel says why. The pictures are docs/pictures/demo.webp and, in the dark theme, demo-dark.webp.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

from tests.support import browser
from tests.support.browser import Browser, NotebookPage, Server
from tests.support.pictures import PICTURES, SETUP, STOP, THEMES

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, HEIGHT = 1000, 1010
FRAME_MS, READ_MS = 220, 2200
"""How long a frame is shown, and how long the first and the last frame of a scene are, in milliseconds."""
PARTS = """
import warnings
warnings.simplefilter("ignore")
def slow(rows):
    time.sleep(0.03)
    return torch.utils.data.default_collate(rows)
def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return model, optimizer, DataLoader(dataset, batch_size=64, shuffle=True, collate_fn=slow)
"""
TRAIN = """def train(epochs):
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(*parts())
    for epoch in range(epochs):
        for inputs, classes in loader:
            loss = nn.functional.cross_entropy(model(inputs), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()})

run = notebook_launcher(train, (3,), num_processes=2, block=False)"""
EVALUATE = """def evaluate():
    accelerator = Accelerator()
    for batch in range(3 - accelerator.process_index):  # one batch less on rank 1
        correct = accelerator.reduce(torch.ones(128))
    while accelerator.process_index:
        time.sleep(0.05)

run = notebook_launcher(evaluate, num_processes=2, block=False)"""
SHOWN = ".jp-NotebookPanel-notebook"
SCROLL = """(index) => {
  const cell = document.querySelectorAll('.jp-NotebookPanel-notebook .jp-Cell')[index];
  const outer = cell.closest('.jp-WindowedPanel-outer') ?? cell.parentElement;
  outer.scrollTop += cell.getBoundingClientRect().top - outer.getBoundingClientRect().top - 8;
}"""
ANSWERED = "() => /never reached/.test(document.querySelectorAll('.na-attention')[{0}]?.innerText ?? '')"
ENDED = "() => [...document.querySelectorAll('.na-state')].some((state) => /Succeeded/.test(state.innerText))"


class Film:
    """Frames of a notebook, each with its time on the screen."""

    def __init__(self, page: NotebookPage) -> None:
        self._page = page
        self.frames: list[Image] = []
        self.times: list[int] = []
        self.first = 0
        """The frame that the picture starts with, which is all that readers without animations see."""

    def take(self, milliseconds: int = FRAME_MS) -> None:
        """Add a frame, or show the last one longer if nothing has changed."""
        from PIL import Image

        shot = self._page.page.locator(SHOWN).first.screenshot()
        frame = Image.open(BytesIO(shot)).convert("RGB").quantize(128, dither=Image.Dither.NONE).convert("RGB")
        if self.frames and self.frames[-1].tobytes() == frame.tobytes():
            self.times[-1] += milliseconds
            return
        self.frames.append(frame)
        self.times.append(milliseconds)

    def record(self, until: Callable[[], object], *, every: float, limit: float = 120.0) -> None:
        """Add a frame every ``every`` seconds until a condition is met, then one that can be read."""
        deadline = time.monotonic() + limit
        while not until() and time.monotonic() < deadline:
            self.take()
            self._page.page.wait_for_timeout(1000 * every)
        self._page.page.wait_for_timeout(800)
        self.take(READ_MS)

    def save(self, name: str) -> None:
        """Write the frames as an animated WebP."""
        first, *others = self.frames[self.first :] + self.frames[: self.first]
        times = self.times[self.first :] + self.times[: self.first]
        path = PICTURES / name
        first.save(
            path, save_all=True, append_images=others, duration=times, loop=0, lossless=True, quality=90, method=4
        )
        print(f"{path}: {len(self.frames)} frames, {path.stat().st_size / 1024:.0f} KiB")


def main() -> int:
    """Take the picture in both themes. Return 1 if there is no browser."""
    if reason := browser.missing():
        print(reason, file=sys.stderr)
        return 1
    with Server() as server, Browser(width=WIDTH) as chromium:
        for theme, end in THEMES.items():
            film(server, chromium, theme).save(f"demo{end}.webp")
    return 0


def film(server: Server, chromium: Browser, theme: str) -> Film:
    """Run the cells and record both scenes in a theme."""
    name = f"demo-{theme}.ipynb"
    server.write(name, [SETUP + PARTS, TRAIN, EVALUATE, STOP])
    page = server.open(chromium, name, theme=theme)
    page.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    page.run(0)
    page.idle()
    made = Film(page)
    for index, ended in ((1, ENDED), (2, ANSWERED.format(1))):
        page.page.evaluate(SCROLL, index)
        page.page.wait_for_timeout(500)
        made.take(READ_MS)
        page.run(index)
        made.record(partial(page.page.evaluate, ended), every=0.2 if index == 1 else 1.0)
        made.first = made.first or len(made.frames) - 1  # The panel of the first run with all of its curves.
    page.run(3)
    page.idle()
    page.close()
    return made


if __name__ == "__main__":
    sys.exit(main())
