"""Allocate memory so that only a little is left for other processes: ``python -m tests.soak.balloon MIB_TO_LEAVE``."""

from __future__ import annotations

import mmap
import sys
import time

import psutil

STEP = 64 * 2**20
SECONDS = 0.2


def hold(left: int) -> None:
    """Keep only `left` bytes available on this machine until the process exits."""
    held: list[mmap.mmap] = []
    while True:
        available = psutil.virtual_memory().available
        if available > left + 2 * STEP:
            block = mmap.mmap(-1, STEP)
            block[:: mmap.PAGESIZE] = b"x" * (STEP // mmap.PAGESIZE)
            held.append(block)
            continue
        if available < left and held:
            held.pop().close()
            continue
        time.sleep(SECONDS)


if __name__ == "__main__":
    hold(int(sys.argv[1]) * 2**20)
