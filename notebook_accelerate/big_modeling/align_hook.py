"""`AlignDevicesHook`: inputs and weights are where a module computes when it computes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch._compile import _disable_dynamo

from notebook_accelerate.big_modeling.empty_init import like
from notebook_accelerate.big_modeling.gradients import GradientSink
from notebook_accelerate.big_modeling.module_hooks import ModelHook
from notebook_accelerate.big_modeling.module_sizes import named_module_tensors
from notebook_accelerate.big_modeling.module_tensors import TiedParams, set_module_tensor_to_device
from notebook_accelerate.big_modeling.module_walk import submodule
from notebook_accelerate.big_modeling.prefetch import Prefetcher, Slot, Unit
from notebook_accelerate.big_modeling.tensor_sources import FileSource, in_memory, loader_of, mapped_in_place, source_of
from notebook_accelerate.big_modeling.weight_transfer import has_lane
from notebook_accelerate.collectives import find_device, send_to_device

_BLOCK = re.compile(r"^.*?\.?\d+(?=\.|$)")


class AlignDevicesHook(ModelHook):
    """Moves a module's inputs to where it computes, and brings its weights there where they are kept elsewhere.

    Args:
        execution_device: Where the module computes; None leaves inputs and weights where they are.
        offload: Keep the weights away between forwards; see `Prefetcher` for how they come in time.
        io_same_device: Move the output to where the input was.
        weights_map: The weights by name, where they are offloaded; None: a copy on the CPU is kept.
        offload_buffers: Keep buffers away too.
        place_submodules: Treat the tensors of all submodules, not only the module's own.
        skip_keys: Keyword arguments that are not moved.
        tied_params_map: Copies of tied parameters by address and device, shared between hooks.
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
        """Name of the block that the module belongs to: blocks measure how far weights are read ahead."""
        self.gradients = GradientSink()
        """Takes the gradients of weights that are put away before backward."""
        self._plain: torch.device | None = None
        self._begins: tuple[Prefetcher, ...] = ()
        self._prefetcher: Prefetcher | None = None
        self._unit: Unit | None = None
        self._slots: list[tuple[dict[str, Any], str, str, Any]] = []
        self._live: dict[str, tuple[Any, Any]] = {}

    def __repr__(self) -> str:
        shown = ("execution_device", "offload", "io_same_device", "offload_buffers", "place_submodules", "skip_keys")
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"AlignDevicesHook({values})"

    # ---- attaching and detaching

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Put the weights where they are kept."""
        device = self.execution_device
        if device in ("meta", torch.device("meta")):
            self.tied_params_map = None
        if device is not None and not self.offload:
            for name, _ in named_module_tensors(module, recurse=self.place_submodules):
                set_module_tensor_to_device(module, name, device, tied_params_map=self.tied_params_map)
        elif self.offload:
            self._send_away(module)
        return module

    def _send_away(self, module: torch.nn.Module) -> None:
        tensors = dict(named_module_tensors(module, recurse=self.place_submodules))
        self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        away = dict(
            named_module_tensors(
                module, include_buffers=self.offload_buffers, recurse=self.place_submodules, remove_non_persistent=True
            )
        )
        if self.weights_map is None:
            self.weights_map = {name: tensor.detach().to("cpu") for name, tensor in away.items()}
        for name, tensor in tensors.items():
            if name in away:
                set_module_tensor_to_device(module, name, "meta")
                owner, key = submodule(module, name)
                held = owner._parameters if key in owner._parameters else owner._buffers
                self._slots.append((held, key, name, held[key]))
            elif self.execution_device is not None and tensor.device.type != "meta":
                set_module_tensor_to_device(module, name, self.execution_device)
        self._plan_ahead()

    def _plan_ahead(self) -> None:
        """Let the weights be read ahead, where they are in files or must be copied to an accelerator."""
        # "is None": 0 is an accelerator.
        device = torch.device("cpu" if self.execution_device is None else self.execution_device)
        loader = loader_of(self.weights_map)
        if loader is None or device.type == "meta" or not self._slots or not has_lane(device):
            return
        assert self.weights_map is not None
        sources = [(slot, source_of(self.weights_map, slot[2])) for slot in self._slots]
        alone = any(source is None or source.dtype != slot[3].dtype for slot, source in sources)
        if alone or (device.type == "cpu" and not any(isinstance(source, FileSource) for _, source in sources)):
            return
        slots = [
            Slot(slot[0], slot[1], slot[3], source, maps=mapped_in_place(source, device))
            for slot, source in sources
            if source is not None
        ]
        self._prefetcher = loader.prefetchers.setdefault(device, Prefetcher(device))
        self._unit = Unit(slots, block_of(self.block))

    def begin_passes_of(self, weights: Mapping[str, Any] | None) -> None:
        """Take this hook's forward as one pass through what is offloaded.

        Args:
            weights: The weights of the modules inside.
        """
        loader = loader_of(weights)
        if loader is not None:
            self._begins = tuple(loader.prefetchers.values())

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        """Bring the weights back to where they were."""
        if self.offload:
            self._put_away()
            for name, device in self.original_devices.items():
                if device.type != "meta":
                    held = self.weights_map or {}
                    value = held[name] if any(name == slot[2] for slot in self._slots) else None
                    set_module_tensor_to_device(module, name, device, value=value)
        return module

    # ---- a forward

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring in the weights and move the inputs."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
            for prefetcher in self._begins:
                _untraced(prefetcher.begin)
        if self.offload:
            _untraced(self._bring_in)
        device = self.execution_device
        if device is None:
            return args, kwargs
        if self._plain is None:
            self._plain = torch.device(device)
        if _all_on(args, self._plain) and (not kwargs or _all_on(kwargs.values(), self._plain)):
            return args, kwargs
        return send_to_device(args, device), send_to_device(kwargs, device, skip_keys=self.skip_keys)

    def _bring_in(self) -> None:
        if self._prefetcher is not None and self._unit is not None:
            tensors = self._prefetcher.bring(self._unit)
            trains = torch.is_grad_enabled()
            for (held, key, name, _), tensor in zip(self._slots, tensors, strict=True):
                held[key] = self.gradients.watch(name, tensor) if trains else tensor
            return
        assert self.weights_map is not None
        for held, key, name, absent in self._slots:
            value = self.weights_map[name]
            known = self._live.get(name)
            held[key] = known[1] if known is not None and known[0] is value else self._made(name, absent, value)

    def _made(self, name: str, absent: Any, value: torch.Tensor) -> Any:
        """Return what stands in the module for a weight; it is kept where it is the weight itself, not a copy."""
        device = self.execution_device if self.execution_device is not None else value.device
        here = value.detach().to(device=device, dtype=absent.dtype if value.is_floating_point() else None)
        made = self.gradients.watch(name, like(absent, here)) if isinstance(absent, torch.nn.Parameter) else here
        if here.data_ptr() == value.data_ptr() and in_memory(self.weights_map, name):
            self._live[name] = (value, made)
        return made

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        """Put the weights away and move the output."""
        if self.offload:
            output = _untraced(self._put_away, output)
        if self.io_same_device and self.input_device is not None:
            if not (isinstance(output, torch.Tensor) and output.device == self.input_device):
                output = send_to_device(output, self.input_device, skip_keys=self.skip_keys)
            self.input_device = None
        return output

    def _put_away(self, output: Any = None) -> Any:
        for held, key, _, absent in self._slots:
            held[key] = absent
        if self._prefetcher is not None and self._unit is not None:
            output = self._prefetcher.own(output)
            self._prefetcher.give_back(self._unit)
        return output


@_disable_dynamo
def _break_graph(function: Any, *arguments: Any) -> Any:
    return function(*arguments)


def _untraced(function: Any, *arguments: Any) -> Any:
    """Call what is no computation; torch.compile breaks its graph there, and is not imported for that elsewhere."""
    return _break_graph(function, *arguments) if torch.compiler.is_compiling() else function(*arguments)


def _all_on(values: Any, device: torch.device) -> bool:
    """Tell, fast, whether all values are tensors on a device or nothing that moves."""
    for value in values:
        if value is None or type(value) in (int, float, bool, str):
            continue
        if not isinstance(value, torch.Tensor) or value.device != device:
            return False
    return True


def block_of(name: str) -> str:
    """Return the name of the repeated block that a module is in: up to its first number, ``h.3`` of ``h.3.mlp.fc``."""
    match = _BLOCK.match(name)
    return match.group() if match else name
