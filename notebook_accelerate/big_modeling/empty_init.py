"""Creates models on the meta device, without memory, or on any other device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from notebook_accelerate.big_modeling.module_hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from notebook_accelerate.collectives import send_to_device
from notebook_accelerate.config import environ
from notebook_accelerate.state import PartialState


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Create models whose parameters take no memory: inside the block they are on the meta device.

    Args:
        include_buffers: Buffers and all other tensors too. None: False, or the value of
            ACCELERATE_INIT_INCLUDE_BUFFERS. With True nothing is allocated. With False each parameter is allocated,
            without being written, until it is moved to the meta device; this counts where the system limits the
            address space of a process.

    Example:
        with init_empty_weights():
            model = torch.nn.Linear(10**6, 10**6)  # would take 4 TB
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create the parameters of models that are built in the block on a device.

    Args:
        device: The device.
        include_buffers: Buffers and all other tensors too, by `torch.device` as a context. None: False, or the value
            of ACCELERATE_INIT_INCLUDE_BUFFERS.
    """
    if include_buffers is None:
        include_buffers = environ.flag("ACCELERATE_INIT_INCLUDE_BUFFERS", default=False)
    with ExitStack() as stack:
        if include_buffers:
            stack.enter_context(torch.device(device))
            return (yield)
        register = torch.nn.Module.register_parameter
        torch.nn.Module.register_parameter = _registering(register, device)  # type: ignore[method-assign]
        stack.callback(setattr, torch.nn.Module, "register_parameter", register)
        yield


def _registering(register: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """Return a `Module.register_parameter` that moves to a device; a tied parameter stays one object."""
    # By id, with a weak reference: the original must be freed at once, and a new parameter may then get its id.
    moved: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        if param is None or param.device == device:
            return
        known = moved.get(id(param))
        if known is None or known[0]() is not param:
            known = moved[id(param)] = (weakref.ref(param), moved_to(param, device))
        self._parameters[name] = known[1]

    return register_parameter


def moved_to(parameter: torch.nn.Parameter, device: Any) -> torch.nn.Parameter:
    """Return a parameter of the same class and attributes on another device.

    Args:
        parameter: The parameter.
        device: The device.
    """
    moved: torch.nn.Parameter = like(parameter, parameter.detach().to(device))
    return moved


def like(parameter: torch.Tensor, value: torch.Tensor) -> Any:
    """Return a parameter with the class and attributes of another, and new data.

    Args:
        parameter: The parameter to copy class and attributes from.
        value: The data.
    """
    kind: Any = type(parameter)
    if kind is torch.nn.Parameter:
        made = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made
    attributes = dict(parameter.__dict__)
    try:  # quantized parameters take their attributes as arguments
        return kind(value, requires_grad=parameter.requires_grad, **attributes)
    except TypeError:
        made = kind(value, requires_grad=parameter.requires_grad)
        made.__dict__.update(attributes)
        return made


# Offloading of whole models, until the user or the next model moves them back.


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
