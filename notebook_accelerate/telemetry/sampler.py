"""Sample the resources of each rank's process and the use of the machine's GPUs, once a second."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from notebook_accelerate.hardware.nvml import GpuReader
from notebook_accelerate.telemetry import steady_time
from notebook_accelerate.telemetry.events import DeviceUseEvent, ResourceEvent
from notebook_accelerate.telemetry.store import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import psutil

PERIOD = 1.0
"""Seconds between two samples."""


def proportional_memory(pid: int) -> int:
    """Return the PSS of a process in bytes (RSS if the system has no PSS), or 0 if the process has exited.

    Forked ranks share most pages with the kernel. PSS divides each shared page among them, so that the sum is right.
    """
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/smaps_rollup").open("rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    import psutil

    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss)
    return 0


class ResourceSampler:
    """A thread that samples processes and GPUs, and passes the records to ``sink``.

    The records contain ``ResourceEvent`` and ``DeviceUseEvent``.

    Args:
        pids: The process id of each rank.
        sink: Called with the records of each sample.
        period: Seconds between two samples.
    """

    def __init__(self, pids: Mapping[int, int], sink: Callable[[list[Record]], None], period: float = PERIOD) -> None:
        self._pids = dict(pids)
        self._sink = sink
        self._period = period
        self._stop = threading.Event()
        self._processes: dict[int, psutil.Process] = {}
        self._thread = threading.Thread(target=self._run, name="notebook-accelerate-sampler", daemon=True)

    def start(self) -> None:
        """Start taking samples on the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # Take the first sample early, because runs may be short, and psutil needs two readings for a CPU rate.
        if self._stop.wait(min(0.2, self._period)):
            return
        gpus = GpuReader()
        self._sink(self.sample(gpus))
        while not self._stop.wait(self._period):
            self._sink(self.sample(gpus))
        gpus.close()

    def sample(self, gpus: GpuReader) -> list[Record]:
        """Take a sample. Return a record for each running process, and for each GPU if a process is running."""
        import psutil

        records = []
        for rank, pid in self._pids.items():
            try:
                process = self._processes.get(rank) or self._processes.setdefault(rank, psutil.Process(pid))
                cpu = process.cpu_percent()
                memory = proportional_memory(pid)
            except (psutil.Error, OSError):  # The process may have exited, or this process may have no free descriptor.
                continue
            if memory:
                records.append(Record(rank, steady_time.now(), ResourceEvent(cpu, memory)))
        for use in gpus.read() if records else ():
            event = DeviceUseEvent(use.uuid, use.percent, use.used_bytes, use.total_bytes)
            records.append(Record(records[0].rank, steady_time.now(), event))
        return records
