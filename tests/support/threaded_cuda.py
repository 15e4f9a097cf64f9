"""A stub of `torch.cuda` with several devices and a current device for each thread, for machines without a GPU.

Importing this module changes nothing. Tensors stay on the CPU; uses of streams, events and devices are recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


def index_of(device: Any) -> int:
    """Return the index of a device given as a number, a name such as "cuda:1", or a torch.device."""
    if isinstance(device, int):
        return device
    return torch.device(device).index or 0


class ThreadedCuda:
    """Replaces `torch.cuda`. As in CUDA, a new thread starts with device 0.

    Attributes:
        log: The calls in order: ("synchronize", 1), ("stream", 1), ("synchronize stream", 1), ("record", 1), ...
        locked: The number of bytes of page-locked memory, by address.
        lockable: The maximum number of bytes that can be locked.
    """

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.log: list[tuple[str, int]] = []
        self.locked: dict[int, int] = {}
        self.lockable = 1 << 60
        self._threads = threading.local()
        self.generators = [torch.Generator().manual_seed(100 + index) for index in range(devices)]

    def current_device(self) -> int:
        """Return this thread's current device."""
        return getattr(self._threads, "device", 0)

    def last_error(self) -> int:
        """Return the last error of the calling thread."""
        return getattr(self._threads, "last_error", 0)

    def set_device(self, device: Any) -> None:
        """Make a device the current one of this thread."""
        self._threads.device = index_of(device)

    def install(self, patch: pytest.MonkeyPatch) -> ThreadedCuda:
        """Replace functions of `torch.cuda` until the test ends."""
        answers: dict[str, Any] = {
            "current_device": self.current_device,
            "set_device": self.set_device,
            "device_count": lambda: self.devices,
            "is_initialized": lambda: True,
            "is_available": lambda: True,
            "is_current_stream_capturing": lambda: False,
            "synchronize": lambda device=None: self._write("synchronize", device),
            "current_stream": lambda device=None: _Stream(self, device),
            "Stream": lambda device=None: self._made(_Stream(self, device)),
            "Event": lambda **_: _Event(self),
            "stream": self._stream,
            "cudart": lambda: self,
            "get_rng_state_all": lambda: [generator.get_state() for generator in self.generators[: self.devices]],
            "get_rng_state": lambda device="cuda": self.generators[index_of(device)].get_state(),
            "set_rng_state": lambda state, device="cuda": self.generators[index_of(device)].set_state(state),
        }
        for name, answer in answers.items():
            patch.setattr(torch.cuda, name, answer)
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        """Lock memory, unless more than `lockable` bytes would be locked, which sets the thread's last error."""
        if sum(self.locked.values()) + size > self.lockable:
            self._threads.last_error = 2
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - the same
        """Undo `cudaHostRegister`."""
        del self.locked[address]
        return 0

    def _write(self, what: str, device: Any) -> None:
        self.log.append((what, self.current_device() if device is None else index_of(device)))

    def _made(self, stream: _Stream) -> _Stream:
        self._write("stream", stream.device)
        return stream

    @contextmanager
    def _stream(self, stream: _Stream) -> Iterator[None]:
        before = self.current_device()
        self.set_device(stream.device)
        try:
            yield
        finally:
            self.set_device(before)


class _Stream:
    def __init__(self, cuda: ThreadedCuda, device: Any) -> None:
        self._cuda = cuda
        self.device = cuda.current_device() if device is None else index_of(device)

    def synchronize(self) -> None:
        self._cuda._write("synchronize stream", self.device)

    def wait_event(self, event: _Event) -> None:
        self._cuda._write("wait", self.device)


class _Event:
    def __init__(self, cuda: ThreadedCuda) -> None:
        self._cuda = cuda

    def record(self, stream: _Stream | None = None) -> None:
        self._cuda._write("record", None if stream is None else stream.device)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


__all__ = ["ThreadedCuda", "index_of"]
