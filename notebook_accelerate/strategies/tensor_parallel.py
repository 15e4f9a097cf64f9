"""Tensor parallelism: ranks with the same data share the weights of single layers.

A plan says how each layer is split. As in transformers models, a plan is a dict from module names to styles, and `*` in
a name stands for any number. A linear layer that is split by columns is followed by one that is split by rows, and only
the second layer communicates (Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from notebook_accelerate.strategies.module_queries import get_model_tp_size, model_has_dtensor, retie, tied_names
from notebook_accelerate.strategies.sharding.sharded_strategy import SplitLayersStrategy

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
}
"""The style for each name that plans may contain.

Styles with `_rep`, `gather_output` or `split_input` in their names, and `embedding_rowwise`, take or return whole
tensors.
"""


def tensor_parallel_plan(model: nn.Module) -> Mapping[str, Any]:
    """Return the tensor-parallel plan of a model.

    Args:
        model: A model whose attribute `tp_plan` (or `_tp_plan`) maps module names to the names of styles, or to
            instances of torch's `ParallelStyle`.

    Raises:
        ValueError: The model has no plan.
    """
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(model, name, None)
        if isinstance(plan, Mapping) and plan:
            return plan
    raise ValueError(
        f"tensor parallelism needs a plan that says how to split {type(model).__name__}, which has no plan; write "
        'model.tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"} before prepare(); styles: '
        + ", ".join(STYLES)
    )


def split_tensors(model: nn.Module, ranks: DeviceMesh | None) -> None:
    """Split a model's weights in place, as its plan says; every rank must call this.

    Args:
        model: A model with equal weights on every rank. If it is already split, nothing is done.
        ranks: The mesh of all ranks. Ranks along the dimension "tp" share tensors. Without such a dimension, nothing is
            done.

    Raises:
        ValueError: The model has no plan, or the plan names unknown modules or styles, splits tied weights in two ways,
            or splits weights whose size is not a multiple of the number of ranks.
    """
    if ranks is None or "tp" not in (ranks.mesh_dim_names or ()) or _is_split(model, ranks):
        return
    mesh = ranks["tp"]
    ties = tied_names(model)
    for name, style in _resolved(model, tensor_parallel_plan(model)).items():
        _check_division(name, model.get_submodule(name), mesh.size())
        parallelize_module(model, mesh, {name: style})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for group in ties:
        kinds = {getattr(parameters[name], "placements", None) for name in group}
        if len(kinds) > 1:
            raise ValueError(
                f"{', '.join(group)} are one parameter, but the plan splits them in different ways; give them styles "
                'that split it in the same way, such as "embedding_rowwise" and "colwise_rep", or leave them out'
            )
    retie(model, ties)


def _is_split(model: nn.Module, ranks: DeviceMesh | None) -> bool:
    """Return whether a model is already split, either by an earlier `prepare`, or by transformers when it was loaded.

    Raises:
        ValueError: transformers has split the model across a different number of ranks.
    """
    size = get_model_tp_size(model) or 1
    expected = ranks["tp"].size() if ranks is not None and "tp" in (ranks.mesh_dim_names or ()) else 1
    if size > 1 and size != expected:
        raise ValueError(
            f"{type(model).__name__} was loaded with tp_size={size}, but this Accelerator has tp_size={expected}"
        )
    return size > 1 or model_has_dtensor(model)


def _resolved(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """Return the style of each module that a plan names."""
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "[0-9]+"))
        hits = [name for name in names if expression.fullmatch(name)]
        if not hits and re.sub(r"\.(weight|bias)$", "", pattern) == pattern:
            raise ValueError(
                f"the tensor-parallel plan names {pattern!r}, but {type(model).__name__} has no such module"
            )
        for name in hits:
            found[name] = _style(pattern, style)
    return found


def _style(pattern: str, style: Any) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise ValueError(
            f"the tensor-parallel plan splits {pattern!r} by {style!r}, which is not known; styles: "
            f"{', '.join(STYLES)}, or a ParallelStyle of torch.distributed.tensor.parallel"
        )
    return STYLES[style]()


def _check_division(name: str, module: nn.Module, size: int) -> None:
    """Reject weights that torch would split unevenly, because neighbouring layers expect equal parts."""
    weight = getattr(module, "weight", None)
    shape = weight.shape if isinstance(weight, torch.Tensor) else ()
    if len(shape) > 1 and all(length % size for length in shape):
        raise ValueError(
            f"{name} of shape {list(shape)} cannot be split across tp_size={size} ranks: no side is a multiple of that"
        )


class TensorParallelStrategy(SplitLayersStrategy):
    """Splits the tensors of layers; see `SplitLayersStrategy`."""

    name: ClassVar[str] = "tp"

    def _has_sharded(self, model: nn.Module) -> bool:
        return _is_split(model, self.setup.state.device_mesh)

    def split(self, model: nn.Module) -> None:
        split_tensors(model, self.setup.state.device_mesh)
