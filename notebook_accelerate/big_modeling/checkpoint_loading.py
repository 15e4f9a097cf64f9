"""Load checkpoints into models, one tensor at a time, directly to the device of each tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.big_modeling.checkpoint_shards import Shard, find_shards, tensor_names, weights_on_disk
from notebook_accelerate.big_modeling.device_map import (
    check_device_map,
    check_free_memory,
    check_limits,
    get_max_memory,
    make_device_map,
)
from notebook_accelerate.big_modeling.dispatching import dispatch_model
from notebook_accelerate.big_modeling.module_tensors import (
    device_of,
    find_tied_parameters,
    name_of_scales,
    retie_parameters,
    set_module_tensor_to_device,
    warn_if_untied,
)
from notebook_accelerate.big_modeling.module_tree import compute_module_sizes, dtype_of
from notebook_accelerate.big_modeling.offload_folder import OffloadedWeightsLoader, offload_weight, save_offload_index
from notebook_accelerate.big_modeling.quantization import (
    is_offloadable,
    keep_8bit,
    make_offloadable_below,
    offloaded_modules,
)
from notebook_accelerate.collectives import broadcast_object_list
from notebook_accelerate.errors import CheckpointError, CheckpointMismatchError
from notebook_accelerate.files.remote_paths import path_of
from notebook_accelerate.files.tensor_sources import FileSource, TensorSource
from notebook_accelerate.files.weight_files import safetensors_sources
from notebook_accelerate.torch_internals import uncompiled_name

_LOG = accelerate_logger("utils.modeling")


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read the weights in a file.

    Args:
        checkpoint_file: The path or URL of a file in safetensors' or torch's format. The latter is read with
            `weights_only=True`.
        device_map: The device of each module by name. Tensors on "disk" are loaded to the CPU. Without a map, all
            tensors are.

    Returns:
        The tensors, by name.

    Raises:
        CheckpointError: The file is corrupt, or contains more than plain data.
    """
    sources = Shard(weights_on_disk(path_of(checkpoint_file))).sources()

    def device_for(name: str) -> torch.device:
        device = device_of(name, device_map or {})
        return torch.device("cpu" if device is None or str(device) == "disk" else device)

    return {name: source.load(device_for(name)) for name, source in sources.items()}


def load_offloaded_weights(model: torch.nn.Module, index: Mapping[str, Any], offload_folder: Any) -> None:
    """Load the weights of an offload folder into a model on the CPU.

    Args:
        model: The model to load the weights into.
        index: The dtype and shape of each weight by name, or the file that contains the weight.
        offload_folder: The folder to read the weights from.
    """
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name].clone())


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, int | str | torch.device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,  # noqa: ARG001
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, one tensor at a time, directly to the device of each tensor.

    On the CPU, empty weights become memory mappings of a safetensors file, which must not change while the model is in
    use.

    All names and shapes are checked before anything is loaded, except that the shapes in a pickled shard are checked
    just before that shard is loaded. Weights on "disk" stay in the checkpoint's safetensors files, and the offload
    folder's index refers to them. Tensors from other files are written to the offload folder.

    Args:
        model: The model to load, on any device, including the meta device.
        checkpoint: A file, an index, or a folder that contains one of them. URLs (s3://, gs://, ...) are downloaded
            first, once per machine, and kept in ``$HF_HOME/accelerate/remote``.
        device_map: The device of each module by name. If None, tensors stay on the model's device, and meta tensors are
            loaded to the CPU.
        offload_folder: The folder for the weights of modules on "disk".
        dtype: The dtype that floating-point weights are converted to. If None, the model's dtype is used.
        offload_state_dict: Accepted for compatibility, but not needed: weights for the CPU are never in memory twice.
        offload_buffers: Whether to offload the buffers of modules on disk, too.
        keep_in_fp32_modules: Parts of names. Modules whose names contain one of them stay in float32.
        offload_8bit_bnb: Whether to quantize the offloaded weights of bitsandbytes' 8-bit layers, and to keep them in 8
            bits with their scales.
        strict: Whether to raise before anything is loaded if names are missing or unexpected, instead of warning.
        full_state_dict: Whether the checkpoint contains full tensors. If False, it contains distributed tensors, as
            `torch.save` writes them, for a model with distributed tensors.
        broadcast_from_rank0: Whether only rank 0 reads the files; every rank must call this.

    Raises:
        ValueError: The checkpoint contains no weights, the map lacks some weights or needs more than a device's free
            memory, or `offload_folder` is missing.
        CheckpointMismatchError: The shapes of the checkpoint and the model differ or, with `strict`, the names do.
        CheckpointError: A file is corrupt, contains more than plain data, or is outside its folder.
    """
    if device_map is not None:
        check_device_map(model, device_map)
        if offload_folder is None and "disk" in [str(device) for device in device_map.values()]:
            raise ValueError(
                "At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`: "
                "offload_folder='a_folder'"
            )
    if offload_8bit_bnb and device_map is not None:
        make_offloadable_below(model, offloaded_modules(device_map))
    kept = tuple(keep_in_fp32_modules or ())
    loading = _Loading(model, checkpoint, device_map, offload_folder, dtype, offload_buffers, kept, strict)
    if broadcast_from_rank0 or any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        loading.load_on_ranks(full_state_dict, broadcast_from_rank0)
    else:
        loading.load_all()
    loading.finish()


class _Loading:
    """Loads one checkpoint into one model."""

    def __init__(
        self, model: torch.nn.Module, checkpoint: Any, device_map: Mapping[str, Any] | None, folder: Any, dtype: Any,
        buffers: bool, kept: tuple[str, ...], strict: bool,
    ) -> None:  # fmt: skip
        self._model, self._checkpoint, self._strict = model, checkpoint, strict
        self._map, self._folder = device_map or {}, folder
        self._tied = find_tied_parameters(model)
        warn_if_untied(model, self._tied)
        self._dtype = None if dtype is None else dtype_of(dtype)
        self._kept, self._offload_buffers = kept, buffers
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self._state = set(model.state_dict())
        self._loaded: set[str] = set()
        self._mismatch = ""
        self._index: dict[str, Any] = {}
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)

    def check_shapes(self, sources: dict[str, TensorSource]) -> None:
        """Raise an error if the shape of any tensor differs from the model's."""
        mismatches = [
            f"{name}: {tuple(source.shape)} in the checkpoint, {tuple(self._tensors[name].shape)} in the model"
            for name, source in sources.items()
            if name in self._tensors and tuple(source.shape) != tuple(self._tensors[name].shape)
        ]
        if mismatches:
            lines = "\n  ".join(mismatches[:10])
            raise CheckpointMismatchError(
                f"size mismatch for {len(mismatches)} tensor{'s' * (len(mismatches) > 1)}; nothing was loaded from "
                f"their file:\n  {lines}\nThis checkpoint belongs to another model."
            )

    def _bytes_to_allocate(self, sources: dict[str, TensorSource]) -> dict[torch.device, int]:
        """Return how many bytes loading allocates per device, not counting mapped, overwritten or offloaded tensors."""
        found: dict[torch.device, int] = {}
        for name, source in sources.items():
            target = device_of(name, self._map)
            old = self._tensors.get(name)
            if target is None or old is None or str(target) == "disk":
                continue
            device, dtype = torch.device(target), self._dtype_of(name, source) or source.dtype
            if (device.type == "cpu" and dtype == source.dtype) or device == old.device:
                continue
            found[device] = found.get(device, 0) + dtype.itemsize * source.nbytes // source.dtype.itemsize
        return found

    def load_all(self) -> None:
        """Check the files, then load them in order. If one cannot be loaded, the error says how much was loaded."""
        shards = find_shards(self._checkpoint, self._state)
        known: dict[str, TensorSource] = {}
        for shard in shards:
            if shard.path.suffix == ".safetensors":
                known |= shard.sources()
        self.check_shapes(known)
        self.check_names(tensor_names(shards))
        check_free_memory(self._bytes_to_allocate(known))
        for count, shard in enumerate(shards):
            try:
                self._load(shard)
            except CheckpointError as error:
                if not self._loaded:
                    raise
                raise type(error)(
                    f"{error} The model is only partly loaded: {count} of {len(shards)} files, and "
                    f"{len(self._loaded)} of {len(self._state)} tensors. Create the model again before you use it."
                ) from error

    def _load(self, shard: Shard) -> None:
        sources = shard.sources()
        self.check_shapes(sources)
        for name, source in sources.items():
            if name not in self._state:
                continue
            if source.dtype.is_floating_point and is_offloadable(self._model, name):
                self._keep_8bit(name, source)
                continue
            self._place(name, source)
            self._loaded.add(name)

    def _keep_8bit(self, name: str, source: TensorSource) -> None:
        to_disk = str(device_of(name, self._map)) == "disk"
        keep_8bit(self._model, name, source.load(torch.device("cpu")), self._folder if to_disk else None, self._index)
        self._loaded |= {name, name_of_scales(name)}

    def load_on_ranks(self, full_state_dict: bool, broadcast_from_rank0: bool) -> None:
        """Load all files; every rank must call this."""
        devices = {str(device) for device in self._map.values()}
        if len(devices) > 1 or "disk" in devices:
            raise ValueError(
                f"device_map has the devices {', '.join(sorted(devices))}; a model that several ranks load together "
                'must be on one device of each rank: pass device_map=None, or device_map={"": device}.'
            )
        found = load_on_ranks(
            self._model, self._checkpoint, self.check_shapes, self.check_names, full_state_dict, broadcast_from_rank0
        )
        self.check_names(found)
        self._loaded = {name for name in found if name in self._state}
        if devices or self._dtype is not None:
            self._model.to(device=next(iter(self._map.values()), None), dtype=self._dtype)

    def _place(self, name: str, source: TensorSource) -> None:
        device = device_of(name, self._map)
        dtype = self._dtype_of(name, source)
        if str(device) == "disk":
            if name in self._parameters or self._offload_buffers:
                self._leave_on_disk(name, source, dtype)
                return
            device = "cpu"
        old = self._tensors[name]
        if device is None:
            device = "cpu" if old.device.type == "meta" else old.device
        if self._fits(old, source, torch.device(device), dtype):
            source.read_into(old.detach())
        else:
            # On the CPU, map the file. Values are then read on first use, into the page cache.
            maps = isinstance(source, FileSource) and torch.device(device).type == "cpu"
            value = source.map(read_ahead=False) if maps else source.load(torch.device(device))
            set_module_tensor_to_device(self._model, name, device, value=value, dtype=dtype)

    def _dtype_of(self, name: str, source: TensorSource) -> torch.dtype | None:
        if not source.dtype.is_floating_point or name.endswith(".SCB"):
            return None  # bitsandbytes keeps the scales of 8-bit weights in float32.
        if self._dtype is not None and any(part in name.split(".") for part in self._kept):
            return torch.float32
        return self._dtype

    @staticmethod
    def _fits(old: torch.Tensor, source: TensorSource, device: torch.device, dtype: torch.dtype | None) -> bool:
        """Return whether a tensor can be read directly into the model's memory."""
        same = old.device == device and old.device.type == "cpu" and old.dtype == source.dtype
        return same and old.is_contiguous() and dtype in (None, old.dtype)

    def _leave_on_disk(self, name: str, source: TensorSource, dtype: torch.dtype | None) -> None:
        dtype = dtype or (self._tensors[name].dtype if source.dtype.is_floating_point else source.dtype)
        if isinstance(source, FileSource) and source.dtype == dtype:
            dtype_name = str(source.dtype).removeprefix("torch.")
            in_file = safetensors_sources(source.path)
            own = name if name in in_file else next(other for other, each in in_file.items() if each is source)
            self._index[name] = {
                "safetensors_file": str(source.path.absolute()), "weight_name": own, "dtype": dtype_name,
                "shape": list(source.shape),
            }  # fmt: skip
        else:
            value = source.load(torch.device("cpu")).to(dtype)
            self._index = offload_weight(value, name, self._folder, index=self._index)
        placeholder = torch.empty(source.shape, dtype=dtype, device="meta")
        set_module_tensor_to_device(self._model, name, "meta", value=placeholder, dtype=dtype)

    def check_names(self, names: Iterable[str]) -> None:
        """Compare the names in all files with the model's before anything is loaded."""
        given = set(names)
        scales = {name_of_scales(name) for name in given if is_offloadable(self._model, name)}
        covered = given | scales | {name for group in self._tied if given & set(group) for name in group}
        missing, unexpected = sorted(self._state - covered), sorted(given - self._state)
        lines = [f"{what} key(s): {', '.join(names[:10])}{' and more' * (len(names) > 10)}"
                 for what, names in (("Missing", missing), ("Unexpected", unexpected)) if names]  # fmt: skip
        self._mismatch = "; ".join(lines)
        if self._strict and lines:
            raise CheckpointMismatchError(
                f"Error(s) in loading {self._checkpoint} into {type(self._model).__name__}: {self._mismatch}. Nothing "
                "was loaded. Pass strict=False to load the names that match."
            )

    def finish(self) -> None:
        """Tie the parameters again, write the index, and warn about names that did not match."""
        for group in self._tied:
            if self._loaded & set(group):
                first = next(name for name in group if name in self._loaded)
                retie_parameters(self._model, [[first, *(name for name in group if name != first)]])
                self._index.update({name: self._index[first] for name in group if first in self._index})
        save_offload_index(self._index, self._folder)
        if self._mismatch:
            _LOG.warning(
                "%s and %s do not match: %s. All other weights were loaded; pass strict=True to make this an error.",
                self._checkpoint, type(self._model).__name__, self._mismatch,
            )  # fmt: skip


def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, int | str | torch.device] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> torch.nn.Module:
    """Load a checkpoint into a model, and dispatch the model's modules to their devices.

    Args:
        model: The model to load, usually created under `init_empty_weights`.
        checkpoint: A file, an index, or a folder that contains one of them.
        device_map: The device of each module by name, or a strategy for creating a map: "auto", "balanced",
            "balanced_low_0" or "sequential". If None, the model is only loaded.
        max_memory: The limit of each device, in bytes or as a string such as "10GB". A given map is checked against the
            limits.
        no_split_module_classes: The names of classes that are not split across devices.
        offload_folder: The folder for the weights of modules on "disk".
        offload_buffers: Whether to offload buffers, too.
        dtype: The dtype that floating-point weights are converted to.
        offload_state_dict: See `load_checkpoint_in_model`.
        skip_keys: The keyword arguments that are not moved.
        preload_module_classes: The classes whose weights are loaded together with their submodules' weights.
        force_hooks: Whether to attach hooks even if the model is on one device.
        strict: Whether to raise if names are missing or unexpected.
        full_state_dict: See `load_checkpoint_in_model`.
        broadcast_from_rank0: Whether only rank 0 reads the files; every rank must call this.

    Returns:
        The loaded model.

    Raises:
        ValueError: The map is not valid, or needs more than a device's free memory or limit.
        CheckpointError: See `load_checkpoint_in_model`.
    """
    if isinstance(device_map, str):
        device_map = make_device_map(
            model, device_map, max_memory, offload_buffers, no_split_module_classes=no_split_module_classes, dtype=dtype
        )
    elif device_map is not None and max_memory is not None:
        _check_device_map_limits(model, device_map, max_memory, dtype)
    load_checkpoint_in_model(
        model, checkpoint, device_map, offload_folder, dtype, bool(offload_state_dict), offload_buffers, strict=strict,
        full_state_dict=full_state_dict, broadcast_from_rank0=broadcast_from_rank0,
    )  # fmt: skip
    if device_map is None:
        return model
    return dispatch_model(
        model, device_map, offload_dir=offload_folder, offload_buffers=offload_buffers, skip_keys=skip_keys,
        preload_module_classes=preload_module_classes, force_hooks=force_hooks,
    )  # fmt: skip


def _check_device_map_limits(
    model: torch.nn.Module, device_map: Mapping[str, Any], max_memory: Any, dtype: Any
) -> None:
    sizes: dict[str, Any] = {}
    measured = compute_module_sizes(model, dtype)
    for name, device in device_map.items():
        sizes[str(device)] = sizes.get(str(device), 0) + measured[name]
    check_limits(sizes, get_max_memory(max_memory))


# ---- loading on several ranks. One rank reads and broadcasts the tensors, or each rank reads its shards.


def load_on_ranks(
    model: torch.nn.Module,
    checkpoint: Any,
    check: Callable[[dict[str, TensorSource]], None],
    check_names: Callable[[Iterable[str]], None],
    full_state_dict: bool,
    broadcast_from_rank0: bool,
) -> list[str]:
    """Load a checkpoint, one file after another; every rank must call this.

    Args:
        model: The model to load, replicated or with distributed tensors. It may be on the meta device.
        checkpoint: A file, an index, or a folder. Only the ranks that read it need to have it.
        check: A function that raises if the tensors of a file do not fit the model.
        check_names: A function that raises if the names in all files do not fit the model. It is called before the
            first file is loaded.
        full_state_dict: Whether the files contain full tensors. If False, each rank has files with distributed tensors.
        broadcast_from_rank0: Whether only rank 0 reads the files, and broadcasts the tensors.

    Returns:
        The names of all tensors in the files.

    Raises:
        CheckpointError: The files are corrupt, or belong to another model. Every rank raises this.
        ValueError: The checkpoint contains no weights. Every rank raises this.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    alone = not torch.distributed.is_initialized()
    reads = alone or not broadcast_from_rank0 or torch.distributed.get_rank() == 0
    broadcasts = broadcast_from_rank0 and not alone
    shards: list[Shard] = []

    def find() -> int:
        shards.extend(find_shards(checkpoint, model.state_dict()))
        check_names(tensor_names(shards))
        return len(shards)

    names: list[str] = []
    for index in range(_on_all_ranks(find, reads, broadcasts)):
        part: dict[str, Any] = {}

        def read(index: int = index, part: dict[str, Any] = part) -> list[str]:
            sources = shards[index].sources()
            check(sources)
            loaded = {name: source.load(torch.device("cpu")) for name, source in sources.items()}
            if not full_state_dict:
                _check_divided(model, loaded)
            # torch expects names without the prefixes that `torch.compile` adds.
            part.update((uncompiled_name(name), tensor) for name, tensor in loaded.items())
            return list(sources)

        names += _on_all_ranks(read, reads, broadcasts)
        options = StateDictOptions(full_state_dict=full_state_dict, broadcast_from_rank0=broadcasts, strict=False)
        set_model_state_dict(model, part, options=options)
    return names


def _check_divided(model: torch.nn.Module, part: dict[str, Any]) -> None:
    """Check that the files contain distributed tensors wherever the model has them."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in part and hasattr(parameter, "device_mesh") and not hasattr(part[name], "device_mesh"):
            raise ValueError(
                f"full_state_dict=False needs files with distributed tensors, but {name} is a full tensor; pass "
                "full_state_dict=True, so that each rank loads its shard of it"
            )


def _on_all_ranks(action: Callable[[], Any], reads: bool, broadcasts: bool) -> Any:
    """Run an action, and return its result or raise its exception. With ``broadcasts``, rank 0's outcome is used."""
    value, failure = None, None
    if reads:
        try:
            value = action()
        except (CheckpointError, ValueError, OSError) as error:
            failure = error
    if broadcasts:
        value, failure = broadcast_object_list([value, failure], from_process=0)
    if failure is not None:
        raise failure
    return value
