"""Sharded training with either package on two ranks. `scripts.py` contains the unsharded training."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def insist_on_sharding(plugin: Any) -> None:
    """Make Accelerate 1.15 shard on a CPU, where it would otherwise ignore its plugin and train with DDP."""
    state = import_module("accelerate.state")
    dynamo = import_module("accelerate.utils").TorchDynamoPlugin()
    state.AcceleratorState(cpu=True, fsdp_plugin=plugin, dynamo_plugin=dynamo, _from_accelerator=True)
    for shared in (state.PartialState._shared_state, state.AcceleratorState._shared_state):
        shared["distributed_type"] = state.DistributedType.FSDP
    state.AcceleratorState._shared_state["fsdp_plugin"] = plugin


class ShardedTraining:
    """A model that two ranks share, with its optimizer and schedule.

    Args:
        package: The package to use: accelerate or notebook_accelerate.
        seed: The seed for the weights.
    """

    def __init__(self, package: str, seed: int) -> None:
        import torch

        plugin = import_module(f"{package}.utils").FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="SHARDED_STATE_DICT",
            auto_wrap_policy="size_based_wrap",
            min_num_params=40,
            cpu_ram_efficient_loading=False,
        )
        if package == "accelerate":
            insist_on_sharding(plugin)
        self.accelerator = import_module(package).Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 6))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)

    def steps(self, numbers: range) -> list[float]:
        """Train on these steps' batches. All ranks have the same batches, with noise from their own random numbers."""
        import torch

        losses = []
        for number in numbers:
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
            loss = (self.model(inputs + 0.1 * torch.rand(4, 6)) - inputs).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def found(self, losses: list[float]) -> list[float]:
        """Check that the parameters are sharded. Return the losses and the learning rate."""
        kinds = {type(parameter).__name__ for parameter in self.model.parameters()}
        assert kinds == {"DTensor"}, kinds
        return [*losses, *self.schedule.get_last_lr()]


def train(package: str, folder: str) -> list[float]:
    """Train, save, and continue. Return the losses after the checkpoint, and the learning rate."""
    training = ShardedTraining(package, 0)
    training.steps(range(4))
    training.accelerator.save_state(folder)
    return training.found(training.steps(range(4, 8)))


def go_on(package: str, folder: str) -> list[float]:
    """Load and continue. Return the same values as `train`."""
    training = ShardedTraining(package, 77)
    training.accelerator.load_state(folder)
    return training.found(training.steps(range(4, 8)))
