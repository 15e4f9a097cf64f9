"""Functions that prepare objects for Megatron-LM one at a time, and collectives of its data-parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from notebook_accelerate._lazy import reexport
from notebook_accelerate.strategies.accelerator_properties import HasState
from notebook_accelerate.strategies.megatron import megatron_setup
from notebook_accelerate.strategies.megatron.megatron_loaders import (
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
)

if TYPE_CHECKING:
    from notebook_accelerate.accelerator import Accelerator
    from notebook_accelerate.strategies.megatron.megatron_strategy import (
        megatron_lm_initialize as megatron_lm_initialize,
        megatron_lm_prepare_model_optimizer_scheduler as megatron_lm_prepare_model_optimizer_scheduler,
    )
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
    )
    from notebook_accelerate.strategies.megatron.megatron_loaders import (
        MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    )

reexport(__name__)


# ---- prepare objects step by step


def megatron_lm_prepare_data_loader(accelerator: Accelerator, dataloader: Any) -> Any:
    """Create a loader for this rank whose batches are accumulation windows; every rank must call this.

    Args:
        accelerator: The Accelerator, with a Megatron-LM plugin.
        dataloader: A DataLoader of micro-batches, or a `MegatronLMDummyDataLoader`.

    Returns:
        The loader. For a `MegatronLMDummyDataLoader`, a list of the loaders for its three splits.
    """
    if isinstance(dataloader, MegatronLMDummyDataLoader):
        return [
            loader if loader is None else accelerator.prepare_data_loader(loader)
            for loader in dataloader.build_loaders(accelerator)
        ]
    return accelerator.prepare_data_loader(dataloader)


def megatron_lm_prepare_optimizer(accelerator: HasState, model: Any) -> Any:
    """Create Megatron's optimizer for a wrapped model; every rank must call this.

    Args:
        accelerator: The Accelerator, or another object with the same `state`.
        model: This rank's parts of the model.

    Returns:
        A `MegatronOptimizer`.
    """
    return megatron_setup.make_optimizer(
        list(model) if isinstance(model, (list, tuple)) else [model], megatron_setup.active_plugin(accelerator.state)
    )


def megatron_lm_prepare_scheduler(accelerator: HasState, optimizer: Any, scheduler: Any) -> Any:
    """Create Megatron's schedule for a Megatron optimizer.

    Args:
        accelerator: The Accelerator, or another object with the same `state`.
        optimizer: A `MegatronOptimizer`.
        scheduler: A `MegatronLMDummyScheduler`. If None, the learning rate is constant.

    Returns:
        An `OptimizerParamScheduler`.
    """
    plugin = megatron_setup.active_plugin(accelerator.state)
    if scheduler is not None:
        plugin.set_scheduler_args(scheduler)
    return megatron_setup.make_schedule(optimizer, plugin, scheduler is not None)


# ---- collectives of the data-parallel group


def avg_losses_across_data_parallel_group(losses: list[torch.Tensor]) -> torch.Tensor:
    """Average losses over the data-parallel group; all ranks of the group must call this.

    Args:
        losses: Scalar tensors.

    Returns:
        The averages, a tensor with one element per loss.
    """
    group = megatron_setup.import_parallel_state().get_data_parallel_group()
    averaged = torch.stack([loss.detach().clone().float().view(()) for loss in losses])
    dist.all_reduce(averaged, group=group)
    return averaged / dist.get_world_size(group)


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """Concatenate tensors of the data-parallel group; all ranks of the group must call this.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors, with the same shapes on these ranks.

    Returns:
        The same structure, with tensors concatenated along the first dimension.
    """
    if isinstance(tensor, dict):
        return type(tensor)({key: gather_across_data_parallel_groups(value) for key, value in tensor.items()})
    if isinstance(tensor, (list, tuple)):
        return type(tensor)(gather_across_data_parallel_groups(item) for item in tensor)
    if not isinstance(tensor, torch.Tensor):
        return tensor
    group = megatron_setup.import_parallel_state().get_data_parallel_group()
    local = (tensor[None] if tensor.dim() == 0 else tensor).contiguous()
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts)
