"""Parts of files in place of parts of the arena: the page cache's own memory, without a copy.

`mmap` with MAP_FIXED over anonymous memory of our own, then MADV_POPULATE_READ (Linux 5.14), as in mmap(2) and
madvise(2). Private mappings: what is written to them stays in this process and is gone at the next reading.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import torch

from notebook_accelerate.errors import BrokenCheckpointError

PAGE = 2**21
"""Bytes: x86's and arm's huge page. Where address and place in the file agree in these bits, the system maps a file of
large folios with one entry per huge page: 0.5 thousand faults per GB instead of 16 thousand, measured on ext4."""
LEAST = PAGE
"""Bytes: smaller tensors are copied, which takes less than the system calls of a mapping."""
_SMALL = mmap.PAGESIZE
_FIXED = 0x10
_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def supported() -> bool:
    """Tell whether the system maps files at an address and reads them ahead on request."""
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return False
    memory = reserve(_SMALL)
    return bool(_libc().madvise(memory.data_ptr(), _SMALL, _POPULATE_READ) == 0)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    number, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_void_p, size, number, number, number, ctypes.c_int64]
    libc.mmap.restype = ctypes.c_void_p
    libc.madvise.argtypes = [ctypes.c_void_p, size, number]
    return libc


def reserve(size: int) -> torch.Tensor:
    """Return memory that begins with a huge page and that nothing else is in; what is not used takes none.

    Args:
        size: Bytes.
    """
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE
    return whole[begin : begin + size]


def map_into(tensor: torch.Tensor, path: Path, offset: int) -> None:
    """Let a tensor in reserved memory show a part of a file; the part is in memory when this returns.

    Args:
        tensor: The tensor: the pages it is on are its own, and it begins as far into a page as the part in the file.
        path: The file.
        offset: Where the part begins.

    Raises:
        BrokenCheckpointError: The file ends too early.
        OSError: The system refuses.
    """
    begin, shift = tensor.data_ptr(), offset % _SMALL
    assert begin % _SMALL == shift, "a file's page can only be where a page begins"
    address, length = begin - shift, shift + tensor.nbytes
    # Opened each time: a descriptor that is kept would outlive the model, and miss that the file was replaced.
    with path.open("rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size < offset + tensor.nbytes:
            raise BrokenCheckpointError(f"{path} ends too early: it changed since it was offloaded.")
        # Starts the reading of all of it where it is not in the page cache; a page fault would read a little at a time.
        os.posix_fadvise(file.fileno(), offset, tensor.nbytes, os.POSIX_FADV_WILLNEED)
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _FIXED
        if _libc().mmap(address, length, protection, flags, file.fileno(), offset - shift) == _FAILED:
            raise OSError(ctypes.get_errno(), f"{path} could not be mapped: {os.strerror(ctypes.get_errno())}")
    if _libc().madvise(address, length, _POPULATE_READ) != 0:
        raise OSError(ctypes.get_errno(), f"{path} could not be read: {os.strerror(ctypes.get_errno())}")
