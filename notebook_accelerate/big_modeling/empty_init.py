"""Create models on the meta device, where they take no memory, or on any other device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from notebook_accelerate.config import environ


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Create models inside the block with their parameters on the meta device, where they take no memory.

    Args:
        include_buffers: Whether to include buffers and all other tensors. If None, the value of
            ACCELERATE_INIT_INCLUDE_BUFFERS is used, or else False. If True, nothing is allocated. If False, each
            parameter is allocated, but not written to, before it is moved to the meta device, which matters if the
            system limits the address space of a process.

    Example:
        with init_empty_weights():
            model = torch.nn.Linear(10**6, 10**6)  # would take 4 TB
    """
    with init_on_device(torch.device("meta"), include_buffers=include_buffers):
        yield


@contextmanager
def init_on_device(device: torch.device, include_buffers: bool | None = None) -> Iterator[None]:
    """Create models inside the block with their parameters on a device.

    Args:
        device: The device to create parameters on.
        include_buffers: Whether to include buffers and all other tensors, as `with torch.device(...)` does. If None,
            the value of ACCELERATE_INIT_INCLUDE_BUFFERS is used, or else False.
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
    """Return a `Module.register_parameter` that moves parameters to a device and keeps tied parameters tied."""
    # The keys are IDs, because each original must be freed immediately. A new parameter may then get the same ID, so
    # the weak reference is checked, too.
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
    """Return a copy of a parameter on another device, with the same class and attributes.

    Args:
        parameter: The parameter to copy.
        device: The device to put the copy on.
    """
    moved: torch.nn.Parameter = like(parameter, parameter.detach().to(device))
    return moved


def like(parameter: torch.Tensor, value: torch.Tensor) -> Any:
    """Return a parameter that has the class and attributes of another one, and new data.

    Args:
        parameter: The parameter whose class and attributes are copied.
        value: The new data.
    """
    kind: Any = type(parameter)
    if kind is torch.nn.Parameter:
        made = torch.nn.Parameter(value, requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        return made
    attributes = dict(parameter.__dict__)
    try:  # The constructors of quantized parameters take the attributes as arguments.
        return kind(value, requires_grad=parameter.requires_grad, **attributes)
    except TypeError:
        made = kind(value, requires_grad=parameter.requires_grad)
        made.__dict__.update(attributes)
        return made
