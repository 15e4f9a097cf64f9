"""Megatron-LM's own start: its import, its groups of ranks, its generators of random numbers."""

from __future__ import annotations

from importlib import import_module, util
from typing import Any

import torch
import torch.distributed as dist

from notebook_accelerate.hardware import devices
from notebook_accelerate.state import process_group

_served: tuple[Any, tuple[int, int, int]] | None = None
"""The default process group and the degrees that Megatron's groups were made for."""


def load() -> Any:
    """Import megatron-core.

    Returns:
        `megatron.core.parallel_state`.

    Raises:
        ImportError: It is not installed.
    """
    if util.find_spec("megatron") is None or util.find_spec("megatron.core") is None:
        raise ImportError(
            "training with a MegatronLMPlugin needs megatron-core, which is not installed: pip install "
            "'megatron-core>=0.16,<0.17'"
        )
    return import_module("megatron.core.parallel_state")


def check_degrees(plugin: Any, world_size: int) -> int:
    """Return how many groups of ranks train on data of their own.

    Args:
        plugin: The `MegatronLMPlugin`.
        world_size: How many ranks there are.

    Raises:
        ValueError: The degrees do not make the world.
    """
    tensors, stages, experts = plugin.tp_degree, plugin.pp_degree, plugin.expert_model_parallel_size or 1
    groups = world_size // (tensors * stages)
    if groups < 1 or world_size != tensors * stages * groups:
        raise ValueError(
            f"tp_degree={tensors} x pp_degree={stages} = {tensors * stages} ranks hold one model, and the world of "
            f"{world_size} ranks is no multiple of that; start {tensors * stages} ranks or a multiple "
            f"(num_processes={tensors * stages}), or change the degrees"
        )
    if groups % experts:
        raise ValueError(
            f"expert_model_parallel_size={experts} must divide the {groups} groups of ranks with data of their own "
            f"(= {world_size} / ({tensors} x {stages}))"
        )
    return int(groups)


def start(state: Any, plugin: Any) -> None:
    """Arrange the ranks by the degrees of a plugin; every rank must call this.

    Args:
        state: The world. In a world of one a process group of one is made: Megatron-LM does not go without.
        plugin: The `MegatronLMPlugin`.

    Raises:
        ImportError: megatron-core is not installed.
        ValueError: The degrees do not make the world.
    """
    global _served  # noqa: PLW0603 - Megatron's groups are one set per process
    check_degrees(plugin, state.num_processes)
    groups = load()
    if not process_group.group_exists():
        process_group.start_group_of_one(devices.row(state.device.type).backend)
    degrees = (plugin.tp_degree, plugin.pp_degree, plugin.expert_model_parallel_size or 1)
    now = (dist.group.WORLD, degrees)
    if groups.model_parallel_is_initialized():
        if _served is None or (_served[0] is now[0] and _served[1] == degrees):
            _served = now
            _check_made_elsewhere(groups, plugin)
            return
        groups.destroy_model_parallel()
    groups.initialize_model_parallel(
        tensor_model_parallel_size=plugin.tp_degree,
        pipeline_model_parallel_size=plugin.pp_degree,
        expert_model_parallel_size=plugin.expert_model_parallel_size or 1,
        expert_tensor_parallel_size=plugin.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    _served = now


def _check_made_elsewhere(groups: Any, plugin: Any) -> None:
    """Refuse groups that the user's own code has made by other degrees."""
    made = (groups.get_tensor_model_parallel_world_size(), groups.get_pipeline_model_parallel_world_size())
    if made != (plugin.tp_degree, plugin.pp_degree):
        raise ValueError(
            f"Megatron-LM's groups exist already, with tensor x pipeline = {made[0]} x {made[1]}, and the plugin says "
            f"{plugin.tp_degree} x {plugin.pp_degree}; call megatron.core.parallel_state.destroy_model_parallel() "
            "first, or give the plugin the same degrees"
        )


def seed(device: torch.device) -> int:
    """Seed Megatron's generators, which ranks that share a layer's tensors draw from; every rank must call this.

    Args:
        device: This rank's device.

    Returns:
        The seed of this rank's pipeline stage for the weights: that of rank 0's generator, and the stage.
    """
    groups = load()
    given = torch.tensor([torch.initial_seed() % (1 << 31)], device=device)
    dist.broadcast(given, src=0)
    mine = int(given.item()) + 100 * groups.get_pipeline_model_parallel_rank()
    random: Any = import_module("megatron.core.tensor_parallel.random")
    random.model_parallel_cuda_manual_seed(mine, force_reset_rng=True)
    return int(mine)


__all__ = ["check_degrees", "load", "seed", "start"]
