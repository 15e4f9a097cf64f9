"""Check whether the live kernel can be forked safely, by querying the runtimes and forking a probe with a time limit.

The run's supervisor thread forks the ranks. A forked child has only the forking thread, and libgomp keeps one team of
workers per calling thread, so a rank never uses the OpenMP team of the kernel's main thread. A child forked from the
main thread would wait forever for the dead workers of that team (pytorch#17199, GCC PR 60035). The checks look for
hazards that all threads share, such as a CUDA or XLA runtime, or a lock held by a thread that is computing.
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

# Use the private function, because signal.pthread_sigmask converts 60 signals into enum members, which takes 0.1 ms.
from _signal import pthread_sigmask  # type: ignore[import-not-found]
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.hardware import detection, device_counts
from notebook_accelerate.hardware.nvml import check_cuda_p2p_ib_support
from notebook_accelerate.hardware.process_liveness import STATE, read_stat
from notebook_accelerate.integrations import accelerate_alias
from notebook_accelerate.launch.plan.planner import KernelFacts, LaunchPlan, make_plan
from notebook_accelerate.launch.processes import shared_imports

PROBE_SECONDS = 2.0
"""A probe's time limit in seconds. Probes normally take milliseconds, so a slower one counts as a hazard."""
MAX_WAITS = 15
"""How many times in all to wait `PROBE_SECONDS` while a busy machine does not give the probe a processor."""
SAMPLE_SECONDS, MAX_SAMPLES = 0.01, 100
COMPUTING_SHARE = 0.1
"""A thread that uses a processor for this share of a sample is computing. A mere wake-up takes far less time."""


def kernel_facts(variables: Mapping[str, str] | None = None) -> KernelFacts:
    """Return the facts about this kernel that the planner needs.

    Args:
        variables: The environment variables that the launch sets.
    """
    return KernelFacts(
        fork_hazard=lambda: shared_imports.hazard(variables) or fork_hazard(),
        can_fork=hasattr(os, "fork"),
        environment=os.environ,
        alias_hazard=accelerate_alias.inherited_hazard(),
        peer_to_peer=check_cuda_p2p_ib_support,
    )


plans = 0
"""The number of calls of `plan_from_here`."""


def plan_from_here(config: LaunchConfig) -> LaunchPlan:
    """Plan a launch from this kernel. Call this on a thread like the one that will fork the ranks.

    Raises:
        ValueError: The configuration requests something that this machine or this kernel does not have.
    """
    global plans  # noqa: PLW0603 - one count per process
    plans += 1
    environment = {**os.environ, **(config.env or {})}
    return make_plan(config, detection.detect(environment), kernel_facts(config.env))


def fork_hazard() -> str:
    """Return why forking this kernel is unsafe, as a phrase for the run's header, or "" if it is safe.

    Any thread may call this.
    """
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
        with contextlib.suppress(Exception):  # A backend that is only partly loaded cannot have been initialised.
            if runtime is not None and runtime.is_initialized():
                return f"{name.upper()} is initialised in the kernel"
    return ""


def _cuda_driver_initialised() -> bool:
    """Ask the driver, which returns CUDA_ERROR_NOT_INITIALIZED (3) if this process has not initialised it."""
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
    """Return the hazard if torch_tpu, which torch imports, is loaded. Its TPU runtime refuses to work after a fork."""
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


_OWN_THREADS = "notebook-accelerate"
"""The start of the names of this package's threads."""
_KERNEL_PACKAGES = ("ipykernel", "IPython", "zmq")
_KERNEL_THREADS = re.compile(rf"IOPub|Subshell|.*\(_watch_pipe_fd\)$|{_OWN_THREADS}")
"""Names of threads whose class is `threading.Thread`."""


def _belongs_to_kernel(thread: threading.Thread) -> bool:
    """Return whether the kernel or this package has started a thread. Such a thread may compute, to collect garbage."""
    package = type(thread).__module__.partition(".")[0]
    return package in _KERNEL_PACKAGES or _KERNEL_THREADS.match(thread.name) is not None


def _busy_thread(_maps: str) -> str:
    """Return the hazard if a Python thread, other than this one and the kernel's own, is computing."""
    mine = {threading.get_ident(), threading.main_thread().ident}
    others = {
        thread.native_id: thread
        for thread in threading.enumerate()
        if thread.ident not in mine and not _belongs_to_kernel(thread)
    }
    before = {tid: _cpu_nanoseconds(_own(tid)) for tid in others if tid is not None}
    # The state "R" is not enough, because a thread that wakes up briefly or waits for a processor has the same state.
    running = [tid for tid in before if _state(_own(tid)) == "R"]
    for _ in range(MAX_SAMPLES):
        if not running:
            break
        time.sleep(SAMPLE_SECONDS)
        used = {tid: (_cpu_nanoseconds(_own(tid)) - before[tid]) / 1e9 for tid in running}
        for tid in running:
            if used[tid] > COMPUTING_SHARE * SAMPLE_SECONDS:
                return f"thread {others[tid].name!r} is computing in the kernel"
        # Keep only the threads that are still running, or waiting for a processor.
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
        # The paths may contain bytes that are not UTF-8.
        return Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    return ""


CHECKS: list[Callable[[str], str]] = [
    _accelerator_runtime,
    _xla_runtime,
    _tpu_runtime,
    _process_group,
    _allocator,
    _busy_thread,
]
"""The checks. Each takes this process's memory map and returns a hazard as a phrase, or "" if there is none. The run's
header shows the first hazard."""


_LIBRARY = re.compile(r"/\S*\.so\S*")
_FROM_PYTHON = re.compile(r"/psygnal/[^/]+$|__mypyc\.")
"""Libraries that mypyc compiled from Python code, such as psygnal's, which a kernel's first panel loads because
anywidget imports psygnal. Loading them changes nothing that a fork could break."""
_NATIVE_CHARS = 15
"""The number of characters of a thread's name that Linux keeps."""
_passed: set[tuple[frozenset[str], frozenset[str]]] = set()


def probe_if_changed(maps: str | None = None) -> str:
    """Fork a probe from a new thread, unless one has passed with the same libraries and the same kinds of threads.

    A probe takes a third as long as a launch of two ranks. Like the ranks, it is forked from a thread without an OpenMP
    team. A probe forked from the main thread could wait for the dead workers of that thread's team.

    Args:
        maps: This process's memory map. If None, it is read from the system.
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
    """Return the mapped libraries and the names of threads, which decide whether a fork works."""
    python = {re.sub(r"\d+", "", t.name) for t in threading.enumerate() if not t.name.startswith(_OWN_THREADS)}
    libraries = frozenset(path for path in set(_LIBRARY.findall(maps)) if not _FROM_PYTHON.search(path))
    return libraries, frozenset(python | _native_thread_names())


def _native_thread_names() -> set[str]:
    """Return Linux's names of the threads, without this package's. Since Python 3.14, they include Python's names."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # The thread may have just ended.
            found.add(re.sub(r"\d+", "", (task / "comm").read_text(encoding="utf-8", errors="replace").strip()))
    return {name for name in found if not name.startswith(_OWN_THREADS[:_NATIVE_CHARS])}


def probe(seconds: float = PROBE_SECONDS) -> str:
    """Fork a child that starts in the same way as ranks. Return a hazard unless the child finishes in time."""
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
        # The child is already reaped if SIGCHLD is ignored, or if one of the user's threads has called os.wait.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return "" if passed else "a probe forked from the kernel did not finish"


def _passes(reader: int, pid: int, seconds: float) -> bool:
    """Wait ``seconds`` for the probe's answer, or longer while a busy machine does not give the probe a processor.

    A child that the fork has broken sleeps forever or spins, which is easily distinguished from waiting for a CPU.
    """
    for _ in range(MAX_WAITS):
        if wait_readable(reader, seconds):
            break
        threads = list(Path(f"/proc/{pid}/task").glob("*"))  # Without /proc, the list is empty.
        sleeps = all(_state(thread) not in ("R", "D") for thread in threads)
        if sleeps or sum(map(_cpu_nanoseconds, threads)) > seconds / 2 * 1e9:
            break
    return wait_readable(reader, 0) and os.read(reader, 1) == b"1"


def wait_readable(descriptor: int, seconds: float) -> bool:
    """Return whether a descriptor becomes readable within ``seconds``."""
    waiter = select.poll()  # Unlike select, poll works with descriptors of 1024 and above.
    waiter.register(descriptor, select.POLLIN)
    return bool(waiter.poll(seconds * 1000))


def _exercise() -> None:
    """Use everything that a fork can break: allocator, import lock, logging, and a multi-threaded torch operator."""
    import importlib
    import logging

    bytearray(1 << 20)
    importlib.import_module("os")
    logging.getLogger("notebook_accelerate").debug("probe")
    torch: Any = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "ones"):
        value = torch.ones(1 << 16, requires_grad=True)
        total = (value * 2).sum()
        # Skip the backward pass on a machine with a GPU, because it starts a thread for each device and initialises the
        # driver, which may take seconds. If the kernel itself has already run a backward pass, the initialised driver
        # is reported as a hazard anyway.
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
    """Fork without the warning of Python 3.12 about threads, because ``fork_hazard`` has already checked them.

    The child starts with all signals blocked except for crash signals. At first, it is still in the kernel's
    process group and has the kernel's handlers. If signals were not blocked, an interrupt from the front end would
    raise KeyboardInterrupt in the child, which would then continue in the kernel's code that called the fork.
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
    # The filters belong to all threads, so a thread that enters or leaves such a block now may lose its own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()
