"""Offloading of whole models, until the user or the next model moves them back."""

from __future__ import annotations

from typing import Any

import torch

from notebook_accelerate.big_modeling.module_hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from notebook_accelerate.collectives import send_to_device
from notebook_accelerate.state import PartialState


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until it computes, and on the device from then on, until `offload` is called.

    Args:
        execution_device: Where it computes; None: the process's device.
        prev_module_hook: The hook of the previous model in a pipeline, which is offloaded when this one computes.
    """

    def __init__(self, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = execution_device if execution_device is not None else PartialState().default_device

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Offload the previous model, and move this one and its inputs to the device."""
        previous = self.prev_module_hook
        if isinstance(previous, UserCpuOffloadHook):
            first = next(previous.model.parameters(), None)
            if first is not None and first.device == torch.device(self.execution_device):
                previous.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """The user's handle of a `CpuOffload`.

    Args:
        model: The model.
        hook: Its hook.
    """

    def __init__(self, model: torch.nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Detach the hook."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: torch.nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[torch.nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until it computes, and on the device from then on: for loops and pipelines.

    Args:
        model: The model.
        execution_device: Where it computes; None: the process's device.
        prev_module_hook: The hook of the previous model, which is offloaded when this one computes.

    Returns:
        The model, and a hook with `offload` and `remove`.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
