"""Tensor parallelism: the weights of single layers are split over ranks that compute on the same data.

How a layer is split is said by a plan, as transformers' models carry one: a dict from names of modules, `*` for any
number in them, to styles. A linear layer split by columns is followed by one split by rows, and only the second one
exchanges anything (Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.strategies.fsdp.fsdp_units import retie, tied_names
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.sharded_strategy import ShardedStrategy, broadcast_start
from notebook_accelerate.telemetry.sharding_events import ShardReport

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
"""What the names of a plan stand for; `_rep` and the two below it take or give whole tensors."""


def plan_of(model: nn.Module) -> Mapping[str, Any]:
    """Return a model's plan.

    Args:
        model: A model with an attribute `tp_plan` (or `_tp_plan`): style, or torch's `ParallelStyle`, by module name.

    Raises:
        ValueError: It has none.
    """
    for name in ("tp_plan", "_tp_plan"):
        plan = getattr(model, name, None)
        if isinstance(plan, Mapping) and plan:
            return plan
    raise ValueError(
        f"tensor parallelism needs a plan that says how {type(model).__name__} is split, and it has none; write "
        'model.tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"} before prepare(); styles: '
        + ", ".join(STYLES)
    )


def split_tensors(model: nn.Module, ranks: DeviceMesh | None) -> None:
    """Split a model's weights by its plan, in place; every rank must call this.

    Args:
        model: A model with equal weights on every rank; one whose weights are split already is left as it is.
        ranks: All ranks; those along its dimension "tp" share tensors. Without one, nothing is done.

    Raises:
        ValueError: There is no plan, it names modules or styles that are not there, it splits tied weights in two ways,
            or weights that the ranks do not divide.
    """
    if ranks is None or "tp" not in (ranks.mesh_dim_names or ()):
        return
    mesh = ranks["tp"]
    if _split_while_loading(model, mesh.size()):
        return
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return
    ties = tied_names(model)
    for name, style in _resolved(model, plan_of(model)).items():
        _check_division(name, model.get_submodule(name), mesh.size())
        parallelize_module(model, mesh, {name: style})
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for group in ties:
        kinds = {getattr(parameters[name], "placements", None) for name in group}
        if len(kinds) > 1:
            raise ValueError(
                f"{', '.join(group)} are one parameter, and the plan splits them in different ways; give both the same "
                'style, as "embedding_rowwise" and "colwise_rep", or leave both out'
            )
    retie(model, ties)


def _split_while_loading(model: nn.Module, ranks: int) -> bool:
    """Tell whether transformers split a model while it was loaded.

    Raises:
        ValueError: It was split over another number of ranks.
    """
    size = getattr(model, "tp_size", None)
    if not isinstance(size, int) or size < 2:
        return False
    if size != ranks:
        raise ValueError(
            f"{type(model).__name__} was loaded with tp_size={size}, and this Accelerator has tp_size={ranks}"
        )
    return True


def _resolved(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, ParallelStyle]:
    """Return a style for each module that a plan names."""
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, ParallelStyle] = {}
    for pattern, style in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", "[0-9]+"))
        hits = [name for name in names if expression.fullmatch(name)]
        if not hits and re.sub(r"\.(weight|bias)$", "", pattern) == pattern:
            raise ValueError(
                f"the tensor-parallel plan names {pattern!r}, and {type(model).__name__} has no such module"
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
    """Refuse what torch would split unevenly: the layers around it compute with equal parts."""
    weight = getattr(module, "weight", None)
    shape = weight.shape if isinstance(weight, torch.Tensor) else ()
    if len(shape) > 1 and all(length % size for length in shape):
        raise ValueError(
            f"{name} of shape {list(shape)} cannot be split over tp_size={size} ranks: neither side divides"
        )


class TensorParallelStrategy(ShardedStrategy):
    """Layers are split; every rank has the same data. Checkpoints are those of FSDP, and load into each other."""

    name: ClassVar[str] = "tp"

    def is_sharded(self, model: nn.Module) -> bool:
        """Tell whether a model is split.

        Args:
            model: The model.

        Raises:
            ValueError: transformers split it over another number of ranks.
        """
        mesh = self.setup.state.device_mesh
        ranks = mesh["tp"].size() if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else 1
        by_transformers = _split_while_loading(model, ranks)
        return by_transformers or any(isinstance(parameter, DTensor) for parameter in model.parameters())

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Split a model; every rank must call this.

        Args:
            model: The model.

        Returns:
            The model itself, its weights replaced by their parts.

        Raises:
            ValueError: As for `split_tensors`.
        """
        model.to(self.setup.device)
        broadcast_start(model, self.setup.device)
        split_tensors(model, self.setup.state.device_mesh)
        return model

    def sharding(self) -> ShardReport:
        """Return what this rank holds of parameters, gradients and optimizer state; nothing is asked of other ranks."""
        split = sum(
            any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False))
            for model in self.models
            for module in model.modules()
        )
        return shard_report.of(self, axis="tp", units=(split, "split layers"))

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare an optimizer; parameters it has from before the splitting are replaced.

        Args:
            optimizer: The optimizer.
            device_placement: Whether its state goes to the device; None means the Accelerator's setting.

        Returns:
            The prepared optimizer.
        """
        prepared = super().prepare_optimizer(optimizer, device_placement)
        step_one_by_one(prepared.optimizer)
        return prepared


def step_one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Keep an optimizer from computing on all parameters in one call where some are split and some are not.

    torch computes on lists of tensors of one mesh only.

    Args:
        optimizer: torch's optimizer.
    """
    for group in optimizer.param_groups:
        meshes = {getattr(parameter, "device_mesh", None) for parameter in group["params"]}
        if len(meshes) > 1:
            group.update({name: False for name in ("foreach", "fused") if name in group})


__all__ = ["STYLES", "TensorParallelStrategy", "plan_of", "split_tensors", "step_one_by_one"]
