"""A copy of a state that a thread can write while training goes on, in buffers that the next copy uses again."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import torch

_ALIGNMENT = 64
_HUGE = 1 << 21


class Snapshots:
    """Copies nested states into buffers that stay allocated: fresh memory costs ten times the copying itself.

    A snapshot is valid until the next one is taken. Tensors that share memory share it in the copy too.
    """

    def __init__(self) -> None:
        self._buffers: dict[bool, memoryview] = {}
        self._owners: dict[bool, Any] = {}

    def take(self, value: Any) -> Any:
        """Copy a nested state.

        Args:
            value: Dicts, lists and tuples of tensors and other objects. Other objects are copied deeply.

        Returns:
            The same structure with CPU tensors.
        """
        storages = {_key(tensor): tensor for tensor in tensors_in(value)}
        copies = self._copy_storages(storages)
        return rebuild(value, lambda tensor: _view(tensor, copies[_key(tensor)]))

    def release(self) -> None:
        """Give the buffers' memory back."""
        self._buffers.clear()
        self._owners.clear()

    def _copy_storages(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.UntypedStorage]:
        sizes: dict[bool, int] = {}
        places = {}
        for key, tensor in tensors.items():
            pinned = tensor.device.type == "cuda"
            places[key] = (pinned, sizes.get(pinned, 0))
            sizes[pinned] = sizes.get(pinned, 0) + _aligned(tensor.untyped_storage().nbytes())
        for pinned, size in sizes.items():
            self._reserve(pinned, size)
        copies = {}
        for key, tensor in tensors.items():
            pinned, offset = places[key]
            copies[key] = _copy(tensor, self._buffers[pinned], offset)
        if sizes.get(True):
            torch.cuda.synchronize()
        return copies

    def _reserve(self, pinned: bool, size: int) -> None:
        if len(self._buffers.get(pinned, b"")) >= size:
            return
        self._buffers.pop(pinned, None)
        self._owners.pop(pinned, None)
        owner: Any
        if pinned:  # page-locked memory: the device copies into it at the full speed of its bus
            owner = torch.empty(size, dtype=torch.uint8, pin_memory=True)
            buffer = memoryview(owner.numpy())
        else:
            owner = mmap.mmap(-1, -(-size // _HUGE) * _HUGE)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # 512 times fewer page faults while the first copy fills it
                owner.madvise(mmap.MADV_HUGEPAGE)
            buffer = memoryview(owner)
        self._owners[pinned] = owner
        self._buffers[pinned] = buffer


def _aligned(size: int) -> int:
    return -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT


def _key(tensor: torch.Tensor) -> Any:
    return tensor.device, tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()


def _copy(tensor: torch.Tensor, buffer: memoryview, offset: int) -> torch.UntypedStorage:
    size = tensor.untyped_storage().nbytes()
    if size == 0:
        return torch.empty(0).untyped_storage()
    source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    # A storage of its own on the slice: torch.save writes whole storages.
    target = torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset)
    target.copy_(source, non_blocking=True)
    return target.untyped_storage()


def _view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    copied = torch.empty(0, dtype=tensor.dtype)
    return copied.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def is_plain(tensor: Any) -> bool:
    """Tell whether a tensor is memory with strides and nothing else (no sparse layout, no subclass with meaning)."""
    plain_type = type(tensor) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
    return plain_type and tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Iterate over the plain tensors of a nested state."""
    if isinstance(value, torch.Tensor):
        if is_plain(value):
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def rebuild(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a nested state with its plain tensors replaced and everything else copied deeply.

    Args:
        value: The state.
        replace: Called with each plain tensor.

    Returns:
        The same structure; a module's state dict keeps its metadata.
    """
    if isinstance(value, torch.Tensor):
        return replace(value) if is_plain(value) else value.detach().cpu().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = rebuild(item, replace)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuild(item, replace) for item in value))
    if type(value) in {list, tuple}:
        return type(value)(rebuild(item, replace) for item in value)
    return copy.deepcopy(value)
