"""The undocumented parts of torch that this package uses. No other module uses torch's private names.

They work with torch 2.9 to 2.15: ``tests/unit/test_torch_internals.py`` tries each of them, and `make test-matrix` runs
that test with the oldest version, the newest one, and one in between. Importing this module does not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, UntypedStorage, _foreach_copy_ as foreach_copy, nn
    from torch._compile import _disable_dynamo as disable_dynamo
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._utils import _flatten_dense_tensors as flatten_dense_tensors
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed._shard._utils import narrow_tensor_by_index
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.shard import Shard
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        _CHECKPOINT_PREFIX as CHECKPOINT_PREFIX,
        CheckpointImpl,
        checkpoint_wrapper,
        offload_wrapper,
    )
    from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import _get_default_store as default_store
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.modules.dropout import _DropoutNd as Dropout
    from torch.optim import Optimizer
    from torch.utils import _pytree as pytree
    from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator


class PrivateName(NamedTuple):
    """A private name that this module exports under another name.

    Attributes:
        name: The module in torch, a colon, and the name. The part after the colon is empty for a whole module.
        use: The purpose of the name, and its replacement if a version of torch does not have it.
    """

    name: str
    use: str


_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
NAMES: dict[str, PrivateName] = {
    "foreach_copy": PrivateName("torch:_foreach_copy_", "copies lists of tensors in one call; copy_ in a loop"),
    "disable_dynamo": PrivateName("torch._compile:_disable_dynamo", "torch.compiler.disable without torch._dynamo"),
    "FakeTensorMode": PrivateName("torch._subclasses.fake_tensor:FakeTensorMode", "shapes of outputs; the meta device"),
    "flatten_dense_tensors": PrivateName("torch._utils:_flatten_dense_tensors", "DDP's cat; torch.cat of views"),
    "HashStore": PrivateName("torch._C._distributed_c10d:HashStore", "the store of a group of one; a FileStore"),
    "narrow_tensor_by_index": PrivateName("torch.distributed._shard._utils:narrow_tensor_by_index", "narrow in a loop"),
    "ShardedTensor": PrivateName("torch.distributed._shard.sharded_tensor.api:ShardedTensor", "FSDP 1's state dicts"),
    "Shard": PrivateName("torch.distributed._shard.sharded_tensor.shard:Shard", "FSDP 1's state dicts"),
    "CHECKPOINT_PREFIX": PrivateName(f"{_WRAPPER}:_CHECKPOINT_PREFIX", "the wrapper's part of parameters' names"),
    "CheckpointImpl": PrivateName(f"{_WRAPPER}:CheckpointImpl", "activation checkpointing of units"),
    "checkpoint_wrapper": PrivateName(f"{_WRAPPER}:checkpoint_wrapper", "activation checkpointing of units"),
    "offload_wrapper": PrivateName(f"{_WRAPPER}:offload_wrapper", "activations in main memory"),
    "StorageInfo": PrivateName("torch.distributed.checkpoint.filesystem:_StorageInfo", "part of checkpoints' metadata"),
    "default_store": PrivateName("torch.distributed.distributed_c10d:_get_default_store", "the default group's store"),
    "set_rotate_method": PrivateName(
        "torch.distributed.tensor.experimental._attention:set_rotate_method", "how context parallel ranks exchange"
    ),
    "Dropout": PrivateName("torch.nn.modules.dropout:_DropoutNd", "the base class of dropout; a tuple of its classes"),
    "pytree": PrivateName("torch.utils._pytree:", "nested containers with the user's registered types"),
    "DataLoaderIterator": PrivateName("torch.utils.data.dataloader:_BaseDataLoaderIter", "where a loop waits for data"),
}

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
"""The tables in each `torch.nn.Module`, the only private names that other files use, in order to replace weights."""


def __getattr__(name: str) -> Any:
    """Import a private name on its first use.

    Raises:
        AttributeError: This module does not have the name.
        ImportError: This version of torch does not have the name.
    """
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = NAMES[name].name.partition(":")
    try:
        found = import_module(module)
        value = getattr(found, attribute) if attribute else found
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"torch {import_module('torch').__version__} has no {module}.{attribute}, a private name ({error}); "
            "notebook_accelerate was tested with torch 2.9 to 2.15: install one of these versions"
        ) from error
    globals()[name] = value
    return value


def weights_only_globals() -> dict[str, Any]:
    """Return the objects that torch.load with `weights_only` may create or call, by their dotted names in files."""
    found: dict[str, Any] = import_module("torch._weights_only_unpickler")._get_allowed_globals()
    return found


def import_inductor() -> None:
    """Import the modules that torch's profiler imports when it starts, which takes seconds.

    Two of these packages import each other. Creating the first optimizer imports them, too, starting with the same one.
    If another thread started with the other package, both imports would fail.
    """
    import_module("torch._dynamo")
    import_module("torch._inductor.config")


def profiler_enabled() -> bool:
    """Return whether one of torch's profilers is recording this thread."""
    return bool(import_module("torch.autograd")._profiler_enabled())


def trace_only() -> dict[str, Any]:
    """Return arguments that make ``torch.profiler.profile`` create no objects for events, or {} before torch 2.13."""
    config: Any = import_module("torch._C._profiler")._ExperimentalConfig
    try:
        return {"experimental_config": config(trace_only=True)}
    except TypeError:
        return {}


def before_profilers_start(call: Callable[[Any], None]) -> Callable[[], None]:
    """Arrange for a function to be called with each `torch.autograd.profiler.profile` before it prepares to record.

    Returns:
        A function that stops these calls.
    """
    kind: Any = import_module("torch.autograd.profiler").profile
    original = kind._prepare_trace

    @wraps(original)
    def prepare(self: object) -> None:
        call(self)
        original(self)

    def end() -> None:
        if kind._prepare_trace is prepare:
            kind._prepare_trace = original

    kind._prepare_trace = prepare
    return end


# ---- process groups

_TABLES_OF_GROUPS = (
    "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state",
)  # fmt: skip


def process_groups() -> list[Any]:
    """Return this process's groups in the order of their creation. This takes about a microsecond."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return list(getattr(world, "pg_map", None) or ())


def group_timeouts(group: Any) -> dict[str, timedelta]:
    """Return the time limits of a group's backends by name, such as "gloo" and "nccl".

    Args:
        group: The process group to inspect.

    Raises:
        Exception: A backend has no options, or this rank is not in the group.
    """
    backends = [group._get_backend(device) for device in group._device_types]
    return {backend.name().lower(): backend.options._timeout for backend in backends}


def set_group_timeout(timeout: timedelta, group: Any = None) -> None:
    """Set the time limit for all operations of a group that start from now on.

    torch 2.15 has `torch.distributed.set_timeout`, and warns about the private name. Earlier versions can only set the
    limit for nccl and gloo. They warn about other backends, whose limit does not change.

    Args:
        timeout: The new time limit.
        group: The process group to change. None means the default group.
    """
    distributed: Any = import_module("torch.distributed")
    public = getattr(distributed, "set_timeout", None)
    settable = {"nccl", "gloo", "undefined"}  # "undefined" means each device type's default.
    if public is None and settable.isdisjoint(distributed.get_backend(group).replace(",", ":").split(":")):
        return
    (public or distributed.distributed_c10d._set_pg_timeout)(timeout, group)


def drop_process_groups() -> list[Any]:
    """Empty the tables of torch.distributed without destroying the groups in them.

    Returns:
        The objects that must be kept alive, because the groups' destructors would wait for threads that a forked
        process lacks.
    """
    c10d: Any = import_module("torch.distributed.distributed_c10d")
    world = c10d._world
    kept: list[Any] = [c10d.GroupMember.WORLD]
    for name in _TABLES_OF_GROUPS:
        table = getattr(world, name, None)
        if table is not None:
            kept.append(dict(table))
            table.clear()
    c10d._update_default_pg(None)
    c10d._unregister_all_process_groups()
    world.group_count = 0
    return kept


def start_all_gather(group: Any, rows: Tensor, flat: Tensor, options: Any) -> Any:
    """Start an all-gather into one tensor with the group's own method, which takes 14 µs less than the public function.

    Args:
        group: The process group of the ranks.
        rows: The tensor to write to, of shape (ranks * count,).
        flat: This rank's tensor, of shape (count,).
        options: The operation's `torch.distributed.AllgatherOptions`.

    Returns:
        The operation that the caller must wait for.
    """
    return group._allgather_base(rows, flat, options)


def greet_in_one_dtype(stage: Any) -> None:
    """Make a pipeline stage greet its neighbours with the float that they expect.

    torch 2.9 itself sends an integer of twice the size, which makes gloo kill the receiver's process.

    Args:
        stage: The stage that `torch.distributed.pipelining` has built, before its schedule starts.
    """
    operations = getattr(stage, "_get_init_p2p_neighbors_ops", None)
    if operations is None:
        return

    def floats() -> list[Any]:
        found: list[Any] = operations()
        for operation in found:
            operation.tensor = operation.tensor.float()
        return found

    stage._get_init_p2p_neighbors_ops = floats


def flight_recorders() -> dict[str, Callable[[bool, bool], bytes]]:
    """Return the functions that dump torch's flight recorders as JSON, by name, or {} if torch is not loaded.

    NCCL has a separate recorder, which only exists in CUDA and ROCm builds of torch.
    """
    module = sys.modules.get("torch._C._distributed_c10d")
    names = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
    return {name: dump for name, function in names.items() if (dump := getattr(module, function, None)) is not None}


# ---- devices, meshes and tensors


def default_device() -> str:
    """Return the type of this thread's default device, or "" if no default device is set.

    To find the index, `torch.get_default_device` would create a tensor, which creates a CUDA context in the kernel.
    """
    contexts: Any = sys.modules.get("torch.utils._device")
    if contexts is None:  # No default device was ever set.
        return ""
    modes = sys.modules["torch"].overrides._get_current_function_mode_stack()
    devices = [mode.device.type for mode in modes if isinstance(mode, contexts.DeviceContext)]
    return str(devices[-1]) if devices else ""


def cuda_seed() -> int | None:
    """Return the seed that CUDA generators have, or will get once CUDA is used, or None if no seed was chosen.

    If a process has not chosen a seed, torch seeds the generators with a random number when CUDA is first used.
    """
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return int(torch.cuda.initial_seed())
    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)
    return int(torch.initial_seed()) if tracker is not None and tracker.call_order else None


def flatten_mesh(mesh: DeviceMesh, name: str) -> Any:
    """Add a dimension to a device mesh that flattens all of its dimensions.

    Args:
        mesh: The mesh to flatten, or a part of a mesh.
        name: The name of the new dimension.
    """
    return mesh._flatten(name)


def local_tensor(tensor: DTensor) -> Tensor:
    """Return this rank's part of a DTensor itself, rather than a view of the part, as `to_local` does.

    Args:
        tensor: The DTensor whose part to return.
    """
    return tensor._local_tensor


def viewed_tensor(tensor: Tensor) -> Tensor:
    """Return the base of a tensor that is a view, or the tensor itself.

    Args:
        tensor: The tensor to inspect.
    """
    return tensor if tensor._base is None else tensor._base


def storage_key(storage: UntypedStorage) -> int:
    """Return a number that is the same for the same storage, even on devices without memory.

    Args:
        storage: The storage to identify.
    """
    return int(storage._cdata)


def tensor_version(tensor: Tensor) -> int:
    """Return how many times a tensor was changed in place, or 0 for inference tensors, which do not count changes.

    Args:
        tensor: The tensor to inspect.
    """
    return 0 if tensor.is_inference() else int(tensor._version)


# ---- modules


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module was returned by `torch.compile`.

    Args:
        module: The module to inspect.
    """
    return "_orig_mod" in module._modules


def compiled_module(module: nn.Module) -> Any:
    """Return the module inside a compiled module.

    Args:
        module: A module that `torch.compile` has returned (see `is_compiled`).
    """
    return module._orig_mod


def uncompiled_name(name: str) -> str:
    """Return the name of a tensor without the prefixes that `torch.compile` adds.

    Args:
        name: A name in a state dict.
    """
    return name.replace("_orig_mod.", "")


def compiled_name(name: str) -> str:
    """Return the name that a tensor has in the module that `torch.compile` returns.

    Args:
        name: The name in the original module.
    """
    return f"_orig_mod.{name}"


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether a module's own `compile` method was called.

    Args:
        module: The module to inspect.
    """
    return getattr(module, "_compiled_call_impl", None) is not None


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's own buffers that are not in its state dict.

    Args:
        module: The module to inspect.
    """
    return set(module._non_persistent_buffers_set)


def refresh_parameters(module: nn.Module) -> None:
    """Make FSDP 2 use a model's new parameter objects, as it does when a function is applied to the model.

    Args:
        module: The sharded model.
    """
    module._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]


def has_own_names(module: nn.Module) -> bool:
    """Return whether a module's state dict has the module's own parameter names, without any changes.

    Args:
        module: The module to inspect.
    """
    return not hasattr(module, "_fqn_modifiers")


def recorded_static_graph(model: nn.Module) -> bool:
    """Return whether a DDP model with a static graph has recorded the graph, or True if torch no longer reports this.

    Args:
        model: The model, wrapped in DDP.
    """
    return bool(getattr(model, "_static_graph_delay_allreduce_enqueued", True))


# ---- FSDP 1


def hybrid_zero2() -> Any:
    """Return the sharding strategy that is named HYBRID_SHARD_ZERO2 in Accelerate's configuration."""
    return import_module("torch.distributed.fsdp").ShardingStrategy._HYBRID_SHARD_ZERO2


def flat_parameter_handle(unit: nn.Module) -> Any:
    """Return the handle of an FSDP 1 unit's flat parameter, or None for a unit without parameters.

    Args:
        unit: The unit to inspect.
    """
    return getattr(unit, "_handle", None)


def flat_parameter(module: nn.Module) -> Any:
    """Return the flat parameter that an FSDP 1 unit registers (with ``use_orig_params=False``), or None.

    Args:
        module: The module to inspect.
    """
    return module._parameters.get("_flat_param")


def names_in_flat_parameter(flat: Any) -> tuple[str, ...]:
    """Return the names of the parameters in a flat parameter.

    Args:
        flat: The flat parameter to inspect.
    """
    return tuple(flat._fqns)


def flat_parameter_sizes(flat: Any) -> tuple[int, int]:
    """Return a flat parameter's number of elements on all ranks, without padding, and on this rank, with padding.

    Args:
        flat: The flat parameter to inspect.
    """
    return flat._unpadded_unsharded_size.numel(), flat._sharded_size.numel()


def group_of_sharded_tensor(tensor: ShardedTensor) -> Any:
    """Return the process group of a `ShardedTensor`.

    Args:
        tensor: The tensor to inspect.
    """
    return tensor._process_group


def sharded_tensor(shards: list[Any], metadata: Any, group: Any) -> ShardedTensor:
    """Create a `ShardedTensor` from this rank's shards without communication.

    Args:
        shards: This rank's shards.
        metadata: The metadata of all ranks' shards.
        group: The process group of the ranks that have shards.
    """
    kind = __getattr__("ShardedTensor")
    tensor: ShardedTensor = kind._init_from_local_shards_and_global_metadata(
        shards, sharded_tensor_metadata=metadata, process_group=group
    )
    return tensor


# ---- loaders, schedulers and optimizers


def sampler_length(sampler: Any) -> int | None:
    """Return the `num_samples` that a `RandomSampler` was given, or None if it uses the dataset's size.

    Args:
        sampler: The sampler to inspect.
    """
    number: int | None = sampler._num_samples
    return number


def count_scheduler_step(scheduler: Any) -> None:
    """Count a step that a scheduler did not take.

    Args:
        scheduler: The scheduler whose steps are counted.
    """
    scheduler._step_count += 1


def scheduler_steps(scheduler: Any) -> int:
    """Return the number of steps that a scheduler has taken. Its construction counts as the first step.

    Args:
        scheduler: The scheduler whose steps are counted.
    """
    return int(scheduler._step_count)


def mark_stepped(optimizer: Optimizer) -> None:
    """Mark an optimizer as stepped, so that its scheduler does not warn.

    Args:
        optimizer: The optimizer to mark.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


__all__ = [
    "CHECKPOINT_PREFIX",
    "MODULE_TABLES",
    "NAMES",
    "CheckpointImpl",
    "DataLoaderIterator",
    "Dropout",
    "FakeTensorMode",
    "HashStore",
    "PrivateName",
    "Shard",
    "ShardedTensor",
    "StorageInfo",
    "before_profilers_start",
    "checkpoint_wrapper",
    "compiled_module",
    "compiled_name",
    "count_scheduler_step",
    "cuda_seed",
    "default_device",
    "default_store",
    "disable_dynamo",
    "drop_process_groups",
    "flat_parameter",
    "flat_parameter_handle",
    "flat_parameter_sizes",
    "flatten_dense_tensors",
    "flatten_mesh",
    "flight_recorders",
    "foreach_copy",
    "greet_in_one_dtype",
    "group_of_sharded_tensor",
    "group_timeouts",
    "has_own_names",
    "hybrid_zero2",
    "import_inductor",
    "is_compiled",
    "is_compiled_in_place",
    "local_tensor",
    "mark_stepped",
    "names_in_flat_parameter",
    "narrow_tensor_by_index",
    "non_persistent_buffers",
    "offload_wrapper",
    "process_groups",
    "profiler_enabled",
    "pytree",
    "recorded_static_graph",
    "refresh_parameters",
    "sampler_length",
    "scheduler_steps",
    "set_group_timeout",
    "set_rotate_method",
    "sharded_tensor",
    "start_all_gather",
    "storage_key",
    "tensor_version",
    "trace_only",
    "uncompiled_name",
    "viewed_tensor",
    "weights_only_globals",
]  # fmt: skip
