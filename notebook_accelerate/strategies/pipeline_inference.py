"""Pipeline parallelism for inference: `prepare_pippy` distributes the layers, this strategy exchanges nothing."""

from __future__ import annotations

from typing import ClassVar

import torch

from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.strategies.strategy import Strategy


class PipelineStrategy(Strategy):
    """Ranks along the dimension "pp" read the same data, and each has some of the layers; none trains."""

    name: ClassVar[str] = "pp"

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Raise an error: no rank has all layers of the model.

        Raises:
            ValueError: Always.
        """
        size = self.setup.state.parallelism_config.pp_size
        raise ValueError(
            f"pp_size={size} distributes layers for inference (prepare_pippy), and {type(optimizer).__name__} trains; "
            f"train a pipeline by Accelerator(megatron_lm_plugin=MegatronLMPlugin(pp_degree={size})), or set pp_size=1"
        )
