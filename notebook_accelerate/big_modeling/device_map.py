"""Create, check and simplify device maps."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from notebook_accelerate._collection import gc_paused
from notebook_accelerate._loggers import accelerate_logger
from notebook_accelerate.big_modeling.allocation import MIXED, Allocation
from notebook_accelerate.big_modeling.module_tensors import (
    device_of,
    warn_if_untied,
)
from notebook_accelerate.big_modeling.module_tree import (
    Totals,
    as_names,
    build_tree,
    compute_module_sizes,
    convert_file_size_to_int,
    find_tensor,
    get_module_leaves,
    prefixes,
    totals_of,
)
from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.hardware.detection import machine_memory, system_memory

_LOG = accelerate_logger("utils.modeling")

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
    """Assign a model's modules to devices in order: accelerators first, then the CPU, then the disk.

    On the first accelerator and on the CPU, where offloaded layers compute, memory for the largest later layer is
    reserved. The running time is linear in the number of modules. Modules that share parameters are placed on one
    device, and shared parameters are counted once. The map differs from Accelerate's in cases where Accelerate would
    count a shared parameter more than once, split it across devices, or exceed a limit.

    Args:
        model: The model, which may be on any device. Its weights should already be tied.
        max_memory: The limit of each device, in bytes or as a string such as "10GB". If None, the free memory is used.
        no_split_module_classes: The names of classes that are not split across devices, such as blocks with a residual
            connection.
        dtype: The dtype that weights will be converted to when they are loaded.
        special_dtypes: The dtypes of tensors by name, which take precedence over `dtype`.
        verbose: Whether to print every decision and a table of the devices.
        clean_result: Whether to join modules that share a device into one entry with their parent's name.
        offload_buffers: Whether buffers will be offloaded, too, so that accelerators need no memory for them.
        fallback_allocation: Whether to search (breadth first) for a module that fits if a device would otherwise stay
            empty.

    Returns:
        The device of each module by name.

    Raises:
        ValueError: A device, a size or a dtype is not valid.
    """
    limits = get_max_memory(max_memory)
    with gc_paused():  # No cycles are created, and collecting garbage would take longer than creating the map.
        tree = build_tree(model)
        totals = totals_of(tree, dtype, special_dtypes)
        allocation = Allocation(tree, totals, limits, no_split_module_classes, verbose, fallback_allocation)
        allocation.place_all()
        device_map = allocation.clean_device_map() if clean_result else allocation.device_map()
    warn_if_untied(model, totals.tied)
    if allocation.too_small:
        devices = ", ".join(f"{device} (it needs {size_text(size)})" for device, size in allocation.too_small.items())
        _LOG.info("No modules were assigned to these devices, whose memory is too small for the next one: %s", devices)
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
    """Create a device map with a named strategy.

    Args:
        model: The model, which may be on any device.
        strategy: "auto" and "balanced" fill accelerators evenly, "balanced_low_0" puts as little as possible on the
            first one, and "sequential" fills one after the other.
        max_memory: The limit of each device, in bytes or as a string such as "10GB". If None, the free memory is used.
        offload_buffers: Whether buffers will be offloaded, too.
        options: The arguments `no_split_module_classes`, `dtype` and `special_dtypes` of `infer_auto_device_map`.

    Raises:
        ValueError: The strategy is unknown.
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
        limit = size_text(limits[device]) if device in limits else "none"
        lines.append(f"{device!s:<8}{size_text(size):>10}{limit:>10}")
    return "\n".join(lines)


def _warn_of_buffers(allocation: Allocation, totals: Totals) -> None:
    """Warn if no accelerator has room for the buffers of offloaded modules. These buffers are not offloaded."""
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
    """Join entries of a device map that share a device into one entry with their parent's name.

    Args:
        device_map: The device of each module by name. The map is changed in place.
        module_name: The name of the module whose entries are joined.

    Returns:
        The same map, `device_map`.
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
    """Check that a device map has a device for every tensor of a model.

    Args:
        model: The model that the map is for.
        device_map: The device of each module by name.

    Raises:
        ValueError: The map is empty, or has no device for some tensors.
    """
    modules = set(build_tree(model).names)
    # Allow names of tensors, too, because `infer_auto_device_map` lists the tensors of split modules.
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


# ---- checking that devices have enough memory for a map, before anything is moved


def free_bytes(device: torch.device) -> int | None:
    """Return the number of bytes on a device that are free for tensors, including memory cached by torch's allocator.

    Args:
        device: The device to query.

    Returns:
        The number of bytes, or None if the device does not report it.
    """
    if device.type == "cpu":
        return machine_memory()[1]
    backend: Any = getattr(torch, device.type, None)
    if not hasattr(backend, "mem_get_info"):
        return None
    cached = backend.memory_reserved(device) - backend.memory_allocated(device)
    return int(backend.mem_get_info(device)[0]) + int(cached)


def bytes_to_move(model: torch.nn.Module, device_map: Mapping[str, Any]) -> dict[torch.device, int]:
    """Return how many bytes a device map moves to each device, not counting tensors already there or on meta.

    Args:
        model: The model before it is dispatched.
        device_map: The device of each module by name.
    """
    found: dict[torch.device, int] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        target = device_of(name, device_map)
        # Offloaded tensors are not moved yet: each forward pass loads them, one module at a time.
        if target is None or str(target) in ("cpu", "disk") or tensor.device.type == "meta":
            continue
        device = torch.device(target)
        if tensor.device != device:
            found[device] = found.get(device, 0) + tensor.nbytes
    return found


def check_free_memory(needed: Mapping[torch.device, int]) -> None:
    """Check that devices have enough free memory.

    Args:
        needed: The number of bytes needed on each device.

    Raises:
        ValueError: A device has too little memory.
    """
    for device, size in needed.items():
        free = free_bytes(device)
        if free is not None and size > free:
            raise ValueError(_overflow(device, size, f"has {size_text(free)} free"))


def check_limits(sizes: Mapping[str, int], limits: Mapping[Any, int]) -> None:
    """Check that a device map respects the user's limits.

    Args:
        sizes: The number of bytes that the map puts on each device, by the device's name.
        limits: The limit of each device in bytes.

    Raises:
        ValueError: The map exceeds a limit.
    """
    for device, limit in limits.items():
        size = sizes.get(str(device), 0)
        if size > limit:
            raise ValueError(_overflow(device, size, f"is limited to {size_text(limit)} by max_memory"))


def _overflow(device: Any, size: int, has: str) -> str:
    return (
        f"The device map puts {size_text(size)} on device {device}, which {has}. Nothing was moved or loaded. Put some "
        'modules on "cpu" or "disk", or pass device_map="auto".'
    )


# ---- limits for the memory of each device

_KINDS = ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu")
_NAMED = ("mps", "cpu", "disk")


def get_max_memory(max_memory: Mapping[Any, Any] | None = None) -> dict[Any, int]:
    """Return how many bytes a model may use on each device: accelerators first, then the CPU, then the disk.

    Args:
        max_memory: The limit of each device (the number of an accelerator, "mps", "cpu" or "disk"), in bytes or as a
            string such as "10GB". If None, the free memory is used. Strings in a dict are replaced in place with
            numbers of bytes.

    Raises:
        ValueError: A device or a size is not valid.
    """
    if max_memory is None:
        return _free()
    sizes = {device: convert_file_size_to_int(size) for device, size in max_memory.items()}
    if isinstance(max_memory, MutableMapping):  # transformers compares its dict with the result.
        max_memory.update({device: sizes[device] for device, size in max_memory.items() if isinstance(size, str)})
    for device in sizes:
        if not (isinstance(device, int) or device in _NAMED):
            raise ValueError(
                f"Device {device} is not recognized, available devices are integers(for GPU/XPU), 'mps', 'cpu' and "
                "'disk': max_memory={0: '10GB', 'cpu': '30GB'}"
            )
    available = [device for device in _free() if isinstance(device, int)]
    numbers = sorted(device for device in sizes if isinstance(device, int))
    for device in numbers:
        if device not in available:
            _LOG.warning("Device %s is not available, available devices are %s", device, available)
    return {device: sizes[device] for device in (*numbers, *(name for name in _NAMED if name in sizes))}


def _free() -> dict[Any, int]:
    found: dict[Any, int] = {}
    shared = False
    for kind in _KINDS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found = {number: module.mem_get_info(number)[0] for number in range(module.device_count())}
            shared = any(_shares_host_memory(module, number) for number in found)
            break
    # If the GPU and the CPU share memory, an entry for each would count the same bytes twice.
    if torch.backends.mps.is_available():
        found["mps"] = system_memory()[1]
    elif not shared:
        found["cpu"] = system_memory()[1]
    return found


def _shares_host_memory(module: Any, number: int) -> bool:
    """Return whether an accelerator is an integrated CUDA device, as in Jetson and DGX Spark."""
    return module is torch.cuda and bool(getattr(module.get_device_properties(number), "is_integrated", False))


def get_balanced_memory(
    model: torch.nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[Any, int]:
    """Return limits that make `infer_auto_device_map` distribute a model evenly across accelerators.

    Args:
        model: The model, which may be on any device.
        max_memory: See `get_max_memory`.
        no_split_module_classes: The names of classes that are not split across devices.
        dtype: The dtype that weights will be converted to.
        special_dtypes: The dtypes of tensors by name.
        low_zero: Whether to put as little as possible on accelerator 0, which leaves memory for generation.

    Returns:
        The limit of each device in bytes. The last accelerator is not limited.
    """
    limits = get_max_memory(max_memory)
    used = [device for device, size in limits.items() if device not in ("cpu", "disk") and size > 0]
    if not used:
        return limits
    if len(used) == 1:
        low_zero = False
    allowed = dict(limits)
    sizes = compute_module_sizes(model, dtype, special_dtypes)
    share = sizes[""] // (len(used) - 1 if low_zero else len(used))
    share += int(1.25 * max(_largest_unsplit(model, sizes, no_split_module_classes), _mean_layer(sizes)))
    for device in used[:-1]:
        limits[device] = min(0 if low_zero and device == 0 else share, allowed[device])
    if low_zero:
        rest = sum(limits[device] for device in used if device != 0)
        limits[0] = min(max(0, sizes[""] - rest), allowed.get(0, 0))
    return limits


def _largest_unsplit(model: torch.nn.Module, sizes: Mapping[str, Any], classes: Any) -> Any:
    """Return the size in bytes of the largest module among some classes. Each class is measured by its first module."""
    names = as_names(classes)
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name and kind in names and name in sizes:
            found.setdefault(kind, sizes[name])
    return max(found.values(), default=0)


def _mean_layer(sizes: Mapping[str, Any]) -> int:
    tensors = set(get_module_leaves(sizes))
    modules = {name: size for name, size in sizes.items() if name not in tensors}
    layers = get_module_leaves(modules)
    return int(sum(modules[name] for name in layers) / max(len(layers), 1))


# ---- dividing a sequence into consecutive parts of roughly equal size


def balanced_cuts(sizes: Sequence[int], parts: int) -> list[int]:
    """Return the start index of each part except the first, chosen so that the largest part is as small as possible.

    Args:
        sizes: The sizes of the items. There must be at least as many items as parts.
        parts: The number of parts. Each part gets at least one item.
    """
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_fill_parts(sizes, middle, 1)) < parts:
            high = middle
        else:
            low = middle + 1
    return _fill_parts(sizes, low, parts)


def _fill_parts(sizes: Sequence[int], limit: int, parts: int) -> list[int]:
    """Return the start index of each part except the first if parts are filled to a limit.

    At least one item is left for each later part.
    """
    cuts: list[int] = []
    held = 0
    for at, size in enumerate(sizes):
        needed = parts - 1 - len(cuts)
        if at and (held + size > limit or len(sizes) - at == needed):
            cuts.append(at)
            held = 0
        held += size
    return cuts
