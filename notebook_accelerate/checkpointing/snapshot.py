"""Copies of states that a thread can write while training continues, in buffers that the next copy reuses."""

from __future__ import annotations

import copy
import mmap
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.errors import CheckpointError

_ALIGNMENT = 64
_HUGE_PAGE = 1 << 21


@dataclass
class _CopyJob:
    """A storage and its place in a buffer."""

    source: torch.Tensor
    target: torch.Tensor
    version: int

    def run(self) -> None:
        """Copy the whole storage, eight bytes at a time if it divides so (a sixth faster than single bytes)."""
        size = self.target.numel()
        dtype = torch.int64 if size % 8 == 0 and self.source.data_ptr() % 8 == 0 else torch.uint8
        storage = self.source.untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=self.source.device).set_(storage)
        self.target.view(dtype).copy_(source.view(dtype), non_blocking=True)


@dataclass
class Snapshot:
    """Copied states.

    Attributes:
        values: The copies, with CPU tensors. Deferred copies are not filled before `finish`.
        copied: Set when all copies are filled.
    """

    values: list[Any]
    copied: threading.Event = field(default_factory=threading.Event)
    _deferred: list[_CopyJob] = field(default_factory=list)

    def finish(self) -> None:
        """Fill the deferred copies; called by the thread that writes them.

        Raises:
            CheckpointError: A tensor was changed in place before it was copied.
        """
        try:
            if any(job.source.device.type == "cuda" for job in self._deferred):
                self._run_on_own_stream()
            else:
                self._run()
            for job in self._deferred:
                _check_unchanged(job)
        finally:
            self._deferred = []
            self.copied.set()

    def _run_on_own_stream(self) -> None:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._run()
        stream.synchronize()

    def _run(self) -> None:
        for job in self._deferred:
            job.run()


def _check_unchanged(job: _CopyJob) -> None:
    if _version(job.source) != job.version:
        raise CheckpointError(
            "An optimizer's state was changed in place, outside its step(), while save_state(blocking=False) was "
            "copying it. This checkpoint was not written, the previous one is unchanged. Code that changes optimizer "
            'states needs accelerator.save_state("my_checkpoint", blocking=True).'
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class SnapshotBuffers:
    """Copies nested states into buffers that stay allocated: fresh memory costs ten times the copying itself.

    A snapshot is valid until the next one is taken. Tensors that share memory share it in the copy too.
    """

    def __init__(self) -> None:
        self._buffers: dict[bool, memoryview] = {}

    def take(self, values: Sequence[Any], deferred: Sequence[Any] = ()) -> Snapshot:
        """Copy nested states.

        Args:
            values: Dicts, lists and tuples of tensors and other objects. Other objects are copied deeply.
            deferred: Parts of the values (the same objects) whose tensors `Snapshot.finish` may copy; code that
                changes them must wait for `Snapshot.copied` first.

        Returns:
            The same structures with CPU tensors.
        """
        now = {_storage_key(tensor): tensor for tensor in tensors_in(list(values), {id(part) for part in deferred})}
        found = {_storage_key(tensor): tensor for tensor in tensors_in(list(deferred))}
        later = {key: tensor for key, tensor in found.items() if key not in now}
        jobs = self._plan_copies({**now, **later})
        for key in now:
            jobs[key].run()
        if any(tensor.device.type == "cuda" for tensor in (*now.values(), *later.values())):
            torch.cuda.synchronize()  # deferred copies run on a stream of their own: queued work must be done by then
        storages = {key: job.target.untyped_storage() for key, job in jobs.items()}
        copied = [map_tensors(value, lambda tensor: _view(tensor, storages[_storage_key(tensor)])) for value in values]
        return Snapshot(copied, _deferred=[jobs[key] for key in later])

    def release(self) -> None:
        """Free the buffers, once no snapshot refers to them."""
        self._buffers.clear()

    def _plan_copies(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, _CopyJob]:
        """Assign every storage a place in a buffer, as a storage of its own: torch.save writes whole storages."""
        sizes = {True: 0, False: 0}
        offsets = {}
        for key, tensor in tensors.items():
            pinned = tensor.device.type == "cuda"
            offsets[key] = sizes[pinned]
            sizes[pinned] += _align(_size_of(key))
        for pinned, size in sizes.items():
            self._reserve(pinned, size)
        jobs = {}
        for key, tensor in tensors.items():
            count = _size_of(key)
            target = torch.empty(0, dtype=torch.uint8)
            if count:
                buffer = self._buffers[tensor.device.type == "cuda"]
                target = torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=offsets[key])
            jobs[key] = _CopyJob(tensor, target, _version(tensor))
        return jobs

    def _reserve(self, pinned: bool, size: int) -> None:
        if not size or len(self._buffers.get(pinned, b"")) >= size:
            return
        self._buffers.pop(pinned, None)
        if pinned:  # page-locked memory: the device copies into it at the full speed of its bus
            self._buffers[pinned] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data
        else:
            # Private: a process forked during the save must not change what a thread here writes to the disk.
            pages = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # 512 times fewer page faults during the first copy
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._buffers[pinned] = memoryview(pages)


def _align(size: int) -> int:
    return -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT


def _storage_key(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def _size_of(key: tuple[torch.device, int, int]) -> int:
    return key[2]


def _view(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    copied = torch.empty(0, dtype=tensor.dtype)
    return copied.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def is_plain_tensor(tensor: Any) -> bool:
    """Tell whether a tensor is only strided memory that this process or CUDA can copy."""
    return (
        type(tensor) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
        and tensor.layout is torch.strided
        and tensor.device.type in {"cpu", "cuda"}
        and not tensor.is_quantized
    )


def tensors_in(value: Any, excluded: Collection[int] = ()) -> Iterator[torch.Tensor]:
    """Iterate over the plain tensors of a nested state.

    Args:
        value: The state.
        excluded: IDs of containers to skip.
    """
    if isinstance(value, torch.Tensor):
        if is_plain_tensor(value):
            yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in excluded:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, excluded)


def map_tensors(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a nested state with its plain tensors replaced and all other objects copied deeply.

    Args:
        value: The state.
        replace: Called with each plain tensor.

    Returns:
        The same structure; a module's state dict keeps its metadata.
    """
    if isinstance(value, torch.Tensor):
        return replace(value) if is_plain_tensor(value) else value.detach().cpu().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = map_tensors(item, replace)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, replace) for item in value))
    if type(value) in {list, tuple}:
        return type(value)(map_tensors(item, replace) for item in value)
    return copy.deepcopy(value)
