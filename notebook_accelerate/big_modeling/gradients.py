"""Gradients of offloaded weights, which are released after their forward."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from notebook_accelerate.big_modeling.module_hooks import SequentialHook
from notebook_accelerate.big_modeling.module_tree import full_name

_LOG = logging.getLogger(__name__)


class GradientSink:
    """Takes the gradients of a module's offloaded weights as backward computes them."""

    def __init__(self) -> None:
        self._prefix = ""
        self._store: dict[str, torch.Tensor] | None = None
        self._warned = False

    def collect(self, store: dict[str, torch.Tensor] | None, prefix: str = "") -> None:
        """Start or stop collecting.

        Args:
            store: Where gradients go; None: they are dropped.
            prefix: The module's name.
        """
        self._store, self._prefix = store, prefix

    def watch(self, name: str, parameter: Any) -> Any:
        """Take a parameter's gradient from it as soon as it is complete.

        Args:
            name: Its name in the module.
            parameter: The module's parameter or buffer during this forward.

        Returns:
            The parameter.
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
        # Summed on the CPU: the device has no memory for them.
        here = gradient.to("cpu")
        self._store[key] = self._store[key] + here if key in self._store else here


def align_hooks(module: Any) -> list[Any]:
    """List a module's hooks that load offloaded weights.

    Args:
        module: The module; its submodules' hooks are not listed.
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
    """Collect the gradients of a model's offloaded weights, summed on the CPU over all backward passes inside.

    Offloaded weights are in their module during its forward only, so their gradients cannot be in ``parameter.grad``,
    where those of other weights (adapters, for instance) are as usual. They take as much main memory as the weights.

    Args:
        model: A model from `cpu_offload`, `disk_offload`, `dispatch_model` or `load_checkpoint_and_dispatch`.

    Yields:
        The gradients by parameter name; a tied parameter has a part of its gradient under each of its names.

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
