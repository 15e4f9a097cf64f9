"""Support for tests that launch from a real kernel: the first cell of a kernel, and checks of processes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from tests.support.kernel import Cell, Kernel

SETUP = """
import ctypes, gc, os, signal, subprocess, sys, threading, time
import torch, torch.distributed as dist
import notebook_accelerate
from notebook_accelerate import notebook_launcher

def rank():
    return int(os.environ["RANK"])

def group():
    dist.init_process_group("gloo")

def join_runs():
    for thread in threading.enumerate():
        if thread.name.startswith("notebook-accelerate-run-"):
            thread.join(5)  # The thread of a finished run prepares the next one.
def gate(name):
    while not os.path.exists(name):
        time.sleep(0.02)

def launch(function, *args, **options):
    return notebook_launcher(function, args, **{"num_processes": 2, "use_port": 0, **options})

def spare_server():
    from notebook_accelerate.launch.processes import zygote
    start, module = zygote.start_interpreter, "notebook_accelerate.launch.processes.zygote_server"
    spare = f"import {module} as server; server.PRELOADED_WHEN_IDLE = (); "
    zygote.start_interpreter = lambda call, *others, **variables: start(spare + call, *others, **variables)
spare_server()
"""
"""The first cell of a kernel, which imports torch, as any training notebook does.

``gate(name)`` blocks its caller until ``open_gate(kernel, name)``. The kernel's idle zygote imports nothing, because
the imports of the first optimizer would take a second of CPU time in each of a hundred kernels.
"""
PAST_THE_CALL = ["n"] if sys.version_info >= (3, 13) else []
"""The input at a breakpoint that leads to the next line: from Python 3.13 on, pdb stops at the call itself."""

WARM_ZYGOTE = "launch(lambda: None, start_method='zygote').results"


WARM_OPTIMIZER = "import torch._dynamo"
"""A cell that imports what each forked rank would otherwise import with its first optimizer, in 1.5 s of CPU time."""


def ready_kernel(*, zygote: bool = True, **options: Any) -> Kernel:
    """Start a kernel, run `SETUP` in it and start its zygote. Without `zygote`, a launch starts one if needed."""
    options.setdefault("server", zygote)
    kernel = Kernel(**options)
    try:
        kernel.check(SETUP)
        if zygote:
            kernel.check(WARM_ZYGOTE)
    except BaseException:
        kernel.close()
        raise
    return kernel


def open_gate(kernel: Kernel, name: str) -> None:
    """Release everything that waits, or will wait, in ``gate(name)``."""
    (kernel.cwd / name).touch()


@contextmanager
def patient(kernel: Kernel, *, warm: bool = False) -> Iterator[None]:
    """Give ranks ten minutes to end after the stop button, because a busy machine may need more than five seconds.

    Args:
        kernel: The kernel with the stop button.
        warm: Whether the ranks are warm ranks, which must only stop their cell.
    """
    place = f"sys.modules['notebook_accelerate.launch.{'warm_ranks' if warm else 'starting'}'].DEFAULT_GRACE"
    usual = kernel.value(place)
    kernel.check(f"{place} = 600.0")
    try:
        yield
    finally:
        kernel.check(f"{place} = {usual}")


def rank_pids(kernel: Kernel) -> list[int]:
    """Return the process ids of the ranks of the kernel's last run."""
    return [int(pid) for pid in kernel.value("[info.pid for info in notebook_accelerate.runs()[-1].ranks]")]


def alive(pids: list[int]) -> list[int]:
    """Return the running processes among `pids`. Zombies do not count."""
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_gone(pids: list[int], seconds: float) -> float:
    """Wait until none of `pids` is running. Return how long it took, or fail after this many seconds."""
    begin = time.monotonic()
    while left := alive(pids):
        assert time.monotonic() - begin < seconds, f"processes still running after {seconds} s: {left}"
        time.sleep(0.01)
    return time.monotonic() - begin


def children(kernel: Kernel, patience: float = 30.0) -> list[str]:
    """Return the kernel's descendants except for its zygote, including zombies, as "pid status command".

    Args:
        kernel: The kernel whose descendants to list.
        patience: Seconds to wait for processes that are about to exit, such as child processes of a rank.
    """
    zygote = kernel.value(
        "getattr(__import__('notebook_accelerate.launch.processes.zygote', fromlist=['x'])._zygote, 'pid', 0)"
    )
    deadline = time.monotonic() + patience
    while (found := _descendants(kernel, zygote)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _descendants(kernel: Kernel, zygote: int) -> list[str]:
    found = []
    for process in kernel.process.children(recursive=True):
        try:
            if process.pid != zygote:
                found.append(f"{process.pid} {process.status()} {' '.join(process.cmdline())[:80]}")
        except psutil.NoSuchProcess:
            continue
    return found


def said(cell: Cell) -> str:
    """Return the error of a cell, as the front end shows it."""
    assert cell.error is not None, f"the cell raised no error; stdout: {cell.stdout}\nstderr: {cell.stderr}"
    return cell.error.text


def blames(text: str, rank: int) -> bool:
    """Return whether an error's text starts by naming this rank as the first failure.

    The text says "failed first" only if another rank lost its connection to this one, and reported that before it was
    stopped.
    """
    return re.match(rf"rank {rank} failed( first)?:", text) is not None
