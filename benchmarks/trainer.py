"""A step of transformers' Trainer with this package imported as `accelerate`, compared with Accelerate itself.

The row runs only if transformers is installed. ``make bench`` has an environment for it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from benchmarks.bench import Figure, alternate, compared, row
from benchmarks.training import HERE, PEER
from benchmarks.worker_ranks import WorkerRanks
from notebook_accelerate.integrations import accelerate_alias

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, STEPS = 30, 25
"""The number of rounds, and of steps in each. The sides alternate. A turn takes about 0.05 seconds on an idle core."""


@row("trainer", "trainer")
def trainer() -> Iterator[Figure]:
    """Measure a step of two batches with clipping. The model is tiny, so that most of the time is overhead."""
    if find_spec("transformers") is None:
        yield Figure(
            what="Trainer", unit="ms", ours=None, note="run make bench ROWS=trainer, which installs transformers"
        )
        return
    for ranks in (1, 2):
        what = f"Trainer, {ranks} rank{'s, DDP' if ranks > 1 else ''}"
        here, peer = time_trainer(ranks)
        for kind, name in (("clock", "a step of a tiny model"), ("processor", "CPU time of a step")):
            times = [[step[kind] for step in side] for side in (here, peer)]
            yield compared(f"{what}: {name}", *times, unit="ms", scale=1e3, ratio=1.0)


def time_trainer(ranks: int) -> list[list[dict[str, float]]]:
    """Return the duration in seconds of a step on the slowest rank, for each side (here, peer) and round."""
    found: list[list[dict[str, float]]] = [[], []]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        paths = {HERE: f"{accelerate_alias.STARTUP_FOLDER}{os.pathsep}{ROOT}", PEER: str(ROOT)}
        sides = [stack.enter_context(_world(side, path, folder, ranks)) for side, path in paths.items()]

        def measure(index: int) -> float:
            found[index].append(sides[index].steps(STEPS))
            return 0.0

        alternate(ROUNDS, lambda: measure(0), lambda: measure(1))
    return [side[1:] for side in found]


def _world(side: str, path: str, folder: str, ranks: int) -> WorkerRanks:
    environment = {"PYTHONPATH": path, "HF_HUB_OFFLINE": 1, "ACCELERATE_USE_CPU": "true"}
    return WorkerRanks(["benchmarks.trainer_worker", side, f"{folder}/{side}"], ranks, environment)
