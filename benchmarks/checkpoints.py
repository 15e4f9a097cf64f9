"""The pause of a training loop while a gigabyte of state is saved."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.bench import Figure, alternate, compared, row

_LAYERS = 21
_WIDTH = 2048
_BATCH = 16
_ITERATIONS = 3


@row("checkpoints", "save_state of 1 GB")
def pauses() -> Iterator[Figure]:
    """Measure how long training pauses while 88 million parameters and Adam's state are saved."""
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoints-"))
    ours, peer = _Trained("notebook_accelerate"), _Trained("accelerate")
    try:
        background, blocking, theirs = alternate(
            5,
            lambda: ours.pause(folder / "ours", blocking=False),
            lambda: ours.pause(folder / "ours"),
            lambda: peer.pause(folder / "theirs"),
        )
        yield compared("save_state(blocking=False): pause of the training loop", background, theirs, unit="ms",
                       scale=1e3, ratio=0.2, note="the call, plus the slowdown of the next iteration")  # fmt: skip
        yield compared("save_state(), synced to disk, with checksums", blocking, theirs, unit="ms", scale=1e3,
                       note="the peer leaves the data in the page cache, without checksums")  # fmt: skip
    finally:
        ours.accelerator.end_training()
        shutil.rmtree(folder)


class _Trained:
    """A model that one of the packages has prepared. Its optimizer has taken a step, so that it has a state."""

    def __init__(self, package: str) -> None:
        import torch

        torch.set_num_threads(1)
        model = torch.nn.Sequential(*(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters())
        self.accelerator = import_module(package).Accelerator(cpu=True)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.inputs = torch.randn(_BATCH, _WIDTH)
        self.iteration()

    def iteration(self) -> None:
        """Train on one batch."""
        self.accelerator.backward(self.model(self.inputs).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pause(self, folder: Path, **options: Any) -> float:
        """Save, and return the seconds of the call plus the slowdown of the next iteration."""
        shutil.rmtree(folder, ignore_errors=True)
        usual = statistics.median(_timed(self.iteration) for _ in range(_ITERATIONS))
        saving = _timed(lambda: self.accelerator.save_state(str(folder), **options))
        # Keep negative differences: cutting them off at zero would turn the noise of a busy machine into a bias.
        longer = _timed(self.iteration) - usual
        if options:
            _wait()
        return saving + longer


def _wait() -> None:
    from notebook_accelerate.checkpointing import wait_for_saves

    wait_for_saves()


def _timed(action: Callable[[], Any]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start
