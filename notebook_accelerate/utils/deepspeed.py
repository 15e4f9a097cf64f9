"""Re-export the classes and functions for DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.config.deepspeed_config import (
        HfDeepSpeedConfig as HfDeepSpeedConfig,
    )
    from notebook_accelerate.config.deepspeed_plugin import (
        DummyOptim as DummyOptim,
        DummyScheduler as DummyScheduler,
    )
    from notebook_accelerate.strategies.deepspeed.deepspeed_strategy import (
        get_active_deepspeed_plugin as get_active_deepspeed_plugin,
    )
    from notebook_accelerate.strategies.deepspeed.deepspeed_engine import (
        DeepSpeedEngineWrapper as DeepSpeedEngineWrapper,
        DeepSpeedOptimizerWrapper as DeepSpeedOptimizerWrapper,
        DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
    )
    from notebook_accelerate.strategies.deepspeed.initialize_arguments import (
        map_pytorch_optim_to_deepspeed as map_pytorch_optim_to_deepspeed,
    )

reexport(__name__)
