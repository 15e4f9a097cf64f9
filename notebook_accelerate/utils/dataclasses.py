"""Re-export the enums, kwargs handlers and plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.config.kwargs_handlers import (
        DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    )
    from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin as TorchDynamoPlugin
    from notebook_accelerate.config.enums import *
    from notebook_accelerate.config.low_precision import *
    from notebook_accelerate.config.fsdp_plugin import *
    from notebook_accelerate.config.kwargs_handlers import *
    from notebook_accelerate.config.megatron_plugin import (
        MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
        MegatronLMPlugin as MegatronLMPlugin,
        add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    )
    from notebook_accelerate.config.kwargs_handlers import ProfileKwargs as ProfileKwargs
    from notebook_accelerate.config.low_precision import BnbQuantizationConfig as BnbQuantizationConfig
    from notebook_accelerate.config.parallelism_config import (
        DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
        TorchContextParallelConfig as TorchContextParallelConfig,
        TorchTensorParallelConfig as TorchTensorParallelConfig,
        TorchTensorParallelPlugin as TorchTensorParallelPlugin,
    )

reexport(__name__)
