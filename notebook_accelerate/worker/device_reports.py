"""Report the memory that a rank holds on its devices, from the agent's thread.

The rank itself measures its memory, because NVML identifies processes by the host's pids, and a rank in a container
does not know its pid on the host.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from notebook_accelerate.hardware import device_table
from notebook_accelerate.hardware.nvml import bare_uuid
from notebook_accelerate.telemetry.events import AgentFailedEvent, DeviceMemoryEvent
from notebook_accelerate.telemetry.tracebacks import describe_error
from notebook_accelerate.worker.agent import Agent

PERIOD = 1.0
"""Seconds between two reports."""
_COUNTERS = {"mps": ("current_allocated_memory", "driver_allocated_memory", "current_allocated_memory")}
_TORCH_COUNTERS = ("memory_allocated", "memory_reserved", "max_memory_allocated")
"""Functions of ``torch.<type>`` that count allocated, reserved and peak memory."""


class DeviceReports:
    """Sends a `DeviceMemoryEvent` once a second for each device on which this process has allocated memory.

    Args:
        agent: The rank's agent.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._due = 0.0
        self._used: set[str] = set()
        self._failed = False
        agent.every_tick(self._tick)

    def send(self) -> None:
        """Queue a report for each device now."""
        if self._failed:
            return
        try:
            for event in self._read():
                self._agent.sink.emit(event)
        except Exception as error:  # noqa: BLE001 - a vendor's module may raise any error; training continues
            self._failed = True
            text = f"the memory of its devices cannot be read: {describe_error(error, 200)}"
            self._agent.sink.emit(AgentFailedEvent(text, ended=False))

    def _tick(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + PERIOD
            self.send()

    def _read(self) -> Iterator[DeviceMemoryEvent]:
        for row in device_table.ROWS:
            if _counts_memory(row) and row.is_initialized():
                for index in range(row.call("device_count") or 0):
                    yield from self._report(row, index)

    def _report(self, row: device_table.DeviceRow, index: int) -> Iterator[DeviceMemoryEvent]:
        device = f"{row.type}:{index}"
        allocated, reserved, peak = (_count(row, name, index) for name in _COUNTERS.get(row.type, _TORCH_COUNTERS))
        if allocated or reserved or peak or device in self._used:
            self._used.add(device)
            yield DeviceMemoryEvent(device, allocated, max(reserved, allocated), peak, *_identity(row, index))


def _counts_memory(row: device_table.DeviceRow) -> bool:
    module = getattr(sys.modules.get("torch"), row.type, None)
    return row.is_accelerator and hasattr(module, _COUNTERS.get(row.type, _TORCH_COUNTERS)[0])


def _count(row: device_table.DeviceRow, name: str, index: int) -> int:
    arguments = () if row.type in _COUNTERS else (index,)
    return int(row.call(name, *arguments) or 0)


@lru_cache
def _identity(row: device_table.DeviceRow, index: int) -> tuple[int, str, str]:
    """Return a device's size, model and identity, as far as torch knows them."""
    if row.type == "mps":
        return int(row.call("recommended_max_memory") or 0), "", ""
    properties: Any = row.call("get_device_properties", index)
    uuid = getattr(properties, "uuid", "")
    return int(getattr(properties, "total_memory", 0)), str(getattr(properties, "name", "")), bare_uuid(uuid)
