"""`dispatch_model`, `cpu_offload` and `disk_offload`, which spread models across devices, CPU memory and the disk."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.big_modeling.align_hook import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
)
from notebook_accelerate.big_modeling.device_map import bytes_to_move, check_device_map, check_free_memory
from notebook_accelerate.big_modeling.module_hooks import add_hook_to_module, align_hooks
from notebook_accelerate.big_modeling.module_tensors import (
    TiedParams,
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from notebook_accelerate.big_modeling.module_tree import named_module_tensors
from notebook_accelerate.big_modeling.offload_folder import (
    INDEX_NAME,
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    offload_state_dict,
)
from notebook_accelerate.hardware import nvml

_LOG = accelerate_logger("big_modeling")
_accelerate_added_attributes = ["to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa"]
"""The methods that `dispatch_model` replaces on a model. Libraries read this list by Accelerate's name."""


def cpu_offload(
    model: torch.nn.Module,
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    state_dict: dict[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
) -> torch.nn.Module:
    """Keep a model's weights on the CPU, and move each module's weights to the device only while the module computes.

    Weights are copied to an accelerator ahead of the computation (see `Prefetcher`), unless gradients are recorded. In
    that case, autograd keeps the weights that each module has computed with.

    Args:
        model: The model to offload.
        execution_device: The device that the model computes on. If None, the device of its first parameter is used.
        offload_buffers: Whether to offload buffers, too.
        state_dict: The weights on the CPU. If None, the model's own weights are used.
        preload_module_classes: The classes whose weights are loaded together with their submodules' weights.

    Returns:
        The same model, whose weights are now offloaded.
    """
    if state_dict is None:
        state_dict = {name: tensor.to("cpu") for name, tensor in model.state_dict().items()}
    weights = OffloadedWeightsLoader(state_dict=state_dict)
    return _offload_all(model, execution_device, weights, offload_buffers, preload_module_classes)


def disk_offload(
    model: torch.nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: int | str | torch.device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
) -> torch.nn.Module:
    """Keep a model's weights on disk, and read each module's weights while the previous module computes.

    Args:
        model: The model to offload.
        offload_dir: The folder for the weights. If it already contains an offloaded model, those weights are used.
        execution_device: The device that the model computes on. If None, the device of its first parameter is used.
        offload_buffers: Whether to offload buffers, too.
        preload_module_classes: The classes whose weights are loaded together with their submodules' weights.

    Returns:
        The same model, whose weights are now offloaded.

    Raises:
        CheckpointError: The disk is full, or the folder's files are corrupt.
        ValueError: The folder contains the weights of another model.
    """
    _write_offloaded(model, [""], offload_dir)
    weights = OffloadedWeightsLoader(save_folder=offload_dir)
    return _offload_all(model, execution_device, weights, offload_buffers, preload_module_classes)


def _write_offloaded(model: torch.nn.Module, names: list[str], folder: str | os.PathLike[str]) -> None:
    """Write the weights of some modules, unless the folder already contains an offloaded model."""
    if not (Path(folder) / INDEX_NAME).is_file():
        offload_state_dict(folder, extract_submodules_state_dict(model.state_dict(), names))


def _offload_all(
    model: torch.nn.Module, device: Any, weights: OffloadedWeightsLoader, buffers: bool, preload: Any
) -> torch.nn.Module:
    """Attach hooks to a model whose weights are all offloaded."""
    if device is None:
        device = next(iter(model.parameters())).device
    _check_weights(model, [""], weights, buffers)
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True), append=True)
    attach_align_device_hook(
        model, device, offload=True, weights_map=weights, offload_buffers=buffers, preload_module_classes=preload
    )
    _mark_passes(model, weights)
    return model


def _check_weights(model: torch.nn.Module, names: list[str], weights: OffloadedWeightsLoader, buffers: bool) -> None:
    """Check the offloaded weights of some modules before hooks replace the model's own weights."""
    tensors = dict(named_module_tensors(model, include_buffers=buffers, recurse=True, remove_non_persistent=True))
    wanted = extract_submodules_state_dict(tensors, names)
    missing = [name for name in wanted if name not in weights]
    if missing:
        raise ValueError(
            f"The offloaded weights lack {', '.join(missing[:5])}{' and more' * (len(missing) > 5)}: they belong to "
            "another model. Pass an empty folder: offload_dir='another_folder'."
        )
    for name, tensor in wanted.items():
        shape = weights.index.get(name, {}).get("shape", tensor.shape)
        if tuple(shape) != tuple(tensor.shape):
            raise ValueError(
                f"The offloaded {name} has shape {tuple(shape)}, but the model's has {tuple(tensor.shape)}: it belongs "
                "to another model. Pass an empty folder: offload_dir='another_folder'."
            )


def _mark_passes(model: torch.nn.Module, weights: OffloadedWeightsLoader) -> None:
    """Make the hook of the whole model mark the start of each pass."""
    for hook in align_hooks(model):
        if hook.io_same_device:
            hook.pass_prefetchers = tuple(weights.prefetchers.values())


def dispatch_model(
    model: torch.nn.Module,
    device_map: Mapping[str, int | str | torch.device],
    main_device: int | str | torch.device | None = None,
    state_dict: dict[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
) -> torch.nn.Module:
    """Move modules to the devices of a device map, and attach hooks that move inputs and load offloaded weights.

    Args:
        model: The model to dispatch.
        device_map: The device of each module by name: a number, a name, "cpu" or "disk".
        main_device: The device that offloaded modules compute on. If None, they compute on the first accelerator in the
            map, or on the CPU if the map has no accelerator.
        state_dict: The weights of the modules on the CPU. If None, the model's own weights are used.
        offload_dir: The folder for modules on disk. Weights are written to it unless it already contains an offloaded
            model.
        offload_index: For each weight on disk, its dtype and shape, or the file that contains it. If None, the folder's
            index is used.
        offload_buffers: Whether to offload buffers, too.
        skip_keys: The keyword arguments that are not moved.
        preload_module_classes: The classes whose weights are loaded together with their submodules' weights.
        force_hooks: Whether to attach hooks even if the model is on one device.

    Returns:
        The model, whose attribute `hf_device_map` is set.

    Raises:
        ValueError: The map lacks weights, needs more than the free memory of an accelerator, or puts modules on disk
            without an `offload_dir`.
        CheckpointError: The disk is full, or the folder's files are corrupt.
    """
    check_device_map(model, device_map)
    devices = set(device_map.values())
    _warn_about_peer_to_peer(devices)
    check_free_memory(bytes_to_move(model, device_map))
    if len(devices) > 1 or devices == {"disk"} or force_hooks:
        placement = _Placement(model, device_map, main_device, state_dict, offload_dir, offload_index)
        placement.attach(offload_buffers, skip_keys, preload_module_classes)
        _guard_moves(model, bool(placement.offloaded))
    else:
        model.to(next(iter(devices)))
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def _warn_about_peer_to_peer(devices: Collection[Any]) -> None:
    """Warn if activations will be copied between GPUs whose driver wrongly reports peer-to-peer access."""
    accelerators = [device for device in devices if str(device) not in ("cpu", "disk")]
    if len(accelerators) > 1 and not nvml.check_cuda_p2p_ib_support():
        _LOG.warning(
            "The driver %s of these GPUs has defects in peer-to-peer access, which affect models on several GPUs. "
            "Install version 550.40.07 or newer.",
            nvml.driver_version(),
        )


class _Placement:
    """The devices that the modules of a model compute on, and the location of the offloaded weights."""

    def __init__(
        self,
        model: torch.nn.Module,
        device_map: Mapping[str, Any],
        main_device: Any,
        state_dict: dict[str, torch.Tensor] | None,
        offload_dir: str | os.PathLike[str] | None,
        offload_index: Mapping[str, Any] | None,
    ) -> None:
        self.model, self.device_map = model, device_map
        accelerators = [device for device in device_map.values() if str(device) not in ("cpu", "disk")]
        self.main = main_device if main_device is not None else next(iter(accelerators), "cpu")
        on_cpu = [name for name, device in device_map.items() if str(device) == "cpu"]
        self.on_disk = [name for name, device in device_map.items() if str(device) == "disk"]
        in_memory = on_cpu if str(self.main) not in ("cpu", "mps") else []
        self.offloaded = [*in_memory, *self.on_disk]
        if in_memory and state_dict is None:
            state_dict = extract_submodules_state_dict(model.state_dict(), in_memory)
        if self.on_disk and offload_dir is None and offload_index is None:
            raise ValueError(
                "We need an `offload_dir` to dispatch this model according to this `device_map`, the following "
                f"submodules need to be offloaded: {', '.join(self.on_disk)}."
            )
        if self.on_disk and offload_index is None and offload_dir is not None:
            _write_offloaded(model, self.on_disk, offload_dir)
        self.weights: OffloadedWeightsLoader | None = None
        if self.offloaded:
            folder = offload_dir if self.on_disk else None
            self.weights = OffloadedWeightsLoader(state_dict, folder, offload_index)

    def attach(self, offload_buffers: bool, skip_keys: Any, preload: Any) -> None:
        """Attach the hooks, and then tie the parameters again, because the hooks untie them."""
        offloaded = set(self.offloaded)
        execution = {name: self.main if name in offloaded or str(device) == "cpu" else device
                     for name, device in self.device_map.items()}  # fmt: skip
        execution.setdefault("", self.main)
        offload = {name: name in offloaded for name in self.device_map}
        if self.weights is not None:
            _check_weights(self.model, self.offloaded, self.weights, offload_buffers)
        tied = find_tied_parameters(self.model)
        check_tied_parameters_on_same_device(tied, self.device_map)
        attach_align_device_hook_on_blocks(
            self.model,
            execution_device=execution,
            offload=offload,
            weights_map=self.weights,
            offload_buffers=offload_buffers,
            skip_keys=skip_keys,
            preload_module_classes=preload,
            tied_params_map=_tied_params_map(self.model, tied),
        )
        if self.weights is not None:
            where = sorted({str(self.device_map[name]) for name in self.offloaded})
            _LOG.warning("Some parameters are on the meta device because they were offloaded to the %s.",
                         " and ".join(where))  # fmt: skip
            _mark_passes(self.model, self.weights)
        retie_parameters(self.model, tied)


def _tied_params_map(model: torch.nn.Module, tied: list[list[str]]) -> TiedParams:
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first = [parameters[group[0]] for group in tied]
    return {tensor.data_ptr(): {} for tensor in first if tensor.device.type != "meta"}


def _guard_moves(model: Any, offloads: bool) -> None:
    """Warn about moves that the hooks would undo, and reject moves that would lose offloaded weights."""
    for name in _accelerate_added_attributes:
        if hasattr(model, name):
            setattr(model, name, _guarded(model, getattr(model, name), offloads))


def _guarded(model: torch.nn.Module, move: Any, offloads: bool) -> Any:
    @functools.wraps(move)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _LOG.warning("You shouldn't move a model that is dispatched using accelerate hooks.")
        if offloads and any(parameter.device.type == "meta" for parameter in model.parameters()):
            raise RuntimeError(
                "You can't move a model that has some modules offloaded to cpu or disk. Dispatch it to other devices: "
                "dispatch_model(model, device_map), after remove_hook_from_submodules(model)."
            )
        return move(*args, **kwargs)

    guarded._of_dispatch = True  # type: ignore[attr-defined]
    return guarded
