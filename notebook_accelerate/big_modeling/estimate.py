"""Estimate the memory that training and inference need per rank, without allocating it."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.big_modeling.device_map import balanced_cuts
from notebook_accelerate.big_modeling.empty_init import init_on_device
from notebook_accelerate.big_modeling.module_tensors import device_of
from notebook_accelerate.big_modeling.module_tree import compute_module_sizes, dtype_of
from notebook_accelerate.collectives import recursively_apply
from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.torch_internals import viewed_tensor

OPTIMIZERS: dict[str, float] = {
    "adamw": 8, "adam": 8, "adamw_8bit": 2, "adagrad": 4, "lion": 4, "rmsprop": 4, "sgd_momentum": 4, "sgd": 0,
}  # fmt: skip
"""The bytes of state per trainable element, by optimizer. Except for 8-bit optimizers, states are float32."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """An estimate of the memory that each rank needs for each part, in bytes.

    Attributes:
        training: The bytes that training needs on the device: weights, gradients, optimizer, activations, buffers,
            strategy.
        inference: The bytes that inference needs on the device: weights, buffers, activations, strategy.
        assumptions: The assumptions behind the numbers, one sentence each.
        main_memory: The bytes of each part that is offloaded to CPU memory.
    """

    training: dict[str, int]
    inference: dict[str, int]
    assumptions: tuple[str, ...] = ()
    main_memory: dict[str, int] = field(default_factory=dict)

    @property
    def training_total(self) -> int:
        """The bytes that training needs on each rank's device."""
        return sum(self.training.values())

    @property
    def inference_total(self) -> int:
        """The bytes that inference needs on each rank's device."""
        return sum(self.inference.values())

    @property
    def main_memory_total(self) -> int:
        """The bytes that training keeps in CPU memory for each rank."""
        return sum(self.main_memory.values())

    def __str__(self) -> str:
        lines = [f"{'per rank':<14}{'training':>12}{'inference':>12}"]
        for part in self.training:
            inference = size_text(self.inference[part]) if part in self.inference else "–"
            lines.append(f"{part:<14}{size_text(self.training[part]):>12}{inference:>12}")
        lines.append(f"{'together':<14}{size_text(self.training_total):>12}{size_text(self.inference_total):>12}")
        if self.main_memory:
            parts = ", ".join(f"{part} {size_text(size)}" for part, size in self.main_memory.items())
            lines.append(f"in this machine's memory: {parts}")
        return "\n".join([*lines, *self.assumptions])

    def _repr_html_(self) -> str:
        from notebook_accelerate.widgets.memory_panel import estimate_html

        return estimate_html(self)


def estimate_memory(
    model_or_config: Any,
    dtype: Any = "float32",
    optimizer: str = "adamw",
    strategy: str = "single",
    num_processes: int = 1,
    batch_size: int = 1,
    sequence_length: int | None = None,
    inputs: Any = None,
    degrees: Mapping[str, int] | None = None,
    offload: Mapping[str, str] | None = None,
) -> MemoryEstimate:
    """Estimate the memory that training and inference need per rank, without allocating it.

    The size of activations is measured by running the model on the meta device and adding up the tensors that autograd
    saves.

    Args:
        model_or_config: A model on any device, a function that creates one, or a transformers configuration.
        dtype: The dtype of weights and gradients.
        optimizer: One of `OPTIMIZERS`.
        strategy: One of `STRATEGIES`.
        num_processes: The number of ranks.
        batch_size: The number of samples per rank and step.
        sequence_length: The number of tokens per sample, for models that take token IDs.
        inputs: The model's arguments if they are not tokens: a tensor, a tuple, or a mapping by name. Only shapes and
            dtypes matter.
        degrees: The sizes of the parallel dimensions, named as in `ParallelismConfig` but without "_size": {"tp": 2}.
            Replicas ("dp_replicate") keep full copies, and along the other dimensions, ranks share the parts that the
            strategy shards. If None, the strategy's own dimension is used.
        offload: The target ("cpu" or "disk") for each offloaded part (weights, gradients, optimizer): {"optimizer":
            "cpu"}.

    Returns:
        The estimate, in bytes for each part.

    Raises:
        ValueError: A name is unknown, a number is not positive, or the degrees do not match the number of ranks.
    """
    _check(optimizer, strategy, num_processes, batch_size)
    layout, offloaded = RankLayout(strategy, num_processes, degrees), checked_offload(offload)
    model = _empty_model(model_or_config).to(dtype_of(dtype))
    if inputs is None and sequence_length is not None:
        inputs = torch.zeros(batch_size, sequence_length, dtype=torch.long)
    saved, largest, problem = _activations(model, inputs)
    buffers = sum(each.nbytes for each in model.buffers())
    sequence, stages = layout.degree("cp") * layout.degree("sp"), layout.degree("pp")
    parts, trained = _parts(model, layout, optimizer)
    gathered = 2 * _largest_block(model, layout) if _gathers(layout, offloaded) else 0
    training = {name: 0 if name in offloaded else size for name, size in parts.items()}
    training |= {"activations": saved // (sequence * stages), "buffers": buffers}
    training["strategy"] = (trained if layout.sharding.buckets and layout.reduces else 0) + gathered
    inference = {"weights": training["weights"], "activations": largest // sequence, "buffers": buffers}
    return MemoryEstimate(
        training=training,
        inference={**inference, "strategy": gathered},
        assumptions=_assumptions(problem, layout, optimizer, offloaded),
        main_memory={name: parts[name] for name in parts if offloaded.get(name) == "cpu"},
    )


def _parts(model: torch.nn.Module, layout: RankLayout, optimizer: str) -> tuple[dict[str, int], int]:
    """Return the sizes in bytes of a rank's weights, gradients and optimizer, and of its gradients before sharding."""
    own, sharding = layout.parts(model), layout.sharding
    weights = sum(each.nbytes * part for each, part in own)
    trained = sum(each.nbytes * part for each, part in own if each.requires_grad)
    elements = sum(each.numel() * part for each, part in own if each.requires_grad)
    full = {"weights": weights, "gradients": trained, "optimizer": elements * OPTIMIZERS[optimizer]}
    parts = {name: math.ceil(size / (layout.shards if getattr(sharding, name) else 1)) for name, size in full.items()}
    return parts, math.ceil(trained)


def _gathers(layout: RankLayout, offloaded: Mapping[str, str]) -> bool:
    """Return whether weights are gathered on the device block by block."""
    return (layout.sharding.weights and layout.shards > 1) or "weights" in offloaded


def _check(optimizer: str, strategy: str, num_processes: int, batch_size: int) -> None:
    for what, value, known in (("optimizer", optimizer, OPTIMIZERS), ("strategy", strategy, STRATEGIES)):
        if value not in known:
            raise ValueError(f"{what}={value!r} is unknown; pass one of {', '.join(known)}")
    for what, number in (("num_processes", num_processes), ("batch_size", batch_size)):
        if number < 1:
            raise ValueError(f"{what}={number} is not allowed; pass a whole number of at least 1")


def _empty_model(source: Any) -> torch.nn.Module:
    if isinstance(source, torch.nn.Module):  # Copy the model without its weights.
        empty: dict[int, torch.Tensor] = {id(each): torch.empty_like(each, device="meta") for each in source.buffers()}
        for each in source.parameters():
            # Don't use `moved_to`, because the constructors of some classes (DTensor, quantized tensors) take other
            # arguments.
            empty[id(each)] = torch.nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
        return copy.deepcopy(source, empty)
    with init_on_device(torch.device("meta"), include_buffers=True):
        if hasattr(source, "model_type"):
            model: torch.nn.Module = importlib.import_module("transformers").AutoModel.from_config(source)
        elif callable(source):
            model = source()
        else:
            raise ValueError(
                f"model_or_config={source!r:.80} is a {type(source).__name__}; pass a model, a function that creates "
                "one, or a transformers configuration: estimate_memory(lambda: MyModel())"
            )
    return model


def _activations(model: torch.nn.Module, inputs: Any) -> tuple[int, int, str]:
    """Return the bytes that autograd saves, twice the largest output's bytes, and the reason if both are unknown."""
    if inputs is None:
        return 0, 0, "Activations are left out: pass sequence_length= or inputs= to count them."
    args, kwargs = _meta_arguments(inputs)
    own = {id(each) for each in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}
    largest = 0

    def save(tensor: torch.Tensor) -> torch.Tensor:
        base = viewed_tensor(tensor)
        if id(base) not in own:
            saved[id(base)] = base
        return tensor

    def measure(_: Any, __: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, torch.Tensor):
            largest = max(largest, output.nbytes)

    handles = [module.register_forward_hook(measure) for module in model.modules()]
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            model(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the model's own code; the estimate states the reason
        return 0, 0, f"Activations are left out: the model does not run on the meta device ({error})."
    finally:
        for handle in handles:
            handle.remove()
    return sum(tensor.nbytes for tensor in saved.values()), 2 * largest, ""


def _meta_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    moved = recursively_apply(lambda tensor: tensor.to("meta"), inputs)
    if isinstance(moved, Mapping):
        return (), dict(moved)
    return tuple(moved) if isinstance(moved, (tuple, list)) else (moved,), {}


def _largest_block(model: torch.nn.Module, layout: RankLayout) -> int:
    own = {id(parameter): parameter.nbytes * part for parameter, part in layout.parts(model)}
    blocks = [child for name, child in model.named_modules() if name.rpartition(".")[2].isdigit()]
    found = (sum(own.get(id(each), 0) for each in block.parameters()) for block in blocks or model.children())
    return math.ceil(max(found, default=0) or sum(own.values()) / 2)


def _assumptions(problem: str, layout: RankLayout, optimizer: str, offloaded: Mapping[str, str]) -> tuple[str, ...]:
    lines = [problem or "Activations are the tensors that autograd saves in one step, without checkpointing."]
    if OPTIMIZERS[optimizer]:
        lines.append(f"{optimizer} keeps {OPTIMIZERS[optimizer]:g} bytes per trained element.")
    if layout.sharding.buckets and layout.reduces:
        lines.append("DDP copies gradients into buckets; gradient_as_bucket_view=True avoids that.")
    if layout.degree("tp") > 1:
        lines.append("Tensor parallelism divides the layers of the model's plan, or every matrix without one; their "
                     "activations are counted in full.")  # fmt: skip
    if layout.degree("pp") > 1:
        lines.append("The largest pipeline stage is counted, with the full batch in flight.")
    if _gathers(layout, offloaded):
        lines.append("Two blocks are gathered at a time: the computing one and the next.")
    return (
        *lines,
        "The framework itself (CUDA context, allocator, workspaces) is not included: 0.5 to 1.5 GB per GPU.",
    )


# ---- device maps


@dataclass(frozen=True)
class PlacedBlock:
    """An entry of a device map.

    Attributes:
        name: The name of the module.
        device: The device of the module's weights.
        size: The size of the module's weights in bytes.
        moves: The number of bytes that are copied to the computing device in each forward pass.
    """

    name: str
    device: str
    size: int
    moves: int


@dataclass(frozen=True)
class PlacedModel:
    """A device map with the sizes of its entries.

    Attributes:
        blocks: The entries in the model's order.
        limits: The limits of devices in bytes, as far as they are known.
    """

    blocks: tuple[PlacedBlock, ...]
    limits: dict[str, int] = field(default_factory=dict)

    @property
    def moves(self) -> int:
        """The number of bytes that are copied in each forward pass."""
        return sum(block.moves for block in self.blocks)

    def overfull(self) -> list[str]:
        """List the devices whose blocks exceed the device's limit."""
        used: dict[str, int] = {}
        for block in self.blocks:
            used[block.device] = used.get(block.device, 0) + block.size
        return [device for device, size in used.items() if size > self.limits.get(device, size)]

    def __str__(self) -> str:
        lines = []
        for _, group in itertools.groupby(self.blocks, key=lambda block: (block.device, block.size, block.moves)):
            first, *others = group
            name = first.name or "the model"
            name += f" … {others[-1].name}, {1 + len(others)} of this size" if others else ""
            moved = f", {size_text(first.moves)} {'each ' * bool(others)}copied to the device on each forward"
            lines.append(f"{first.device:<6}{size_text(first.size):>9}  {name}{moved if first.moves else ''}")
        lines += [f"device {device} exceeds its limit" for device in self.overfull()]
        return "\n".join([*lines, f"{size_text(self.moves)} copied on each forward"])

    def _repr_html_(self) -> str:
        from notebook_accelerate.widgets.memory_panel import device_map_html

        return device_map_html(self)


def measure_device_map(
    model: torch.nn.Module,
    device_map: Mapping[str, Any],
    dtype: Any = None,
    max_memory: Mapping[Any, Any] | None = None,
) -> PlacedModel:
    """Measure the entries of a device map, and the bytes that are copied in each forward pass.

    Args:
        model: The model, which may be on any device.
        device_map: The device of each module by name.
        dtype: The dtype that floating-point weights will be converted to.
        max_memory: The limit of each device in bytes.
    """
    sizes = compute_module_sizes(model, dtype)
    names = {str(device) for device in device_map.values()}
    computing = names - {"cpu", "disk"}
    blocks = []
    for name in device_map:
        device = str(device_of(name, device_map))
        is_offloaded = device == "disk" or (device == "cpu" and bool(computing))
        size = int(sizes.get(name, 0))
        blocks.append(PlacedBlock(name, device, size, size if is_offloaded else 0))
    return PlacedModel(tuple(blocks), {str(device): int(size) for device, size in (max_memory or {}).items()})


# ---- the part of a model that each rank has, which depends on the strategy and the parallel degrees

DEGREES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
"""The parallel dimensions, as in `ParallelismConfig`."""
EXPERTS = "experts"
"""The name of modules that expert parallelism splits. Their parameters have one row per expert."""
OFFLOAD_TARGETS = ("cpu", "disk")
PARTS = ("weights", "gradients", "optimizer")
"""The parts of a training run's memory that can be sharded and offloaded."""


@dataclass(frozen=True)
class Sharding:
    """The parts that a strategy shards across ranks.

    Attributes:
        weights: Whether weights are sharded.
        gradients: Whether gradients are sharded.
        optimizer: Whether optimizer states are sharded.
        buckets: Whether gradients are copied into buckets before they are reduced.
        dimension: The parallel dimension that all ranks are arranged along if no degrees are given, or "" without such
            a dimension.
    """

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    buckets: bool = False
    dimension: str = ""


STRATEGIES: dict[str, Sharding] = {
    "single": Sharding(),
    "ddp": Sharding(buckets=True),
    "zero1": Sharding(optimizer=True),
    "zero2": Sharding(gradients=True, optimizer=True),
    "shard_grad_op": Sharding(gradients=True, optimizer=True),
    "zero3": Sharding(weights=True, gradients=True, optimizer=True),
    "fsdp": Sharding(weights=True, gradients=True, optimizer=True),
    "tp": Sharding(dimension="tp"),
    "cp": Sharding(weights=True, gradients=True, optimizer=True, dimension="cp"),
    "ep": Sharding(dimension="ep"),
    "pp": Sharding(dimension="pp"),
    "megatron": Sharding(),
    "megatron_distributed_optimizer": Sharding(optimizer=True),
}


class RankLayout:
    """The layout of ranks along parallel dimensions.

    Args:
        strategy: One of `STRATEGIES`.
        ranks: The number of ranks.
        degrees: The sizes of dimensions, by their names in `DEGREES`. If None, the strategy's own dimension is used.

    Raises:
        ValueError: A dimension is unknown, a size is not positive, or the product of the sizes is not the number of
            ranks.
    """

    def __init__(self, strategy: str, ranks: int, degrees: Mapping[str, int] | None = None) -> None:
        self.sharding, self.ranks = STRATEGIES[strategy], ranks
        dimension = self.sharding.dimension
        self.degrees = dict(degrees) if degrees is not None else ({dimension: ranks} if dimension else {})
        for name, degree in self.degrees.items():
            if name not in DEGREES or degree < 1:
                raise ValueError(
                    f"degrees={{{name!r}: {degree}}} is not allowed; pass sizes from 1 for {', '.join(DEGREES)}: "
                    "degrees={'tp': 2}"
                )
        product = math.prod(self.degrees.values())
        if ranks % product or ("dp_shard" in self.degrees and product != ranks):
            factors = " * ".join(f"{name}={degree}" for name, degree in self.degrees.items())
            raise ValueError(
                f"degrees do not match num_processes={ranks}: {factors} = {product}; pass num_processes={product} or "
                "other degrees"
            )

    def degree(self, name: str) -> int:
        """Return the size of a dimension, or 1 if it is not in `degrees`."""
        return self.degrees.get(name, 1)

    @property
    def shards(self) -> int:
        """The number of ranks that hold shards of the same tensors, not counting replicas."""
        return self.ranks // (self.degree("dp_replicate") * self.degree("tp") * self.degree("ep") * self.degree("pp"))

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced across ranks that have the same weights."""
        return self.ranks > self.degree("tp") * self.degree("ep") * self.degree("pp")

    def parts(self, model: torch.nn.Module) -> list[tuple[torch.nn.Parameter, float]]:
        """Return the parameters in the largest pipeline stage, and the fraction of each that a rank has.

        Args:
            model: The model whose parameters are divided.
        """
        tp, ep = self.degree("tp"), self.degree("ep")
        divided = dict.fromkeys(_tensor_parallel_names(model), 1 / tp) if tp > 1 else {}
        divided |= dict.fromkeys(_expert_names(model), 1 / ep) if ep > 1 else {}
        stage = _largest_stage(_blocks(model), self.degree("pp"))
        return [(parameter, divided.get(name, 1.0)) for name, parameter in stage]


def checked_offload(offload: Mapping[str, str] | None) -> dict[str, str]:
    """Check the names of offloaded parts and their targets, and return them.

    Args:
        offload: The target (one of `OFFLOAD_TARGETS`) for each part in `PARTS` that is offloaded.

    Raises:
        ValueError: A part or a target is unknown.
    """
    for part, target in (offload or {}).items():
        if part not in PARTS or target not in OFFLOAD_TARGETS:
            raise ValueError(
                f"offload={{{part!r}: {target!r}}} is not allowed; pass {' or '.join(map(repr, OFFLOAD_TARGETS))} for "
                f"{', '.join(PARTS)}: offload={{'optimizer': 'cpu'}}"
            )
    return dict(offload or {})


def _tensor_parallel_names(model: torch.nn.Module) -> set[str]:
    """Return the parameters that tensor parallelism splits: those in the plan or, without a plan, all matrices."""
    plans = (getattr(model, name, None) for name in ("tp_plan", "_tp_plan"))
    plan: Any = next((found for found in plans if isinstance(found, Mapping) and found), None)
    named = dict(model.named_parameters())
    if plan is None:
        return {name for name, parameter in named.items() if parameter.dim() > 1}
    patterns = [
        re.compile(re.escape(pattern).replace(r"\*", "[0-9]+") + r"(\.weight|\.bias)?")
        for pattern, style in plan.items()
        if style != "sequence_parallel"
    ]
    return {name for name in named if any(pattern.fullmatch(name) for pattern in patterns)}


def _expert_names(model: torch.nn.Module) -> set[str]:
    """Return the parameters that expert parallelism splits."""
    return {name for name, _ in model.named_parameters() if EXPERTS in name.split(".")[:-1]}


def _blocks(model: torch.nn.Module) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Return the parameters in the model's order, grouped by numbered block."""
    blocks: dict[str, list[tuple[str, torch.nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        block = re.match(r"(.*?\.)?\d+(?=\.)", name)
        blocks.setdefault(block[0] if block else name.rpartition(".")[0], []).append((name, parameter))
    return list(blocks.values())


def _largest_stage(
    blocks: list[list[tuple[str, torch.nn.Parameter]]], stages: int
) -> list[tuple[str, torch.nn.Parameter]]:
    """Split blocks into stages, so that the largest stage is as small as possible, and return that stage."""
    sizes = [sum(parameter.nbytes for _, parameter in block) for block in blocks]
    if not blocks:
        return []
    bounds = [0, *balanced_cuts(sizes, min(stages, len(blocks))), len(blocks)]
    first, stop = max(itertools.pairwise(bounds), key=lambda stage: sum(sizes[stage[0] : stage[1]]))
    return [pair for block in blocks[first:stop] for pair in block]
