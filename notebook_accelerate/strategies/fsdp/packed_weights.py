"""4-bit weights, such as bitsandbytes' `Params4bit`, under `fully_shard`.

A packed weight consists of bytes, and of a state that says how to decode them (scales, a table of values). The bytes
are sharded like any frozen parameter. The state is only a few percent of their size, so it stays whole on every rank.
The state is stored in the module, because bitsandbytes reads it from there if the weight itself has no state. Gathered
weights have no state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def has_packed_weights(model: nn.Module) -> bool:
    """Return whether a model has 4-bit weights.

    Args:
        model: The model to check.
    """
    return any(True for _ in _packed(model))


def _packed(model: nn.Module) -> Iterator[tuple[Any, nn.Parameter]]:
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and getattr(weight, "quant_state", None) is not None:
            yield module, weight


@torch.no_grad()
def make_weights_shardable(model: nn.Module, device: torch.device) -> None:
    """Turn 4-bit weights into plain byte parameters that are equal on all ranks, in place; every rank must call this.

    Otherwise, torch would treat weights that are stored as bfloat16 as numbers: gathering them would convert them to
    the dtype of mixed precision, and change bit patterns that look like NaN (bitsandbytes#1945).

    Args:
        model: The model before it is sharded.
        device: The device that the model trains on.
    """
    for module, weight in list(_packed(model)):
        state = weight.quant_state  # type: ignore[attr-defined]
        state.to(device)
        for tensor in _tensors_of(state):
            dist.broadcast(tensor, src=0)
        stored = weight.detach().as_subclass(torch.Tensor).to(device).contiguous()
        plain = nn.Parameter(stored.view(torch.uint8).reshape(-1, 1).clone(), requires_grad=False)
        module._parameters["weight"] = plain
        module.quant_state = state
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # Otherwise, evaluation would convert the weight.


def _tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a quantization state, including the nested state of its quantized scales."""
    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _tensors_of(value)
