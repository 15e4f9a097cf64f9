"""The sources that offloaded tensors are read from: memory, or a part of a file."""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate.errors import BrokenCheckpointError
from notebook_accelerate.torch_internals import tensor_version

_ALIGNMENT = 64
"""The alignment in bytes of torch's CPU allocator. With safetensors' 8 bytes, MKL's dot products round differently."""


class TensorSource:
    """A tensor that can be read any number of times.

    Args:
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
    """

    pinned: torch.Tensor | None = None
    """The tensor in pinned memory, or None if it is not pinned."""
    mappable = False
    """Whether `map` is possible, and faster than `read_into`."""
    address: int | None = None
    """The address of a tensor in memory, or None for a tensor in a file."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.nbytes = dtype.itemsize * int(torch.Size(shape).numel())

    def read_into(self, tensor: torch.Tensor) -> None:
        """Fill a tensor of the same shape and dtype on the CPU."""
        raise NotImplementedError

    def read(self) -> torch.Tensor:
        """Return the tensor on the CPU, in new memory."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(tensor)
        return tensor

    def version(self) -> Any:
        """Return a value that changes whenever the tensor does, so that outdated reads are not used."""
        return None

    def map(self, *, read_ahead: bool = True) -> torch.Tensor:
        """Return the tensor as a mapping of its file.

        Args:
            read_ahead: Whether to read the tensor into memory now, instead of on first access.
        """
        raise NotImplementedError

    def pin(self, known: dict[int, torch.Tensor]) -> None:
        """Move the tensor to pinned memory if it is in memory.

        Args:
            known: The tensors that are already pinned, by their former address, so that tied weights are pinned only
                once.

        Raises:
            RuntimeError: The system cannot pin more memory.
        """

    def load(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on a device, in new memory."""
        return self.read().to(device)


class MemorySource(TensorSource):
    """A tensor in memory.

    Args:
        tensor: The tensor in CPU memory.
        state: The dictionary that contains the tensor. `pin` replaces the tensor there.
        name: The name of the tensor in `state`.
    """

    def __init__(self, tensor: torch.Tensor, state: Any, name: str) -> None:
        super().__init__(tuple(tensor.shape), tensor.dtype)
        self._tensor, self._state, self._name = tensor, state, name
        self.address = tensor.data_ptr()

    def version(self) -> Any:
        """Return the identity and version of the tensor that is now in the dictionary."""
        found = self._state.get(self._name) if isinstance(self._state, dict) else None
        if found is not None and found is not self._tensor:
            super().__init__(tuple(found.shape), found.dtype)
            self._tensor, self.pinned, self.address = found, None, found.data_ptr()
        return id(self._tensor), tensor_version(self._tensor)

    def read_into(self, tensor: torch.Tensor) -> None:
        """Copy this tensor into the given one."""
        tensor.data.copy_(self._tensor.detach())

    def pin(self, known: dict[int, torch.Tensor]) -> None:
        """Pin the tensor, and replace it in the dictionary, so that its memory is not needed twice."""
        self.version()
        if self.pinned is not None:
            return
        own = self._tensor.detach()
        other = known.get(own.data_ptr())
        if other is None or (other.shape, other.stride(), other.dtype) != (own.shape, own.stride(), own.dtype):
            other = own.contiguous().pin_memory()
            if own.is_contiguous() and own.data_ptr():  # Tensors that wrap others have no memory: their address is 0.
                known[own.data_ptr()] = other
        self.pinned = self._tensor = other
        if isinstance(self._state, dict) and self._name in self._state:
            self._state[self._name] = other

    def load(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on a device."""
        self.version()
        return self._tensor.detach().to(device)


class FileSource(TensorSource):
    """A tensor in a file.

    Args:
        path: The file that contains the tensor.
        offset: The offset of the tensor's first byte.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        self.path, self.offset = path, offset
        # The alignment of tensors determines the choice of kernels, and therefore affects the last bits of results.
        self._is_aligned = offset % _ALIGNMENT == 0
        large = self.nbytes >= MIN_BYTES
        self.mappable = large and self._is_aligned and can_read_ahead()

    def read_into(self, tensor: torch.Tensor) -> None:
        """Read the tensor without holding the GIL."""
        if not self.nbytes:
            return
        # Use .data, because the tensor may be a parameter. This is safe, because nothing is computing with the tensor
        # now.
        flat: Any = tensor.data.reshape(-1).view(torch.uint8).numpy()
        view = memoryview(flat)
        done = 0
        with opened(self.path) as descriptor:
            while done < self.nbytes:
                count = os.preadv(descriptor, [view[done:]], self.offset + done)
                if not count:
                    raise too_short(self.path)
                done += count

    def map(self, *, read_ahead: bool = True) -> torch.Tensor:
        """Return the tensor as a mapping of its file; see `TensorSource.map`."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        data = map_file(self.path, self.offset, self.nbytes, read_ahead=read_ahead)
        return data.view(self.dtype).view(self.shape)

    def load(self, device: torch.device) -> torch.Tensor:
        """Return the tensor on a device.

        On the CPU, map the file, unless its alignment would change the choice of kernels.
        """
        return self.map(read_ahead=False) if device.type == "cpu" and self._is_aligned else super().load(device)


# ---- mapping parts of files into memory, so that tensors are used directly from the page cache
# Each tensor has a separate mapping. Mappings at fixed addresses in an arena (MAP_FIXED through libc) are not faster:
# with them, a 1 GB model of 30 blocks took 376 ms for a forward pass of 32 tokens, and 79 ms for one token, compared
# with 378 ms and 75 ms without, at the same peak memory (305 MB). Copying into an arena took 1.6 and 2.6 times as long
# (2 cores, ext4, warm page cache).

MIN_BYTES = 2**21
"""Tensors smaller than this are copied, which takes less time than the system calls for a mapping."""
_MEMORY_WITH_A_NAME = ("/dev/shm/", "/memfd:", "/SYSV")  # noqa: S108 - names found in /proc; no file is created there
_POPULATE_READ = 22  # MADV_POPULATE_READ of madvise(2), which Linux has since 5.14, but not the mmap module.


@functools.cache
def can_read_ahead() -> bool:
    """Return whether the system can read a mapping into memory on request."""
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(_POPULATE_READ)
    except (AttributeError, OSError):
        return False
    return True


def mapped_addresses() -> Callable[[int], bool]:
    """Return a function that returns whether an address of this process is in a mapped file (False without /proc)."""
    starts, ends = [], []
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            addresses, _, _, _, inode, *path = line.split(maxsplit=5)
            if inode != "0" and not path[0].startswith(_MEMORY_WITH_A_NAME):
                start, _, end = addresses.partition("-")
                starts.append(int(start, 16))
                ends.append(int(end, 16))

    def is_mapped(address: int) -> bool:
        index = bisect.bisect_right(starts, address) - 1
        return index >= 0 and address < ends[index]

    return is_mapped


@functools.cache
def _madvise() -> Any:
    # Don't use `mmap.madvise`, which holds the GIL while the file is read.
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


@functools.cache
def _has_large_folios() -> bool:
    """Return whether the system reads mappings marked as huge in 2 MB folios, if the file system supports them.

    With such folios, reading 1 GB from disk took 20 ms of CPU time instead of 285 ms with MADV_WILLNEED, mapping the
    file again took 1 ms instead of 70 ms, and removing the mapping took 1 ms instead of 30 ms (Linux 6.18, ext4).
    """
    version = re.match(r"(\d+)\.(\d+)", platform.release()) if sys.platform == "linux" else None
    return version is not None and (int(version[1]), int(version[2])) >= (5, 18)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for reading, and yield its descriptor.

    Files are opened again for each read. A descriptor that stayed open could outlive the model, and would keep
    referring to a file that has been replaced.

    Args:
        path: The file to open.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def map_file(path: Path, offset: int, nbytes: int, *, read_ahead: bool = False) -> torch.Tensor:
    """Map a part of a file into memory. The mapping is private: writing to it does not change the file.

    Args:
        path: The file to map.
        offset: The offset of the part's first byte.
        nbytes: The size of the part in bytes, at least 1.
        read_ahead: Whether to read the part now, instead of page by page on first access. This requires that
            `can_read_ahead` returns True. Other threads can run while the part is read.

    Returns:
        The bytes of the part. The mapping is removed together with the last tensor that uses it.

    Raises:
        BrokenCheckpointError: The file is too short.
        OSError: The file is missing, or cannot be read.
    """
    shift = offset % mmap.ALLOCATIONGRANULARITY
    with opened(path) as descriptor:
        try:
            memory = mmap.mmap(descriptor, shift + nbytes, access=mmap.ACCESS_COPY, offset=offset - shift)
        except ValueError as error:
            raise too_short(path) from error
    data = torch.frombuffer(memory, dtype=torch.uint8, offset=shift, count=nbytes)
    begin, size = data.data_ptr() - shift, shift + nbytes
    if size >= MIN_BYTES and _has_large_folios():
        _madvise()(begin, size, mmap.MADV_HUGEPAGE)
    elif read_ahead:
        # Request the whole part first, because populating alone only reads a little at a time.
        _madvise()(begin, size, mmap.MADV_WILLNEED)
    if read_ahead and _madvise()(begin, size, _POPULATE_READ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return data


def too_short(path: Path) -> BrokenCheckpointError:
    """Return the error for a file that ends before a tensor's last byte."""
    return BrokenCheckpointError(f"{path} ends too early: it has changed since the offload. Offload the model again.")
