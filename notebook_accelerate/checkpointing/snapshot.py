"""Copy states into reusable buffers, so that a thread can write them while training continues."""

from __future__ import annotations

import copy
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from notebook_accelerate.config.plain_values import size_text
from notebook_accelerate.errors import CheckpointError
from notebook_accelerate.hardware import device_table
from notebook_accelerate.state.warn_once import warn_once

_ALIGNMENT = 64
_HUGE_PAGE = 1 << 21
_FOR_ALL_DEVICES = 1
"""The value of cudaHostRegisterPortable in CUDA."""
_UNKNOWN_ERROR = 999
"""The value of cudaErrorUnknown in CUDA."""


@dataclass
class _CopyJob:
    """A storage to copy, and the memory in a buffer to copy it to."""

    source: torch.Tensor
    target: torch.Tensor
    version: int

    def run(self) -> None:
        """Copy the whole storage, if possible in units of eight bytes, which is a sixth faster than single bytes."""
        size = self.target.numel()
        dtype = torch.int64 if size % 8 == 0 and self.source.data_ptr() % 8 == 0 else torch.uint8
        storage = self.source.untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=self.source.device).set_(storage)
        self.target.view(dtype).copy_(source.view(dtype), non_blocking=True)


@dataclass
class Snapshot:
    """Copies of states in CPU memory.

    Attributes:
        values: The copies. Deferred ones are filled by `finish`.
        copied: An event that is set once all copies are filled.
    """

    values: list[Any]
    copied: threading.Event = field(default_factory=threading.Event)
    _deferred: list[_CopyJob] = field(default_factory=list)

    def finish(self) -> None:
        """Fill the deferred copies. The writing thread calls this.

        Raises:
            CheckpointError: A tensor was changed in place before it was copied.
        """
        try:
            self._run()
            for job in self._deferred:
                _check_unchanged(job)
        finally:
            self._deferred = []
            self.copied.set()

    def _run(self) -> None:
        """Make the copies, using separate streams for CUDA devices, because training uses the default stream."""
        streams: dict[torch.device, Any] = {}
        for job in self._deferred:
            device = job.source.device
            if device.type == "cuda" and device not in streams:
                streams[device] = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(streams[device]) if device in streams else nullcontext():
                job.run()
        for stream in streams.values():
            stream.synchronize()


def _check_unchanged(job: _CopyJob) -> None:
    if _version(job.source) != job.version:
        raise CheckpointError(
            "An optimizer's state was changed in place, outside its step(), while save_state(blocking=False) was "
            "copying it. This checkpoint was not written, and the previous one is unchanged. If your code changes "
            'optimizer states, call accelerator.save_state("my_checkpoint", blocking=True).'
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class SnapshotBuffers:
    """Copies nested states to buffers that stay allocated, because new memory takes ten times as long as the copying.

    A snapshot is valid until the next one is taken. Tensors that share memory also share it in the copy. Copies of CUDA
    tensors are in page-locked memory, which devices access at the full speed of their bus.
    """

    def __init__(self) -> None:
        self._buffers: dict[bool, _Pages] = {}

    def take(self, values: Sequence[Any], deferred: Sequence[Any] = ()) -> Snapshot:
        """Copy nested states.

        Args:
            values: Dicts, lists and tuples of tensors and other objects. The other objects are deep-copied.
            deferred: Parts of the values (the same objects) whose tensors `Snapshot.finish` may copy later. Code that
                changes these parts must first wait for `Snapshot.copied`.

        Returns:
            The same structures with tensors in CPU memory.
        """
        now = {_storage_key(tensor): tensor for tensor in tensors_in(list(values), {id(part) for part in deferred})}
        found = {_storage_key(tensor): tensor for tensor in tensors_in(list(deferred))}
        later = {key: tensor for key, tensor in found.items() if key not in now}
        jobs = self._plan_copies({**now, **later})
        for key in now:
            jobs[key].run()
        for device in {tensor.device for tensor in (*now.values(), *later.values()) if tensor.device.type == "cuda"}:
            torch.cuda.synchronize(device)  # Deferred copies use another stream: finish queued work first.
        storages = {key: job.target.untyped_storage() for key, job in jobs.items()}
        copied = [map_tensors(value, lambda tensor: _view(tensor, storages[_storage_key(tensor)])) for value in values]
        return Snapshot(copied, _deferred=[jobs[key] for key in later])

    def release(self) -> None:
        """Free the buffers once no snapshot refers to them."""
        for locked in list(self._buffers):
            self._buffers.pop(locked).unlock()

    def _plan_copies(self, tensors: dict[Any, torch.Tensor]) -> dict[Any, _CopyJob]:
        """Assign memory in a buffer to each storage.

        Each piece of memory becomes a separate storage, because torch.save writes whole storages.
        """
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
                target = torch.frombuffer(buffer.memory, dtype=torch.uint8, count=count, offset=offsets[key])
            jobs[key] = _CopyJob(tensor, target, _version(tensor))
        return jobs

    def _reserve(self, locked: bool, size: int) -> None:
        before = self._buffers.get(locked)
        if not size or (before is not None and len(before.memory) >= size):
            return
        if before is not None:
            self._buffers.pop(locked).unlock()
            del before
        self._buffers[locked] = _Pages(size, locked=locked)


class _Pages:
    """Memory that consists of whole pages, which can be page-locked.

    torch rounds the size of its page-locked memory up to a power of two, and keeps it allocated, so 9 GB of
    state takes up 16 GiB until the process exits. Registered memory has the requested size, and is returned to the
    system.

    Args:
        size: The size in bytes.
        locked: Whether to page-lock the memory with CUDA. If CUDA cannot do this, the memory stays pageable.
    """

    def __init__(self, size: int, *, locked: bool) -> None:
        # Make the mapping private, so that a process forked during the save cannot change the data being written.
        pages = mmap.mmap(-1, -(-size // _HUGE_PAGE) * _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # With huge pages, the first copy causes 512 times fewer page faults.
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(pages)
        self._unlock: weakref.finalize[..., Any] | None = None
        if locked and (address := self._register()):
            self._unlock = weakref.finalize(self, _unregister, address, os.getpid())
            self._unlock.atexit = False  # The system frees memory at exit, when CUDA may be shut down.

    def _register(self) -> int:
        """Register the memory for all devices of the process, and return its address, or 0 if CUDA fails."""
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        errors: list[int] = []

        def register() -> None:
            device_table.select_again()
            errors.append(int(_cuda_runtime().cudaHostRegister(address, len(self.memory), _FOR_ALL_DEVICES)))

        # Use a separate thread, because CUDA keeps the last error of each thread. In this thread, torch would raise the
        # error when it launches training's next kernel.
        thread = threading.Thread(target=register, name="save_state locks memory")
        thread.start()
        thread.join()
        error = errors[0] if errors else _UNKNOWN_ERROR
        if error:
            warn_once(
                f"save_state(blocking=False) could not lock {size_text(len(self.memory))} of CPU memory (CUDA error "
                f"{error}), so copies from the device are slower. ulimit -l shows the limit."
            )
        return 0 if error else address

    def unlock(self) -> None:
        """Undo the registration. The memory is freed when the last reference to it is dropped."""
        if self._unlock is not None:
            self._unlock()


def _unregister(address: int, process: int) -> None:
    if os.getpid() == process:  # A forked process has registered nothing, and cannot use CUDA.
        _cuda_runtime().cudaHostUnregister(address)


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


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
    """Return whether a tensor consists of strided memory alone, which this process or CUDA can copy."""
    return (
        type(tensor) in {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
        and tensor.layout is torch.strided
        and tensor.device.type in {"cpu", "cuda"}
        and not tensor.is_quantized
    )


def tensors_in(value: Any, excluded: Collection[int] = ()) -> Iterator[torch.Tensor]:
    """Iterate over the plain tensors of a nested state.

    Args:
        value: The state to search.
        excluded: The IDs of containers to skip.
    """
    if isinstance(value, torch.Tensor):
        if is_plain_tensor(value):
            yield value
    elif isinstance(value, (dict, list, tuple)) and id(value) not in excluded:
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, excluded)


def map_tensors(value: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Copy a nested state, replacing its plain tensors and deep-copying all other objects.

    Args:
        value: The state to copy.
        replace: A function that returns the replacement for a plain tensor.

    Returns:
        A copy with the same structure. The state dict of a module keeps its metadata.
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
