"""The devices of a run's ranks: the memory that each rank holds on them, and their use as measured by the driver."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from notebook_accelerate.telemetry.events import DeviceMemoryEvent, DeviceUseEvent

MAX_DEVICES = 64
"""Maximum number of devices per rank, because a rank may send any name. Hosts may report as many GPUs per rank."""


@dataclass(frozen=True, kw_only=True)
class RankDevice:
    """One device of a rank. Sizes are in bytes, or None if unknown.

    Attributes:
        device: The rank's name for the device, such as "cuda:0".
        name: The device's model, such as "Tesla T4", or "" if unknown.
        uuid: The device's identity, equal for two ranks on the same device, or "" if unknown.
        allocated: The memory of the rank's tensors.
        reserved: The memory that torch's allocator in the rank has taken from the device.
        peak: The maximum memory that was allocated at any time.
        total: The size of the device's memory.
        used: The memory that all processes together use on the device.
        percent: The device's utilisation by all processes.
    """

    device: str
    name: str
    uuid: str
    allocated: int
    reserved: int
    peak: int
    total: int | None
    used: int | None
    percent: float | None


class RankDevices:
    """The latest figures of each rank's devices."""

    def __init__(self) -> None:
        self._memory: dict[int, dict[str, DeviceMemoryEvent]] = {}
        self._use: dict[str, DeviceUseEvent] = {}
        # The ranks on each device, by uuid. Every sample of a device looks them up.
        self._on: dict[str, dict[int, None]] = {}

    def add_memory(self, rank: int, event: DeviceMemoryEvent) -> None:
        """Store a rank's report. The peak is the highest of all reports, because torch's peak can be reset."""
        sizes = (event.allocated, event.reserved, event.peak, event.total)
        if not _numbers(sizes) or not all(isinstance(text, str) for text in (event.device, event.name, event.uuid)):
            return
        devices = self._memory.setdefault(rank, {})
        if (before := devices.get(event.device)) is not None:
            event.peak = max(before.peak, event.peak)
        elif len(devices) >= MAX_DEVICES:
            return
        devices[event.device] = event
        self._on.setdefault(event.uuid, {})[rank] = None
        if before is not None and all(each.uuid != before.uuid for each in devices.values()):
            del self._on[before.uuid][rank]
            if not self._on[before.uuid]:
                del self._on[before.uuid]

    def add_use(self, event: DeviceUseEvent) -> None:
        """Store a host's report of a GPU's use."""
        known = event.uuid in self._use or len(self._use) < MAX_DEVICES * max(1, len(self._memory))
        if known and isinstance(event.uuid, str) and _numbers((event.used, event.total, event.percent or 0)):
            self._use[event.uuid] = event

    def of_rank(self, rank: int) -> list[RankDevice]:
        """Return the devices on which a rank has held memory, in order."""
        return [self._joined(event) for _, event in sorted(self._memory.get(rank, {}).items(), key=_order)]

    def ranks_on(self, uuid: str) -> list[int]:
        """Return the ranks that hold memory on a device."""
        return list(self._on.get(uuid, ()))

    def __bool__(self) -> bool:
        return bool(self._memory)

    def _joined(self, event: DeviceMemoryEvent) -> RankDevice:
        use = self._use.get(event.uuid)
        return RankDevice(
            device=event.device,
            name=event.name,
            uuid=event.uuid,
            allocated=event.allocated,
            reserved=event.reserved,
            peak=event.peak,
            total=event.total or (use.total if use is not None else 0) or None,
            used=use.used or None if use is not None else None,
            percent=use.percent if use is not None else None,
        )


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) and 0 <= value < 2**63 for value in values)


def _order(item: tuple[str, DeviceMemoryEvent]) -> tuple[str, int]:
    kind, _, index = item[0].partition(":")
    return kind, int(index) if index.isdigit() else 0
