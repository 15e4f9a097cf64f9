"""A small model and its training, sharded across ranks, for tests of saving and resuming."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from notebook_accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

FORMS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp": {"fsdp_version": 2}},
    "fsdp1": {"fsdp": {"use_orig_params": True}},
    "fsdp1, flat": {"fsdp": {"use_orig_params": False}},
    "fsdp2, whole": {"fsdp": {"fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT"}},
    "tp": {"degrees": {"tp_size": 2}},
    "fsdp2 of replicas": {"fsdp": {"fsdp_version": 2}, "degrees": {"dp_replicate_size": 2, "dp_shard_size": 2}},
    "fsdp2 and tp": {"fsdp": {"fsdp_version": 2}, "degrees": {"dp_shard_size": 2, "tp_size": 2}},
}
"""Ways to split a model. The forms with replicas and the one with both fsdp2 and tp need four ranks."""


class Net(nn.Module):
    """A model of two layers, with a buffer that changes during training."""

    tp_plan: ClassVar = {"first": "colwise", "last": "rowwise"}
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return scores, and count the call."""
        if self.training:
            self.steps += 1
        scores: torch.Tensor = self.last(torch.tanh(self.first(inputs)))
        return scores


class ShardedTraining:
    """A sharded model with its optimizer and schedule.

    Args:
        form: A key of `FORMS`.
        seed: The seed for the weights.
    """

    def __init__(self, form: str = "fsdp2", seed: int = 0) -> None:
        settings = FORMS[form]
        fsdp, degrees = settings.get("fsdp"), settings.get("degrees")
        if fsdp is not None:
            fsdp = {"state_dict_type": "SHARDED_STATE_DICT", "auto_wrap_policy": "SIZE_BASED_WRAP", **fsdp}
            fsdp.setdefault("min_num_params", 100)
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp),
            parallelism_config=None if degrees is None else ParallelismConfig(**degrees),
        )
        torch.manual_seed(seed)
        raw = Net()
        optimizer = torch.optim.AdamW(raw.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(raw, optimizer, schedule)
        self.done = 0

    def step(self) -> float:
        """Train on this step's batch, which is the same on every rank. Return the loss."""
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(self.done))
        self.done += 1
        loss = self.model(inputs).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def go_on(self, folder: str, done: int) -> None:
        """Load a checkpoint that was saved after this many steps."""
        self.accelerator.load_state(folder)
        self.done = done
