"""Which module goes where: `infer_auto_device_map` and what checks and tidies device maps."""

from __future__ import annotations

import gc
import warnings
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from notebook_accelerate.big_modeling.allocation import Allocation
from notebook_accelerate.big_modeling.device_memory import get_max_memory
from notebook_accelerate.big_modeling.module_sizes import Totals, readable, totals_of
from notebook_accelerate.big_modeling.module_walk import prefixes, submodule, tree_of
from notebook_accelerate.big_modeling.tied_parameters import (
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
)

DeviceMap = dict[str, Any]


def infer_auto_device_map(
    model: torch.nn.Module,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMap:
    """Fill the devices with a model's modules in order: accelerators, then the CPU, then the disk.

    Room for the largest layer that comes later is kept on the first accelerator and on the CPU, where offloaded layers
    are put to work. Time is linear in the number of modules. What shares parameters goes to one device and is counted
    once; maps of such models differ from Accelerate's where that counts a shared parameter again, or divides it among
    devices, or exceeds a limit.

    Args:
        model: The model, on any device; its weights should be tied already.
        max_memory: Bytes or "10GB" by device; None: what is free.
        no_split_module_classes: Names of classes that are not divided among devices, such as blocks with a residual
            connection.
        dtype: What weights will be converted to when they are loaded.
        special_dtypes: Dtypes of tensors by name; they go before `dtype`.
        verbose: Print every decision and a table of the devices.
        clean_result: Join modules that are together on one device under their parent's name.
        offload_buffers: Buffers are offloaded too, so the accelerators need no room for them.
        fallback_allocation: Where a device would stay empty, look (breadth first) for a module that fits it.

    Returns:
        Device by module name.

    Raises:
        ValueError: A device, a size or a dtype is none.
    """
    limits = get_max_memory(max_memory)
    collects = gc.isenabled()
    gc.disable()  # what is made here has no cycles, and walking a large model's objects takes longer than the map
    try:
        tree = tree_of(model)
        totals = totals_of(tree, dtype, special_dtypes)
        run = Allocation(
            tree, totals.all, totals.measure, totals.tied, limits, no_split_module_classes, verbose, fallback_allocation
        )
        run.place_all()
        device_map = run.joined() if clean_result else run.apart()
    finally:
        if collects:
            gc.enable()
    if check_tied_parameters_in_config(model) and not totals.tied:
        warnings.warn(
            "The model weights are not tied. Please use the `tie_weights` method before using the "
            "`infer_auto_device` function.",
            stacklevel=2,
        )
    if verbose:
        print(_table(run.used, limits))  # noqa: T201 - what verbose asks for
    if not offload_buffers:
        _warn_of_buffers(run, totals)
    return device_map


def _table(used: Mapping[Any, Any], limits: Mapping[Any, int]) -> str:
    lines = [f"{'device':<8}{'used':>10}{'limit':>10}"]
    for device, size in used.items():
        limit = readable(limits[device]) if device in limits else "none"
        lines.append(f"{device!s:<8}{readable(size):>10}{limit:>10}")
    return "\n".join(lines)


def _warn_of_buffers(run: Allocation, totals: Totals) -> None:
    """Warn where the buffers of offloaded modules, which stay on an accelerator, fit none."""
    rooms = [run.limits[device] - run.used.get(device, 0) - run.reserve(device) for device in run.accelerators]
    needed = sum(totals.buffers[node] for node in run.offloaded)
    if needed and rooms and needed > max(rooms):
        warnings.warn(
            f"Current model requires {needed} bytes of buffer for offloaded layers, which seems does not fit any GPU's "
            "remaining memory. If you are experiencing a OOM later, please consider using offload_buffers=True.",
            stacklevel=3,
        )


def clean_device_map(device_map: DeviceMap, module_name: str = "") -> DeviceMap:
    """Join the entries of a device map that are together on one device under their parent's name.

    Args:
        device_map: Device by module name; changed in place.
        module_name: Join what is inside this module only.

    Returns:
        `device_map`.
    """
    counts: dict[str, int] = defaultdict(int)
    devices: dict[str, Any] = {}
    for name, device in device_map.items():
        for outer in prefixes(name):
            counts[outer] += 1
            devices[outer] = device if counts[outer] == 1 or devices[outer] == device else _MIXED
    joined = {name for name, count in counts.items() if count > 1 and devices[name] is not _MIXED}
    for name in list(device_map):
        inside = (outer for outer in prefixes(name) if _within(outer, module_name))
        outermost = next((outer for outer in inside if outer in joined), None)
        if outermost is not None and outermost != name:
            device_map[outermost] = device_map.pop(name)
    return device_map


_MIXED = object()


def _within(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(f"{outer}.")


def check_device_map(model: torch.nn.Module, device_map: Mapping[str, Any]) -> None:
    """Check that a device map gives every tensor of a model a device.

    Args:
        model: The model.
        device_map: Device by module name.

    Raises:
        ValueError: Tensors have none, or the map is empty.
    """
    tree = tree_of(model)
    modules = set(tree.names)
    unknown = [name for name in device_map if name not in modules and not _is_tensor(model, name)]
    if unknown:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}", stacklevel=2
        )
    missing = [name for name in model.state_dict() if not any(outer in device_map for outer in prefixes(name))]
    if missing:
        raise ValueError(
            "The device_map provided does not give any device for the following parameters: " + ", ".join(missing)
        )


def _is_tensor(model: torch.nn.Module, name: str) -> bool:
    """Tell whether a name is a parameter's or a buffer's: `infer_auto_device_map` gives those of divided modules."""
    try:
        owner, key = submodule(model, name)
    except AttributeError:
        return False
    return isinstance(getattr(owner, key, None), torch.Tensor)


__all__ = [
    "check_device_map",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "infer_auto_device_map",
]
