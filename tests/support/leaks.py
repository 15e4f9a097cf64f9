"""The parts of a process's state that tests must not change, and a comparison of before and after."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

# Libraries set these when they are first imported, or pytest sets them for its own use.
_ENVIRONMENT_NOISE = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "COLUMNS", "LINES")
# Leave out SIGALRM, which the test runner uses for its timeouts.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)
LASTING: set[int | str] = set()
"""Process ids and sockets (their link targets in /proc) of test helpers that live for the whole session."""


@dataclass(frozen=True)
class Snapshot:
    """The parts of a process's state that a test can leak into."""

    children: dict[tuple[int, int, bool], str]
    threads: frozenset[str]
    sockets: frozenset[str]
    environment: frozenset[tuple[str, str]]
    handlers: frozenset[str]
    optimizer_hooks: frozenset[str]
    process_group: bool


def take() -> Snapshot:
    """Return the state of this process now."""
    return Snapshot(
        children=_children(),
        threads=frozenset(f"{thread.name} ({thread.ident})" for thread in threading.enumerate()),
        sockets=_sockets(),
        environment=frozenset(item for item in os.environ.items() if not item[0].startswith(_ENVIRONMENT_NOISE)),
        handlers=frozenset(f"{number.name}: {signal.getsignal(number)}" for number in _SIGNALS),
        optimizer_hooks=_optimizer_hooks(),
        process_group=_process_group(),
    )


def compare(before: Snapshot, patience: float = 30.0) -> list[str]:
    """Return one line per leaked object. Objects that disappear within `patience` seconds do not count.

    Args:
        before: The state to compare with.
        patience: Seconds to wait for objects that are about to disappear.

    Returns:
        Lines for the message of a failed test, or an empty list if nothing leaked.
    """
    deadline = time.monotonic() + patience
    while (lines := _differences(before, take())) and time.monotonic() < deadline:
        time.sleep(0.02)
    return lines


def _differences(before: Snapshot, after: Snapshot) -> list[str]:
    lines = [f"child process: {after.children[key]}" for key in sorted(after.children.keys() - before.children.keys())]
    lines += [f"thread: {entry}" for entry in sorted(after.threads - before.threads)]
    lines += [f"socket: {entry}" for entry in sorted(after.sockets - before.sockets)]
    changed = sorted(before.environment ^ after.environment)
    lines += [f"environment variable: {name}={value!r}" for name, value in changed]
    lines += [f"signal handler: {entry}" for entry in sorted(after.handlers - before.handlers)]
    # Report only removed hooks: the first run in this process adds hooks that count the steps of all later runs.
    removed = sorted(before.optimizer_hooks - after.optimizer_hooks)
    lines += [f"hook on all optimizers, which was removed: {entry}" for entry in removed]
    if after.process_group and not before.process_group:
        lines.append("torch process group: still initialised")
    return lines


def _children() -> dict[tuple[int, int, bool], str]:
    """Return the descendants of this process, except the helpers that multiprocessing keeps for the whole session.

    Returns:
        The name of each process, keyed by process id, by psutil's identity of the process, and by whether the process
        is a zombie. The command line does not identify a process, because a forked process changes it when it executes
        its program. Nor does the start time, which changes when the system's clock is set.
    """
    keep = {getattr(forkserver._forkserver, "_forkserver_pid", None)}
    keep.add(getattr(resource_tracker._resource_tracker, "_pid", None))
    found = {}
    for pid in _descendants():
        try:
            child = psutil.Process(pid)
            if child.pid not in keep | LASTING and child.ppid() not in keep:
                # A process that was busy and now sleeps counts as unchanged, but one that has become a zombie does not.
                dead = child.status() == psutil.STATUS_ZOMBIE
                text = f"{child.pid} {'zombie' if dead else 'alive'} {' '.join(child.cmdline())[:120]}"
                found[child.pid, hash(child), dead] = text
        except psutil.NoSuchProcess:
            continue
    return found


def _descendants() -> list[int]:
    """Return the process ids of all descendants. psutil would read all processes of the machine, which takes 4 ms."""
    # Linux kernels may lack this file, and other systems do.
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return [child.pid for child in psutil.Process().children(recursive=True)]
    found: list[int] = []
    pending = [os.getpid()]
    while pending:
        pids = _direct_children(pending.pop())
        found += pids
        pending += pids
    return found


def _direct_children(parent: int) -> list[int]:
    """Return the process ids of a process's children, which the kernel records by the thread that started them."""
    last: list[str] | None = None
    while True:  # A single read may miss a child if another one exits at the same time.
        texts = []
        for task in Path(f"/proc/{parent}/task").glob("*"):
            with suppress(OSError):  # The thread has exited since the listing.
                texts.append((task / "children").read_text())
        if texts == last:
            return [int(pid) for text in texts for pid in text.split()]
        last = texts


def _sockets() -> frozenset[str]:
    found = set()
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            target = str(entry.readlink())
        except OSError:  # The descriptor has been closed since the listing.
            continue
        if target.startswith("socket:") and target not in LASTING:
            found.add(target)
    return frozenset(found - _of_cuda())


def _of_cuda() -> set[str]:
    """Return the sockets of CUDA's driver, which are open from a process's first context until the process exits."""
    with suppress(OSError):  # Some systems have no /proc.
        lines = Path("/proc/net/unix").read_text().splitlines()
        return {f"socket:[{line.split()[6]}]" for line in lines if "cuda-uvmfd" in line}
    return set()


def _optimizer_hooks() -> frozenset[str]:
    optimizer = sys.modules.get("torch.optim.optimizer")
    if optimizer is None:
        return frozenset()
    tables = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    return frozenset(f"{hook} ({number})" for table in tables for number, hook in table.items())


def _process_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(distributed and distributed.is_available() and distributed.is_initialized())
