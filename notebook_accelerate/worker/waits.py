"""Find out what a rank is waiting for: devices that are busy with its work, or collectives that it has not left."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from typing import Any

from notebook_accelerate._collection import instances
from notebook_accelerate.hardware import device_table
from notebook_accelerate.telemetry.debug_protocol import Collective
from notebook_accelerate.torch_internals import flight_recorders

# ---- devices: a thread that waits for a CUDA device uses a CPU core

ANSWER_SECONDS = 0.2
"""How long the driver may take to reply. If it takes longer, it is busy, for example with a full launch queue."""
NOT_READY = 600
"""The return value of cuStreamQuery for a stream with unfinished work."""
RELAXED_CAPTURE = 2
"""Capture mode that lets a query run without ending the capture of a CUDA graph in another thread."""


class DeviceWatch:
    """Queries the streams of this process's devices on a separate thread, because a query may block forever."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._busy = False

    def busy(self) -> bool:
        """Return whether a stream has unfinished work, or the driver does not answer within `ANSWER_SECONDS`.

        Only default streams and streams with a Python object are checked.
        """
        if self._thread is None or not self._thread.is_alive():
            self._busy = True
            self._thread = threading.Thread(target=self._ask, name="notebook-accelerate-devices", daemon=True)
            self._thread.start()
            self._thread.join(ANSWER_SECONDS)
        return self._busy

    def _ask(self) -> None:
        busy = False
        # A device that has failed answers every query with its error, and is not busy.
        with suppress(Exception):
            in_use = (row for row in device_table.ROWS if row.is_accelerator and row.is_initialized())
            busy = any(_is_busy(row) for row in in_use)
        self._busy = busy


def _is_busy(row: device_table.DeviceRow) -> bool:
    module = row.load()
    streams = _streams(getattr(module, "Stream", None))
    if row.type == "cuda":
        # Don't use torch's own query, which holds the GIL, so that a blocked driver would block the interpreter too.
        with suppress(OSError):
            return cuda_is_busy(ctypes.CDLL("libcuda.so.1"), streams)
    device_table.select_again()
    current = getattr(module, "current_stream", None)
    return any(not stream.query() for stream in (*streams, *([] if current is None else [current()])))


def _streams(kind: Any) -> list[Any]:
    return instances(kind) if isinstance(kind, type) else []


def cuda_is_busy(driver: Any, streams: list[Any]) -> bool:
    """Return whether a stream has unfinished work.

    Args:
        driver: NVIDIA's driver library. Its functions are called without the interpreter lock.
        streams: The streams to check, as torch's objects. The default stream of each device is checked too.
    """
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(RELAXED_CAPTURE)))
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        handles = [0, *(stream.cuda_stream for stream in streams if stream.device_index == index)]
        with _context(driver, index) as active:
            if active and any(_has_work(driver, handle) for handle in handles):
                return True
    return False


@contextmanager
def _context(driver: Any, index: int) -> Iterator[bool]:
    """Enter a device's context in this thread, and yield whether it has one. This never creates a context."""
    device, flags, active, context = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int(), ctypes.c_void_p()
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    if not active.value or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        yield False
        return
    try:
        yield driver.cuCtxSetCurrent(context) == 0
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


def _has_work(driver: Any, handle: int) -> bool:
    stream, capturing = ctypes.c_void_p(handle), ctypes.c_int()
    if driver.cuStreamIsCapturing(stream, ctypes.byref(capturing)) or capturing.value:
        return False
    return bool(driver.cuStreamQuery(stream) == NOT_READY)


class DeviceCalls:
    """Records whether a thread is in a torch call that reads a tensor from a device.

    Attributes:
        inside: Whether the thread is reading a tensor from a device.
    """

    def __init__(self) -> None:
        self.inside = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the calls that this thread makes within the block."""
        types = {row.type for row in device_table.ROWS if row.is_accelerator and row.is_initialized()}
        if not types:  # Import nothing, because the main thread may be importing torch, which this would break.
            yield
            return
        with _mode(self, types):
            yield


def _mode(calls: DeviceCalls, types: set[str]) -> Any:
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            outer = calls.inside
            given = (*args, *(kwargs or {}).values())
            calls.inside = outer or any(getattr(getattr(each, "device", None), "type", "") in types for each in given)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                calls.inside = outer

    return Mode()


# ---- collectives: gloo and NCCL each fill a flight recorder if TORCH_FR_BUFFER_SIZE is set before the first operation

_DTYPES = {
    "Float": "f32", "Double": "f64", "Half": "f16", "BFloat16": "bf16", "Long": "i64", "Int": "i32", "Short": "i16",
    "Char": "i8", "Byte": "u8", "Bool": "bool",
}  # fmt: skip


def read_flight_recorder() -> tuple[tuple[Collective, ...], dict[str, int]]:
    """Return the open collectives of this rank, and for each process group, the number of the last one entered."""
    return _parse(_entries())


def entered_collectives(begin: float, end: float) -> list[tuple[str, int, str, int, float]]:
    """Return the collectives entered by this rank between two times: group, number, operation, elements, time.

    Args:
        begin: The start of the period, in seconds since the epoch.
        end: The end of the period, in seconds since the epoch.
    """
    return [
        (
            entry["process_group"][0],
            int(entry["collective_seq_id"]),
            entry["profiling_name"].rpartition(":")[2],
            sum(map(prod, entry["input_sizes"])),
            at,
        )
        for entry in _entries()
        if not entry.get("is_p2p") and begin <= (at := entry["time_created_ns"] / 1e9) <= end
    ]


def _entries() -> Iterator[dict[str, Any]]:
    if _has_group():
        for dump in flight_recorders().values():
            yield from json.loads(dump(True, False)).get("entries", [])


def _has_group() -> bool:
    distributed: Any = sys.modules.get("torch.distributed")
    # A request may arrive while the rank is importing torch, when the module exists but lacks its functions.
    initialised = getattr(distributed, "is_initialized", None)
    return bool(initialised is not None and distributed.is_available() and initialised())


def _parse(entries: Iterable[dict[str, Any]]) -> tuple[tuple[Collective, ...], dict[str, int]]:
    waiting: list[Collective] = []
    last: dict[str, int] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        # A group with a backend for each device type counts the collectives of each backend separately.
        backend = str(entry["profiling_name"]).partition(":")[0]
        group = f"{entry['process_group'][1] or entry['process_group'][0]}/{backend}"
        number = int(entry["collective_seq_id"])
        last[group] = max(number, last.get(group, 0))
        if not entry.get("retired") and entry.get("state") != "completed":
            waiting.append(_collective(entry, group, number))
    return tuple(waiting), last


def _collective(entry: dict[str, Any], group: str, number: int) -> Collective:
    return Collective(
        group=group,
        number=number,
        operation=str(entry["profiling_name"]).rpartition(":")[2],
        shapes=tuple(tuple(shape) for shape in entry["input_sizes"]),
        dtypes=tuple(_DTYPES.get(dtype, dtype.lower()) for dtype in entry["input_dtypes"]),
        since=entry["time_created_ns"] / 1e9,
    )
