"""Makes, checks and cleans device maps."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from notebook_accelerate._collection import uncollected
from notebook_accelerate.big_modeling.allocation import MIXED, Allocation
from notebook_accelerate.big_modeling.device_memory import get_balanced_memory, get_max_memory
from notebook_accelerate.big_modeling.module_sizes import Totals, readable, totals_of
from notebook_accelerate.big_modeling.module_tree import build_tree, find_tensor, prefixes
from notebook_accelerate.big_modeling.tied_parameters import (
    check_tied_parameters_in_config,
)

DeviceMap = dict[str, int | str | torch.device]
_STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")


def infer_auto_device_map(
    model: torch.nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> DeviceMap:
    """Assign a model's modules to devices in order: accelerators, then the CPU, then the disk.

    Memory for the largest later layer is reserved on the first accelerator and on the CPU, where offloaded layers
    compute. Time is linear in the number of modules. Modules that share parameters are placed on one device, and shared
    parameters are counted once. Maps of such models differ from Accelerate's where Accelerate counts a shared parameter
    again, divides it among devices, or exceeds a limit.

    Args:
        model: The model, on any device; its weights should be tied already.
        max_memory: Bytes or "10GB" by device; None: the free memory.
        no_split_module_classes: Names of classes that are not divided among devices, such as blocks with a residual
            connection.
        dtype: Dtype that weights will be converted to when they are loaded.
        special_dtypes: Dtypes of tensors by name; they take precedence over `dtype`.
        verbose: Print every decision and a table of the devices.
        clean_result: Join modules that share a device under their parent's name.
        offload_buffers: Buffers are offloaded too, so the accelerators need no memory for them.
        fallback_allocation: Where a device would stay empty, search (breadth first) for a module that fits.

    Returns:
        Device by module name.

    Raises:
        ValueError: A device, a size or a dtype is not valid.
    """
    limits = get_max_memory(max_memory)
    with uncollected():  # nothing here has cycles, and collecting a large model's objects takes longer than the map
        tree = build_tree(model)
        totals = totals_of(tree, dtype, special_dtypes)
        allocation = Allocation(tree, totals, limits, no_split_module_classes, verbose, fallback_allocation)
        allocation.place_all()
        device_map = allocation.clean_device_map() if clean_result else allocation.device_map()
    if check_tied_parameters_in_config(model) and not totals.tied:
        warnings.warn(
            "The model weights are not tied. Please use the `tie_weights` method before using the "
            "`infer_auto_device` function.",
            stacklevel=2,
        )
    if verbose:
        print(_table(allocation.used, limits))  # noqa: T201 - verbose
    if not offload_buffers:
        _warn_of_buffers(allocation, totals)
    return device_map


def make_device_map(
    model: torch.nn.Module,
    strategy: str,
    max_memory: Mapping[Any, Any] | None = None,
    offload_buffers: bool = False,
    **options: Any,
) -> DeviceMap:
    """Make a device map by the name of a strategy.

    Args:
        model: The model, on any device.
        strategy: "auto" and "balanced" fill accelerators evenly; "balanced_low_0" puts as little as possible on the
            first; "sequential" fills one after the other.
        max_memory: Bytes or "10GB" by device; None: the free memory.
        offload_buffers: Buffers are offloaded too.
        options: `no_split_module_classes`, `dtype` and `special_dtypes` of `infer_auto_device_map`.

    Raises:
        ValueError: There is no strategy of that name.
    """
    if strategy not in _STRATEGIES:
        raise ValueError(
            f"device_map={strategy!r}: If passing a string for `device_map`, please choose 'auto', 'balanced', "
            "'balanced_low_0' or 'sequential'."
        )
    if strategy != "sequential":
        max_memory = get_balanced_memory(model, max_memory, low_zero=strategy == "balanced_low_0", **options)
    return infer_auto_device_map(model, max_memory, offload_buffers=offload_buffers, **options)


def _table(used: Mapping[Any, Any], limits: Mapping[Any, int]) -> str:
    lines = [f"{'device':<8}{'used':>10}{'limit':>10}"]
    for device, size in used.items():
        limit = readable(limits[device]) if device in limits else "none"
        lines.append(f"{device!s:<8}{readable(size):>10}{limit:>10}")
    return "\n".join(lines)


def _warn_of_buffers(allocation: Allocation, totals: Totals) -> None:
    """Warn if the buffers of offloaded modules, which stay on an accelerator, fit on none."""
    used, limits = allocation.used, allocation.limits
    free = [limits[device] - used.get(device, 0) - allocation.reserve(device) for device in allocation.accelerators]
    needed = sum(totals.buffers[node] for node in allocation.offloaded)
    if needed and free and needed > max(free):
        warnings.warn(
            f"Current model requires {needed} bytes of buffer for offloaded layers, which seems does not fit any GPU's "
            "remaining memory. If you are experiencing a OOM later, please consider using offload_buffers=True.",
            stacklevel=3,
        )


def clean_device_map(device_map: DeviceMap, module_name: str = "") -> DeviceMap:
    """Join the entries of a device map that share a device under their parent's name.

    Args:
        device_map: Device by module name; changed in place.
        module_name: Join only entries inside this module.

    Returns:
        `device_map`.
    """
    counts: dict[str, int] = defaultdict(int)
    devices: dict[str, Any] = {}
    for name, device in device_map.items():
        for outer in prefixes(name):
            counts[outer] += 1
            devices[outer] = device if counts[outer] == 1 or devices[outer] == device else MIXED
    joined = {name for name, count in counts.items() if count > 1 and devices[name] is not MIXED}
    for name in list(device_map):
        inside = (outer for outer in prefixes(name) if module_name in prefixes(outer))
        outermost = next((outer for outer in inside if outer in joined), None)
        if outermost is not None and outermost != name:
            device_map[outermost] = device_map.pop(name)
    return device_map


def check_device_map(model: torch.nn.Module, device_map: Mapping[str, int | str | torch.device]) -> None:
    """Check that a device map gives every tensor of a model a device.

    Args:
        model: The model.
        device_map: Device by module name.

    Raises:
        ValueError: The map gives tensors no device, or is empty.
    """
    modules = set(build_tree(model).names)
    # Tensors are listed too: `infer_auto_device_map` lists those of split modules.
    unknown = [name for name in device_map if name not in modules and find_tensor(model, name) is None]
    if unknown:
        warnings.warn(
            f"The following device_map keys do not match any submodules in the model: {unknown}", stacklevel=2
        )
    missing = [name for name in model.state_dict() if not any(outer in device_map for outer in prefixes(name))]
    if missing:
        raise ValueError(
            "The device_map provided does not give any device for the following parameters: " + ", ".join(missing)
        )
