"""8-bit linear layers whose weights can be offloaded. Importing this module needs bitsandbytes."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from notebook_accelerate.big_modeling.module_tensors import name_of_scales, set_module_tensor_to_device
from notebook_accelerate.big_modeling.module_tree import submodule
from notebook_accelerate.big_modeling.offload_folder import offload_weight

bitsandbytes: Any = importlib.import_module("bitsandbytes")  # The package's type hints export nothing.


class OffloadedLinear8bitLt(bitsandbytes.nn.Linear8bitLt):  # type: ignore[misc] # published without types
    """A bitsandbytes layer whose int8 weights and scales are plain parameters, which hooks can load and release.

    Args:
        layer: The layer to replace. Its bias is kept, but not its weights.
    """

    weight: Any
    bias: Any
    state: Any

    def __init__(self, layer: Any) -> None:
        super().__init__(
            layer.in_features, layer.out_features, False, has_fp16_weights=False, threshold=layer.state.threshold,
            device="meta",
        )  # fmt: skip
        shape = (layer.out_features, layer.in_features)
        self.weight = _parameter(torch.empty(shape, dtype=torch.int8, device="meta"))
        self.SCB = _parameter(torch.empty(shape[:1], dtype=torch.float32, device="meta"))
        self.bias = layer.bias
        self.train(layer.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute with the loaded weights, without keeping state that refers to them.

        Args:
            x: The input, with `in_features` as its last dimension.
        """
        state = bitsandbytes.MatmulLtState()
        state.threshold, state.use_pool = self.state.threshold, self.state.use_pool
        state.has_fp16_weights, state.is_training = False, self.training
        state.CB, state.SCB = self.weight, self.SCB
        bias = None if self.bias is None else self.bias.to(x.dtype)
        output: torch.Tensor = bitsandbytes.matmul(x, self.weight, bias=bias, state=state)
        return output


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def make_offloadable(model: torch.nn.Module, name: str) -> None:
    """Replace an 8-bit layer of bitsandbytes with a layer whose weights can be offloaded.

    Other layers are not replaced.

    Args:
        model: The model, changed in place.
        name: The dotted name of the layer.
    """
    owner, key = submodule(model, name)
    layer = getattr(owner, key)
    if isinstance(layer, bitsandbytes.nn.Linear8bitLt) and not isinstance(layer, OffloadedLinear8bitLt):
        setattr(owner, key, OffloadedLinear8bitLt(layer))


def quantize_8bit(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight, on an accelerator if one is available.

    Args:
        weight: The matrix to quantize.

    Returns:
        The int8 matrix and the scale of each row, on the CPU.
    """
    device: Any = torch.accelerator.current_accelerator() or "cpu"
    quantized: Any = bitsandbytes.nn.Int8Params(weight, requires_grad=False).to(device)
    return quantized.data.cpu(), quantized.SCB.cpu()


def place_8bit(model: torch.nn.Module, name: str, weight: torch.Tensor) -> None:
    """Quantize a weight, and keep it and its scales in CPU memory.

    Args:
        model: The model that has the weight. The weight's layer is made offloadable.
        name: The dotted name of the weight.
        weight: The weight, in floating point.
    """
    make_offloadable(model, name.rpartition(".")[0])
    layer, _ = submodule(model, name)
    layer.weight, layer.SCB = (_parameter(tensor) for tensor in quantize_8bit(weight))


def offload_8bit(
    model: torch.nn.Module,
    name: str,
    weight: torch.Tensor,
    folder: str | os.PathLike[str],
    index: dict[str, Any],
    scales: torch.Tensor | None = None,
) -> None:
    """Quantize a weight and write it, with its scales, to an offload folder.

    Args:
        model: The model that has the weight. The weight's layer is made offloadable, and the weight is moved to the
            meta device.
        name: The dotted name of the weight.
        weight: The weight, in floating point, or in int8 if `scales` are given.
        folder: The offload folder to write to.
        index: The index of the folder. The weight's dtype and shape are added to it.
        scales: The scales, if the weight is already quantized.
    """
    make_offloadable(model, name.rpartition(".")[0])
    if scales is None:
        weight, scales = quantize_8bit(weight)
    for each, tensor in ((name, weight), (name_of_scales(name), scales)):
        offload_weight(tensor.cpu(), each, folder, index=index)
        placeholder = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        set_module_tensor_to_device(model, each, "meta", value=placeholder, dtype=tensor.dtype)
