"""Samples the resources of each rank's process, once a second."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from notebook_accelerate.hardware.detection import system_memory
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.events import ResourceEvent
from notebook_accelerate.telemetry.store import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import psutil

PERIOD = 1.0
"""Seconds between two samples."""


def proportional_memory(pid: int) -> int:
    """Return the PSS of a process in bytes (RSS where the system has no PSS); 0 when it has ended.

    Forked ranks share most pages with the kernel; PSS divides each shared page among them, so that the sum is right.
    """
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/smaps_rollup").open("rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


class GpuReader:
    """Reads utilisation and per-process memory of NVIDIA GPUs through NVML; without a driver, there are none."""

    def __init__(self) -> None:
        import pynvml

        self._nvml: Any = None
        with contextlib.suppress(pynvml.NVMLError):  # no driver
            pynvml.nvmlInit()
            self._nvml = pynvml

    def read(self) -> dict[int, tuple[float, int]]:
        """Return, by pid, the utilisation of its GPU in percent and its GPU memory in bytes."""
        found: dict[int, tuple[float, int]] = {}
        if self._nvml is None:
            return found
        for index in range(self._nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(self._nvml.NVMLError):
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                busy = float(self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found[int(process.pid)] = (busy, int(process.usedGpuMemory or 0))
        return found

    def close(self) -> None:
        """Shut NVML down."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None


class Sampler:
    """A thread that samples processes and passes ``ResourceEvent`` records to ``sink``.

    Args:
        pids: Rank to process id.
        sink: Called with the records of one sample.
        period: Seconds between samples.
    """

    def __init__(self, pids: Mapping[int, int], sink: Callable[[list[Record]], None], period: float = PERIOD) -> None:
        self._pids = dict(pids)
        self._sink = sink
        self._period = period
        self._stop = threading.Event()
        self._processes: dict[int, psutil.Process] = {}
        self._thread = threading.Thread(target=self._run, name="notebook-accelerate-sampler", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # The first sample is early, for short runs; psutil needs two readings for a CPU rate.
        if self._stop.wait(min(0.2, self._period)):
            return
        gpus = GpuReader()
        self._sink(self.sample(gpus))
        while not self._stop.wait(self._period):
            self._sink(self.sample(gpus))
        gpus.close()

    def sample(self, gpus: GpuReader) -> list[Record]:
        """Return one record per living process."""
        import psutil

        gpu = gpus.read()
        records = []
        for rank, pid in self._pids.items():
            try:
                process = self._processes.get(rank) or self._processes.setdefault(rank, psutil.Process(pid))
                cpu = process.cpu_percent()
                memory = proportional_memory(pid)
            except (psutil.Error, OSError):  # it has ended, or this process has no descriptor left
                continue
            if memory:
                busy, held = gpu.get(pid, (None, None))
                records.append(Record(rank, steady_time.now(), ResourceEvent(cpu, memory, busy, held)))
        return records


def machine_memory() -> tuple[int, int]:
    """Return total and available memory in bytes, within the control group's limit where one is set."""
    total, available = system_memory()
    for limit_path, used_path in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):
            limit, used = int(Path(limit_path).read_text()), int(Path(used_path).read_text())
            if limit < total:
                total, available = limit, min(available, limit - used)
    return total, available
