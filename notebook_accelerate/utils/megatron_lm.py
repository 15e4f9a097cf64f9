"""Re-exports: Megatron-LM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from notebook_accelerate._lazy import reexport

if TYPE_CHECKING:
    from notebook_accelerate.strategies.megatron.forward_steps import (
        AbstractTrainStep as AbstractTrainStep,
        BertTrainStep as BertTrainStep,
        GPTTrainStep as GPTTrainStep,
        T5TrainStep as T5TrainStep,
    )
    from notebook_accelerate.strategies.megatron.megatron_engine import (
        MegatronEngine as MegatronEngine,
        MegatronLMOptimizerWrapper as MegatronLMOptimizerWrapper,
        MegatronLMSchedulerWrapper as MegatronLMSchedulerWrapper,
        avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
        gather_across_data_parallel_groups as gather_across_data_parallel_groups,
    )
    from notebook_accelerate.strategies.megatron.megatron_loaders import (
        MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
        MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    )

reexport(__name__)
