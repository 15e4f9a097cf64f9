"""Hooks around modules' forward methods: attaching hooks, layerwise casting, and keeping models on the CPU."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from notebook_accelerate.big_modeling.module_tree import as_names, full_name
from notebook_accelerate.collectives import send_to_device
from notebook_accelerate.state import PartialState

_LOG = logging.getLogger(__name__)


class ModelHook:
    """The base class of hooks, which are called around a module's forward pass, and when attached or detached.

    A subclass overrides the methods that it needs. Attach a hook with `add_hook_to_module`.

    Attributes:
        no_grad: Whether the module computes without recording gradients.
    """

    no_grad = False

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Prepare a module when the hook is attached to it.

        Args:
            module: The module that the hook is attached to.

        Returns:
            The module to use from now on, usually the same one.
        """
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward pass.

        Args:
            module: The module that the hook is attached to.
            args: The positional arguments of the forward method.
            kwargs: The keyword arguments of the forward method.

        Returns:
            The arguments to pass to the forward method.
        """
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Run after the forward pass.

        Args:
            module: The module that the hook is attached to.
            output: The result of the forward method.

        Returns:
            The output to return instead.
        """
        return output

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Undo `init_hook` when the hook is removed.

        Args:
            module: The module that the hook is removed from.

        Returns:
            The module to use from now on, usually the same one.
        """
        return module


class SequentialHook(ModelHook):
    """Calls several hooks in order.

    Args:
        hooks: The hooks to call.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Call the `init_hook` of each hook."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call the `pre_forward` of each hook with the arguments that the previous hook returned."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Call the `post_forward` of each hook with the output that the previous hook returned."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Call the `detach_hook` of each hook."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: Any, hook: ModelHook, append: bool = False) -> torch.nn.Module:
    """Attach a hook to a module by replacing its `forward` with a method that also calls the hook.

    Args:
        module: The module to attach the hook to.
        hook: The new hook, which replaces the module's current hook.
        append: Whether to keep the module's current hook, and call the new one after it.

    Returns:
        The module with the hook.
    """
    if append and getattr(module, "_hf_hook", None) is not None:
        before = module._hf_hook
        remove_hook_from_module(module)
        hook = SequentialHook(before, hook)
    old_forward = module._old_forward if hasattr(module, "_hf_hook") else module.forward
    if not hasattr(module, "_hf_hook"):
        module._old_forward = old_forward
    module = hook.init_hook(module)
    module._hf_hook = hook
    forward = functools.update_wrapper(functools.partial(_hooked_forward, module), old_forward)
    module.forward = forward
    return module  # type: ignore[no-any-return]


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    # Read the hook from the module, not from a closure, so that a copy of the module calls its own hook.
    hook = module._hf_hook
    args, kwargs = hook.pre_forward(module, *args, **kwargs)
    if hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return hook.post_forward(module, output)


def remove_hook_from_module(module: Any, recurse: bool = False) -> torch.nn.Module:
    """Detach a module's hook and restore its `forward`.

    Args:
        module: The module whose hook is detached.
        recurse: Whether to detach the hooks of the module's submodules, too.

    Returns:
        The module without the hook.
    """
    state = vars(module)
    if "_hf_hook" in state:
        module._hf_hook.detach_hook(module)
        del module._hf_hook
    if "_old_forward" in state:
        # If the forward method is the class's own, delete the attribute. If it had been set on the module, set it
        # again.
        bound = getattr(module._old_forward, "__func__", None) is getattr(type(module), "forward", None)
        if bound:
            state.pop("forward", None)
        else:
            module.forward = module._old_forward
        del module._old_forward
    for name in [name for name, value in state.items() if getattr(value, "_of_dispatch", False)]:
        del state[name]
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module  # type: ignore[no-any-return]


def remove_hook_from_submodules(module: torch.nn.Module) -> None:
    """Detach the hooks of a module and of all its submodules.

    Args:
        module: The outermost module.
    """
    remove_hook_from_module(module, recurse=True)


class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in one dtype and computes in another.

    Args:
        storage_dtype: The dtype between forward passes, such as float8_e4m3fn.
        compute_dtype: The dtype during the forward pass.
        non_blocking: Whether to convert without waiting for the conversions to complete.
    """

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Convert the weights to the storage dtype."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert the weights to the compute dtype."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Convert the weights back to the storage dtype."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


# ---- gradients of offloaded weights. The weights themselves are released after each forward pass.


class GradientSink:
    """Collects the gradients of a module's offloaded weights as the backward pass computes them."""

    def __init__(self) -> None:
        self._prefix = ""
        self._store: dict[str, torch.Tensor] | None = None
        self._warned = False

    def collect(self, store: dict[str, torch.Tensor] | None, prefix: str = "") -> None:
        """Start or stop collecting.

        Args:
            store: The dict to add the gradients to, or None to drop them.
            prefix: The name of the module in the model.
        """
        self._store, self._prefix = store, prefix

    def watch(self, name: str, parameter: Any) -> Any:
        """Arrange for a parameter's gradient to be collected once it is complete.

        Args:
            name: The name of the parameter in the module.
            parameter: The module's parameter or buffer during this forward pass.

        Returns:
            The same parameter.
        """
        if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda each: self._take(name, each))  # type: ignore[no-untyped-call]
        return parameter

    def _take(self, name: str, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if self._store is None:
            if not self._warned:
                self._warned = True
                _LOG.warning(
                    "The gradient of the offloaded %s is dropped, because the weight itself was released after its "
                    "forward. To collect it: with notebook_accelerate.big_modeling.offloaded_gradients(model) as "
                    "gradients: ... To skip it: parameter.requires_grad_(False) before the model is offloaded.",
                    name,
                )
            return
        assert gradient is not None
        key = full_name(self._prefix, name)
        # Sum gradients on the CPU, because the device may not have enough memory for them.
        here = gradient.to("cpu")
        self._store[key] = self._store[key] + here if key in self._store else here


def align_hooks(module: Any) -> list[Any]:
    """List a module's hooks that load offloaded weights.

    Args:
        module: The module. The hooks of its submodules are not listed.
    """
    found, hooks = [], [getattr(module, "_hf_hook", None)]
    while hooks:
        hook = hooks.pop(0)
        if isinstance(hook, SequentialHook):  # Appending hooks one at a time nests SequentialHooks.
            hooks[:0] = hook.hooks
        elif isinstance(getattr(hook, "gradients", None), GradientSink):
            found.append(hook)
    return found


@contextmanager
def offloaded_gradients(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the gradients of a model's offloaded weights, summed on the CPU over all backward passes in the block.

    Offloaded weights are in their module only during its forward pass, so their gradients cannot be in
    ``parameter.grad``. The gradients of all other weights, such as adapters, are there as usual. The collected
    gradients take up as much CPU memory as the weights.

    Args:
        model: A model from `cpu_offload`, `disk_offload`, `dispatch_model` or `load_checkpoint_and_dispatch`.

    Yields:
        The gradients by parameter name. If a parameter is tied, each of its names has only a part of the gradient.

    Example:
        with offloaded_gradients(model) as gradients:
            loss_of(model(batch)).backward()
        gradients["layers.0.weight"]
    """
    store: dict[str, torch.Tensor] = {}
    hooks = [(name, hook) for name, module in model.named_modules() for hook in align_hooks(module)]
    for name, hook in hooks:
        hook.gradients.collect(store, name)
    try:
        yield store
    finally:
        for _, hook in hooks:
            hook.gradients.collect(None)


# ---- whole models that stay on the CPU until their forward pass


class CpuOffload(ModelHook):
    """Keeps a model on the CPU until it computes, and then on a device until `offload` is called.

    Args:
        execution_device: The device that the model computes on. If None, the device of the process is used.
        prev_module_hook: The hook of the previous model in a pipeline, which is offloaded when this model computes.
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
    """The user's handle to a `CpuOffload`.

    Args:
        model: The model that has the hook.
        hook: The `CpuOffload` of the model.
    """

    def __init__(self, model: torch.nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Detach the hook from the model."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: torch.nn.Module,
    execution_device: int | str | torch.device | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[torch.nn.Module, UserCpuOffloadHook]:
    """Keep a model on the CPU until it computes, and then on the device, which is useful for loops and pipelines.

    Args:
        model: The model to offload.
        execution_device: The device that the model computes on. If None, the device of the process is used.
        prev_module_hook: The handle of the previous model, which is offloaded when this model computes.

    Returns:
        The model, and a handle with the methods `offload` and `remove`.
    """
    hook = CpuOffload(execution_device=execution_device, prev_module_hook=prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d,
    torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d,
    torch.nn.Linear,
)  # fmt: skip
"""The layers that `attach_layerwise_casting_hooks` casts.

Normalization layers are left out, because they are small and need high precision.
"""


def attach_layerwise_casting_hooks(
    module: torch.nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: Any = None,
    skip_modules_classes: tuple[type[torch.nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of linear layers and convolutions in one dtype, and compute in another.

    Args:
        module: The model to attach hooks to.
        storage_dtype: The dtype between forward passes, such as float8_e4m3fn.
        compute_dtype: The dtype during forward passes.
        skip_modules_pattern: Regular expressions that match the names of modules that are not cast.
        skip_modules_classes: Classes that are not cast, including all of their submodules.
        non_blocking: Whether to convert without waiting for the conversions to complete.
    """
    _cast(module, "", as_names(skip_modules_pattern), skip_modules_classes or (),
          (storage_dtype, compute_dtype, non_blocking))  # fmt: skip


def _cast(module: torch.nn.Module, name: str, patterns: Any, classes: Any, dtypes: tuple[Any, ...]) -> None:
    if isinstance(module, tuple(classes)) or any(re.search(pattern, name) for pattern in patterns):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, LayerwiseCastingHook(*dtypes), append=True)
        return
    for key, child in module.named_children():
        _cast(child, full_name(name, key), patterns, classes, dtypes)
