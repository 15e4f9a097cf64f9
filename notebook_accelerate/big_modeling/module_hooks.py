"""Hooks around a module's forward: base class, attaching and detaching, layerwise casting."""

from __future__ import annotations

import functools
from typing import Any

import torch


class ModelHook:
    """Functions to call before and after a module's forward, and when the hook is attached and detached.

    A subclass replaces those that it needs. Attach it by `add_hook_to_module`.

    Attributes:
        no_grad: Compute the module without gradients.
    """

    no_grad = False

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Prepare a module when the hook is attached to it.

        Args:
            module: The module.

        Returns:
            The module to use.
        """
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run before the forward.

        Args:
            module: The module.
            args: Positional arguments of its forward.
            kwargs: Keyword arguments of its forward.

        Returns:
            The arguments to call the forward with.
        """
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Run after the forward.

        Args:
            module: The module.
            output: What its forward returned.

        Returns:
            The output to return in its place.
        """
        return output

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Undo `init_hook`, when the hook is removed.

        Args:
            module: The module.

        Returns:
            The module to use.
        """
        return module


class SequentialHook(ModelHook):
    """Calls several hooks in order.

    Args:
        hooks: The hooks.
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Call every hook's `init_hook`."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Call every hook's `pre_forward` with the arguments of the previous one."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Call every hook's `post_forward` with the output of the previous one."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Call every hook's `detach_hook`."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: Any, hook: ModelHook, append: bool = False) -> torch.nn.Module:
    """Attach a hook to a module: replace its `forward` by one that also calls the hook.

    Args:
        module: The module.
        hook: The hook; it replaces the module's hook.
        append: Keep the module's hook, and call the new one after it.

    Returns:
        The module.
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
    # Reads the hook from the module, not from a closure: a copy of the module calls the copy's hook.
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
        module: The module.
        recurse: Detach the hooks of its submodules too.

    Returns:
        The module.
    """
    state = vars(module)
    if "_hf_hook" in state:
        module._hf_hook.detach_hook(module)
        del module._hf_hook
    if "_old_forward" in state:
        # The class's own forward needs no attribute; a forward that was set on the module is set again.
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
        module: The module.
    """
    remove_hook_from_module(module, recurse=True)


class LayerwiseCastingHook(ModelHook):
    """Keeps a module's weights in one dtype and computes in another.

    Args:
        storage_dtype: Dtype between forwards, for instance float8_e4m3fn.
        compute_dtype: Dtype during the forward.
        non_blocking: Do not wait for the conversions.
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
