"""Expert parallelism: ranks with the same data share the experts of mixture-of-experts layers.

Every rank has an equal share of each layer's experts, and computes the tokens that are routed to them. The layer's
output is the sum over the ranks. Accelerate's `ep_size` (accelerate#4202) only creates the mesh, and leaves splitting
the experts to the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from notebook_accelerate.big_modeling.estimate import EXPERTS
from notebook_accelerate.hardware.versions import is_torch_version
from notebook_accelerate.strategies.module_queries import model_has_dtensor, retie, tied_names
from notebook_accelerate.strategies.sharding.sharded_strategy import SplitLayersStrategy
from notebook_accelerate.torch_internals import Dropout

MINIMUM = "2.10"
"""The oldest torch version for expert parallelism. torch 2.9 loses rows when it gathers experts that FSDP 2 has
sharded unevenly."""


def split_experts(model: nn.Module, ranks: DeviceMesh | None) -> None:
    """Split the experts of a model in place.

    A layer of experts is a module named `experts`, as in transformers 5. Its parameters have one row per
    expert. The module is called with the hidden states, and the indices and weights of the chosen experts.

    Args:
        model: A model with equal weights on every rank.
        ranks: The mesh of all ranks. Ranks along the dimension "ep" share the experts. Without such a dimension,
            nothing is done.

    Raises:
        ValueError: The model has no layer of experts, the number of experts is not a multiple of the number of ranks, a
            layer uses dropout, or parameters are already split.
    """
    if ranks is None or "ep" not in (ranks.mesh_dim_names or ()):
        return
    if is_torch_version("<", MINIMUM):
        raise ValueError(
            f"ep_size={ranks['ep'].size()} needs torch {MINIMUM} or later; torch {torch.__version__} gathers "
            f"unevenly sharded experts with rows missing: pip install -U 'torch>={MINIMUM}'"
        )
    if model_has_dtensor(model):
        raise ValueError(f"{type(model).__name__} is already split, but ep_size needs whole weights; load it unsplit")
    mesh, ties = ranks["ep"], tied_names(model)
    layers = _expert_layers(model)
    for name, layer in layers.items():
        _check_layer(name, layer, mesh.size())
    for layer in layers.values():
        _split(layer, mesh)
    retie(model, ties)


def _expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    layers = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] == EXPERTS}
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no module named {EXPERTS!r}, which ep_size would split; use dp_shard_size or "
            "tp_size for models without experts"
        )
    return layers


def _check_layer(name: str, layer: nn.Module, size: int) -> None:
    parameters = list(layer.named_parameters())
    counts = {parameter.shape[0] if parameter.dim() else 0 for _, parameter in parameters}
    stacked = all("." not in own for own, _ in parameters) and any(p.dim() > 2 for _, p in parameters)
    if not stacked or len(counts) != 1 or getattr(layer, "num_experts", (count := counts.pop())) != count:
        raise ValueError(
            f"{name} ({type(layer).__name__}) cannot be split by ep_size: its own parameters must have the shape "
            "(experts, ...), as in transformers 5; an nn.ModuleList of experts is not supported"
        )
    if count % size:
        raise ValueError(f"{name} has {count} experts, which is not a multiple of ep_size={size}; choose a divisor")
    if any(isinstance(module, Dropout) and module.p for module in layer.modules()):
        raise ValueError(
            f"{name} uses dropout, which would draw different random numbers on each rank of ep_size; set its "
            "probability to 0"
        )


def _split(layer: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in layer.named_parameters():
        own = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        part = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        layer.register_parameter(name, nn.Parameter(part, parameter.requires_grad))
    layer.register_forward_pre_hook(_select_own)
    layer.register_forward_hook(_sum_outputs, always_call=True)


# ---- the forward pass of a layer

_CALL = "_expert_parallel_call"


@dataclass(frozen=True)
class _Call:
    """State of one call to a layer: the token of each row, and the attributes that the call replaced."""

    group: dist.ProcessGroup
    shape: torch.Size
    tokens: torch.Tensor
    replaced: dict[str, Any]


def _check_call(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    if len(inputs) != 3 or inputs[1].shape != inputs[2].shape:
        raise ValueError(
            f"{type(layer).__name__} is split by ep_size; call it as experts(hidden_states, top_k_index, "
            "top_k_weights), the last two with the same shape"
        )


def _select_own(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Select the (token, expert) pairs of this rank's experts. Each pair becomes a row with one chosen expert."""
    _check_call(layer, inputs)
    # FSDP has gathered its shards by now, so any DTensor that remains is split over "ep".
    parts = {name: part for name, part in layer.named_parameters(recurse=False) if isinstance(part, DTensor)}
    mesh = next(iter(parts.values())).device_mesh
    own: dict[str, Any] = {name: part.to_local() for name, part in parts.items()}
    count = next(iter(own.values())).shape[0]
    hidden, weights = _SumGradients.apply(mesh.get_group(), inputs[0], inputs[2])  # type: ignore[no-untyped-call]
    chosen = inputs[1].flatten(0, -2) - count * mesh.get_local_rank()
    tokens, places = torch.where((chosen >= 0) & (chosen < count))
    none = not len(tokens) and len(chosen) > 0
    if none:
        # Compute one row with weight 0: every rank needs gradients, because clipping sums their norms over the ranks.
        tokens, places = tokens.new_zeros(1), places.new_zeros(1)
    shares = weights.flatten(0, -2)[tokens, places]
    rows, experts = hidden.flatten(0, -2)[tokens], chosen[tokens, places].clamp(0, count - 1)
    if "num_experts" in layer.__dict__:
        own["num_experts"] = count
    replaced = {name: layer.__dict__[name] for name in own if name in layer.__dict__}
    # Python looks up attributes in the instance's __dict__ before it asks Module.__getattr__ for a parameter. The layer
    # therefore computes with the local tensors, while its parameters stay registered.
    layer.__dict__.update(own)
    layer.__dict__[_CALL] = _Call(mesh.get_group(), inputs[0].shape, tokens, {**dict.fromkeys(own), **replaced})
    return rows, experts[:, None], (shares * 0 if none else shares)[:, None]


def _sum_outputs(layer: nn.Module, _: object, output: torch.Tensor | None) -> torch.Tensor | None:
    """Add this rank's rows to their tokens, and sum the result over the ranks.

    After an exception, only restore the layer.
    """
    call: _Call | None = layer.__dict__.pop(_CALL, None)
    if call is None:
        return None
    for name, value in call.replaced.items():
        if value is None:
            del layer.__dict__[name]
        else:
            layer.__dict__[name] = value
    if output is None:
        return None
    whole = output.new_zeros(call.shape[:-1].numel(), output.shape[-1]).index_add(0, call.tokens, output)
    total: torch.Tensor = _SumOutputs.apply(call.group, whole)  # type: ignore[no-untyped-call]
    return total.view(*call.shape[:-1], -1)


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class _SumGradients(torch.autograd.Function):
    """Returns tensors unchanged, and sums their gradients, because each rank computes only a part of each gradient.

    A single function handles all tensors of a layer, so that every rank runs the collectives in the order of layers.
    """

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = zip(gradients, ctx.needs_input_grad[1:], strict=True)
        return None, *(_summed(gradient, ctx.group) if needs else None for gradient, needs in needed)


class _SumOutputs(torch.autograd.Function):
    """Sums a tensor over ranks. The gradient is the same on all ranks, and is passed on unchanged."""

    @staticmethod
    def forward(_: Any, group: dist.ProcessGroup, tensor: torch.Tensor) -> torch.Tensor:
        return _summed(tensor, group)

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, gradients[0]


class ExpertParallelStrategy(SplitLayersStrategy):
    """Splits the experts of layers; see `SplitLayersStrategy`."""

    name: ClassVar[str] = "ep"

    def _has_sharded(self, model: nn.Module) -> bool:
        layers = [module for name, module in model.named_modules() if name.rpartition(".")[2] == EXPERTS]
        return any(model_has_dtensor(layer) for layer in layers)

    def split(self, model: nn.Module) -> None:
        split_experts(model, self.setup.state.device_mesh)
