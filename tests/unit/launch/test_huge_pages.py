"""The memory of a process that forks ranks is moved into huge pages, and no other memory is."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from notebook_accelerate import LaunchConfig
from notebook_accelerate.launch.processes import fork, fork_costs, fork_probe

SIZE = 8 * fork_costs.HUGE_PAGE
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def in_huge_pages(memory: mmap.mmap) -> int:
    """Return how many bytes are in huge pages, in the area of memory that contains the middle of the mapping."""
    address = _address(memory)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, end = (int(text, 16) for text in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "AnonHugePages:":
            return 1024 * int(line.split()[1])
    raise LookupError(f"{address:#x} is not mapped")


def _address(memory: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) + SIZE // 2


@pytest.fixture
def memory() -> mmap.mmap:
    found = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # On every system, the pages must be small at first. Give no advice where it is not necessary, because the kernel's
    # own thread, khugepaged, moves memory that has been advised, at any time.
    advised = _ENABLED.exists() and "[always]" in _ENABLED.read_text()
    if advised:
        found.madvise(mmap.MADV_NOHUGEPAGE)
    found.write(b"x" * SIZE)
    if advised:
        found.madvise(mmap.MADV_HUGEPAGE)
    if not _can_collapse():
        pytest.skip("the system cannot move pages: needs Linux 6.1")
    return found


def _can_collapse() -> bool:
    release = tuple(int(part) for part in Path("/proc/sys/kernel/osrelease").read_text().split("-")[0].split(".")[:2])
    return release >= (6, 1) and _ENABLED.exists()


def test_resident_memory_is_moved(memory: mmap.mmap) -> None:
    assert in_huge_pages(memory) == 0
    for _ in range(10):  # While a busy system has no free huge page, it moves nothing.
        fork_costs.collapse_memory(30)
        if in_huge_pages(memory) >= SIZE - 2 * fork_costs.HUGE_PAGE:
            break
        time.sleep(0.5)
    assert in_huge_pages(memory) >= SIZE - 2 * fork_costs.HUGE_PAGE
    assert memory[:] == b"x" * SIZE


def test_sparse_memory_stays_as_it_is(memory: mmap.mmap) -> None:
    for start in range(0, SIZE, fork_costs.HUGE_PAGE):
        memory.madvise(mmap.MADV_DONTNEED, start, 3 * fork_costs.HUGE_PAGE // 4)
    fork_costs.collapse_memory(30)
    assert in_huge_pages(memory) == 0


def test_it_stops_on_request(memory: mmap.mmap) -> None:
    fork_costs.collapse_memory(30, stop=lambda: True)
    assert in_huge_pages(memory) == 0
    fork_costs.collapse_memory(-1)
    assert in_huge_pages(memory) == 0


@pytest.mark.parametrize("file", ["_MAPS", "_PAGEMAP"])
def test_it_does_nothing_if_the_system_hides_the_memory_map(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_costs, file, Path("/proc/self/hidden"))
    fork_costs.collapse_memory(30)


def test_the_next_launch_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []

    def collapse(_seconds: float, stop: Callable[[], bool]) -> None:
        stopped.append(stop())
        fork_probe.plan_from_here(LaunchConfig(num_processes=2, use_port=0))
        stopped.append(stop())

    monkeypatch.setattr(fork, "collapse_memory", collapse)
    backend = fork.ForkBackend(print, ())
    backend.prepare_next()  # A run that is stopped before its ranks start calls this, too.
    stopped.clear()
    backend.configure(LaunchConfig(), print, bool)
    backend.start_ranks([], print)
    backend.prepare_next()
    assert stopped == [False, True]
