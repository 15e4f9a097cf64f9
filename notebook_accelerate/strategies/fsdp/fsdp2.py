"""FSDP 2: torch's `fully_shard`, which turns every parameter into a separate DTensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from notebook_accelerate.config.fsdp_plugin import FullyShardedDataParallelPlugin
from notebook_accelerate.optimizer import AcceleratedOptimizer
from notebook_accelerate.strategies.expert_parallel import split_experts
from notebook_accelerate.strategies.fsdp.fsdp_units import choose_units, resolved_plugin
from notebook_accelerate.strategies.module_queries import (
    check_values,
    layer_kinds,
    model_has_dtensor,
    retie,
    tied_names,
    without_compile,
)
from notebook_accelerate.strategies.sharding import shard_report
from notebook_accelerate.strategies.sharding.sharded_strategy import ShardedStrategy, broadcast_weights
from notebook_accelerate.strategies.strategy import NOTHING
from notebook_accelerate.strategies.tensor_parallel import split_tensors
from notebook_accelerate.telemetry.sharding import ShardReport
from notebook_accelerate.torch_internals import refresh_parameters

# FSDP 1's names for the variants, by whether shards are replicated, and whether parameters stay whole between the
# forward and the backward pass.
_VARIANTS = {
    (False, False): "FULL_SHARD", (False, True): "SHARD_GRAD_OP",
    (True, False): "HYBRID_SHARD", (True, True): "HYBRID_SHARD_ZERO2",
}  # fmt: skip


class FSDP2Strategy(ShardedStrategy):
    """Trains with torch's `fully_shard`, over all ranks or over a mesh of replicas and shards."""

    name: ClassVar[str] = "fsdp2"
    gathers_fp8: ClassVar[bool] = True

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh over which models are sharded: one dimension of shards, or replicas times shards."""
        layout, mesh = self.setup.state.parallelism_config, self.setup.state.device_mesh
        if mesh is None:
            world = (self.setup.state.num_processes,)
            return init_device_mesh(self.setup.device.type, world, mesh_dim_names=("dp_shard",))
        # Use the flattened submesh only if it is needed, because torch is deprecating slicing by flattened names.
        shards = layout.dp_shard_cp_dim_names
        flat = shards if len(shards) == 1 else ["dp_shard_cp"]
        names = (*layout.fsdp_dim_names[:-1], *flat)
        return mesh[names]  # type: ignore[no-any-return]

    def _has_sharded(self, model: nn.Module) -> bool:
        return isinstance(model, FSDPModule)

    def shard(self, model: nn.Module) -> nn.Module:
        """Shard a model in place; every rank must call this. `fsdp2_prepare_model` runs only this step.

        Args:
            model: The model, on any device: each unit is moved to this rank's device when it is sharded. With
                `cpu_ram_efficient_loading`, the parameters may have no values on ranks other than 0.

        Returns:
            The model itself, with its parameters replaced by their shards.

        Raises:
            ValueError: Parameters have no values, or a setting of the plugin does not fit the model.
        """
        plugin, device = resolved_plugin(self.setup), self.setup.device
        if self._splits_sequences:
            make_attention_causal(model)
        ties = tied_names(model)  # Both moving a model to the meta device and splitting it untie parameters.
        weights = None
        packed = has_packed_weights(model)
        if packed:
            make_weights_shardable(model, device)
        if not model_has_dtensor(model):  # A model that transformers has split is already the same on all ranks.
            if plugin.cpu_ram_efficient_loading and not packed:  # Packed weights have values on every rank.
                weights = _move_weights_out(model, ties)
            else:
                check_values(model, _LOAD_ON_RANK_0)
                if plugin.sync_module_states is not False:
                    broadcast_weights(model, device)
        split_tensors(model, self.setup.state.device_mesh)
        split_experts(model, self.setup.state.device_mesh)
        _shard_units(model, self.mesh, plugin, device)
        if weights is not None:
            _load_weights(model, weights, device, plugin.offloads)
            retie(model, ties)
            refresh_parameters(model)
        return model

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """See `ShardedStrategy.prepare_optimizer`. After each step, `Precision.after_step` runs for the models."""
        known = len(self.optimizers)
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if len(self.optimizers) > known:
            prepared.optimizer.register_step_post_hook(self._after_step)
        return prepared

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for model in self.models_of(optimizer):
            self.setup.precision.after_step(model)

    @property
    def _splits_sequences(self) -> bool:
        layout = self.setup.state.parallelism_config
        return layout is not None and bool(layout.cp_enabled)

    def context_parallel(
        self, buffers: list[torch.Tensor], dims: list[int], kept_split: set[torch.Tensor]
    ) -> AbstractContextManager[Any]:
        """See `Strategy.context_parallel`. Sequences are split over the ranks of the dimension "cp"."""
        if not self._splits_sequences:
            return NOTHING
        how = self.setup.state.parallelism_config.cp_handler.cp_comm_strategy
        return split_sequences(self.setup.state.device_mesh["cp"], how, buffers, dims, kept_split)

    def accumulating(self, models: Sequence[Any]) -> AbstractContextManager[Any]:
        """See `Strategy.accumulating`. Gradients stay whole on every rank."""
        sharded = [inner for model in models if isinstance(inner := without_compile(model), FSDPModule)]
        return Unreduced(sharded) if sharded else NOTHING

    def no_sync(self, model: Any) -> AbstractContextManager[Any]:
        sharded = isinstance(without_compile(model), FSDPModule)
        return self.accumulating([model]) if sharded else super().no_sync(model)

    def sharding(self) -> ShardReport:
        plugin = resolved_plugin(self.setup)
        mesh = shard_report.mesh_axes(self, "dp_shard")
        hybrid = "dp_replicate" in mesh[0]
        kept = plugin.reshard_after_forward is False
        units = sum(isinstance(module, FSDPModule) for model in self.models for module in model.modules())
        return shard_report.count_shards(
            self,
            variant=_VARIANTS[hybrid, kept],
            offloaded="cpu" if plugin.offloads else "",
            note="whole from forward to backward" if kept else "gathered unit by unit",
            mesh=mesh,
            units=(units, "units"),
        )


class Unreduced:
    """A context that keeps the backward pass of sharded models from exchanging gradients.

    Each rank keeps whole gradients instead.

    Args:
        models: The sharded models.
    """

    __slots__ = ("_models",)

    def __init__(self, models: Sequence[FSDPModule]) -> None:
        self._models = models

    def __enter__(self) -> None:
        for model in self._models:
            model.set_requires_gradient_sync(False)

    def __exit__(self, *_: object) -> None:
        for model in self._models:
            model.set_requires_gradient_sync(True)


# ---- steps of shard

_Weights = tuple[dict[str, Any], dict[str, torch.Tensor]]
_LOAD_ON_RANK_0 = (
    "load its weights on rank 0, with FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)"
)


def _move_weights_out(model: nn.Module, ties: list[list[str]]) -> _Weights:
    """Move a model to the meta device in place, and return its values; every rank must call this.

    Returns:
        The model's state, which is empty on ranks other than 0, and rank 0's buffers that are not part of the state,
        on every rank.
    """
    first = dist.get_rank() == 0
    state = model.state_dict() if first else {}
    known = state.keys() | {name for name, _ in model.named_parameters(remove_duplicate=False)}
    sent = [{n: b.cpu() for n, b in model.named_buffers() if n not in known} if first else None]
    dist.broadcast_object_list(sent, src=0)
    model.to("meta")
    retie(model, ties)
    return state, sent[0] or {}


def _load_weights(model: nn.Module, weights: _Weights, device: torch.device, cpu_offload: bool) -> None:
    """Load the values from `_move_weights_out` into the sharded model; every rank must call this."""
    state, buffers = weights
    load_full_state(model, state, cpu_offload)
    for name, buffer in buffers.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.register_buffer(name.rpartition(".")[2], buffer.to(device), persistent=False)


def _shard_units(
    model: nn.Module, mesh: DeviceMesh, plugin: FullyShardedDataParallelPlugin, device: torch.device
) -> None:
    units, ignored = choose_units(model, plugin)
    pin = device.type != "cpu" and getattr(plugin.cpu_offload, "pin_memory", True)  # The CPU has no pinned memory.
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=pin) if plugin.offloads else OffloadPolicy(),
        "ignored_params": {parameter for module in ignored for parameter in module.parameters()} or None,
    }
    reshard: Any = plugin.reshard_after_forward
    for unit in units:
        fully_shard(unit, reshard_after_forward=reshard, **settings)
    # The backward pass needs the root's own parameters right after the forward pass. None lets torch keep them whole.
    fully_shard(model, reshard_after_forward=None if units and reshard is True else reshard, **settings)


def load_full_state(model: nn.Module, state: dict[str, Any], cpu_offload: bool = False) -> None:
    """Load rank 0's full state dict into a sharded model; every rank must call this.

    Args:
        model: The sharded model. Its parameters may have no values yet.
        state: The full state dict on rank 0; ignored on other ranks.
        cpu_offload: Whether the shards are kept in main memory.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
    set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)


# ---- 4-bit weights, such as bitsandbytes' `Params4bit`
#
# A packed weight consists of bytes and of a state that says how to decode them (scales, a table of values). The bytes
# are sharded like any frozen parameter. The state takes a few percent of their size, so it stays whole on every rank.
# It is stored in the module, where bitsandbytes finds it if the (gathered) weight does not have it.


def has_packed_weights(model: nn.Module) -> bool:
    """Return whether a model has 4-bit weights.

    Args:
        model: The model.
    """
    return any(True for _ in _packed(model))


def _packed(model: nn.Module) -> Iterator[tuple[Any, nn.Parameter]]:
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and getattr(weight, "quant_state", None) is not None:
            yield module, weight


@torch.no_grad()
def make_weights_shardable(model: nn.Module, device: torch.device) -> None:
    """Turn 4-bit weights into plain byte parameters, in place and equal on all ranks; every rank must call this.

    Without this, torch would treat weights that are stored as bfloat16 as numbers: gathering them would convert them to
    the dtype of mixed precision, and change bit patterns that look like NaN (bitsandbytes#1945).

    Args:
        model: The model before it is sharded.
        device: The device on which the model trains.
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
            module.support_avx512bf16_for_cpu = False  # In evaluation, bitsandbytes would convert the gathered copy.


def _tensors_of(state: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a quantization state, including the nested state of its quantized scales."""
    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
        elif hasattr(value, "absmax"):
            yield from _tensors_of(value)


# ---- context parallelism
#
# Each rank computes a part of every sequence, and attention layers exchange keys and values. Sources: Liu et al., "Ring
# Attention", https://arxiv.org/abs/2310.01889, and torch's experimental `context_parallel`.


@contextmanager
def split_sequences(
    mesh: DeviceMesh, exchange: str, buffers: Sequence[torch.Tensor], dims: Sequence[int], kept_split: set[torch.Tensor]
) -> Iterator[None]:
    """Split sequences over ranks inside a with block; every rank must enter it.

    Args:
        mesh: The ranks that share sequences.
        exchange: How ranks exchange keys and values: "allgather" or "alltoall".
        buffers: The tensors to split in place.
        dims: The sequence dimension of each buffer.
        kept_split: The buffers that are not restored afterwards.

    Yields:
        Nothing.

    Raises:
        ValueError: Buffers and dimensions do not match, or a sequence cannot be split evenly.
    """
    from torch.distributed.tensor.experimental import context_parallel

    from notebook_accelerate.torch_internals import set_rotate_method

    _check_buffers(buffers, dims, kept_split, 2 * mesh.size())
    set_rotate_method(exchange)
    with context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=list(dims), no_restore_buffers=set(kept_split)):
        yield


def _check_buffers(
    buffers: Sequence[torch.Tensor], dims: Sequence[int], kept_split: set[torch.Tensor], pieces: int
) -> None:
    if len(buffers) != len(dims):
        raise ValueError(
            f"maybe_context_parallel was given {len(buffers)} buffers and {len(dims)} buffer_seq_dims; pass the "
            "sequence dimension of each buffer"
        )
    if not all(any(kept is buffer for buffer in buffers) for kept in kept_split):
        raise ValueError("no_restore_buffers contains a tensor that is not in buffers; pass a subset of buffers")
    for buffer, dim in zip(buffers, dims, strict=True):
        # Later positions attend to more keys. Each rank gets one piece from the front and one from the back, so that
        # all ranks have the same amount of work.
        if not -buffer.dim() <= dim < buffer.dim() or buffer.shape[dim] % pieces:
            raise ValueError(
                f"a buffer of shape {list(buffer.shape)} cannot be split along buffer_seq_dims={dim}: that dimension "
                f"must be a multiple of {pieces}, twice cp_size; pad the sequences"
            )


def make_attention_causal(model: nn.Module) -> None:
    """Make a transformers model use causal attention instead of a mask, in place.

    A mask for the whole sequence does not fit a part of it, and torch's split attention does not accept a mask.

    Args:
        model: A model whose attention modules are named self_attn.

    Raises:
        ValueError: Some layers need a mask other than the causal one (sliding windows, chunks), or have no attention.
    """
    if others := [kind for kind in layer_kinds(model) if kind != "full_attention"]:
        raise ValueError(
            f"context parallelism computes causal attention over the whole sequence, and {type(model).__name__} has "
            f"layers of the kind {', '.join(others)}, whose mask would be lost; train a model with full attention, or "
            "write ParallelismConfig(...) without cp_size"
        )
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_causal, with_kwargs=True)


def _causal(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    changed: dict[str, Any] = {"attention_mask": None} if "attention_mask" in kwargs else {}
    if "is_causal" in kwargs:
        changed["is_causal"] = True
    return args, {**kwargs, **changed}
