"""Re-exports: Megatron-LM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import attach

if TYPE_CHECKING:
    from notebook_accelerate.strategies.megatron.megatron_strategy import (
        AbstractTrainStep as AbstractTrainStep,
        BertTrainStep as BertTrainStep,
        GPTTrainStep as GPTTrainStep,
        MegatronEngine as MegatronEngine,
        MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
        MegatronLMDummyScheduler as MegatronLMDummyScheduler,
        MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
        MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
        T5TrainStep as T5TrainStep,
        avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
