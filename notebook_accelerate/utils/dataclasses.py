"""Re-exports: enums, kwargs handlers and plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.config.ddp_kwargs import DistributedDataParallelKwargs as DistributedDataParallelKwargs
    from notebook_accelerate.config.deepspeed_plugin import DeepSpeedPlugin as DeepSpeedPlugin
    from notebook_accelerate.config.dynamo_plugin import TorchDynamoPlugin as TorchDynamoPlugin
    from notebook_accelerate.config.enums import *
    from notebook_accelerate.config.fp8_recipes import (
        AORecipeKwargs as AORecipeKwargs,
        FP8RecipeKwargs as FP8RecipeKwargs,
        MSAMPRecipeKwargs as MSAMPRecipeKwargs,
        TERecipeKwargs as TERecipeKwargs,
    )
    from notebook_accelerate.config.fsdp_plugin import (
        FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
        get_module_class_from_name as get_module_class_from_name,
    )
    from notebook_accelerate.config.kwargs_handlers import (
        AutocastKwargs as AutocastKwargs,
        GradScalerKwargs as GradScalerKwargs,
        InitProcessGroupKwargs as InitProcessGroupKwargs,
        KwargsHandler as KwargsHandler,
    )
    from notebook_accelerate.config.megatron_plugin import (
        MODEL_CONFIGS_TO_MEGATRON_PARSERS as MODEL_CONFIGS_TO_MEGATRON_PARSERS,
        MegatronLMPlugin as MegatronLMPlugin,
        add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    )
    from notebook_accelerate.config.parallelism_plugins import (
        DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
        TorchContextParallelConfig as TorchContextParallelConfig,
        TorchTensorParallelConfig as TorchTensorParallelConfig,
        TorchTensorParallelPlugin as TorchTensorParallelPlugin,
    )
    from notebook_accelerate.config.profile_kwargs import ProfileKwargs as ProfileKwargs
    from notebook_accelerate.config.quantization_config import BnbQuantizationConfig as BnbQuantizationConfig
    from notebook_accelerate.config.training_config import (
        DataLoaderConfiguration as DataLoaderConfiguration,
        GradientAccumulationPlugin as GradientAccumulationPlugin,
        ProjectConfiguration as ProjectConfiguration,
        TensorInformation as TensorInformation,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
