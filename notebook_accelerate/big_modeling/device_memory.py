"""Computes how much memory of each device a model may use."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch

from notebook_accelerate.big_modeling.module_sizes import (
    as_names,
    compute_module_sizes,
    convert_file_size_to_int,
    get_module_leaves,
)
from notebook_accelerate.hardware.detection import system_memory

_LOG = logging.getLogger(__name__)
_KINDS = ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu")
_NAMED = ("mps", "cpu", "disk")


def get_max_memory(max_memory: Mapping[Any, Any] | None = None) -> dict[Any, int]:
    """Return the bytes that a model may use on each device, accelerators first, then the CPU, then the disk.

    Args:
        max_memory: Bytes or "10GB" by device: numbers of accelerators, "mps", "cpu", "disk"; None: the free memory.
            Texts in a dict are replaced by their numbers.

    Raises:
        ValueError: A device or a size is not valid.
    """
    if max_memory is None:
        return _free()
    sizes = {device: convert_file_size_to_int(size) for device, size in max_memory.items()}
    if isinstance(max_memory, MutableMapping):  # transformers compares the values of its dict with the result's
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
    for kind in _KINDS:
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            found = {number: module.mem_get_info(number)[0] for number in range(module.device_count())}
            break
    if torch.backends.mps.is_available():
        found["mps"] = system_memory()[1]  # shared with the CPU
    else:
        found["cpu"] = system_memory()[1]
    return found


def get_balanced_memory(
    model: torch.nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Sequence[str] | None = None,
    dtype: str | torch.dtype | None = None,
    special_dtypes: Mapping[str, Any] | None = None,
    low_zero: bool = False,
) -> dict[Any, int]:
    """Limit each accelerator, so that `infer_auto_device_map` distributes a model evenly.

    Args:
        model: The model, on any device.
        max_memory: See `get_max_memory`.
        no_split_module_classes: Names of classes that are not divided among devices.
        dtype: Dtype that weights will be converted to.
        special_dtypes: Dtypes of tensors by name.
        low_zero: Put as little as possible on accelerator 0, whose memory generation needs.

    Returns:
        Bytes by device; the last accelerator is not limited.
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
    """Return the bytes of the largest class, measured by its first module."""
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
