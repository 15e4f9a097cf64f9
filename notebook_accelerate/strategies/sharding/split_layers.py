"""What strategies that split layers over one dimension of the mesh have in common: tensors, or experts."""

from __future__ import annotations

from abc import abstractmethod

from torch import nn

from notebook_accelerate.strategies.module_queries import is_dtensor
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.sharded_strategy import ShardedStrategy, broadcast_weights
from notebook_accelerate.telemetry.sharding_events import ShardReport


class SplitLayersStrategy(ShardedStrategy):
    """Layers are split over the dimension of the mesh that `name` names; every rank has the same data.

    Its checkpoints and those of FSDP load into each other.
    """

    @abstractmethod
    def split(self, model: nn.Module) -> None:
        """Split a model on its device, in place; every rank must call this.

        Args:
            model: The model, with equal weights on all ranks.

        Raises:
            ValueError: The model cannot be split.
        """

    def shard(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and split it there, in place; every rank must call this.

        Args:
            model: The model, not split.

        Returns:
            The model itself, its weights replaced by their parts.

        Raises:
            ValueError: As for `split`.
        """
        model.to(self.setup.device)
        broadcast_weights(model, self.setup.device)
        self.split(model)
        return model

    def sharding(self) -> ShardReport:
        """See `Strategy.sharding`."""
        split = sum(
            any(is_dtensor(parameter) for parameter in module.parameters(recurse=False))
            for model in self.models
            for module in model.modules()
        )
        return shard_report.count_shards(self, axis=self.name, units=(split, "split layers"))
