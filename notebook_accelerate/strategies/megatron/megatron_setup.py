"""Imports megatron-core, and initializes its groups of ranks and its random number generators."""

from __future__ import annotations

from importlib import import_module, util
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.config.megatron_plugin import MegatronLMPlugin
from notebook_accelerate.hardware import device_table
from notebook_accelerate.state import AcceleratorState, process_group

_initialized_for: tuple[Any, tuple[int, int, int]] | None = None
"""The default process group and the degrees of Megatron's current groups."""


def import_parallel_state() -> Any:
    """Import megatron-core's groups of ranks.

    Returns:
        `megatron.core.parallel_state`.

    Raises:
        ImportError: megatron-core is not installed.
    """
    if util.find_spec("megatron") is None or util.find_spec("megatron.core") is None:
        raise ImportError(
            "training with a MegatronLMPlugin needs megatron-core, which is not installed: pip install "
            "'megatron-core>=0.16,<0.17'"
        )
    return import_module("megatron.core.parallel_state")


def active_plugin(state: AcceleratorState) -> MegatronLMPlugin:
    """Return the Megatron-LM plugin.

    Args:
        state: The world.

    Raises:
        ValueError: The world has no such plugin.
    """
    plugin: object = state.megatron_lm_plugin
    if not isinstance(plugin, MegatronLMPlugin):
        raise ValueError(f"megatron_lm_plugin is a {type(plugin).__name__}; pass a MegatronLMPlugin")
    return plugin


def check_degrees(plugin: MegatronLMPlugin, world_size: int) -> int:
    """Return the number of groups of ranks with data of their own.

    Args:
        plugin: The plugin.
        world_size: Number of ranks.

    Raises:
        ValueError: The degrees do not fit the world.
    """
    tensors, stages, experts = plugin.tp_degree or 1, plugin.pp_degree or 1, plugin.expert_model_parallel_size or 1
    groups = world_size // (tensors * stages)
    if groups < 1 or world_size != tensors * stages * groups:
        raise ValueError(
            f"tp_degree={tensors} x pp_degree={stages} = {tensors * stages} ranks hold one model, and the world of "
            f"{world_size} ranks is not a multiple of that; start {tensors * stages} ranks or a multiple "
            f"(num_processes={tensors * stages}), or change the degrees"
        )
    if groups % experts:
        raise ValueError(
            f"expert_model_parallel_size={experts} must divide the {groups} groups of ranks with data of their own "
            f"(= {world_size} / ({tensors} x {stages}))"
        )
    return int(groups)


def initialize_groups(state: AcceleratorState, plugin: MegatronLMPlugin) -> None:
    """Initialize Megatron's groups of ranks by the degrees of a plugin; every rank must call this.

    Args:
        state: The world. In a world of one a process group of one is created: Megatron-LM requires one.
        plugin: The plugin.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The degrees do not fit the world.
    """
    global _initialized_for  # noqa: PLW0603 - Megatron's groups are one set per process
    check_degrees(plugin, state.num_processes)
    groups = import_parallel_state()
    if not process_group.group_exists():
        process_group.start_group_of_one(device_table.row(state.device.type).backend, state.device)
    degrees = (plugin.tp_degree or 1, plugin.pp_degree or 1, plugin.expert_model_parallel_size or 1)
    now = (dist.group.WORLD, degrees)
    if groups.model_parallel_is_initialized():
        if _initialized_for is None or (_initialized_for[0] is now[0] and _initialized_for[1] == degrees):
            _initialized_for = now
            _check_existing_groups(groups, plugin)
            return
        groups.destroy_model_parallel()
    groups.initialize_model_parallel(
        tensor_model_parallel_size=plugin.tp_degree,
        pipeline_model_parallel_size=plugin.pp_degree,
        expert_model_parallel_size=plugin.expert_model_parallel_size or 1,
        expert_tensor_parallel_size=plugin.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    _initialized_for = now


def _check_existing_groups(groups: Any, plugin: MegatronLMPlugin) -> None:
    """Check that groups which the user's code has created have the plugin's degrees."""
    existing = (groups.get_tensor_model_parallel_world_size(), groups.get_pipeline_model_parallel_world_size())
    if existing != (plugin.tp_degree, plugin.pp_degree):
        raise ValueError(
            f"Megatron-LM's groups exist already, with tensor x pipeline = {existing[0]} x {existing[1]}, and the "
            f"plugin has {plugin.tp_degree} x {plugin.pp_degree}; call "
            "megatron.core.parallel_state.destroy_model_parallel() first, or give the plugin the same degrees"
        )


def seed_generators(device: torch.device) -> int:
    """Seed Megatron's generators of ranks that share a layer's tensors; every rank must call this.

    Args:
        device: This rank's device.

    Returns:
        The seed for the weights of this rank's pipeline stage: rank 0's seed, plus 100 times the stage.
    """
    groups = import_parallel_state()
    first = torch.tensor([torch.initial_seed() % (1 << 31)], device=device)
    dist.broadcast(first, src=0)
    seed = int(first.item()) + 100 * groups.get_pipeline_model_parallel_rank()
    random: Any = import_module("megatron.core.tensor_parallel.random")
    random.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return int(seed)
