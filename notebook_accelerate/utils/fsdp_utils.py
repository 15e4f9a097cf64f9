"""Functions that libraries on top of Accelerate call to shard, save and load models themselves."""
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
        fsdp_plugin: The plugin; its `state_dict_type` decides the form.
        accelerator: The Accelerator.
        model: The sharded model.
        output_dir: The folder; made where it does not exist.
        model_index: Number of the model, in the names of the files.
        adapter_only: Write only the adapter of a PEFT model.
        use_dcp: Whether sharded states are written by torch's distributed checkpoint; otherwise each rank writes a file
            of its shards, without the others, which as many ranks can load; with FSDP 1 rank 0 writes one file.
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
        fsdp_plugin: Not used: the folder says how it was written.
        accelerator: The Accelerator.
        model: The sharded model.
        input_dir: The folder.
        model_index: Number of the model, in the names of the files.
        adapter_only: The folder has only the adapter of a PEFT model.
        use_dcp: Not used.

    Returns:
        The names that were missing or not expected.
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
        fsdp_plugin: The plugin; its `state_dict_type` decides the form.
        accelerator: The Accelerator.
        optimizer: The optimizer, prepared or not.
        model: The sharded model.
        output_dir: The folder; made where it does not exist.
        optimizer_index: Number of the optimizer, in the names of the files.
        use_dcp: Whether sharded states are written by torch's distributed checkpoint; otherwise each rank writes a file
            of its shards, without the others, which as many ranks can load; with FSDP 1 rank 0 writes one file.
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
        fsdp_plugin: Not used: the folder says how it was written.
        accelerator: The Accelerator.
        optimizer: The optimizer, prepared or not.
        model: The sharded model.
        input_dir: The folder.
        optimizer_index: Number of the optimizer, in the names of the files.
        adapter_only: Not used: the optimizer has only the parameters that it trains.
        use_dcp: Not used.
    """
    accelerator.wait_for_everyone()
    sharded_checkpoint.load_optimizer(_inner(optimizer), without_compile(model), input_dir, optimizer_index)


def _adapter_filter(model: nn.Module, adapter_only: bool) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return the filter that keeps only the adapter of a PEFT model; None for other models, and to keep everything."""
    inner: Any = without_compile(model)
    inner = getattr(inner, "module", inner)
    if not adapter_only or not hasattr(inner, "peft_config"):
        return None
    from peft import get_peft_model_state_dict  # type: ignore[import-not-found,unused-ignore]

    return lambda state: get_peft_model_state_dict(inner, state_dict=state)


# ---- FSDP 2, step by step


def fsdp2_prepare_model(accelerator: AcceleratorProperties, model: nn.Module) -> nn.Module:
    """Shard a model as the Accelerator's plugin says; every rank must call this.

    Args:
        accelerator: The Accelerator, with an FSDP 2 plugin.
        model: The model.

    Returns:
        The model, sharded in place.

    Raises:
        ValueError: The Accelerator does not train by FSDP 2.
    """
    strategy = accelerator.strategy
    if not isinstance(strategy, FSDP2Strategy):
        raise ValueError(
            f"fsdp2_prepare_model needs FSDP 2, and this Accelerator trains by {strategy.name!r}; write "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )
    if not isinstance(model, FSDPModule):
        strategy.shard(model)
    return model


def fsdp2_prepare_auto_wrap_policy(fsdp2_plugin: Any, model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return which modules of a model become units.

    Args:
        fsdp2_plugin: The plugin.
        model: The model, not sharded.

    Returns:
        A function of a module.
    """
    units = set(find_units(model, fsdp2_plugin.policy_for(model)))
    return lambda module: module in units


def fsdp2_apply_ac(accelerator: AcceleratorProperties, model: nn.Module) -> nn.Module:
    """Make the units of a model recompute their activations in the backward pass, in place.

    Args:
        accelerator: The Accelerator, with an FSDP 2 plugin.
        model: The model, not sharded.

    Returns:
        The model.
    """
    plugin = accelerator.state.fsdp_plugin
    checkpoint_activations(
        model, find_units(model, plugin.policy_for(model)), bool(plugin.activation_checkpointing_offload)
    )
    return model


def fsdp2_canonicalize_names(named_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by their names without wrappers' prefixes.

    Args:
        named_params: Parameters by name.
    """
    return {plain_name(name): parameter for name, parameter in named_params.items()}


def fsdp2_load_full_state_dict(
    accelerator: AcceleratorProperties, model: nn.Module, full_sd: dict[str, Any], cpu_offload: bool = False
) -> None:
    """Load the weights that rank 0 has into a sharded model, on any device; every rank must call this.

    Args:
        accelerator: The Accelerator.
        model: The sharded model; its parameters may have no values yet.
        full_sd: The full state on rank 0; ignored on other ranks.
        cpu_offload: Whether the shards rest in main memory.
    """
    ties = tied_names(model)
    load_full_state(model, full_sd, cpu_offload)
    retie(model, ties)


def fsdp2_switch_optimizer_parameters(optimizer: torch.optim.Optimizer, mapping: Mapping[Any, nn.Parameter]) -> None:
    """Replace the parameters of an optimizer that was made before its model was sharded, in place.

    Args:
        optimizer: The optimizer.
        mapping: The new parameter by old one, or by the old one's `data_ptr()`.
    """
    switch_parameters(optimizer, mapping)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a scaler of losses for models sharded by FSDP 2.

    Args:
        kwargs: As for `torch.amp.GradScaler`.

    Returns:
        torch's own, which takes sharded gradients.
    """
    return torch.amp.GradScaler(**kwargs)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device
) -> set[nn.Parameter]:
    """Return the parameters of some modules of a model, moved to a device.

    Args:
        modules: The modules, or a regular expression that matches their full names; None for no module.
        model: The model.
        device: Where the modules go.

    Returns:
        The parameters.
    """
    found = find_ignored_modules(model, modules)
    return {parameter for module in found for parameter in module.to(device).parameters()}


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], Any]:
    """Make a function that allocates modules keep shared parameters shared.

    Args:
        param_init_fn: Called with each module.
        model: The model, its parameters shared as they should be.
        device: Not used: `param_init_fn` knows it.

    Returns:
        The function to use instead.
    """
    return keep_ties(param_init_fn, model)
