"""`AlignDevicesHook`, which moves inputs and weights to a module's device, and the functions that attach the hook."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from notebook_accelerate.big_modeling.empty_init import like
from notebook_accelerate.big_modeling.module_hooks import GradientSink, ModelHook, add_hook_to_module
from notebook_accelerate.big_modeling.module_tensors import TiedParams, set_module_tensor_to_device
from notebook_accelerate.big_modeling.module_tree import as_names, full_name, named_module_tensors, submodule
from notebook_accelerate.big_modeling.offload_folder import OffloadedWeightsLoader, PrefixedDataset, unprefixed
from notebook_accelerate.big_modeling.prefetch import Prefetcher, Slot, Unit, can_prefetch
from notebook_accelerate.collectives import find_device, send_to_device
from notebook_accelerate.files.tensor_sources import FileSource
from notebook_accelerate.torch_internals import disable_dynamo

_BLOCK = re.compile(r"^.*?\.?\d+(?=\.|$)")


class AlignDevicesHook(ModelHook):
    """Moves a module's inputs, and its weights if they are offloaded, to the device that the module computes on.

    Args:
        execution_device: The device that the module computes on. If None, nothing is moved.
        offload: Whether to offload the weights between forward passes. A `Prefetcher` reads them ahead.
        io_same_device: Whether to move the output to the device of the input.
        weights_map: The offloaded weights by name. If None, copies of the weights are kept on the CPU.
        offload_buffers: Whether to offload buffers, too.
        place_submodules: Whether to handle the tensors of all submodules, instead of only the module's own.
        skip_keys: The names of the keyword arguments that are not moved.
        tied_params_map: The copies of tied parameters that hooks share, by address and device.
    """

    def __init__(
        self,
        execution_device: Any = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, Any] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: Any = None,
        tied_params_map: TiedParams | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.input_device: Any = None
        self.original_devices: dict[str, torch.device] = {}
        self.block = ""
        """The name of the module, which identifies its block. Weights are read ahead block by block."""
        self.gradients = GradientSink()
        """The object that collects the gradients of weights that are released before the backward pass."""
        self._device: torch.device | None = None
        self.pass_prefetchers: tuple[Prefetcher, ...] = ()
        """The prefetchers that start a new pass with each forward pass of the module."""
        self._prefetcher: Prefetcher | None = None
        self._unit: Unit | None = None
        self._planned: tuple[Any, Any] = (None, None)  # The weights and the device that reading ahead is planned for.
        self._slots: list[tuple[dict[str, Any], str, str, Any]] = []
        self._reused: dict[str, tuple[Any, Any]] = {}

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"AlignDevicesHook({values})"

    # ---- attaching and detaching

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the weights to the execution device, or offload them."""
        device = self.execution_device
        if device in ("meta", torch.device("meta")):
            self.tied_params_map = None
        if device is not None and not self.offload:
            for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map)
        elif self.offload:
            self._offload_weights(module)
        return module

    def _offload_weights(self, module: torch.nn.Module) -> None:
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        offloaded = dict(
            named_module_tensors(
                module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
            )
        )
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in offloaded.items()}
        for name, tensor in tensors.items():
            if name in offloaded:
                set_module_tensor_to_device(module, name, "meta")
                owner, key = submodule(module, name)
                own = owner._parameters if key in owner._parameters else owner._buffers
                self._slots.append((own, key, name, own[key]))
            elif self.execution_device is not None and tensor.device.type != "meta":
                set_module_tensor_to_device(module, name, self.execution_device)
        self._plan_ahead()

    def _plan_ahead(self) -> None:
        """Register the weights to be read ahead, if they are in files or need to be copied to an accelerator."""
        # Compare with None, because 0 is a valid device, the first accelerator.
        device = torch.device("cpu" if self.execution_device is None else self.execution_device)
        loader, prefix = unprefixed(self.weights_map)
        if not isinstance(loader, OffloadedWeightsLoader) or not self._slots:
            return
        if device.type == "meta" or not can_prefetch(device):
            return
        slots = [Slot(placeholder, loader.source(prefix + name)) for _, _, name, placeholder in self._slots]
        converted = any(slot.source.dtype != slot.placeholder.dtype for slot in slots)
        if converted or (device.type == "cpu" and not any(isinstance(slot.source, FileSource) for slot in slots)):
            return
        self._prefetcher = loader.prefetchers.setdefault(device, Prefetcher(device))
        self._unit = Unit(slots, block_of(self.block))
        self._planned = self.weights_map, self.execution_device

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the weights back to their original devices."""
        if self.offload:
            self._release_weights()
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    weights = self.weights_map or {}
                    value = weights[name] if any(name == slot[2] for slot in self._slots) else None
                    set_module_tensor_to_device(module, name, device, value=value)
        return module

    # ---- a forward pass

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Load the weights and move the inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
            for prefetcher in self.pass_prefetchers:
                _untraced(prefetcher.begin_pass)
        if self.offload:
            _untraced(self._load_weights)
        device = self.execution_device
        if device is None:
            return args, kwargs
        if self._device is None:
            self._device = torch.device(device)
        if _all_on(args, self._device) and (not kwargs or _all_on(kwargs.values(), self._device)):
            return args, kwargs
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _load_weights(self) -> None:
        if self._prefetcher is not None and self._unit is not None and self._is_planned():
            tensors = self._prefetcher.fetch(self._unit)
            trains = torch.is_grad_enabled()
            for (own, key, name, _), tensor in zip(self._slots, tensors, strict=True):
                own[key] = self.gradients.watch(name, tensor) if trains else tensor
            return
        assert self.weights_map is not None
        for own, key, name, placeholder in self._slots:
            value = self.weights_map[name]
            reused = self._reused.get(name)
            if reused is not None and reused[0] is value:
                own[key] = reused[1]
            else:
                own[key] = self._load_weight(name, placeholder, value)

    def _is_planned(self) -> bool:
        """Return whether the plan is still valid. For example, peft invalidates it by assigning to `weights_map`."""
        weights, device = self._planned
        return weights is self.weights_map and device is self.execution_device

    def _load_weight(self, name: str, placeholder: Any, value: torch.Tensor) -> Any:
        """Return a weight in the form that its module expects.

        Keep it for the next pass if it shares the value's memory.
        """
        device = self.execution_device if self.execution_device is not None else value.device
        moved = value.detach().to(device=device, dtype=placeholder.dtype if value.is_floating_point() else None)
        is_parameter = isinstance(placeholder, torch.nn.Parameter)
        loaded = self.gradients.watch(name, like(placeholder, moved)) if is_parameter else moved
        if moved.data_ptr() == value.data_ptr() and self._is_in_memory(name):
            self._reused[name] = (value, loaded)
        return loaded

    def _is_in_memory(self, name: str) -> bool:
        """Return whether a weight is in memory. Otherwise, it is mapped from its file again on each access."""
        weights, prefix = unprefixed(self.weights_map)
        if isinstance(weights, OffloadedWeightsLoader):
            return prefix + name in weights.state_dict
        return isinstance(weights, dict)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Release the weights and move the output."""
        if self.offload:
            _untraced(self._release_weights)
        if self.io_same_device and self.input_device is not None:
            if not (isinstance(output, torch.Tensor) and output.device == self.input_device):
                output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
            self.input_device = None
        return output

    def _release_weights(self) -> None:
        held = [own[key] for own, key, _, _ in self._slots if key in own]  # Forward may have deleted some weights.
        for own, key, _, placeholder in self._slots:
            own[key] = placeholder
        if self._prefetcher is not None and self._unit is not None:
            self._prefetcher.release(self._unit, held)

    @contextmanager
    def loading_for(self, device: torch.device | None) -> Iterator[None]:
        """Load the weights for something other than a forward pass, without disturbing the plan for reading ahead.

        Args:
            device: The device to load the weights to. If None, they are loaded to the device that the module computes
                on.
        """
        usual = self.execution_device, self._planned
        self.execution_device, self._planned = usual[0] if device is None else device, (None, None)
        try:
            yield
        finally:
            self.execution_device, self._planned = usual


@disable_dynamo
def _break_graph(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def _untraced(function: Any, *arguments: Any) -> Any:
    """Call a function that torch.compile must not trace. torch._dynamo is only imported if a model is compiled."""
    return _break_graph(function, *arguments) if torch.compiler.is_compiling() else function(*arguments)


def _all_on(values: Any, device: torch.device) -> bool:
    """Return whether all tensors are on a device, in which case the module receives the caller's own objects."""
    for value in values:
        if value is None or type(value) in (int, float, bool, str):
            continue
        if isinstance(value, torch.Tensor):
            if value.device != device:
                return False
        elif hasattr(value, "to"):
            return False
        elif isinstance(value, (list, tuple)):
            if not _all_on(value, device):
                return False
        elif isinstance(value, Mapping) and not _all_on(value.values(), device):
            return False
    return True


def block_of(name: str) -> str:
    """Return the name of the repeated block that contains a module, such as ``h.3`` for ``h.3.mlp.fc``."""
    match = _BLOCK.match(name)
    return match.group() if match else name


# ---- attaching to the modules of a model


def attach_execution_device_hook(
    module: torch.nn.Module,
    execution_device: Any,
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach hooks that move the inputs of a module, and of all modules inside it, to one device.

    Args:
        module: The module to attach hooks to.
        execution_device: The device that all of these modules compute on.
        skip_keys: The names of the keyword arguments that are not moved.
        preload_module_classes: The classes whose submodules need no hook.
        tied_params_map: See `AlignDevicesHook`.
    """
    if not hasattr(module, "_hf_hook") and any(True for _ in named_module_tensors(module, recurse=True)):
        add_hook_to_module(
            module, AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        )
    if type(module).__name__ in as_names(preload_module_classes):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: torch.nn.Module,
    execution_device: torch.device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach an `AlignDevicesHook` to ``module`` and each module inside it, if they have tensors of their own.

    Args:
        module: The module to attach hooks to.
        execution_device: The device that all of these modules compute on.
        offload: Whether to offload the modules' weights between forward passes.
        weights_map: The offloaded weights by name.
        offload_buffers: Whether to offload buffers, too.
        module_name: The name of the module in `weights_map`.
        skip_keys: The names of the keyword arguments that are not moved.
        preload_module_classes: The classes whose weights are loaded together with their submodules' weights.
        tied_params_map: See `AlignDevicesHook`.
    """
    loads_submodules = offload and type(module).__name__ in as_names(preload_module_classes)
    if loads_submodules or any(True for _ in named_module_tensors(module)):
        prefix = f"{module_name}." if module_name else ""
        hook = AlignDevicesHook(
            execution_device=execution_device,
            offload=offload,
            weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
            offload_buffers=offload_buffers,
            place_submodules=loads_submodules,
            skip_keys=skip_keys,
            tied_params_map=tied_params_map,
        )
        hook.block = module_name
        add_hook_to_module(module, hook, append=True)
    if loads_submodules:
        return
    for key, child in module.named_children():
        attach_align_device_hook(
            child, execution_device, offload, weights_map, offload_buffers, full_name(module_name, key), skip_keys,
            preload_module_classes, tied_params_map,
        )  # fmt: skip


def attach_align_device_hook_on_blocks(
    module: torch.nn.Module,
    execution_device: Any = None,
    offload: Any = False,
    weights_map: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: Any = None,
    preload_module_classes: Any = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Attach hooks to the blocks of a device map.

    Args:
        module: The model that contains the blocks.
        execution_device: The device that each block computes on, by the block's name, or one device for all blocks.
        offload: Whether each block's weights are offloaded, by the block's name, or one value for all blocks.
        weights_map: The offloaded weights by name.
        offload_buffers: Whether to offload buffers, too.
        module_name: The name of `module` in these mappings.
        skip_keys: The names of the keyword arguments that are not moved.
        preload_module_classes: See `attach_align_device_hook`.
        tied_params_map: See `AlignDevicesHook`.
    """
    devices = execution_device if isinstance(execution_device, Mapping) else {module_name: execution_device}
    offloaded = offload if isinstance(offload, Mapping) else dict.fromkeys(devices, offload)
    shared = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping) and not offload:
        hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **shared)
        add_hook_to_module(module, hook, append=True)
        return
    if module_name in devices and module_name in offloaded:
        arguments = (devices[module_name], offloaded[module_name], weights_map, offload_buffers)
        _attach_to_block(module, module_name, arguments, preload_module_classes, shared)
    elif not module_name:
        hook = AlignDevicesHook(devices.get(""), io_same_device=True, **shared)
        add_hook_to_module(module, hook, append=True)
    for key, child in module.named_children():
        attach_align_device_hook_on_blocks(
            child, devices, offloaded, weights_map, offload_buffers, full_name(module_name, key), skip_keys,
            preload_module_classes, tied_params_map,
        )  # fmt: skip


def _attach_to_block(
    module: torch.nn.Module, name: str, arguments: tuple[Any, ...], preload: Any, shared: dict[str, Any]
) -> None:
    device, offload, weights, buffers = arguments
    outermost = not name
    if not offload:
        hook = AlignDevicesHook(
            device, offload_buffers=buffers, io_same_device=outermost, place_submodules=True, **shared
        )
        add_hook_to_module(module, hook, append=True)
    else:
        if outermost:  # This hook comes first, so that a pass starts before the model's own weights are loaded.
            add_hook_to_module(module, AlignDevicesHook(io_same_device=True, **shared), append=True)
        attach_align_device_hook(module, device, True, weights, buffers, name, preload_module_classes=preload, **shared)
        if not hasattr(module, "_hf_hook"):
            add_hook_to_module(module, AlignDevicesHook(device, io_same_device=outermost, **shared))
    attach_execution_device_hook(module, device, preload_module_classes=preload, **shared)
