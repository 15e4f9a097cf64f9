"""Weights from files into models, one tensor at a time, straight to where they belong."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate.big_modeling.checkpoint_shards import Shard, names_of, shards_of, tensors_of
from notebook_accelerate.big_modeling.device_capacity import check_limits, check_room
from notebook_accelerate.big_modeling.device_map import check_device_map, infer_auto_device_map
from notebook_accelerate.big_modeling.device_memory import get_balanced_memory, get_max_memory
from notebook_accelerate.big_modeling.dispatching import dispatch_model
from notebook_accelerate.big_modeling.module_sizes import compute_module_sizes, dtype_of
from notebook_accelerate.big_modeling.module_tensors import name_of_scales, set_module_tensor_to_device
from notebook_accelerate.big_modeling.module_walk import submodule
from notebook_accelerate.big_modeling.multi_rank_loading import load_on_ranks
from notebook_accelerate.big_modeling.offload_folder import OffloadedWeightsLoader, offload_weight, save_offload_index
from notebook_accelerate.big_modeling.quantization import (
    is_offloadable,
    keep_8bit,
    make_offloadable_below,
    offloaded_modules,
)
from notebook_accelerate.big_modeling.remote_files import weights_on_disk
from notebook_accelerate.big_modeling.remote_paths import path_of
from notebook_accelerate.big_modeling.tensor_sources import FileSource, Source
from notebook_accelerate.big_modeling.tied_parameters import device_of, find_tied_parameters, retie_parameters
from notebook_accelerate.errors import CheckpointError, CheckpointMismatchError

_LOG = logging.getLogger(__name__)
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read one file of weights.

    Args:
        checkpoint_file: safetensors, or torch's format (read with `weights_only=True`); a path or URL.
        device_map: Device by module name, each tensor goes there; what is on "disk" there, and all without a map, goes
            to the CPU.

    Returns:
        The named tensors.

    Raises:
        CheckpointError: The file is broken, or holds more than data.
    """
    sources = Shard(weights_on_disk(path_of(checkpoint_file))).sources()

    def device_for(name: str) -> Any:
        device = device_of(name, device_map) if device_map is not None else None
        return "cpu" if device is None or str(device) == "disk" else device

    return dict(tensors_of(sources, device_for))


def load_offloaded_weights(model: torch.nn.Module, index: Mapping[str, Any], offload_folder: Any) -> None:
    """Load the weights of an offload folder into a model on the CPU.

    Args:
        model: The model.
        index: Dtype and shape, or file, by name; an empty one loads nothing.
        offload_folder: The folder.
    """
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    for name in index:
        set_module_tensor_to_device(model, name, "cpu", value=weights[name].clone())


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: Any = None,
    offload_state_dict: bool = False,  # noqa: ARG001
    offload_buffers: bool = False,
    keep_in_fp32_modules: list[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, each tensor straight to its device; one tensor is in flight at a time.

    On the CPU, empty weights become maps of a safetensors file, which must stay as it is while the model is used.

    All names and shapes are checked before anything is loaded (shapes of a pickled shard when its turn comes). What
    goes to disk stays in the checkpoint's safetensors files, which the offload folder's index then names; other files'
    tensors are written to the folder.

    Args:
        model: The model, on any device; the meta device too.
        checkpoint: A file, an index, or a folder that holds one of either; what is behind a URL (s3://, gs://, ...) is
            downloaded first, once per machine, and kept in ``$HF_HOME/accelerate/remote``.
        device_map: Device by module name; None: where the model is, the CPU for what is on the meta device.
        offload_folder: Folder for what the map puts on "disk".
        dtype: What floating weights are converted to; None: what the model has.
        offload_state_dict: Taken for compatibility: weights for the CPU are never in memory twice.
        offload_buffers: Buffers of modules on disk go there too.
        keep_in_fp32_modules: Parts of names of modules that stay in float32.
        offload_8bit_bnb: Quantize the weights of bitsandbytes' 8-bit layers that the map keeps away from where they
            compute, and keep them in 8 bits with their scales.
        strict: Raise where names are missing or unexpected, before anything is loaded, rather than warn.
        full_state_dict: The checkpoint has whole tensors, whatever the model has; False: distributed tensors, as
            `torch.save` writes them, for a model of such.
        broadcast_from_rank0: Rank 0 alone reads the files; every rank must call this.

    Raises:
        ValueError: There are no weights, the map misses some or puts more on a device than is free, or no folder is
            named.
        CheckpointMismatchError: Shapes differ; with `strict`, names too.
        CheckpointError: A file is broken, holds more than data, or is outside its folder.
    """
    if device_map is not None:
        check_device_map(model, device_map)
        if offload_folder is None and "disk" in [str(device) for device in device_map.values()]:
            raise ValueError(
                "At least one of the model submodule will be offloaded to disk, please pass along an `offload_folder`."
            )
    if offload_8bit_bnb and device_map is not None:
        make_offloadable_below(model, offloaded_modules(device_map))
    tied = find_tied_parameters(model)
    kept = tuple(keep_in_fp32_modules or ())
    loading = _Loading(model, device_map, offload_folder, dtype, offload_buffers, kept)
    if broadcast_from_rank0 or _distributed_tensors(model):

        def check_names(names: Iterable[str]) -> None:
            loading.check_names(names, checkpoint, tied, strict)

        loading.load_on_ranks(checkpoint, check_names, full_state_dict, broadcast_from_rank0)
        loading.finish(checkpoint, tied)
        return
    shards = shards_of(checkpoint)
    parts = [shard.sources() for shard in shards if shard.path.suffix == ".safetensors"]
    loading.check(parts)
    loading.check_names(names_of(shards), checkpoint, tied, strict)
    check_room(loading.bytes_to_allocate(parts))
    loading.load_all(shards)
    loading.finish(checkpoint, tied)


class _Loading:
    """One checkpoint on its way into one model."""

    def __init__(
        self, model: torch.nn.Module, device_map: Mapping[str, Any] | None, folder: Any, dtype: Any, buffers: bool,
        kept: tuple[str, ...],
    ) -> None:  # fmt: skip
        self._model, self._map, self._folder = model, device_map, folder
        self._dtype = None if dtype is None else dtype_of(dtype)
        self._kept, self._offload_buffers = kept, buffers
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._wanted = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self._state = set(model.state_dict())
        self._loaded: set[str] = set()
        self._mismatch = ""
        self._index: dict[str, Any] = {}
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)

    def check(self, parts: list[dict[str, Source]]) -> None:
        """Compare shapes, of all tensors at once."""
        wrong = [
            f"{name}: {tuple(source.shape)} in the checkpoint, {tuple(self._wanted[name].shape)} in the model"
            for sources in parts
            for name, source in sources.items()
            if name in self._wanted and tuple(source.shape) != tuple(self._wanted[name].shape)
        ]
        if wrong:
            lines = "\n  ".join(wrong[:10])
            raise CheckpointMismatchError(
                f"size mismatch for {len(wrong)} tensor{'s' * (len(wrong) > 1)}; nothing of their file was loaded:\n"
                f"  {lines}\nThis checkpoint is of another model."
            )

    def bytes_to_allocate(self, parts: list[dict[str, Source]]) -> dict[torch.device, int]:
        """Add up what loading takes of each device; what is mapped, read into place or left on disk takes nothing."""
        found: dict[torch.device, int] = {}
        for name, source in (pair for part in parts for pair in part.items()):
            target = device_of(name, self._map) if self._map is not None else None
            old = self._wanted.get(name)
            if target is None or old is None or str(target) == "disk":
                continue
            device, dtype = torch.device(target), self._dtype_of(name, source) or source.dtype
            if (device.type == "cpu" and dtype == source.dtype) or device == old.device:
                continue
            found[device] = found.get(device, 0) + dtype.itemsize * source.nbytes // source.dtype.itemsize
        return found

    def load_all(self, shards: list[Shard]) -> None:
        """Load the files, one after the other; say how far that came where one is broken."""
        for count, shard in enumerate(shards):
            try:
                self.load(shard)
            except CheckpointError as error:
                if not self._loaded:
                    raise
                raise type(error)(
                    f"{error} The model is loaded in part: {count} of {len(shards)} files, and {len(self._loaded)} of "
                    f"{len(self._state)} tensors. Do not use it as it is."
                ) from error

    def load(self, shard: Shard) -> None:
        """Load one file."""
        sources = shard.sources()
        self.check([sources])
        for name, source in sources.items():
            if name not in self._state:
                continue
            if source.dtype.is_floating_point and is_offloadable(self._model, name):
                self._keep_8bit(name, source)
                continue
            self._place(name, source)
            self._loaded.add(name)

    def _keep_8bit(self, name: str, source: Source) -> None:
        to_disk = str(device_of(name, self._map or {})) == "disk"
        keep_8bit(self._model, name, source.load(torch.device("cpu")), self._folder if to_disk else None, self._index)
        self._loaded |= {name, name_of_scales(name)}

    def load_on_ranks(
        self,
        checkpoint: Any,
        check_names: Callable[[Iterable[str]], None],
        full_state_dict: bool,
        broadcast_from_rank0: bool,
    ) -> None:
        """Load all files; see `ranks.load_on_ranks`."""
        devices = {str(device) for device in (self._map or {}).values()}
        if len(devices) > 1 or "disk" in devices:
            raise ValueError(
                f"The device map names {', '.join(sorted(devices))}; a model that several ranks load together is on "
                'one device of each rank: pass device_map=None, or {"": device}.'
            )
        found = load_on_ranks(
            self._model,
            checkpoint,
            lambda sources: self.check([sources]),
            check_names,
            full_state_dict,
            broadcast_from_rank0,
        )
        check_names(found)
        self._loaded = {name for name in found if name in self._state}
        if devices or self._dtype is not None:
            self._model.to(device=next(iter((self._map or {}).values()), None), dtype=self._dtype)

    def _place(self, name: str, source: Source) -> None:
        device = device_of(name, self._map) if self._map is not None else None
        dtype = self._dtype_of(name, source)
        if str(device) == "disk":
            if name in self._parameters or self._offload_buffers:
                self._leave_on_disk(name, source, dtype)
                return
            device = "cpu"
        old = self._wanted[name]
        if device is None:
            device = "cpu" if old.device.type == "meta" else old.device
        if self._fits(old, source, torch.device(device), dtype):
            source.read_into(old.detach())
        else:
            # Mapped where it stays on the CPU: nothing is read before it is used, and memory is the page cache's.
            maps = isinstance(source, FileSource) and torch.device(device).type == "cpu"
            value = source.map_lazily() if maps else source.load(torch.device(device))  # type: ignore[attr-defined]
            set_module_tensor_to_device(self._model, name, device, value=value, dtype=dtype)

    def _dtype_of(self, name: str, source: Source) -> torch.dtype | None:
        if not source.dtype.is_floating_point or name.endswith(".SCB"):
            return None  # scales of weights in 8 bits: bitsandbytes has them in float32
        if self._dtype is not None and any(part in name.split(".") for part in self._kept):
            return torch.float32
        return self._dtype

    @staticmethod
    def _fits(old: torch.Tensor, source: Source, device: torch.device, dtype: torch.dtype | None) -> bool:
        """Tell whether a tensor can be read straight into the model's memory."""
        same = old.device == device and old.device.type == "cpu" and old.dtype == source.dtype
        return same and old.is_contiguous() and dtype in (None, old.dtype)

    def _leave_on_disk(self, name: str, source: Source, dtype: torch.dtype | None) -> None:
        dtype = dtype or (self._wanted[name].dtype if source.dtype.is_floating_point else source.dtype)
        if isinstance(source, FileSource) and source.dtype == dtype:
            short = str(source.dtype).removeprefix("torch.")
            self._index[name] = {
                "safetensors_file": str(source.path.absolute()), "weight_name": name, "dtype": short,
                "shape": list(source.shape),
            }  # fmt: skip
        else:
            value = source.load(torch.device("cpu")).to(dtype)
            self._index = offload_weight(value, name, self._folder, index=self._index)
        owner, key = submodule(self._model, name)
        absent = torch.empty(source.shape, dtype=dtype, device="meta")
        set_module_tensor_to_device(owner, key, "meta", value=absent, dtype=dtype)

    def check_names(self, names: Iterable[str], checkpoint: Any, tied: list[list[str]], strict: bool) -> None:
        """Compare names, of all files at once, before anything is loaded."""
        given = set(names)
        scales = {name_of_scales(name) for name in given if is_offloadable(self._model, name)}
        covered = given | scales | {name for group in tied if given & set(group) for name in group}
        missing, unexpected = sorted(self._state - covered), sorted(given - self._state)
        lines = [f"{what} key(s): {', '.join(names[:10])}{' and more' * (len(names) > 10)}"
                 for what, names in (("Missing", missing), ("Unexpected", unexpected)) if names]  # fmt: skip
        self._mismatch = "; ".join(lines)
        if strict and lines:
            kind = type(self._model).__name__
            raise CheckpointMismatchError(
                f"Error(s) in loading {checkpoint} into {kind}: {self._mismatch}. Nothing was loaded."
            )

    def finish(self, checkpoint: Any, tied: list[list[str]]) -> None:
        """Tie again, write the index, and say what did not match."""
        for group in tied:
            if self._loaded & set(group):
                first = next(name for name in group if name in self._loaded)
                retie_parameters(self._model, [[first, *(name for name in group if name != first)]])
                self._index.update({name: self._index[first] for name in group if first in self._index})
        save_offload_index(self._index, self._folder) if self._index else None
        if self._mismatch:
            _LOG.warning(
                "%s and %s do not match: %s. The rest was loaded; pass strict=True to make this an error.",
                checkpoint, type(self._model).__name__, self._mismatch,
            )  # fmt: skip


def _distributed_tensors(model: torch.nn.Module) -> bool:
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Any = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: Any = None,
    offload_state_dict: bool | None = None,
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> torch.nn.Module:
    """Load a checkpoint into a model and put its modules on their devices.

    Args:
        model: The model, mostly from `init_empty_weights`.
        checkpoint: A file, an index, or a folder that holds one of either.
        device_map: Device by module name; "auto", "balanced", "balanced_low_0" or "sequential" make one; None loads
            only.
        max_memory: Bytes or "10GB" by device: what made maps keep to, and what a given one is checked against.
        no_split_module_classes: Names of classes that are not divided among devices.
        offload_folder: Folder for what the map puts on "disk".
        offload_buffers: Keep buffers away too.
        dtype: What floating weights are converted to.
        offload_state_dict: See `load_checkpoint_in_model`.
        skip_keys: Keyword arguments that are not moved.
        preload_module_classes: Classes whose weights come all at once, those of their submodules too.
        force_hooks: Attach hooks even where the whole model is on one device.
        strict: Raise where names are missing or unexpected.
        full_state_dict: See `load_checkpoint_in_model`.
        broadcast_from_rank0: Rank 0 alone reads the files; every rank must call this.

    Returns:
        The model.

    Raises:
        ValueError: The map is none, or puts more on a device than it has free or than `max_memory` allows.
        CheckpointError: See `load_checkpoint_in_model`.
    """
    if isinstance(device_map, str):
        device_map = _made_map(model, device_map, max_memory, no_split_module_classes, dtype, offload_buffers)
    elif device_map is not None and max_memory is not None:
        _check_own_map(model, device_map, max_memory, dtype)
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


def _check_own_map(model: torch.nn.Module, device_map: Mapping[str, Any], max_memory: Any, dtype: Any) -> None:
    sizes: dict[str, Any] = {}
    measured = compute_module_sizes(model, dtype)
    for name, device in device_map.items():
        sizes[str(device)] = sizes.get(str(device), 0) + measured[name]
    check_limits(sizes, get_max_memory(max_memory))


def _made_map(
    model: torch.nn.Module, kind: str, max_memory: Any, classes: Any, dtype: Any, buffers: bool
) -> dict[str, Any]:
    if kind not in _STRATEGIES:
        raise ValueError(
            f"device_map={kind!r}: If passing a string for `device_map`, please choose 'auto', 'balanced', "
            "'balanced_low_0' or 'sequential'."
        )
    if kind != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split_module_classes=classes, dtype=dtype, low_zero=kind == "balanced_low_0"
        )
    return infer_auto_device_map(
        model, max_memory, no_split_module_classes=classes, dtype=dtype, offload_buffers=buffers
    )
