"""Maps parts of files into memory: tensors in the page cache, without a copy.

Each tensor is a mapping of its own. Mappings at fixed addresses of an arena (MAP_FIXED through libc) are not faster: a
1 GB model of 30 blocks took 376 ms per forward of 32 tokens and 79 ms of one token, against 378 ms and 75 ms, with the
same peak memory (305 MB). Copying into an arena took 1.6 and 2.6 times as long (2 cores, ext4, warm page cache).
"""

from __future__ import annotations

import functools
import mmap
from pathlib import Path

import torch

from notebook_accelerate.errors import BrokenCheckpointError

MIN_BYTES = 2**21
"""Smaller tensors are copied, which takes less than the system calls of a mapping."""
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


def map_file(path: Path, offset: int, nbytes: int, *, read_ahead: bool = False) -> torch.Tensor:
    """Map a part of a file into memory. The mapping is private: writes to it do not reach the file.

    Args:
        path: The file.
        offset: First byte of the part.
        nbytes: Size of the part; at least 1.
        read_ahead: Read the part now, instead of page by page on first access; needs `can_read_ahead`.

    Returns:
        The bytes; the mapping ends with the last tensor that uses it.

    Raises:
        BrokenCheckpointError: The file is too short.
        OSError: The file is missing, or cannot be read.
    """
    shift = offset % mmap.ALLOCATIONGRANULARITY
    # Opened each time: an open descriptor would outlive the model, and keep a file that was replaced.
    with path.open("rb", buffering=0) as file:
        try:
            memory = mmap.mmap(file.fileno(), shift + nbytes, access=mmap.ACCESS_COPY, offset=offset - shift)
        except ValueError as error:
            raise too_short(path) from error
    if read_ahead:
        memory.madvise(mmap.MADV_WILLNEED)  # starts reading all of it; populating alone reads a little at a time
        memory.madvise(_POPULATE_READ)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=shift, count=nbytes)


def too_short(path: Path) -> BrokenCheckpointError:
    """Return the error for a file that ends before a tensor's last byte."""
    return BrokenCheckpointError(f"{path} ends too early: it changed since it was offloaded. Offload the model again.")
