"""Reads torch's flight recorders: the collectives that this rank has entered and not left.

gloo and NCCL fill one each if TORCH_FR_BUFFER_SIZE is set before the first operation.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from notebook_accelerate.telemetry.debug_protocol import Collective
from notebook_accelerate.torch_internals import flight_recorders

_DTYPES = {
    "Float": "f32", "Double": "f64", "Half": "f16", "BFloat16": "bf16", "Long": "i64", "Int": "i32", "Short": "i16",
    "Char": "i8", "Byte": "u8", "Bool": "bool",
}  # fmt: skip


def read() -> tuple[tuple[Collective, ...], dict[str, int]]:
    """Return the open collectives of this rank and, by process group, the number of the last one entered."""
    return _parse(_entries())


def entered(begin: float, end: float) -> list[tuple[str, int, str, int, float]]:
    """Return the collectives that this rank has entered between two times: group, number, operation, elements, when.

    Args:
        begin: Seconds since the epoch.
        end: The same.
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
    # A request may arrive while the rank imports torch: the module then exists without its functions.
    initialised = getattr(distributed, "is_initialized", None)
    return bool(initialised is not None and distributed.is_available() and initialised())


def _parse(entries: Iterable[dict[str, Any]]) -> tuple[tuple[Collective, ...], dict[str, int]]:
    waiting: list[Collective] = []
    last: dict[str, int] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        # A group with a backend for each type of device counts the collectives of each backend separately.
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
