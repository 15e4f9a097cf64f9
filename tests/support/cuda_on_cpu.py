"""Run code written for CUDA on the CPU, for tests on a machine without a GPU.

megatron-core requests tensors "on cuda" by name. Inside `cuda_on_cpu`, the CPU serves every such request, and CUDA's
generators are replaced with the CPU's. Only tests use this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


class _Redirect(TorchFunctionMode):
    """Redirects tensors that are created on or moved to "cuda" to the CPU. Their `type()` still contains "cuda"."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(item) else item for item in args)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return str(func(*args)).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextmanager
def cuda_on_cpu() -> Iterator[None]:
    """Serve every request for CUDA on the CPU inside the block.

    Yields:
        Nothing.
    """
    generators = import_module("megatron.core.tensor_parallel.random")

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    answers: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "synchronize": lambda *_: None,
        "get_rng_state": get_state,
        "set_rng_state": set_state,
        "manual_seed": torch.manual_seed,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        stack.enter_context(mock.patch.object(generators, "_set_cuda_rng_state", set_state))
        stack.enter_context(mock.patch.object(generators, "_get_cuda_rng_state", get_state))
        stack.enter_context(_Redirect())
        yield


__all__ = ["cuda_on_cpu"]
