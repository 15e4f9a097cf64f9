"""Functions for libraries that shard, save and load models themselves, on top of Accelerate."""
# ruff: noqa: ARG001 - the parameters are Accelerate's

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from notebook_accelerate._lazy import reexport
from notebook_accelerate.config import environ
from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.state.rank_execution import RankExecution
from notebook_accelerate.strategies.accelerator_properties import AcceleratorProperties
from notebook_accelerate.strategies.fsdp.fsdp2 import FSDP2Strategy, load_full_state
from notebook_accelerate.strategies.fsdp.fsdp_units import checkpoint_activations, find_ignored_modules, find_units
from notebook_accelerate.strategies.module_queries import (
    keep_ties,
    plain_name,
    retie,
    switch_parameters,
    tied_names,
    without_compile,
)
from notebook_accelerate.strategies.sharding import sharded_checkpoint

if TYPE_CHECKING:
    from notebook_accelerate.checkpointing.model_weights import merge_fsdp_weights as merge_fsdp_weights

reexport(__name__)


def enable_fsdp_ram_efficient_loading() -> None:
    """Make `from_pretrained` of transformers load weights on rank 0 only, in this process from now on."""
    environ.set_variables({"ACCELERATE_USE_FSDP": "True", "FSDP_CPU_RAM_EFFICIENT_LOADING": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make `from_pretrained` of transformers load weights on every rank, in this process from now on."""
    environ.set_variables({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"})


def _state_dict_kind(plugin: FullyShardedDataParallelPlugin, use_dcp: bool) -> str:
    kind = plugin.state_dict_kind
    if use_dcp or kind != "SHARDED_STATE_DICT":
        return kind
    return sharded_checkpoint.OWN_SHARDS if plugin.fsdp_version == 2 else "FULL_STATE_DICT"


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: RankExecution,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write a sharded model into a folder; every rank must call this.

    Args:
        fsdp_plugin: The plugin whose `state_dict_type` determines the format.
        accelerator: The Accelerator that prepared the model.
        model: The sharded model.
        output_dir: The folder, which is created if it does not exist.
        model_index: The number of the model, which is part of the file names.
        adapter_only: Whether to write only the adapter of a PEFT model.
        use_dcp: Whether torch's distributed checkpoint writes sharded states. Otherwise each rank writes a file with
            its shards, without collectives, and only the same number of ranks can load them. With FSDP 1, rank 0
            writes one file.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    keep = _adapter_filter(model, adapter_only)
    sharded_checkpoint.save_model(
        without_compile(model), output_dir, model_index, _state_dict_kind(fsdp_plugin, use_dcp), keep
    )
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: RankExecution,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Read a sharded model from a folder; every rank must call this.

    Args:
        fsdp_plugin: Not used, because the folder shows its format.
        accelerator: The Accelerator that prepared the model.
        model: The sharded model.
        input_dir: The folder.
        model_index: The number of the model, which is part of the file names.
        adapter_only: Whether the folder contains only the adapter of a PEFT model.
        use_dcp: Not used.

    Returns:
        The missing and unexpected names.
    """
    accelerator.wait_for_everyone()
    keep = _adapter_filter(model, adapter_only)
    return sharded_checkpoint.load_model(
        without_compile(model), input_dir, model_index, strict=not adapter_only, keep=keep
    )


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: RankExecution,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the optimizer of a sharded model into a folder; every rank must call this.

    Args:
        fsdp_plugin: The plugin whose `state_dict_type` determines the format.
        accelerator: The Accelerator that prepared the model.
        optimizer: The optimizer, prepared or not.
        model: The sharded model.
        output_dir: The folder, which is created if it does not exist.
        optimizer_index: The number of the optimizer, which is part of the file names.
        use_dcp: Whether torch's distributed checkpoint writes sharded states. Otherwise each rank writes a file with
            its shards, without collectives, and only the same number of ranks can load them. With FSDP 1, rank 0
            writes one file.
    """
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    kind = _state_dict_kind(fsdp_plugin, use_dcp)
    sharded_checkpoint.save_optimizer(_inner(optimizer), without_compile(model), output_dir, optimizer_index, kind)
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: RankExecution,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Read the optimizer of a sharded model from a folder; every rank must call this.

    Args:
        fsdp_plugin: Not used, because the folder shows its format.
        accelerator: The Accelerator that prepared the model.
        optimizer: The optimizer, prepared or not.
        model: The sharded model.
        input_dir: The folder.
        optimizer_index: The number of the optimizer, which is part of the file names.
        adapter_only: Not used, because the optimizer contains only the parameters that it trains.
        use_dcp: Not used.
    """
    accelerator.wait_for_everyone()
    sharded_checkpoint.load_optimizer(_inner(optimizer), without_compile(model), input_dir, optimizer_index)


def _adapter_filter(model: nn.Module, adapter_only: bool) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return a filter that keeps only the adapter of a PEFT model, or None to keep everything."""
    inner: Any = without_compile(model)
    inner = getattr(inner, "module", inner)
    if not adapter_only or not hasattr(inner, "peft_config"):
        return None
    from peft import get_peft_model_state_dict  # type: ignore[import-not-found,unused-ignore]

    return lambda state: get_peft_model_state_dict(inner, state_dict=state)


# ---- FSDP 2, step by step


def fsdp2_prepare_model(accelerator: AcceleratorProperties, model: nn.Module) -> nn.Module:
    """Shard a model according to the Accelerator's plugin; every rank must call this.

    Args:
        accelerator: The Accelerator, with an FSDP 2 plugin.
        model: The model to shard.

    Returns:
        The model, sharded in place.

    Raises:
        ValueError: The Accelerator does not use FSDP 2.
    """
    strategy = accelerator.strategy
    if not isinstance(strategy, FSDP2Strategy):
        raise ValueError(
            f"fsdp2_prepare_model needs FSDP 2, but this Accelerator uses {strategy.name!r}; write "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    if not isinstance(model, FSDPModule):
        strategy.shard(model)
    return model


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a function that decides which modules of a model become units.

    Args:
        fsdp2_plugin: The FSDP 2 plugin with the policy.
        model: The model, which is not sharded yet.

    Returns:
        A function that takes a module and returns whether it becomes a unit.
    """
    units = set(find_units(model, fsdp2_plugin.policy_for(model)))
    return lambda module: module in units


def fsdp2_apply_ac(accelerator: AcceleratorProperties, model: nn.Module) -> nn.Module:
    """Make a model's units recompute their activations in the backward pass. The model is changed in place.

    Args:
        accelerator: The Accelerator, with an FSDP 2 plugin.
        model: The model, which is not sharded yet.

    Returns:
        The model.
    """
    plugin = accelerator.state.fsdp_plugin
    checkpoint_activations(
        model, find_units(model, plugin.policy_for(model)), bool(plugin.activation_checkpointing_offload)
    )
    return model


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters under names without the prefixes that wrappers add.

    Args:
        named_params: The parameters by their names in the model.
    """
    return {plain_name(name): parameter for name, parameter in named_params.items()}


def fsdp2_load_full_state_dict(
    accelerator: AcceleratorProperties, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Load the weights of rank 0 into a sharded model on any device; every rank must call this.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The sharded model. Its parameters may be on the meta device.
        full_sd: The full state on rank 0. It is ignored on other ranks.
        cpu_offload: Whether the shards are kept in CPU memory.
    """
    ties = tied_names(model)
    load_full_state(model, full_sd, cpu_offload)
    retie(model, ties)


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer, in place, if it was created before its model was sharded.

    Args:
        optimizer: The optimizer to change.
        mapping: The new parameters, by the old parameter or by its `data_ptr()`.
    """
    switch_parameters(optimizer, mapping)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a loss scaler for models sharded with FSDP 2.

    Args:
        kwargs: Arguments of `torch.amp.GradScaler`.

    Returns:
        A `torch.amp.GradScaler`, which accepts sharded gradients.
    """
    return torch.amp.GradScaler(**kwargs)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Move some of a model's modules to a device, and return their parameters.

    Args:
        modules: The modules, or a regular expression that matches their full names. If None, there are no modules.
        model: The model that contains the modules.
        device: The device to which the modules are moved.

    Returns:
        The parameters.
    """
    found = find_ignored_modules(model, modules)
    return {parameter for module in found for parameter in module.to(device).parameters()}


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """Wrap a function that allocates modules, so that shared parameters stay shared.

    Args:
        param_init_fn: The function, which is called with each module.
        model: The model, with shared parameters.
        device: Not used, because `param_init_fn` knows the device.

    Returns:
        The wrapped function.
    """
    return keep_ties(param_init_fn, model)
