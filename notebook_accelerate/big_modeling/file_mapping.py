"""Maps parts of files into memory: tensors in the page cache, without a copy.

Each tensor is a mapping of its own. Mappings at fixed addresses of an arena (MAP_FIXED through libc) are not faster: a
1 GB model of 30 blocks took 376 ms per forward of 32 tokens and 79 ms of one token, against 378 ms and 75 ms, with the
same peak memory (305 MB). Copying into an arena took 1.6 and 2.6 times as long (2 cores, ext4, warm page cache).
"""

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

MIN_BYTES = 2**21
"""Smaller tensors are copied, which takes less than the system calls of a mapping."""
_MEMORY_WITH_A_NAME = ("/dev/shm/", "/memfd:", "/SYSV")  # noqa: S108 - read in /proc; nothing is created there
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14, madvise(2); the mmap module does not name it


@functools.cache
def can_read_ahead() -> bool:
    """Return whether the system reads a mapping into memory on request."""
    try:
        with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(_POPULATE_READ)
    except (AttributeError, OSError):
        return False
    return True


def mapped_addresses() -> Callable[[int], bool]:
    """Return a predicate for addresses of this process that are in a mapped file; always False without /proc."""
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
    # Not `mmap.madvise`, which keeps the interpreter's lock while the file is read.
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


@functools.cache
def _has_large_folios() -> bool:
    """Return whether the system reads mappings marked as huge in folios of 2 MB, where the file system supports them.

    Reading 1 GB from disk in such folios took 20 ms of processor time instead of 285 ms after MADV_WILLNEED, mapping it
    again 1 ms instead of 70 ms, and ending the mapping 1 ms instead of 30 ms (Linux 6.18, ext4).
    """
    version = re.match(r"(\d+)\.(\d+)", platform.release()) if sys.platform == "linux" else None
    return version is not None and (int(version[1]), int(version[2])) >= (5, 18)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a file for reading and yield its descriptor.

    Files are opened for each read: an open descriptor would outlive the model, and keep a file that was replaced.

    Args:
        path: The file.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def map_file(path: Path, offset: int, nbytes: int, *, read_ahead: bool = False) -> torch.Tensor:
    """Map a part of a file into memory. The mapping is private: writes to it do not reach the file.

    Args:
        path: The file.
        offset: First byte of the part.
        nbytes: Size of the part; at least 1.
        read_ahead: Read the part now, instead of page by page on first access; needs `can_read_ahead`. Other threads
            run meanwhile.

    Returns:
        The bytes; the mapping ends with the last tensor that uses it.

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
        _madvise()(begin, size, mmap.MADV_WILLNEED)  # reads all of it; populating alone reads a little at a time
    if read_ahead and _madvise()(begin, size, _POPULATE_READ):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return data


def too_short(path: Path) -> BrokenCheckpointError:
    """Return the error for a file that ends before a tensor's last byte."""
    return BrokenCheckpointError(f"{path} ends too early: it changed since it was offloaded. Offload the model again.")
