"""A rank that runs transformers' Trainer on command: ``python -m benchmarks.trainer_worker PACKAGE FOLDER``.

PYTHONPATH determines which package is imported as `accelerate`. The Trainer waits for a command ("steps COUNT") on
standard input, runs that many steps, answers with the time of one step, and waits again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import accelerate  # noqa: TID251 - resolves to this package or the peer
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments  # type: ignore[import-not-found,unused-ignore]

from tests.clients.trainer import TinyConfig, TinyModel


class Samples(Dataset[dict[str, Any]]):
    """A dataset that always returns the same sample, so that reading costs almost nothing."""

    def __init__(self) -> None:
        self.sample = {"x": torch.ones(4), "labels": 1}

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.sample


class Commands(TrainerCallback):
    """A callback that pauses training between commands."""

    def __init__(self) -> None:
        self._count = self._left = 0
        self._begin = 0.0, 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first command."""
        print("= ready", flush=True)
        self._wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Answer after the last step of a command."""
        self._left -= 1
        if self._left:
            return
        clock, processor = time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]
        found = {"clock": clock / self._count, "processor": processor / self._count}
        print(f"= {json.dumps(found)}", flush=True)
        self._wait()

    def _wait(self) -> None:
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # The other ranks also exit, so no process waits for the group.
        self._count = self._left = int(line.split()[1])
        self._begin = time.perf_counter(), time.process_time()


def main(package: str, folder: str) -> None:
    """Train until the end of input."""
    torch.set_num_threads(1)
    assert accelerate.Accelerator.__module__.startswith(f"{package}."), accelerate.Accelerator.__module__
    settings = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=10**7,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=TinyModel(TinyConfig()), args=settings, train_dataset=Samples(), callbacks=[Commands()]).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
