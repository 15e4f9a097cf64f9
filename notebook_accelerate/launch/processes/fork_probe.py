"""Check whether the live kernel is safe to fork: query the runtimes, then fork a probe with a time limit.

The run's supervisor thread forks the ranks. A forked child keeps only the forking thread, and libgomp keeps one team of
workers per calling thread. A rank therefore never uses the warm OpenMP team of the kernel's main thread. A child forked
from the main thread would wait forever for the dead workers of that team (pytorch#17199, GCC PR 60035). The checks look
for state that all threads share: a CUDA or XLA runtime, or a lock held by a thread that is computing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import threading
import time
import warnings

# The public signal.pthread_sigmask converts each of 60 signals into an enum member, which takes 0.1 ms.
from _signal import pthread_sigmask  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from notebook_accelerate.hardware import device_counts
from notebook_accelerate.hardware.nvml import check_cuda_p2p_ib_support
from notebook_accelerate.hardware.process_liveness import STATE, read_stat
from notebook_accelerate.integrations import accelerate_alias
from notebook_accelerate.launch.plan.planner import KernelFacts
from notebook_accelerate.launch.processes import shared_imports

PROBE_SECONDS = 2.0
"""Time limit of the probe, in seconds. It normally needs a few milliseconds, so a slower kernel counts as unsafe."""
MAX_WAITS = 15
"""The limit is extended up to this many times while the probe only waits for a processor on a busy machine."""
SAMPLE_SECONDS, MAX_SAMPLES = 0.01, 100
COMPUTING_SHARE = 0.1
"""A thread that uses a processor for a tenth of a sample is computing. A mere wake-up takes far less."""


def kernel_facts(variables: Mapping[str, str] | None = None) -> KernelFacts:
    """Return the planner's facts about this kernel.

    Args:
        variables: The environment variables that the launch sets.
    """
    environment = {**os.environ, **(variables or {})}
    return KernelFacts(
        fork_hazard=lambda: shared_imports.hazard(environment) or fork_hazard(),
        can_fork=hasattr(os, "fork"),
        environment=os.environ,
        alias_hazard=accelerate_alias.inherited_hazard(),
        peer_to_peer=check_cuda_p2p_ib_support,
    )


def fork_hazard() -> str:
    """Return why forking this kernel is unsafe, as a phrase for the run's header, or "". May run on any thread."""
    if not hasattr(os, "fork") or sys.platform != "linux":
        return "forking is not safe on this platform" if hasattr(os, "fork") else "this platform cannot fork"
    if not Path("/proc/self/task").is_dir():
        return "there is no /proc, which shows whether forking is safe"
    maps = _memory_map()
    for check in CHECKS:
        if found := check(maps):
            return found
    return probe_if_changed(maps)


def _accelerator_runtime(maps: str) -> str:
    if "libcuda.so" in maps and _cuda_driver_initialised():
        return "CUDA is initialised in the kernel"
    for name in ("cuda", "xpu", "npu", "mlu", "musa", "sdaa", "hpu"):
        runtime: Any = sys.modules.get(f"torch.{name}") or sys.modules.get(f"torch_{name}.{name}")
        with contextlib.suppress(Exception):  # A backend that is only partly loaded cannot be initialised.
            if runtime is not None and runtime.is_initialized():
                return f"{name.upper()} is initialised in the kernel"
    return ""


def _cuda_driver_initialised() -> bool:
    """Query the driver, which returns CUDA_ERROR_NOT_INITIALIZED (3) if there is no CUDA context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return int(driver.cuDeviceGetCount(ctypes.byref(count))) != 3


def _xla_runtime(_maps: str) -> str:
    xla: Any = sys.modules.get("_XLAC")
    initialised = getattr(xla, "_xla_runtime_is_initialized", None)
    if initialised is not None and initialised():
        return "the XLA runtime is initialised in the kernel"
    return ""


def _tpu_runtime(_maps: str) -> str:
    """Return the hazard of torch_tpu, which torch imports. Its runtime for TPUs refuses to work after a fork."""
    if "torch_tpu" in sys.modules and device_counts.count("tpu"):
        return "torch_tpu is loaded in the kernel"
    return ""


def _process_group(_maps: str) -> str:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "a process group is open in the kernel"
    return ""


def _allocator(maps: str) -> str:
    for name in ("jemalloc", "tcmalloc"):
        if f"lib{name}" in maps:
            return f"{name} is the kernel's allocator"
    return ""


_KNOWN_THREADS = (
    "IOPub",
    "Heartbeat",
    "Control",
    "Shell channel",
    "IPythonHistorySavingThread",
    "notebook-accelerate",
    "Subshell",
)


def _busy_thread(_maps: str) -> str:
    """Return the hazard if a Python thread other than this one and the kernel's own threads is computing."""
    mine = {threading.get_ident(), threading.main_thread().ident}
    others = {
        thread.native_id: thread
        for thread in threading.enumerate()
        if thread.ident not in mine and not thread.name.startswith(_KNOWN_THREADS)
    }
    before = {tid: _cpu_nanoseconds(_own(tid)) for tid in others if tid is not None}
    # The state alone is not enough: it is also "R" during a rare wake-up, or while a thread waits for a processor.
    running = [tid for tid in before if _state(_own(tid)) == "R"]
    for _ in range(MAX_SAMPLES):
        if not running:
            break
        time.sleep(SAMPLE_SECONDS)
        used = {tid: (_cpu_nanoseconds(_own(tid)) - before[tid]) / 1e9 for tid in running}
        for tid in running:
            if used[tid] > COMPUTING_SHARE * SAMPLE_SECONDS:
                return f"thread {others[tid].name!r} is computing in the kernel"
        # Keep the threads that have only waited for a processor so far.
        running = [tid for tid in running if _state(_own(tid)) == "R"]
    return ""


def _own(tid: int) -> Path:
    return Path(f"/proc/self/task/{tid}")


def _state(thread: Path) -> str:
    fields = read_stat(thread)
    return fields[STATE] if fields else ""


def _cpu_nanoseconds(thread: Path) -> int:
    """Return the CPU time that a thread has used, in nanoseconds."""
    with contextlib.suppress(OSError, ValueError):
        return int((thread / "schedstat").read_text().split()[0])
    return 0


def _memory_map() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")  # A path may contain any bytes.
    return ""


CHECKS: list[Callable[[str], str]] = [
    _accelerator_runtime,
    _xla_runtime,
    _tpu_runtime,
    _process_group,
    _allocator,
    _busy_thread,
]
"""Each check takes the memory map of this process and returns a hazard as a phrase, or "". The run's header shows the
first hazard."""


_LIBRARY = re.compile(r"/\S*\.so\S*")
_passed: set[tuple[frozenset[str], frozenset[str]]] = set()


def probe_if_changed(maps: str | None = None) -> str:
    """Probe on a new thread, unless a probe has passed with the same libraries and the same kinds of threads.

    A probe takes a third of the time of a launch of two ranks. Like the ranks, it is forked from a thread without an
    OpenMP team. A probe forked from the main thread could wait for the dead workers of that thread's team.

    Args:
        maps: The memory map of this process, or None to read it.
    """
    now = _libraries_and_threads(_memory_map() if maps is None else maps)
    if now in _passed:
        return ""
    if not (hazard := _call_on_new_thread(probe)):
        _passed.add(now)
    return hazard


def _call_on_new_thread(function: Callable[[], str]) -> str:
    outcome: Future[str] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # noqa: BLE001 - re-raised on the caller's thread
            outcome.set_exception(error)

    threading.Thread(target=call, name="notebook-accelerate-probe", daemon=True).start()
    return outcome.result()


def _libraries_and_threads(maps: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the properties that decide whether a fork works: the mapped libraries and the kinds of threads."""
    python = {re.sub(r"\d+", "", t.name) for t in threading.enumerate() if not t.name.startswith("notebook-accelerate")}
    return frozenset(_LIBRARY.findall(maps)), frozenset(python | _native_thread_names())


def _native_thread_names() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # The thread has just ended.
            found.add(re.sub(r"\d+", "", (task / "comm").read_text(encoding="utf-8", errors="replace").strip()))
    return found


def probe(seconds: float = PROBE_SECONDS) -> str:
    """Fork a child that does what ranks do first. Return a hazard unless it finishes in time."""
    reader, writer = os.pipe()
    pid = fork_quietly()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            _exercise()
            os.write(writer, b"1")
            code = 0
        finally:
            os._exit(code)
    passed = False
    try:
        os.close(writer)
        passed = _passes(reader, pid, seconds)
    finally:
        os.close(reader)
        if not passed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # SIGCHLD is ignored, or one of the user's threads has reaped the child.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return "" if passed else "a probe forked from the kernel did not finish"


def _passes(reader: int, pid: int, seconds: float) -> bool:
    """Wait ``seconds`` for the probe's answer, or longer if it only waits for a processor on a busy machine.

    A child broken by the fork either sleeps forever or spins.
    """
    for _ in range(MAX_WAITS):
        if wait_readable(reader, seconds):
            break
        threads = list(Path(f"/proc/{pid}/task").glob("*"))  # The list is empty without /proc.
        sleeps = all(_state(thread) not in ("R", "D") for thread in threads)
        if sleeps or sum(map(_cpu_nanoseconds, threads)) > seconds / 2 * 1e9:
            break
    return wait_readable(reader, 0) and os.read(reader, 1) == b"1"


def wait_readable(descriptor: int, seconds: float) -> bool:
    """Return whether a descriptor becomes readable within ``seconds``."""
    waiter = select.poll()  # Unlike select, poll works with descriptors above 1024.
    waiter.register(descriptor, select.POLLIN)
    return bool(waiter.poll(seconds * 1000))


def _exercise() -> None:
    """Use what a fork can break: the allocator, the import lock, logging, and a multi-threaded torch operator."""
    import importlib
    import logging

    bytearray(1 << 20)
    importlib.import_module("os")
    logging.getLogger("notebook_accelerate").debug("probe")
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "ones"):
        value = torch.ones(1 << 16, requires_grad=True)
        total = (value * 2).sum()
        # A backward pass starts a thread for each device and initialises the driver, which may take seconds. A kernel
        # that has already computed one on a machine with a GPU has initialised the driver, which is reported as a
        # hazard.
        if not device_counts.count("cuda"):
            total.backward()


_FORK_WARNS: bool = sys.version_info >= (3, 12)
_SENT_BY_OTHERS = signal.valid_signals() - {
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGSEGV,
    signal.SIGSYS,
    signal.SIGTRAP,
}


def fork_quietly() -> int:
    """Fork without Python 3.12's warning about threads, which ``fork_hazard`` has checked.

    The child starts with all signals blocked except those of its own crashes. It is still in the kernel's process group
    and still has the kernel's handlers. Without the block, an interrupt from the front end would raise
    KeyboardInterrupt wherever the child is, and unwind the child into the code of the kernel's thread that forked it.
    """
    before = pthread_sigmask(signal.SIG_BLOCK, _SENT_BY_OTHERS)
    pid = -1
    try:
        pid = _fork()
    finally:
        if pid != 0:
            pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _fork() -> int:
    if not _FORK_WARNS:
        return os.fork()
    with (
        warnings.catch_warnings()
    ):  # This affects all threads: a thread that enters or leaves such a block now may lose its own filters.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
