"""Layers that ranks share out between them, for inference: `prepare_pippy` does it, nothing is exchanged here."""

from __future__ import annotations

from typing import ClassVar

import torch

from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.strategies.strategy import Strategy


class PipelineStrategy(Strategy):
    """Ranks along the dimension "pp" read the same data, and have a model's layers between them; none trains."""

    name: ClassVar[str] = "pp"

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Raise an error: no rank has all layers of the model, and nothing is trained.

        Args:
            optimizer: Not used.
            device_placement: Not used.

        Raises:
            ValueError: Always.
        """
        size = self.setup.state.parallelism_config.pp_size
        raise ValueError(
            f"pp_size={size} shares layers out for inference (prepare_pippy), and {type(optimizer).__name__} trains; "
            f"train a pipeline by Accelerator(megatron_lm_plugin=MegatronLMPlugin(pp_degree={size})), or set pp_size=1"
        )


__all__ = ["PipelineStrategy"]
