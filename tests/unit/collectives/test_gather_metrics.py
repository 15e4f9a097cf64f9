"""Results of the last batch in a world of one rank."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from notebook_accelerate import Accelerator


def test_padding_samples_are_cut_in_a_world_of_one_too() -> None:
    # transformers repeats the loss of a batch to the full batch size and lets gather_for_metrics cut it.
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(10)), batch_size=8))  # type: ignore[arg-type]
    lengths = [
        (len(accelerator.gather_for_metrics(torch.ones(8))), len(accelerator.gather_for_metrics(batch)))
        for batch in loader
    ]
    assert lengths == [(8, 8), (2, 2)]
